"""The fitted state of a `TabularEncoder` in a configuration: its checks, and its row."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pandas as pd
from msgspec import Meta

from subbayes.artifacts.facts import Facts, Finite, Name, Positive


class _Options(Facts):
    unknown: Literal["error", "ignore"]
    missing: Literal["error", "impute"]
    missing_indicator: bool
    missing_values: list[Name | int | float | bool | None]
    categorical: list[Name]
    max_categories: Annotated[int, Meta(ge=2)]
    many: Literal["error", "group"] = "error"


class _Numeric(Facts):
    columns: list[Name]
    median: list[Finite]
    mean: list[Finite]
    variance: list[Annotated[float, Meta(ge=0, le=1e300)]]
    scale: list[Positive]


class _Categorical(Facts):
    columns: list[Name]
    levels: list[list[Name]]
    most_frequent: list[Name]


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
