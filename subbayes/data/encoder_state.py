"""The options and the fitted state of a `TabularEncoder`, as an artifact holds them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from subbayes.artifacts.facts import Facts, Finite, Name, Positive


class EncoderOptions(Facts):
    """The arguments of a `TabularEncoder`."""

    unknown: Literal["error", "ignore"]
    missing: Literal["error", "impute"]
    missing_indicator: bool
    missing_values: list[Name | int | float | bool | None]
    categorical: list[Name]
    max_categories: Annotated[int, Meta(ge=2)]
    many: Literal["error", "group"] = "error"


class NumbersFacts(Facts):
    """Medians, means, variances and scales of the numeric columns."""

    columns: list[Name]
    median: list[Finite]
    mean: list[Finite]
    variance: list[Annotated[float, Meta(ge=0, le=1e300)]]
    scale: list[Positive]

    def __post_init__(self) -> None:
        lists = self.columns, self.median, self.mean, self.variance, self.scale
        if len({len(values) for values in lists}) > 1:
            raise ValueError("expected a number of each kind for each column")


class CategoriesFacts(Facts):
    """Levels of the categorical columns, and the most frequent one of each."""

    columns: list[Name]
    levels: list[list[Name]]
    most_frequent: list[Name]

    def __post_init__(self) -> None:
        if not len(self.columns) == len(self.levels) == len(self.most_frequent):
            raise ValueError("expected levels and a most frequent one for each column")

    def by_column(self) -> dict[str, list[str]]:
        """The levels of each column."""
        return dict(zip(self.columns, self.levels, strict=True))


class EncoderFacts(Facts):
    """Options and fitted state of a `TabularEncoder`."""

    format: Literal[1]
    options: EncoderOptions
    columns: list[Name]
    named: bool
    dropped: list[Name]
    numeric: NumbersFacts
    categorical: CategoriesFacts
    flagged: list[Name]

    def __post_init__(self) -> None:
        encoded = {*self.numeric.columns, *self.categorical.columns}
        if encoded != {*self.columns} - {*self.dropped} or not encoded.issuperset(self.flagged):
            raise ValueError("expected numbers or levels of each column that is not dropped")

    @property
    def n_features(self) -> int:
        """Number of columns of the matrix."""
        levels = sum(map(len, self.categorical.levels))
        return len(self.numeric.columns) + levels + len(self.flagged)
