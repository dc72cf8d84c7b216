"""Print results to standard output and everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from os import PathLike
from typing import Any

import typer

from subbayes.utils.checks import InputError, InputTypeError, MissingPackageError, message
from subbayes.utils.text_table import json_value, printable
from subbayes.utils.warning import is_first_process

COMMAND: ContextVar[str] = ContextVar("COMMAND", default="subbayes")
"""The running command, as it was typed."""

NAMES: ContextVar[Mapping[str, str]] = ContextVar("NAMES", default={})  # noqa: B039
"""Options and files by the names that arguments of the library have in errors."""

ROWS_BEFORE: ContextVar[int | None] = ContextVar("ROWS_BEFORE", default=0)
"""Rows of the table before those in use; None if they are a random part of it."""

_BAD_INPUT, _UNEXPECTED = 2, 1
_USAGE = typer.BadParameter.__mro__[2]  # click's, whether it is installed or inside typer


def print_line(text: str) -> None:
    """Print one line to standard error; of many processes only the first one does."""
    if is_first_process():
        print_error(text)


def print_error(text: str) -> None:
    """Print one line to standard error, in each process."""
    print(f"subbayes: {printable(text)}", file=sys.stderr)


@contextmanager
def naming(**names: str) -> Iterator[None]:
    """Within, name arguments in errors; an error that leaves keeps these names until it is printed.

    Example:
        >>> with naming(path="--out"):
        ...     NAMES.get()["path"]
        '--out'
    """
    before = NAMES.set({**NAMES.get(), **names})
    yield
    NAMES.reset(before)


@contextmanager
def naming_table(path: str | PathLike[str]) -> Iterator[None]:
    """Name a table in errors about `path`, and in later errors about X and y."""
    NAMES.set({**NAMES.get(), "X": str(path), "y": f"{path} (target)"})
    ROWS_BEFORE.set(0)
    with naming(path=str(path)):
        yield


def report_error(error: Exception) -> int:
    """Print one line about an error, and return the exit code."""
    if isinstance(error, _USAGE):
        context = getattr(error, "ctx", None)
        command = "subbayes" if context is None else context.command_path
        reason = _in_one_line(error.format_message())  # type: ignore[attr-defined]
        print_error(f"error: {reason} See '{command} --help'.")
        return _BAD_INPUT
    if isinstance(error, (InputError, InputTypeError, MissingPackageError)):
        print_error(f"error: {describe_error(error)}")
        return _BAD_INPUT
    if isinstance(error, OSError) and error.filename is not None:
        name = str(error.filename)
        shown = name if len(name) < 100 else name[:97] + "..."
        print_error(f"error: '{shown}': {error.strerror}. Choose another path.")
        return _BAD_INPUT
    reason = _in_one_line(str(error)) or "no message"
    print_error(
        f"error: unexpected {type(error).__name__}: {reason[:300]}. Run it again with --debug to "
        "see where."
    )
    return _UNEXPECTED


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def describe_error(error: Any) -> str:
    """An error of the library in one line, with files and options in place of arguments.

    Args:
        error: the error, with the attributes argument, expected, got, remedy and row.

    Example:
        >>> from subbayes.utils.checks import InputError
        >>> with naming(max_categories="--max-categories"):
        ...     describe_error(InputError("max_categories", "at least 1", "0"))
        '--max-categories: expected at least 1, got 0.'
    """
    if not error.argument:
        return _in_one_line(str(error))
    name = NAMES.get().get(error.argument.rpartition(".")[2], error.argument)
    row = None if error.row is None else _place_of(error.row)
    return message(name, error.expected, error.got, error.remedy, row)


def _place_of(row: int) -> str | None:
    """The row in the whole table, with the line of its file; None for a random part of a table."""
    path, before = NAMES.get().get("X"), ROWS_BEFORE.get()
    if path is None:
        return str(row)
    if before is None:
        return None
    row += before
    line = _line_of(path, row)
    return f"{row}, line {line} of the file" if line else f"{row}, counted from 0"


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


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one JSON object to standard output."""
    print(_json(facts))


def _json(value: Any) -> str:
    return json.dumps(json_value(value), allow_nan=False)


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
