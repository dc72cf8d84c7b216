"""What formulas of other libraries say, and what to write here instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from subbayes.utils.checks import fail

__all__ = ["check_dialect"]

_CALL = re.compile(r"(?<![\w.])(te|ti|t2|s|re)\s*\(")
_GROUPED = re.compile(r"\(([^()|]*)\|+([^()|]*)\)")


def check_dialect(argument: str, text: str) -> None:
    """Refuse terms of lme4 and mgcv that have another name here, or none.

    Args:
        argument: what an error names.
        text: the right-hand side of a formula.

    Raises:
        InputError: such a term, with what to write instead.

    Example:
        >>> check_dialect("formula", "age + s(bmi, df=5) + re(school)")
        >>> check_dialect("formula", "age + (1 | school)")
        Traceback (most recent call last):
        ...
        subbayes.InputError: formula: expected re(school) for random intercepts, got
        '(1 | school)'. Write re(school).
    """
    for found in _GROUPED.finditer(text):
        left, group = (part.strip() for part in found.groups())
        if left in ("", "1"):
            fail(
                argument, f"re({group}) for random intercepts", repr(found[0]), f"Write re({group})"
            )
        fail(
            argument,
            "random intercepts alone, re(...)",
            repr(found[0]),
            f"Random slopes are not there: write re({group}), or C({group}):... for slopes "
            "that are not pooled",
        )
    for name, call in _calls(text):
        _check_call(argument, name, call)


def _calls(text: str) -> Iterator[tuple[str, str]]:
    """Calls of smooths and random effects, by name, as they are written."""
    for found in _CALL.finditer(text):
        depth, end = 0, len(text)
        for i in range(found.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[i], 0)
            if not depth:
                end = i + 1
                break
        yield found[1], text[found.start() : end]


def _check_call(argument: str, name: str, call: str) -> None:
    try:
        tree = ast.parse(call, mode="eval").body
    except SyntaxError:
        return  # the parser of formulas says what is wrong
    if not isinstance(tree, ast.Call):
        return
    read = [ast.unparse(arg) for arg in tree.args if not isinstance(arg, ast.Constant)]
    given = {word.arg: word.value for word in tree.keywords if word.arg}
    if name in ("te", "ti", "t2") or (name == "s" and len(read) > 1) or "by" in given:
        several = ", ".join(
            dict.fromkeys([*read, *([ast.unparse(given["by"])] if "by" in given else [])])
        )
        fail(
            argument,
            "smooths of one column, s(...)",
            repr(call),
            "For a surface let a network "
            f"read the columns, deep={{'surface': (module, [{_quoted(several)}])}}",
        )
    if name == "s" and "k" in given:
        df = ast.unparse(given["k"])
        fail(
            argument,
            "the number of splines as df=",
            repr(call),
            f"Write s({', '.join(read)}, df={df})",
        )
    known = {"s": ("df", "degree")}.get(name, ())
    unknown = [word for word in given if word not in known]
    if unknown:
        fail(
            argument,
            f"{name}(...) with " + (" and ".join(f"{k}=" for k in known) or "a column alone"),
            repr(call),
            "Leave out " + ", ".join(f"{k}=" for k in unknown),
        )


def _quoted(names: str) -> str:
    return ", ".join(repr(name.strip()) for name in names.split(","))
