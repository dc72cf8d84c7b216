"""Calls with numbers and names in text, such as "student_t(3, 0, 2.5)", read without evaluation."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from inspect import Signature
from typing import Any

from subbayes.utils.checks import fail

_CALL = re.compile(r"([A-Za-z][\w.-]*)\s*\((.*)\)", re.DOTALL)
_LONGEST = 1000


@dataclass(frozen=True)
class LiteralCall:
    """A call whose arguments are finite numbers, text or lists of these.

    Attributes:
        argument: what the text was given for, for errors.
        text: the call.
        name: the name of what is called.
        values: arguments by position.
        options: arguments by name.
    """

    argument: str
    text: str
    name: str
    values: tuple[Any, ...]
    options: dict[str, Any]

    def bound(self, signature: Signature) -> dict[str, Any]:
        """The arguments by name, those by position too.

        Args:
            signature: of what is called.

        Raises:
            InputError: arguments that the signature does not have, or one that is missing.
        """
        try:
            return signature.bind(*self.values, **self.options).arguments
        except TypeError as error:
            expected = f"{self.name}({', '.join(signature.parameters)})"
            fail(self.argument, expected, repr(self.text), cause=error)


def literal_call(argument: str, text: str) -> LiteralCall | None:
    """Read a call; None for a text without brackets at its end.

    Args:
        argument: what the text was given for, for errors.
        text: the call, in which names may have hyphens and points.

    Raises:
        InputError: other arguments than finite numbers, text and lists of these.

    Example:
        >>> call = literal_call("family", "piecewise-exponential(cuts=[1, 2.5])")
        >>> call.name, call.options
        ('piecewise-exponential', {'cuts': [1, 2.5]})
        >>> literal_call("family", "normal") is None
        True
        >>> literal_call("prior", "normal(open('file'))")
        Traceback (most recent call last):
            ...
        subbayes.InputError: prior: expected numbers, text in quotes or lists of these in brackets,
        got "normal(open('file'))".
    """
    found = _CALL.fullmatch(text.strip())
    if found is None:
        return None
    shown, what = text[:_LONGEST], "numbers, text in quotes or lists of these in brackets"
    try:
        if len(text) > _LONGEST:
            raise ValueError("too long")
        node = ast.parse(f"f({found[2]})", mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("more than one call")
        if len({word.arg for word in node.keywords}) < len(node.keywords):
            raise ValueError("the same name twice")
        values = tuple(_literal(value) for value in node.args)
        options = {str(word.arg): _literal(word.value) for word in node.keywords}
    except (SyntaxError, ValueError, TypeError, OverflowError, MemoryError, RecursionError):
        fail(argument, what, repr(shown))
    return LiteralCall(argument, text.strip(), found[1], values, options)


def _literal(node: ast.expr) -> Any:
    value = ast.literal_eval(node)
    for part in value if isinstance(value, list) else [value]:
        if type(part) not in (int, float, str) or (part != str(part) and not _is_finite(part)):
            raise ValueError(part)
    return value


def _is_finite(value: float) -> bool:
    return math.isfinite(float(value))
