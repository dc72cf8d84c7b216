"""Results to standard output, everything else to standard error, in one voice."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from os import PathLike
from typing import Any

import typer

__all__ = [
    "COMMAND",
    "SUBJECT",
    "Console",
    "as_options",
    "complain",
    "in_one_line",
    "in_their_words",
    "lines",
    "reading",
    "say",
]

COMMAND: ContextVar[str] = ContextVar("COMMAND", default="subbayes")
"""The command under way, as it was typed."""

SUBJECT: ContextVar[str | None] = ContextVar("SUBJECT", default=None)
"""The table that was read last, as the user calls it."""

_BAD_INPUT, _UNEXPECTED = 2, 1
_USAGE = typer.BadParameter.__mro__[2]  # click's, whether it is installed or inside typer


@dataclass(frozen=True)
class Console:
    """How one command speaks.

    Attributes:
        json: print one JSON object instead of text.
        quiet: no progress bars and no hints.
    """

    json: bool = False
    quiet: bool = False

    @property
    def progress(self) -> bool | None:
        """What the library's functions take: bars on a terminal, or none."""
        return False if self.quiet else None

    def result(self, facts: Mapping[str, Any], text: str) -> None:
        """The result, as text or as one JSON object."""
        print(json.dumps(_plain(facts), allow_nan=False) if self.json else text)

    def hint(self, text: str) -> None:
        """What to do next."""
        if not self.quiet:
            print(f"next: {text}", file=sys.stderr)


def say(text: str) -> None:
    """One line to standard error."""
    print(f"subbayes: {text}", file=sys.stderr)


@contextmanager
def reading(path: str | PathLike[str]) -> Iterator[None]:
    """What goes wrong in the block is about this table; what goes wrong later may be, too."""
    SUBJECT.set(str(path))
    try:
        yield
    except ValueError as error:
        if getattr(error, "argument", "") != "path":
            raise
        given: Any = error
        raise type(given)(str(path), given.expected, given.got, given.remedy) from None


def lines(facts: Mapping[str, Any]) -> str:
    """Names and values, aligned.

    Example:
        >>> print(lines({"rows": 3, "target": "age"}))
        rows    3
        target  age
    """
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def complain(error: Exception) -> int:
    """Say what is wrong in one line, and return the exit code."""
    if isinstance(error, _USAGE):
        context = getattr(error, "ctx", None)
        command = "subbayes" if context is None else context.command_path
        reason = in_one_line(error.format_message())  # type: ignore[attr-defined]
        say(f"error: {reason} See '{command} --help'.")
        return _BAD_INPUT
    if _is_ours(error):
        say(f"error: {in_their_words(in_one_line(str(error)))}")
        return _BAD_INPUT
    reason = in_one_line(str(error)) or "no further word"
    if isinstance(error, ImportError) and "pip install" in reason:
        say(f"error: {reason}")
        return _BAD_INPUT
    say(
        f"error: unexpected {type(error).__name__}: {reason[:300]}. Run it again with --debug to "
        "see where."
    )
    return _UNEXPECTED


def _is_ours(error: Exception) -> bool:
    """Whether it is an `InputError`, without importing torch to know."""
    checks = sys.modules.get("subbayes.utils.checks")
    return checks is not None and isinstance(error, (checks.InputError, checks.InputTypeError))


def in_one_line(text: str) -> str:
    r"""Without line ends.

    Example:
        >>> in_one_line("one\n  two")
        'one two'
    """
    return " ".join(text.split())


_OPTIONS = frozenset(
    (
        "activation",
        "batch_size",
        "chains",
        "covariance",
        "draws",
        "dropout",
        "early_epochs",
        "epochs",
        "hidden",
        "ignore",
        "inference",
        "keep",
        "learning_rate",
        "level",
        "likelihood",
        "max_categories",
        "members",
        "out",
        "patience",
        "posterior",
        "prior",
        "prior_inclusion",
        "prior_scale",
        "rank",
        "scale_prior",
        "seed",
        "separator",
        "slab",
        "structure",
        "swa_epochs",
        "swa_learning_rate",
        "target",
        "task",
        "temperature",
        "threshold",
        "validation",
        "warmup",
        "weights",
    )
)
_AFTER_FIT = ("predict", "evaluate")
_ONLY_FIT = ("unknown", "missing", "categorical", "missing_values", "max_categories", "task")
_OPTION = re.compile(
    r"\b(unknown|missing|task|separator|categorical|missing_values|overwrite|"
    r"max_categories|draws|warmup|inference|structure|weights)="
    r"(\[[^\]]*\]|'[^']*'|\w+|\.\.\.)"
)


def in_their_words(text: str) -> str:
    """What the library says of its arguments, said of files and options.

    Example:
        >>> token = SUBJECT.set("people.csv")
        >>> in_their_words("X: expected numbers in column 'age', got '?'.")
        "people.csv: expected numbers in column 'age', got '?'."
        >>> in_their_words("max_categories: expected a whole number of at least 1, got 0.")
        '--max-categories: expected a whole number of at least 1, got 0.'
        >>> SUBJECT.reset(token)
    """
    name, colon, rest = text.partition(": ")
    subject = SUBJECT.get()
    if name in ("X", "y") and subject and colon:
        name = subject if name == "X" else f"{subject} (target)"
    elif name.rpartition(".")[2] in _OPTIONS and rest.startswith("expected "):
        name = f"--{name.rpartition('.')[2].replace('_', '-')}"
    return as_options(name + colon + rest, _owner())


def _owner() -> str:
    """What to say after an option that the running command does not have, but `fit` does."""
    words = COMMAND.get().split()
    return " of 'subbayes fit'" if len(words) > 1 and words[1] in _AFTER_FIT else ""


def as_options(text: str, owner: str = "") -> str:
    """The library's remedies name arguments; here they are options.

    Args:
        text: what the library says.
        owner: said after an option of reading and encoding, which only `fit` has.

    Example:
        >>> as_options("Use missing='impute', or run longer (draws=...)")
        'Use --missing impute, or run longer (--draws)'
        >>> as_options("Pass weights='mean' beside structure='all'")
        'Pass --weights mean beside --structure all'
        >>> as_options("Use unknown='ignore'", " of 'subbayes fit'")
        "Use --unknown ignore of 'subbayes fit'"
    """

    def option(match: re.Match[str]) -> str:
        name = "--" + match[1].replace("_", "-")
        if match[2] in ("True", "..."):
            return name
        listed = match[2].startswith("[")
        values = match[2].strip("[]") or "''"
        each = [value.strip() for value in values.split(",")] if listed else [values]
        plain = [v.strip("'") if re.fullmatch(r"'[\w-]+'", v) else v for v in each]
        said = " ".join(f"{name} {value}".replace("...", "NAME") for value in plain)
        return said + (owner if match[1] in _ONLY_FIT else "")

    return _OPTION.sub(option, text)


def _plain(value: Any) -> Any:
    """Values JSON has: NumPy numbers as Python's, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
