"""Errors of one line (what was expected, what was passed, what to do), and shared checks."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from subbayes.utils.text_table import printable

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointError",
    "InputError",
    "InputTypeError",
    "MissingPackageError",
    "UndefinedError",
    "check_choice",
    "check_count",
    "check_finite",
    "check_fraction",
    "check_positive",
    "check_positive_or_zero",
    "check_same_length",
    "check_seed",
    "closest",
    "error_text",
    "fail",
    "fail_type",
    "is_finite",
    "message",
    "number_text",
    "one_of",
]

_MOST_ARGUMENT, _MOST_EXPECTED, _MOST_GOT, _MOST_REMEDY = 200, 300, 300, 300  # characters
_MOST_LISTED = 8  # choices that an error lists
_LONGEST_NAME = 60  # characters of a name that `closest` compares, in a time that grows with them


class _Described(Exception):
    """An error of one line, which keeps the parts that it is composed of."""

    def __init__(
        self,
        argument: str,
        expected: str = "",
        got: str = "",
        remedy: str = "",
        row: int | None = None,
    ) -> None:
        super().__init__(message(argument, expected, got, remedy, row) if expected else argument)
        self.argument = _cut(argument, _MOST_ARGUMENT) if expected else ""
        self.expected, self.got = _cut(expected, _MOST_EXPECTED), _cut(got, _MOST_GOT)
        self.remedy, self.row = _cut(remedy, _MOST_REMEDY), row


class InputError(_Described, ValueError):
    """A value that cannot be used, described in one line.

    Attributes:
        argument: name of the argument at fault, as the caller wrote it; "" if unknown.
        expected: what would have been right.
        got: what was passed.
        remedy: what to do about it.
        row: number of the first row at fault, counted from 0; None if there is none.
    """

    __module__ = "subbayes"


class CheckpointError(InputError):
    """A checkpoint from which a run cannot be resumed."""

    __module__ = "subbayes"


class UndefinedError(InputError, AttributeError):
    """A property that an object of this kind does not have, for which `hasattr` is False."""


class MissingPackageError(_Described, ImportError):
    """A package that a function needs and that is not installed; attributes as of `InputError`."""

    __module__ = "subbayes"


class InputTypeError(_Described, TypeError):
    """An argument of a type that cannot be used; attributes as of `InputError`."""

    __module__ = "subbayes"


def message(
    argument: str, expected: str, got: str, remedy: str = "", row: int | str | None = None
) -> str:
    """Compose the line of an error from the attributes of `InputError`, each of which is cut.

    Example:
        >>> message("rank", "at most 20", "30", "Record more snapshots")
        'rank: expected at most 20, got 30. Record more snapshots.'
        >>> message("X", "finite numbers", "inf", row=3)
        'X: expected finite numbers, got inf (first in row 3).'
    """
    place = "" if row is None else f" (first in row {row})"
    remedy = _cut(remedy, _MOST_REMEDY)
    argument, expected = _cut(argument, _MOST_ARGUMENT), _cut(expected, _MOST_EXPECTED)
    line = f"{argument}: expected {expected}, got {_cut(got, _MOST_GOT)}{place}."
    if remedy and not remedy.endswith((".", "?")):
        remedy += "."
    return printable(" ".join(f"{line} {remedy}".split()))


def _cut(text: str, most: int) -> str:
    """Text in one line of fewer than `most` characters; of a long text only the start is copied."""
    start = text[: 2 * most]
    line = " ".join(start.split())
    return line if len(line) < most and start == text else line[: most - 3] + "..."


def number_text(value: float) -> str:
    """A number in six digits, or in all of its digits where six would read as a whole number.

    Example:
        >>> number_text(2.0), number_text(0.12345678), number_text(3.000000003)
        ('2', '0.123457', '3.000000003')
    """
    value = float(value)
    text = f"{value:g}"
    return repr(value) if float(text) != value and float(text).is_integer() else text


def fail(
    argument: str,
    expected: str,
    got: Any,
    remedy: str = "",
    cause: BaseException | None = None,
    row: int | None = None,
) -> NoReturn:
    """Raise `InputError` with the composed line, from its cause if there is one."""
    error = InputError(argument, expected, str(got), remedy, row)
    if cause is None:
        raise error
    raise error from cause


def fail_type(argument: str, expected: str, got: Any, remedy: str = "") -> NoReturn:
    """Raise `InputTypeError`; `got` is the offending object, named by its type."""
    raise InputTypeError(argument, expected, type(got).__name__, remedy)


def error_text(error: BaseException) -> str:
    """The message of an exception in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def closest(name: Any, names: Iterable[Any]) -> str:
    """Suggest the name that is most similar to `name`; empty if there is none.

    Names of more than 60 characters are not compared.

    Example:
        >>> closest("Agee", ["age", "job"])
        "Did you mean 'age'?"
        >>> closest("10", [10, 20])
        'Did you mean 10?'
    """
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        return ""
    texts = ((other if isinstance(other, str) else str(other), other) for other in names)
    lower = {
        text.lower(): text if isinstance(other, Real) else repr(text)
        for text, other in texts
        if len(text) <= _LONGEST_NAME
    }
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"Did you mean {lower[near[0]]}?" if near else ""


