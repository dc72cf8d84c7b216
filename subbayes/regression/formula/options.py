"""What an option of a call in a formula has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subbayes.regression.formula.grammar import Constant, Keyword, Listing, Node, Operation
from subbayes.utils.checks import fail

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


def read_options(
    argument: str,
    call: str,
    known: Mapping[str, Option],
    positional: Sequence[Node],
    keywords: Sequence[Keyword],
) -> dict[str, Any]:
    """The options of a call, which are literals, or parts of the tree.

    Args:
        argument: name of the argument, for errors.
        call: the call, for errors.
        known: what each option has to be, in the order in which they may have no name.
        positional: options without a name.
        keywords: options with their names.

    Raises:
        InputError: unknown options, one that is given twice, or another value.
    """
    words = [*zip(known, positional, strict=False), *((w.name, w.value) for w in keywords)]
    names = {name for name, _ in words}
    if not names <= known.keys() or len(names) < len(positional) + len(keywords):
        listed = ", ".join(f"{name}=" for name in known) or "no options"
        fail(argument, f"{call.partition('(')[0]}(...) with {listed}", repr(call))
    found = {}
    for name, node in words:
        shown, allowed = known[name]
        value = _literal(node)
        if not allowed(value):
            fail(argument, f"{name}= to be {shown}", repr(call), _REMEDIES.get(str(value), ""))
        found[name] = value
    return found


def _literal(node: Node) -> Any:
    """The value of a literal; other nodes as they are."""
    match node:
        case Constant(value=value) if value is not None:
            return value
        case Operation("-" | "+" as sign, (Constant(value=int() | float() as value),)):
            return -value if sign == "-" else value
        case Listing(items=items):
            return [_literal(item) for item in items]
    return node


_REMEDIES = {
    name: f"Write bs={other!r}; smooths that shrink to 0 are not available"
    for name, other in (("cs", "cr"), ("ts", "tp"))
} | {"gp": "Write gp(x), a term of its own"}
