"""Parse calls such as `s(x, bs="cr", k=8)`, without evaluating them."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from formulaic.utils.code import sanitize_variable_names

from subbayes.regression.formula.factors import parse_errors
from subbayes.regression.terms.bases import BASES
from subbayes.utils.checks import fail

Option = tuple[str, Callable[[Any], bool]]
_MOST_FUNCTIONS = 1000


def _whole(low: int, high: int) -> Option:
    return f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high


def _one_or_each(option: Option) -> Option:
    words, allowed = option
    return (
        f"{words}, or a list of them",
        lambda v: all(map(allowed, v)) if isinstance(v, (list, tuple)) else allowed(v),
    )


def _text(*choices: str) -> Option:
    return "one of " + ", ".join(map(repr, choices)), lambda v: isinstance(v, str) and v in choices


_K = _whole(3, _MOST_FUNCTIONS)
_TENSOR = {"k": _one_or_each(_whole(3, 50)), "bs": _one_or_each(_text(*BASES))}
_KNOWN: dict[str, dict[str, Option]] = {
    "s": {
        "bs": _text(*BASES, "re"),
        "k": _K,
        "df": _K,
        "knots": (
            "the two ends of a period",
            lambda v: (
                isinstance(v, (list, tuple))
                and len(v) == 2
                and all(type(e) in (int, float) and abs(e) < 1e15 for e in v)
                and v[0] < v[1]
            ),
        ),
    },
    "te": _TENSOR,
    "ti": _TENSOR,
    "t2": _TENSOR,
    "mo": {},
    "gp": {
        "k": _one_or_each(_whole(3, 500)),
        "c": ("a number from 1.05 to 10", lambda v: type(v) in (int, float) and 1.05 <= v <= 10),
        "cov": _text("se", "matern52", "matern32"),
        "iso": ("True or False", lambda v: isinstance(v, bool)),
    },
}
_SHRINKAGE = {
    name: f"Write bs={other!r}; smooths that shrink to 0 are not available"
    for name, other in (("cs", "cr"), ("ts", "tp"))
}
_VARYING = ("s", "te", "ti")  # smooths with by=
_COLUMNS = {"s": (1, 2), "te": (2, 3), "ti": (2, 3), "t2": (2, 3), "mo": (1, 1), "gp": (1, 2)}


@dataclass(frozen=True)
class Call:
    """A call: its function, columns, options, and the column of `by=`."""

    text: str
    function: str
    columns: tuple[str, ...]
    options: Mapping[str, Any]
    by: str | None


def parse_call(argument: str, text: str) -> Call:
    """Parse a call of columns with options that are literals.

    Args:
        argument: name of the argument, for errors.
        text: the call.

    Raises:
        InputError: other syntax, another number of columns, or unknown options.

    Example:
        >>> parse_call("formula", "te(x, `body mass`, k=5)").columns
        ('x', 'body mass')
    """
    aliases: dict[str, str] = {}
    with parse_errors(argument, text):
        code = sanitize_variable_names(text, {}, aliases, template="_column_{}")
        node = ast.parse(code, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        fail(argument, "a call such as s(x, k=8)", repr(text))
    function = node.func.id
    known, (least, most) = _KNOWN[function], _COLUMNS[function]
    columns = [_column(argument, text, arg, aliases) for arg in node.args]
    if not least <= len(columns) <= most or len(set(columns)) < len(columns):
        count = f"{least}" if least == most else f"{least} or {most}"
        remedy = "Use te(...) for tensor products" if function == "s" else ""
        fail(argument, f"{function}(...) of {count} different columns", repr(text), remedy)
    options: dict[str, Any] = {}
    by = None
    for word in node.keywords:
        if word.arg == "by" and function in _VARYING:
            by = _column(argument, text, word.value, aliases)
            continue
        if word.arg not in known or word.arg in options:
            listed = [f"{name}=" for name in known] + ["by="] * (function in _VARYING)
            expected = f"{function}(...) with " + (", ".join(listed) or "no options")
            fail(argument, expected, repr(text))
        words, allowed = known[word.arg]
        try:
            value = ast.literal_eval(word.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            remedy = _vector_of_r(word, allowed)
            fail(argument, f"{word.arg}= to be {words}", repr(text), remedy)
        if word.arg == "k" and value == -1:  # the default of mgcv
            continue
        if not allowed(value):
            fail(argument, f"{word.arg}= to be {words}", repr(text), _SHRINKAGE.get(str(value), ""))
        options[word.arg] = value
    return Call(" ".join(text.split()), function, tuple(columns), options, by)


def _vector_of_r(word: ast.keyword, allowed: Callable[[Any], bool]) -> str:
    """A remedy for `c(4, 5)` where a list is allowed."""
    node = word.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "c":
        written = ast.unparse(ast.List(node.args, ast.Load()))
        with contextlib.suppress(ValueError):
            if allowed(ast.literal_eval(written)):
                return f"Write {word.arg}={written}"
    return ""


def _column(argument: str, text: str, node: ast.expr, aliases: Mapping[str, str]) -> str:
    if not isinstance(node, ast.Name):
        remedy = "Add a column to the data frame"
        fail(argument, "columns", f"{ast.unparse(node)!r} in {text!r}", remedy)
    return aliases.get(node.id, node.id)