def one_of(choices: Iterable[Any], listing: str = "") -> str:
    """Name the choices of an argument if they are few, and else where they are listed.

    Example:
        >>> one_of(["pca", "random"])
        "one of 'pca', 'random'"
        >>> one_of(range(20), "subbayes.likelihoods")
        'one of the 20 that subbayes.likelihoods lists'
    """
    options = list(choices)
    if not options:
        return "none"
    if len(options) <= _MOST_LISTED:
        return "one of " + ", ".join(map(repr, options))
    if listing:
        return f"one of the {len(options)} that {listing} lists"
    first = ", ".join(map(repr, options[:_MOST_LISTED]))
    return f"one of {first} and {len(options) - _MOST_LISTED} others"


def check_choice(argument: str, value: Any, choices: Iterable[Any], listing: str = "") -> None:
    """Check that `value` is one of `choices`; the error names a similar one."""
    options = list(choices)
    if value not in options:
        got = repr(value[:_MOST_GOT] if isinstance(value, str) else value)
        fail(argument, one_of(options, listing), got, closest(value, options))


def check_count(argument: str, value: Any, minimum: int = 1) -> int:
    """Check that `value` is a whole number of at least `minimum` and return it as `int`."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < minimum:
        fail(argument, f"a whole number of at least {minimum}", repr(value))
    return int(value)


def check_seed(value: Any) -> int:
    """Check that `value` is a whole number from 0 to 2**63 - 1, as torch takes, and return it."""
    if check_count("seed", value, 0) >= 2**63:
        fail("seed", "a whole number below 2**63", value)
    return int(value)


def check_positive(argument: str, value: Any) -> float:
    """Check that `value` is a finite number above zero and return it as `float`."""
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        fail(argument, "a number above 0", repr(value))
    if not (math.isfinite(number) and number > 0):
        fail(argument, "a finite number above 0", repr(value))
    return number


def check_positive_or_zero(argument: str, value: Any) -> float:
    """Check that `value` is 0, or a number that `check_positive` takes, and return it as `float`.

    Example:
        >>> check_positive_or_zero("decay", 0)
        0.0
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if not is_number or not value >= 0:
        fail(argument, "a number of at least 0", repr(value))
    return check_positive(argument, value) if value else 0.0


def check_fraction(argument: str, value: Any) -> None:
    """Check that `value` is a number strictly between 0 and 1."""
    try:
        inside = bool(0 < value < 1)
    except (TypeError, ValueError, RuntimeError):  # None, text, and arrays of several numbers
        inside = False
    if not inside:
        fail(argument, "a number strictly between 0 and 1", repr(value))


def check_device(device: Any) -> torch.device:
    """Check that torch can put tensors on a device of this machine, and return the device."""
    import torch

    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError):
        fail("device", "a device of this machine", repr(str(device)), "Pass 'cpu'")


def is_finite(values: torch.Tensor) -> bool:
    """Whether every entry is finite; a finite sum proves it in a single pass."""
    import torch

    values = values.detach()
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def check_finite(argument: str, values: torch.Tensor | np.ndarray) -> None:
    """Check that every entry is finite; the error names the first row that is not."""
    import torch

    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()  # torch warns of read-only arrays
    tensor = torch.as_tensor(values)
    if not tensor.is_floating_point() or is_finite(tensor):
        return
    bad = ~torch.isfinite(tensor)
    rows = bad.reshape(len(tensor), -1).any(1).nonzero().flatten() if tensor.ndim else bad
    count = int(bad.sum())
    fail(
        argument,
        "finite numbers",
        f"{count} NaN or infinite value{'s' * (count > 1)}",
        "Drop or impute them first",
        row=int(rows[0]) if tensor.ndim else None,
    )


def check_same_length(names: Sequence[str], lengths: Sequence[int]) -> None:
    """Check that arrays have the same number of rows."""
    if len(set(lengths)) > 1:
        fail(
            " and ".join(names),
            "the same number of rows",
            " and ".join(str(n) for n in lengths),
            "Pass one row of each per observation",
        )
