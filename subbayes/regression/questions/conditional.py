"""Predictions along a column, with the other columns at typical values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from subbayes.data.levels import levels_of
from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.questions.summary import beside_statistics, central
from subbayes.utils.checks import check_choice

_POINTS = 60


@dataclass(frozen=True)
class Conditional:
    """Predictions along a column.

    Attributes:
        variable: the column.
        x: its values, or levels.
        by: column of the lines, or None.
        groups: value of `by` for each line; one None without it.
        draws: shape (groups, S, len(x)).
        typical: values of the other columns; empty for averages over rows.
        level: level of the intervals.
        quantity: what is predicted, such as "mean of y".
    """

    variable: str
    x: np.ndarray
    by: str | None
    groups: tuple[Any, ...]
    draws: Float[np.ndarray, "g S m"]
    typical: dict[str, Any]
    level: float
    quantity: str = "prediction"

    def __repr__(self) -> str:
        by = f" by {self.by!r} ({', '.join(map(str, self.groups))})" if self.by else ""
        typical = (f", {name} = {_short(value)}" for name, value in self.typical.items())
        at = "".join(one for one in typical if one not in self.quantity)
        return (
            f"Conditional({self.quantity} at {len(self.x)} values of {self.variable!r}{by}{at}, "
            f"{self.draws.shape[1]} draws)"
        )

    def as_conditional(self) -> Conditional:
        """This object; other results that are drawn alike are converted by this method."""
        return self

    @property
    def discrete(self) -> bool:
        """Whether the column has levels instead of numbers."""
        return self.x.dtype.kind not in "iuf"

    def table(self) -> pd.DataFrame:
        """Mean, standard deviation and central interval at each value, by group.

        A column of the data with the name of one of these, such as "mean", is called "mean (data)".
        """
        parts = []
        for group, draws in zip(self.groups, self.draws, strict=True):
            part = beside_statistics({self.variable: self.x}, central(draws, self.level))
            if self.by is not None:
                part.insert(0, f"{self.by} (data)" if self.by in part else self.by, group)
            parts.append(part)
        return pd.concat(parts, ignore_index=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def typical_values(
    frame: pd.DataFrame,
    columns: Sequence[str],
    weights: str | None = None,
    by_level: Collection[str] = (),
) -> dict[str, Any]:
    """The mean of each column of numbers, the most frequent value of the others.

    Rows count as often as the column `weights` says. Numbers of the columns `by_level` are levels.

    Example:
        >>> typical_values(pd.DataFrame({"x": [1.0, 2.0], "g": ["b", "b"]}), ["x", "g"])
        {'x': 1.5, 'g': 'b'}
    """
    found = {}
    for name in columns:
        column = frame[name]
        if has_numbers(column) and name not in by_level:
            w = None if weights is None else frame[weights]
            found[name] = float(np.average(column, weights=w))
        elif weights is None:
            found[name] = column.mode().tolist()[0]
        else:
            counts = frame[weights].groupby(column, observed=True).sum()
            found[name] = counts.index.tolist()[counts.argmax()]
    return found


def conditional_effect(
    predict: Callable[[pd.DataFrame], Float[np.ndarray, "S n"]],
    frame: pd.DataFrame,
    columns: Sequence[str],
    variable: str,
    by: str | None,
    level: float,
    weights: str | None = None,
    by_level: Collection[str] = (),
) -> Conditional:
    """Predictions along a column; see `Results.conditional_effect`.

    Columns of `by_level` are factors, groups and ordered values, whose numbers are levels.
    """
    check_choice("variable", variable, tuple(columns))
    observed = frame[variable]
    number = has_numbers(observed) and variable not in by_level
    x = (
        np.linspace(observed.min(), observed.max(), _POINTS)
        if number
        else np.array(levels_of(observed), dtype=object)
    )
    groups: list[Any] = [None]
    if by is not None:
        check_choice("by", by, tuple(name for name in columns if name != variable))
        other = frame[by]
        number = has_numbers(other) and by not in by_level
        if number and other.nunique() > 5:
            order = np.argsort(other)
            w = np.ones(len(other)) if weights is None else frame[weights].to_numpy()[order]
            below = (w.cumsum() - w / 2) / w.sum()
            groups = np.interp([0.1, 0.5, 0.9], below, other.to_numpy()[order]).tolist()
        else:
            groups = levels_of(other)
    others = [name for name in columns if name not in (variable, by)]
    typical = typical_values(frame, others, weights, by_level)
    draws = []
    for group in groups:
        grid = pd.DataFrame({variable: x.tolist(), **{k: [v] * len(x) for k, v in typical.items()}})
        if by is not None:
            grid[by] = group
        for name in grid:
            if isinstance(frame[name].dtype, pd.CategoricalDtype):
                grid[name] = grid[name].astype(frame[name].dtype)
        draws.append(predict(grid))
    return Conditional(variable, x, by, tuple(groups), np.stack(draws), typical, level)
