"""Names of terms and effects as people write them: other quotes and spaces, back-quotes around.

A factor's name has single quotes and spaces after commas, a smooth's those of the formula, and a
column's name no back-quotes: `C(g, Treatment("c"))` is the effect "C(g, Treatment('c'))".
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def written_as(name: str, known: Iterable[str]) -> str:
    """The known name that a name stands for, or the name itself if there is none, or several.

    Example:
        >>> written_as('C(g,Treatment("c"))', ["x", "C(g, Treatment('c'))"])
        "C(g, Treatment('c'))"
        >>> written_as("`body mass`", ["body mass"])
        'body mass'
        >>> written_as("re(town)", ["x", "(1 | town)"])
        '(1 | town)'
    """
    known = list(known)
    if name in known:
        return name
    for pattern, other in _SPELLINGS.items():
        if found := re.fullmatch(pattern, name):
            name = other.format(found[1].strip(" `"))
    bare = name[1:-1] if re.fullmatch(r"`[^`]*`", name) else name
    if bare in known:
        return bare
    alike = {other for other in known if re.fullmatch(pattern_of(other), bare)}
    return alike.pop() if len(alike) == 1 else name


_SPELLINGS = {r"re\((.+)\)": "(1 | {})", r"sd\(re\((.+)\)\)": "sd(Intercept | {})"}
"""Names of random intercepts by what else is written for them."""


def pattern_of(name: str) -> str:
    """A regular expression of what a name may be written as; of a column's name it is the name.

    Example:
        >>> bool(re.fullmatch(pattern_of("s(x, k=5)"), "s(x,k=5)"))
        True
    """
    if "(" not in name:
        return re.escape(name)
    every = {'"': "[\"']", "'": "[\"']", ",": r",\s*"}
    parts = re.split(r"""(["']|,\s*)""", name)
    return "".join(every.get(part.strip(), re.escape(part)) for part in parts)
