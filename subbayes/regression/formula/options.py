"""What an option of a call in a formula has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Option = tuple[str, Callable[[Any], bool]]
"""What an option has to be, in words and as a predicate of its value."""


def whole(low: int, high: int) -> Option:
    """A whole number within limits."""
    return f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high


def number(low: float, high: float) -> Option:
    """A number within limits.

    Example:
        >>> words, allowed = number(0.5, 3)
        >>> words, allowed(1), allowed(True), allowed(4.0)
        ('a number from 0.5 to 3', True, False, False)
    """
    return (
        f"a number from {low:g} to {high:g}",
        lambda v: type(v) in (int, float) and low <= v <= high,
    )


def one_of(*choices: str) -> Option:
    """One of some texts."""
    shown = "one of " + ", ".join(map(repr, choices))
    return shown, lambda v: isinstance(v, str) and v in choices


def list_of(items: str, allowed: Callable[[Any], bool]) -> Option:
    """A list of items."""
    return f"a list of {items}", lambda v: isinstance(v, (list, tuple)) and all(map(allowed, v))


def one_or_each(option: Option) -> Option:
    """One value for all columns, or a list with one for each."""
    words, allowed = option
    return (
        f"{words}, or a list of them",
        lambda v: all(map(allowed, v)) if isinstance(v, (list, tuple)) else allowed(v),
    )


FLAG: Option = ("True or False", lambda v: isinstance(v, bool))
