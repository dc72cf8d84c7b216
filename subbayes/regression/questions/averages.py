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

from subbayes.data.levels import levels_of
from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.questions.conditional import Conditional
from subbayes.regression.questions.summary import central
from subbayes.utils.checks import check_choice, fail

Predict = Callable[[pd.DataFrame], Float[np.ndarray, "S n"]]
"""From rows to the draws of a quantity of each."""

ESTIMANDS = ("population", "sample")
_MOST_ROWS = 2000  # predicted in one call, evenly spaced ones of more
_MOST_PRINTED = 60  # averages
_STEP = 1e-3  # of a slope, in standard deviations of the column
_BOOTSTRAP = 11  # distinguishes its random numbers from others of a seed
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
        effects: averages over the "population" of the rows, or over these rows, the "sample".
    """

    name: str
    labels: tuple[Any, ...]
    draws: Float[np.ndarray, "S m"]
    level: float
    quantity: str = "average"
    null: float = 0.0
    effects: str = "sample"

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
        of = "the population of rows" if self.effects == "population" else "the rows"
        return f"Averages of {self.name!r} over {of}, {len(self.draws)} draws\n{shown}"


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
        chosen = list(values)
        return chosen if chosen else fail("values", "at least one value", "none")
    column = frame[variable]
    if pd.api.types.is_numeric_dtype(column) and column.nunique() > 10 and not by_level:
        got = f"{column.nunique()} numbers in {variable!r}"
        fail("values", "values of the column", got, "Pass values=[...], or use marginal_slopes")
    return levels_of(column)


class RowAverage:
    """Averages over rows: of these rows, or of the population that they were drawn from.

    For the population each draw has random weights of the rows, the Bayesian bootstrap, as effects
    beside networks have (see `subbayes.semistructured.estimand`).

    Args:
        frame: all rows, of which at most 2000 evenly spaced ones are averaged.
        column: column that says how many times a row counts; by default once.
        seed: of the weights, for averages over the population; None for these rows.

    Attributes:
        rows: the rows that are averaged.

    Raises:
        InputError: no rows, or a column that does not hold such numbers.

    Example:
        >>> average = RowAverage(pd.DataFrame({"n": [1, 3]}), "n")
        >>> average(np.array([[0.0, 1.0]]))
        array([0.75])
    """

    def __init__(
        self, frame: pd.DataFrame, column: str | None = None, seed: int | None = None
    ) -> None:
        if not len(frame):
            fail("data", "at least one row", "an empty data frame")
        self.rows, self.seed = rows_to_average(frame), seed
        self._counts = None if column is None else _counts(self.rows, column)
        self._each = len(frame) / len(self.rows)
        self._drawn = np.empty((0, len(self.rows)))

    def __call__(
        self, values: Float[np.ndarray, "S n"], part: np.ndarray | None = None
    ) -> Float[np.ndarray, "S"]:
        """Averages of each draw over the rows, or over those that a mask selects."""
        if part is not None and self._counts is not None and not self._counts[part].any():
            fail("weights", "some above 0 in each group of rows", "0 in all rows of one")
        weights = self._weights(len(values))
        if part is not None:
            values, weights = values[:, part], None if weights is None else weights[..., part]
        if weights is None:
            return values.mean(1)
        if weights.ndim == 1:
            return values @ (weights / weights.sum())
        return np.einsum("sn,sn->s", values, weights) / weights.sum(1)

    def _weights(self, draws: int) -> np.ndarray | None:
        if self.seed is None:
            return self._counts
        if len(self._drawn) != draws:  # the same for all averages
            counts = np.ones(len(self.rows)) if self._counts is None else self._counts
            rng = np.random.default_rng([self.seed, _BOOTSTRAP])
            self._drawn = rng.standard_gamma(counts * self._each, (draws, len(counts)))
        return self._drawn


def _counts(rows: pd.DataFrame, column: str) -> Float[np.ndarray, "n"]:
    """How many times each row counts."""
    check_choice("weights", column, tuple(map(str, rows.columns)))
    w = rows[column]
    if not pd.api.types.is_numeric_dtype(w):
        fail("weights", "a column of numbers", f"dtype {w.dtype}")
    w = w.to_numpy(dtype=np.float64)
    if not (np.isfinite(w).all() and (w >= 0).all() and w.sum() > 0):
        got = f"{float(w.min())} to {float(w.max())}"
        fail("weights", "finite numbers of at least 0, some above 0", got)
    return w


def set_to(frame: pd.DataFrame, variable: str, value: Any) -> pd.DataFrame:
    """A copy of a table with one value of a variable in all rows, in the type of its column."""
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
    average: RowAverage,
    by_level: bool = False,
) -> Averages:
    """The average prediction with a column set to each value; see `AfterFit.marginal_means`."""
    chosen = values_of(variable, frame, values, by_level)
    draws = [average(predict(set_to(average.rows, variable, value))) for value in chosen]
    return Averages(variable, tuple(chosen), np.stack(draws, 1), level)


def contrasts(
    predict: Predict,
    frame: pd.DataFrame,
    variable: str,
    pairs: Sequence[Any] | None,
    level: float,
    average: RowAverage,
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
    means = marginal_means(predict, frame, variable, needed, level, average)
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
        remedy = "Compare by 'ratio', or set trials to 1 in data= for the odds of a trial"
        fail("comparison", "means below 1 for an odds ratio", got, remedy)
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
    average: RowAverage,
) -> Averages:
    """Average slopes in a column of numbers; see `AfterFit.marginal_slopes`."""
    check_choice("variable", variable, tuple(map(str, frame.columns)))
    rows = average.rows
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
        return Averages(variable, ("average",), average(slopes)[:, None], level)
    check_choice("by", by, tuple(map(str, frame.columns)))
    groups = levels_of(rows[by])
    parts = [(rows[by] == group).to_numpy() for group in groups]
    draws = [average(slopes, part) for part in parts]
    return Averages(f"{variable} by {by}", tuple(groups), np.stack(draws, 1), level)
