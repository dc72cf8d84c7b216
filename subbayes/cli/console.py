"""Print results to standard output and everything else to standard error."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from os import PathLike
from typing import Any

import typer

from subbayes.utils.first_process import is_first_process
from subbayes.utils.text_table import printable

__all__ = [
    "COMMAND",
    "OPTION_NAMES",
    "ROWS_BEFORE",
    "SUBJECT",
    "as_options",
    "describe_error",
    "describe_warning",
    "print_json",
    "print_json_batches",
    "naming_table",
    "report_error",
    "print_line",
]

COMMAND: ContextVar[str] = ContextVar("COMMAND", default="subbayes")
"""The running command, as it was typed."""

OPTION_NAMES: ContextVar[frozenset[str]] = ContextVar("OPTION_NAMES", default=frozenset())
"""Names of the options of the running command, as Python parameters."""

SUBJECT: ContextVar[str | None] = ContextVar("SUBJECT", default=None)
"""The path of the table that was read last."""

ROWS_BEFORE: ContextVar[int | None] = ContextVar("ROWS_BEFORE", default=0)
"""Rows of that table before those in use; None if they are a random part of it."""

_BAD_INPUT, _UNEXPECTED = 2, 1
_USAGE = typer.BadParameter.__mro__[2]  # click's, whether it is installed or inside typer


def print_line(text: str) -> None:
    """Print one line to standard error; of many processes the first one, and others errors."""
    if is_first_process() or text.startswith("error"):
        print(f"subbayes: {printable(text)}", file=sys.stderr)


@contextmanager
def naming_table(path: str | PathLike[str]) -> Iterator[None]:
    """Name a table in errors about `path`, and in later errors about X and y."""
    SUBJECT.set(str(path))
    ROWS_BEFORE.set(0)
    try:
        yield
    except ValueError as error:
        if getattr(error, "argument", "") != "path":
            raise
        given: Any = error
        raise type(given)(str(path), given.expected, given.got, given.remedy) from None


def report_error(error: Exception) -> int:
    """Print one line about an error, and return the exit code."""
    if isinstance(error, _USAGE):
        context = getattr(error, "ctx", None)
        command = "subbayes" if context is None else context.command_path
        reason = _in_one_line(error.format_message())  # type: ignore[attr-defined]
        print_line(f"error: {_wrong_choice(reason) or reason} See '{command} --help'.")
        return _BAD_INPUT
    if _is_input_error(error):
        print_line(f"error: {describe_error(error)}")
        return _BAD_INPUT
    if isinstance(error, OSError) and error.filename is not None:
        name = str(error.filename)
        shown = name if len(name) < 100 else name[:97] + "..."
        print_line(f"error: '{shown}': {error.strerror}. Choose another path.")
        return _BAD_INPUT
    reason = _in_one_line(str(error)) or "no message"
    if isinstance(error, ImportError) and "pip install" in reason:
        print_line(f"error: {reason}")
        return _BAD_INPUT
    print_line(
        f"error: unexpected {type(error).__name__}: {reason[:300]}. Run it again with --debug to "
        "see where."
    )
    return _UNEXPECTED


def _wrong_choice(reason: str) -> str:
    """The message of a wrong choice in the form of the other errors; empty for other messages."""
    found = re.search(r"for (.*?): (?:.*, )?'([^']*)' is not one of (.*)", reason)
    if found is None:
        return ""
    from subbayes.utils.checks import closest, message

    flags, choices = (re.findall(r"'([^']*)'", part) for part in (found[1], found[3]))
    typed = [flag for flag in flags if flag in re.split(r"[ =]", COMMAND.get())]
    expected = "one of " + ", ".join(map(repr, choices))
    return message((typed or flags or [found[1]])[0], expected, f"'{found[2]}'",
                   closest(found[2], choices))  # fmt: skip


def _is_input_error(error: Exception) -> bool:
    """Whether it is an `InputError` or `InputTypeError`, without importing NumPy to know."""
    checks = sys.modules.get("subbayes.utils.checks")
    return checks is not None and isinstance(error, (checks.InputError, checks.InputTypeError))


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def describe_error(error: Any) -> str:
    """An `InputError` in one line, with files and options in place of arguments.

    Args:
        error: the error, with the attributes argument, expected, got and remedy.

    Example:
        >>> from subbayes.utils.checks import InputError
        >>> token = SUBJECT.set("people.csv")
        >>> describe_error(InputError("X", "numbers in column 'age'", "'?'"))
        "people.csv: expected numbers in column 'age', got '?'."
        >>> SUBJECT.reset(token)
        >>> token = OPTION_NAMES.set(frozenset(["max_categories"]))
        >>> describe_error(InputError("max_categories", "a whole number of at least 1", "0"))
        '--max-categories: expected a whole number of at least 1, got 0.'
        >>> OPTION_NAMES.reset(token)
    """
    from subbayes.utils.checks import message

    if not error.argument:
        return as_options(_in_one_line(str(error)))
    name, expected, remedy = _name_of(error.argument), error.expected, error.remedy
    got = _with_line(error.got) if error.argument in _OF_ROWS else error.got
    return message(name, as_options(expected), got, as_options(remedy))


_ROW = re.compile(r"\brow (\d+)")
_OF_ROWS = ("X", "y", "predictions", "model")  # arguments of errors that name rows of the table


def _with_line(got: str) -> str:
    """What was found, with the line of the file beside the row of the table."""
    path, before = SUBJECT.get(), ROWS_BEFORE.get()
    found = _ROW.search(got)
    if path is None or found is None:
        return got
    if before is None:
        return re.sub(r" \(first in row \d+\)| in row \d+", "", got)
    row = int(found[1]) + before
    line = _line_of(path, row)
    place = f"row {row}, line {line} of the file" if line else f"row {row}, counted from 0"
    return _ROW.sub(place, got, count=1)


def _line_of(path: str, row: int) -> int | None:
    """The line of a row of a text file; None if rows may have several lines, or none."""
    if not path.lower().endswith((".csv", ".tsv")):
        return None
    try:
        with open(path, "rb") as file:
            for line, text in enumerate(file, start=1):
                if b'"' in text or not text.strip():
                    return None
                if line == row + 2:
                    return line
    except OSError:
        pass
    return None


def describe_warning(text: str) -> str:
    """A warning of the library in one line, with files and options in place of arguments."""
    name, colon, rest = _in_one_line(text).partition(": ")
    return as_options(_name_of(name) + colon + rest)


def _name_of(argument: str) -> str:
    """The file or option that the user knows an argument by."""
    subject, last = SUBJECT.get(), argument.rpartition(".")[2]
    if argument in ("X", "y") and subject:
        return subject if argument == "X" else f"{subject} (target)"
    return f"--{last.replace('_', '-')}" if last in OPTION_NAMES.get() else argument


_ASSIGNMENT = re.compile(
    r"\b(unknown|missing|task|separator|decimal|encoding|categorical|missing_values|overwrite|"
    r"max_categories|draws|warmup|inference|new_levels|structure|weights|dropout|budget|"
    r"likelihood(?=='))="
    r"(\[[^\]]*\]|'[^']*'|\w+|\.\.\.)"
)


def as_options(text: str) -> str:
    """Replace Python arguments in a message by options of the command line.

    Options that the running command does not have are those of `subbayes fit`.

    Args:
        text: a message of the library.

    Example:
        >>> as_options("Use missing='impute', or run longer (draws=...)")
        'Use --missing impute, or run longer (--draws)'
        >>> as_options("Pass weights='mean' beside structure='all'")
        'Pass --weights mean beside --structure all'
        >>> as_options("Pass new_levels='sample'")
        'Pass --new-levels sample'
        >>> as_options("Use missing_values=['12,5', 'none']")
        "Use --missing-values '12,5' --missing-values none"
        >>> token = OPTION_NAMES.set(frozenset(["level"]))
        >>> as_options("Use unknown='ignore'")
        "Use --unknown ignore of 'subbayes fit'"
        >>> OPTION_NAMES.reset(token)
    """
    names = OPTION_NAMES.get()

    def option(match: re.Match[str]) -> str:
        owner = " of 'subbayes fit'" if names and match[1] not in names else ""
        name = "--" + match[1].replace("_", "-")
        if match[2] in ("True", "..."):
            return name + owner
        listed = match[2].startswith("[")
        values = match[2].strip("[]") or "''"
        each = [values]
        if listed:
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # text of a user
                items = ast.literal_eval(f"[{match[2].strip('[]')}]") or [""]
                each = ["..." if item is ... else repr(item) for item in items]
        bare = [v.strip("'") if re.fullmatch(r"'[\w-]+'", v) else v for v in each]
        return " ".join(f"{name} {value}".replace("...", "NAME") for value in bare) + owner

    return _ASSIGNMENT.sub(option, text)


def _plain(value: Any) -> Any:
    """Convert to values that JSON can represent; NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one JSON object to standard output."""
    print(_json(facts))


def _json(value: Any) -> str:
    return json.dumps(_plain(value), allow_nan=False)


def print_json_batches(name: str, batches: Iterable[Iterable[Any]]) -> None:
    """Print one JSON object with a list and its length "rows", batch by batch.

    Nothing is printed before the first batch is there.

    Args:
        name: of the list.
        batches: its items.

    Example:
        >>> print_json_batches("values", [[1, 2], [{"a": 3}]])
        {"values": [1, 2, {"a": 3}], "rows": 3}
    """
    rows, start = 0, f'{{"{name}": ['
    for batch in batches:
        items = [_json(item) for item in batch]
        print(start + ", ".join(items), end="")
        rows, start = rows + len(items), ", " if rows + len(items) else start
    print(("" if rows else start) + f'], "rows": {rows}}}')
