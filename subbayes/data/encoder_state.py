"""The fitted state of a `TabularEncoder` in a configuration: its checks, and its row."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pandas as pd
from msgspec import Meta, structs

from subbayes.artifacts.facts import Facts, Finite, Name, Positive
from subbayes.data.frames import check_text, check_width, quote
from subbayes.utils.checks import fail
from subbayes.utils.text_table import MOST_MARKS


class _Options(Facts):
    unknown: Literal["error", "ignore"]
    missing: Literal["error", "impute"]
    missing_indicator: bool
    missing_values: Annotated[list[Name | int | float | bool | None], Meta(max_length=MOST_MARKS)]
    categorical: list[Name]
    max_categories: Annotated[int, Meta(ge=2)]


class _Numeric(Facts):
    columns: list[Name]
    median: list[Finite]
    mean: list[Finite]
    variance: list[Annotated[float, Meta(ge=0, le=1e300)]]
    scale: list[Positive]

    def __post_init__(self) -> None:
        _check_lengths(self)


class _Categorical(Facts):
    columns: list[Name]
    levels: list[list[Name]]
    most_frequent: list[Name]

    def __post_init__(self) -> None:
        _check_lengths(self)


def _check_lengths(group: _Numeric | _Categorical) -> None:
    if len({len(values) for values in structs.astuple(group)}) > 1:
        raise ValueError("expected as many medians, means and levels as columns")


class EncoderFacts(Facts):
    """Options and fitted state of a `TabularEncoder`."""

    format: Literal[1]
    options: _Options
    columns: list[Name]
    named: bool
    dropped: list[Name]
    numeric: _Numeric
    categorical: _Categorical
    flagged: list[Name]

    def __post_init__(self) -> None:
        _check_columns(self)
        _check_levels(self.categorical, self.options.max_categories)


def _check_columns(config: EncoderFacts) -> None:
    """Check that each column has one place, and that the lists of columns agree in their order."""
    columns, dropped = config.columns, config.dropped
    numeric, categorical = config.numeric.columns, config.categorical.columns
    check_width("config", len(columns), len(categorical))
    if len(set(columns)) < len(columns):
        fail("config", "columns of different names", quote(columns))
    for kind, names in (
        ("numeric", numeric),
        ("categorical", categorical),
        ("dropped", dropped),
        ("flagged", config.flagged),
    ):
        among = set(names)
        if names != [name for name in columns if name in among]:
            fail("config", f"{kind} columns of the table, in its order", quote(names))
    if sorted([*numeric, *categorical, *dropped]) != sorted(columns):
        expected = "columns that are either numeric, categorical or dropped"
        fail("config", expected, quote(columns))
    known = {*categorical, *dropped}
    if others := [name for name in config.options.categorical if name not in known]:
        fail("config", "categorical columns, as the options name them", quote(others))


def _check_levels(categorical: _Categorical, most: int) -> None:
    """Check that levels are sorted and not too many, and imputed categories among them."""
    for levels, imputed in zip(categorical.levels, categorical.most_frequent, strict=True):
        if len(levels) > most:
            fail("config", f"at most {most} levels of a column", str(len(levels)))
        check_text("config", levels)
        if levels != sorted(set(levels)):
            fail("config", "different levels of a column, sorted", quote(levels))
        if imputed not in levels:
            fail("config", "a level as the most frequent category", quote([imputed]))


def encoded_columns(config: EncoderFacts) -> int:
    """Number of columns of the matrix that an encoder of a configuration gives."""
    levels = sum(map(len, config.categorical.levels))
    return len(config.numeric.columns) + levels + len(config.flagged)


def one_row(config: EncoderFacts) -> tuple[pd.DataFrame, dict[str, list[str]], list[str]]:
    """The arguments of `TabularEncoder._build`: a row of medians and modes, levels and flags."""
    numeric, categorical = config.numeric, config.categorical
    row: dict[str, Any] = {
        n: [float(v)] for n, v in zip(numeric.columns, numeric.median, strict=True)
    }
    for name, value in zip(categorical.columns, categorical.most_frequent, strict=True):
        row[name] = pd.Series([value], dtype=object)
    dropped = set(config.dropped)
    kept = [name for name in config.columns if name not in dropped]
    levels = dict(zip(categorical.columns, map(list, categorical.levels), strict=True))
    return pd.DataFrame({name: row[name] for name in kept}), levels, list(config.flagged)
