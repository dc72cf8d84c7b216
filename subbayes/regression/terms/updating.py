"""Changed formulas: `update("~ . + z")`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from subbayes.regression.formula.splitting import (
    is_own,
    outside_quotes,
    plain_name,
    sides_of,
    split_terms,
    summands,
    within_brackets,
)
from subbayes.regression.terms.parsing import written_terms
from subbayes.utils.checks import fail, fail_type

_POINT = re.compile(r"(?<![\w.)])\.(?![\w(.])")  # not that of 0.5, np.log or x.real
_KEPT = re.compile(r"[01]|offset\s*\(.*\)", re.DOTALL)  # intercept and offset do not interact


def updated_formula(
    old: str | Mapping[str, str], change: str | Mapping[str, str], location: str
) -> str | dict[str, str]:
    """A formula in which a point stands for the old side, as `update` of R.

    On the right-hand side the point is in brackets where it is a part of a term: in "~ .:z" all old
    terms interact with z. Smooths, group terms and the like can be taken away by "-", and have
    no interactions.

    Args:
        old: the formula, or one for each parameter.
        change: the new formula, whose left-hand side may be missing; or one for each parameter to
            change.
        location: name of the location.

    Raises:
        InputError: a formula without "~", an interaction with a smooth or a group term, or one to
            take away that the formula does not have.

    Example:
        >>> updated_formula("y ~ x", "~ . + z", "mu")
        'y ~ x + z'
        >>> updated_formula("y ~ x + z", "~ .:sex", "mu")
        'y ~ (x + z):sex'
        >>> updated_formula("y ~ x + (1 | g)", "log(y) ~ . - (1 | g)", "mu")
        'log(y) ~ x'
    """
    if not isinstance(change, (str, Mapping)):
        fail_type("formula", "text such as '~ . + z'", change)
    parts = {location: old} if isinstance(old, str) else dict(old)
    for name, text in ({location: change} if isinstance(change, str) else change).items():
        parts[name] = _updated(parts.get(name, "~ 1"), text, name == location)
    return parts[location] if isinstance(old, str) and isinstance(change, str) else parts


def with_columns(formula: str | Mapping[str, str], columns: Sequence[str]) -> Any:
    """A formula in which the columns stand for points of right-hand sides, as in `y ~ .` of R.

    Args:
        formula: the formula, or one for each parameter.
        columns: names of columns.

    Example:
        >>> with_columns("y ~ . + s(x) - x", ["x", "body mass"])
        'y ~ x + `body mass` + s(x) - x'
        >>> with_columns("y ~ .:g", ["x", "z"])
        'y ~ (x + z):g'
    """
    if not isinstance(formula, str):
        return {name: with_columns(text, columns) for name, text in formula.items()}
    left, *right = sides_of(formula)
    if len(right) != 1 or _replaced(right[0], "") == right[0]:
        return formula
    names = (name if name.isidentifier() else f"`{name}`" for name in columns)
    return f"{left.strip()} ~ {_expanded(right[0].strip(), ' + '.join(names) or '1')}".strip()


def _updated(old: str, change: str, response: bool) -> str:
    before, after = ([side.strip() for side in sides_of(text)] for text in (old, change))
    if len(after) != 2:
        fail("formula", "a formula such as '~ . + z'", repr(change))
    left, right = after[0], _expanded(after[1], before[-1])
    return f"{_replaced(left, before[0]) or before[0]} ~ {right}" if response else f"~ {right}"


def _replaced(text: str, value: str) -> str:
    """Text with a value in place of its points."""
    code = set(outside_quotes(text))
    return _POINT.sub(lambda found: value if found.start() in code else ".", text)


def _expanded(text: str, old: str) -> str:
    """A right-hand side with the old one for points, in brackets where a term needs them."""
    parts = []
    for sign, summand in summands(text):
        content = summand.strip()
        inner = within_brackets(content)
        if _replaced(content, "") == content:
            new = content
        elif content == ".":
            new = f"({old})" if sign == "-" else old
        elif inner is not None and not is_own(content):
            new = f"({_expanded(inner, old)})"
        else:
            new = _term(content, sign, old)
        parts.append(f"{sign} {new}".strip())
    return _without_own_terms(" ".join(parts))


def _term(content: str, sign: str, old: str) -> str:
    """A term with the old effects for its points; intercept and offsets stay beside it."""
    if own := split_terms("formula", old)[1]:
        got = f"{content!r}, where the point contains {', '.join(own)}"
        fail("formula", "interactions of columns and factors", got, "Write the formula out")
    effects, others = "", ""
    for own_sign, summand in summands(old):
        one = f"{own_sign or '+'} {summand.strip()} "
        if _KEPT.fullmatch(summand.strip()):
            others += one
        else:
            effects += one
    effects = effects.removeprefix("+").strip() or "1"
    new = _replaced(content, effects if plain_name(effects) else f"({effects})")
    return new if sign == "-" else f"{new} {others}".strip()


def _without_own_terms(text: str) -> str:
    """A right-hand side without the smooths, group terms and the like that it takes away."""
    kept, gone = "", set[str]()
    for sign, summand in summands(text):
        content = summand.strip()
        rest, own = split_terms("formula", content) if sign == "-" else (content, [])
        gone.update(name for term in own for name in _names(term))
        if not own:
            kept += f"{sign} {content} "
        elif rest != "1":
            kept += f"- ({rest}) "
    if not gone:
        return text
    rest, own = split_terms("formula", kept)
    names = {term: _names(term) for term in own}
    left = [term for term in own if not names[term] <= gone]
    found = {name for term in own if term not in left for name in names[term]}
    if gone - found:
        remedy = f"It has {', '.join(own)}" if own else "It has only terms of columns"
        fail("formula", "terms to take away that it has", ", ".join(sorted(gone - found)), remedy)
    return " + ".join(left if left and rest == "1" else [rest, *left])


def _names(term: str) -> set[str]:
    """The names of a term of this package, one for each level of nested groups."""
    names = [part.name for part in written_terms("formula", [term])]
    return {re.sub(r"\s", "", name).replace('"', "'") for name in names}
