"""Tables of records in Markdown, and the pages of the documentation that show them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.store import Record
from subbayes.artifacts.files import atomic_write_text
from subbayes.utils.checks import fail

__all__ = [
    "Figure",
    "add_recorded_option",
    "add_write_option",
    "distinct",
    "markdown_table",
    "mean_and_deviation",
    "number",
    "publish",
    "select",
    "with_deviation",
    "write_between",
]

Figure = tuple[float, float]
"""Mean and standard deviation (or standard error) of a score."""


# --- records --------------------------------------------------------------------------------------


def select(records: Sequence[Record], **wanted: str) -> list[Record]:
    """Return the records with the given values."""
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def distinct(records: Sequence[Record], key: str) -> list[str]:
    """Return the distinct values of a field, in order of first occurrence."""
    return list(dict.fromkeys(r[key] for r in records))


# --- text -----------------------------------------------------------------------------------------


def mean_and_deviation(values: np.ndarray) -> Figure:
    """Return mean and standard deviation; the deviation of a single value is 0."""
    return float(values.mean()), float(values.std(ddof=min(1, len(values) - 1)))


def number(value: float, digits: int = 3) -> str:
    """Format a number with a typographic minus sign, which zero never gets."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def with_deviation(mean: float, deviation: float | None, digits: int = 3) -> str:
    """Format a mean and, where there is one, its deviation."""
    return number(mean, digits) + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> str:
    """Format a table under its title; without rows, return an empty string."""
    if not rows:
        return ""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([f"**{title}**", "", *lines] if title else lines)


# --- pages ----------------------------------------------------------------------------------------


def add_recorded_option(parser: argparse.ArgumentParser) -> None:
    """Add `--recorded` to the options of an experiment."""
    parser.add_argument(
        "--recorded", action="store_true", help="tables of the records, without computing others"
    )


def add_write_option(parser: argparse.ArgumentParser) -> None:
    """Add `--write PAGE` to the options of an experiment."""
    parser.add_argument(
        "--write",
        default=None,
        metavar="PAGE",
        help="write the tables between the marks of this page of the documentation",
    )


_ELSEWHERE = ("json", "write", "recorded", "results", "data_dir")
"""Options that do not select records."""


def publish(text: str, name: str, options: argparse.Namespace, say: Callable[..., None]) -> None:
    """Print the tables of an experiment and write them to the page of `--write`, if there is one.

    Args:
        text: the tables; empty if there are no records.
        name: of the marks of the page.
        options: options of the command line.
        say: prints a line.

    Raises:
        InputError: a page without the marks of the experiment; or no tables to write, which would
            empty the page: settings for which there are no records.
    """
    say(text)
    if options.write:
        if not text.strip():
            wanted = (f"{k}={v}" for k, v in vars(options).items() if k not in _ELSEWHERE)
            fail(
                "write",
                f"records of {', '.join(wanted)}",
                f"none in '{options.results}'",
                "Pass the options with which they were computed",
            )
        write_between(options.write, name, text)


def write_between(page: str | Path, name: str, text: str) -> None:
    """Write text between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page.

    Raises:
        InputError: a page without the marks.
    """
    path, marks = Path(page), (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    before = path.read_text()
    if any(mark not in before for mark in marks):
        fail("page", f"the marks {' and '.join(marks)} in '{path}'", "a page without them")
    begin, end = map(re.escape, marks)
    block = f"{marks[0]}\n\n{text}\n\n{marks[1]}"
    atomic_write_text(path, re.sub(f"{begin}.*{end}", lambda _: block, before, flags=re.DOTALL))
