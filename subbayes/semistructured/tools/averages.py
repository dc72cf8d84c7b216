r"""Averages of predictions over rows: marginal means, contrasts of levels, and average slopes.

A marginal mean is the prediction with a column set to one value in all rows, averaged over the
rows, for each draw; a contrast is the difference of two of them, their ratio or the ratio of their
odds (g-computation; Arel-Bundock, Greifer and Heiss 2024). They are quantities of the response,
unlike coefficients behind a link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from subbayes.semistructured.formula_checks import has_numbers, levels_of
from subbayes.semistructured.summary import central
from subbayes.semistructured.tools.conditional import Conditional
from subbayes.utils.checks import check_choice, fail

__all__ = ["Averages", "contrasts", "marginal_means", "marginal_slopes"]

Predict = Callable[[pd.DataFrame], Float[np.ndarray, "S n"]]
"""From rows to the draws of a quantity of each."""

_MOST_ROWS = 2000  # predicted in one call, evenly spaced ones of more
_MOST_PRINTED = 60  # averages
_STEP = 1e-3  # of a slope, in standard deviations of the column
_COMPARISONS = {"difference": "{} - {}", "ratio": "{} / {}", "odds ratio": "odds({}) / odds({})"}


@dataclass(frozen=True)
class Averages:
    """Averages over rows, with their draws.

    Attributes:
        name: what is averaged.
        labels: of the averages.
        draws: shape (S, m).
        level: level of the intervals in the table.
        quantity: what is averaged, for figures.
        null: the value without an effect, which the direction is away from.
    """

    name: str
    labels: tuple[Any, ...]
    draws: Float[np.ndarray, "S m"]
    level: float
    quantity: str = "average"
    null: float = 0.0

    def table(self) -> pd.DataFrame:
        """Mean, standard deviation, central interval and probability of direction."""
        positive = (self.draws > self.null).mean(0)
        columns = {
            **central(self.draws, self.level),
            "direction": np.maximum(positive, 1 - positive),
        }
        return pd.DataFrame(columns, index=pd.Index(self.labels, name=self.name))

    def as_conditional(self) -> Conditional:
        """The averages by label, as `subbayes.plots.conditional.conditional` draws them."""
        labels = np.array([str(label) for label in self.labels], dtype=object)
        return Conditional(
            self.name, labels, None, (None,), self.draws[None], {}, self.level, self.quantity
        )

    def __repr__(self) -> str:
        shown = self.table().to_string(float_format=lambda v: f"{v:.4g}", max_rows=_MOST_PRINTED)
        return f"Averages of {self.name!r} over {len(self.draws)} draws\n{shown}"


def rows_to_average(frame: pd.DataFrame) -> pd.DataFrame:
    """At most 2000 evenly spaced rows."""
    if len(frame) <= _MOST_ROWS:
        return frame
    return frame.iloc[np.linspace(0, len(frame) - 1, _MOST_ROWS).round().astype(int)]


def values_of(
    variable: str, frame: pd.DataFrame, values: Sequence[Any] | None, by_level: bool
) -> list[Any]:
    """The given values, or all levels, which may be many numbers if effects are by level."""
    check_choice("variable", variable, tuple(map(str, frame.columns)))
    if values is not None:
        return list(values)
    column = frame[variable]
    if pd.api.types.is_numeric_dtype(column) and column.nunique() > 10 and not by_level:
        got = f"{column.nunique()} numbers in {variable!r}"
        fail("values", "values of the column", got, "Pass values=[...], or use marginal_slopes")
    return levels_of(column)


def average_rows(
    values: Float[np.ndarray, "S n"], rows: pd.DataFrame, weights: str | None
) -> Float[np.ndarray, "S"]:
    """Averages over rows, which count alike or by a column of weights."""
    if weights is None:
        return values.mean(1)
    check_choice("weights", weights, tuple(map(str, rows.columns)))
    w = rows[weights]
    if not pd.api.types.is_numeric_dtype(w):
        fail("weights", "a column of numbers", f"dtype {w.dtype}")
    w = w.to_numpy(dtype=np.float64)
    if not (np.isfinite(w).all() and (w >= 0).all() and w.sum() > 0):
        got = f"{float(w.min())} to {float(w.max())}"
        fail("weights", "finite numbers of at least 0, some above 0", got)
    return values @ (w / w.sum())


def set_to(frame: pd.DataFrame, variable: str, value: Any) -> pd.DataFrame:
    column = pd.Series([value] * len(frame), index=frame.index)
    dtype = frame[variable].dtype
    if isinstance(dtype, pd.CategoricalDtype):
        column = column.astype(dtype)
    return frame.assign(**{variable: column})


def marginal_means(
    predict: Predict,
    frame: pd.DataFrame,
    variable: str,
    values: Sequence[Any] | None,
    level: float,
    weights: str | None = None,
    by_level: bool = False,
) -> Averages:
    """The average prediction with a column set to each value; see `AfterFit.marginal_means`."""
    chosen = values_of(variable, frame, values, by_level)
    rows = rows_to_average(frame)
    draws = [
        average_rows(predict(set_to(rows, variable, value)), rows, weights) for value in chosen
    ]
    return Averages(variable, tuple(chosen), np.stack(draws, 1), level)


def contrasts(
    predict: Predict,
    frame: pd.DataFrame,
    variable: str,
    pairs: Sequence[Any] | None,
    level: float,
    weights: str | None = None,
    by_level: bool = False,
    comparison: str = "difference",
) -> Averages:
    """Comparisons of marginal means; see `AfterFit.contrast`."""
    check_choice("comparison", comparison, tuple(_COMPARISONS))
    if pairs is None:
        levels = values_of(variable, frame, None, by_level)
        pairs = [(value, levels[0]) for value in levels[1:]]
    if not pairs or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        fail("levels", "pairs of levels, such as [('b', 'a')]", repr(pairs))
    needed = list(dict.fromkeys(value for pair in pairs for value in pair))
    means = marginal_means(predict, frame, variable, needed, level, weights)
    place = {value: i for i, value in enumerate(needed)}
    first, second = (means.draws[:, [place[pair[i]] for pair in pairs]] for i in (0, 1))
    labels = tuple(_COMPARISONS[comparison].format(a, b) for a, b in pairs)
    if comparison == "difference":
        return Averages(variable, labels, first - second, level)
    _check_positive(means.draws, comparison)
    if comparison == "odds ratio":
        first, second = _odds(first), _odds(second)
    return Averages(variable, labels, first / second, level, null=1.0)


def _odds(means: Float[np.ndarray, "S m"]) -> Float[np.ndarray, "S m"]:
    if means.max() >= 1:
        got = f"means up to {means.max():.4g}"
        fail("comparison", "means below 1 for an odds ratio", got, "Compare by 'ratio'")
    return means / (1 - means)


def _check_positive(means: Float[np.ndarray, "S m"], comparison: str) -> None:
    if means.min() <= 0:
        got = f"means down to {means.min():.4g}"
        remedy = "Compare by 'difference'"
        fail("comparison", f"means above 0 for a comparison by {comparison!r}", got, remedy)


def marginal_slopes(
    predict: Predict,
    frame: pd.DataFrame,
    variable: str,
    by: str | None,
    level: float,
    weights: str | None = None,
) -> Averages:
    """Average slopes in a column of numbers; see `AfterFit.marginal_slopes`."""
    check_choice("variable", variable, tuple(map(str, frame.columns)))
    rows = rows_to_average(frame)
    column = rows[variable]
    if not has_numbers(column):
        got = f"dtype {column.dtype}"
        fail("variable", "a column of numbers", got, "Use contrast or marginal_means for levels")
    x = column.to_numpy(dtype=np.float64)
    step = _STEP * float(np.std(x)) or _STEP
    low, high = x - step, x + step
    if x.min() < x.max():  # within splines
        low, high = np.maximum(low, x.min()), np.minimum(high, x.max())
    up, down = (predict(rows.assign(**{variable: at})) for at in (high, low))
    slopes = (up - down) / (high - low)
    if by is None:
        average = average_rows(slopes, rows, weights)[:, None]
        return Averages(variable, ("average",), average, level)
    check_choice("by", by, tuple(map(str, frame.columns)))
    groups = levels_of(rows[by])
    parts = [(rows[by] == group).to_numpy() for group in groups]
    draws = [average_rows(slopes[:, part], rows[part], weights) for part in parts]
    return Averages(f"{variable} by {by}", tuple(groups), np.stack(draws, 1), level)
