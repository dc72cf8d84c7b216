r"""Averages of predictions over rows: marginal means, contrasts of levels, and average slopes.

A marginal mean is the prediction with a column set to one value in all rows, averaged over the
rows, for each draw; a contrast is the difference of two of them, their ratio or the ratio of their
odds (g-computation; Arel-Bundock, Greifer and Heiss 2024). They are quantities of the response,
unlike coefficients behind a link.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from subbayes.data.levels import kind_of_level, levels_of, same_level
from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.questions.conditional import Conditional
from subbayes.regression.questions.summary import central
from subbayes.utils.checks import check_choice, closest, fail
from subbayes.utils.types import RowNumbers

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
        note: what else the printed table says.
    """

    name: str
    labels: tuple[Any, ...]
    draws: Float[np.ndarray, "S m"]
    level: float
    quantity: str = "average"
    null: float = 0.0
    effects: str = "sample"
    note: str = ""

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
        note = f"\n{self.note}" if self.note else ""
        return f"Averages of {self.name!r} over {of}, {len(self.draws)} draws\n{shown}{note}"


def chosen_values(
    variable: str,
    frame: pd.DataFrame,
    levels: Sequence[Any] | None,
    values: Iterable[Any] | None,
    argument: str = "values",
) -> list[Any]:
    """The given values of a column, or all of them.

    Args:
        variable: the column.
        frame: the rows.
        levels: the values of a column whose effects are by level; None for other columns.
        values: the given values.
        argument: which has them, for errors.

    Raises:
        InputError: an unknown column, values that are no levels, or many numbers if none are given.
    """
    check_choice("variable", variable, tuple(map(str, frame.columns)))
    if values is None:
        column = frame[variable]
        if pd.api.types.is_numeric_dtype(column) and column.nunique() > 10 and levels is None:
            got = f"{column.nunique()} numbers in {variable!r}"
            fail("values", "values of the column", got, "Pass values=[...], or use marginal_slopes")
        return levels_of(column)
    chosen = list(values)
    for value in chosen:
        if levels is None or any(same_level(level, value) for level in levels):
            continue
        expected = f"levels of {variable!r} in the training rows: {listed_first(levels)}"
        alike = [v for v in levels if str(v) == str(value) or v == value]
        if not alike:
            fail(argument, expected, repr(value), closest(value, levels))
        got = f"{value!r}, where levels are {kind_of_level(alike[0])}"
        fail(argument, expected, got, f"Pass {alike[0]!r}")
    return chosen or fail(argument, "at least one value", "none")


def listed_first(values: Sequence[Any]) -> str:
    """The first of some values."""
    return ", ".join(map(repr, values[:8])) + (", ..." if len(values) > 8 else "")


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
        most = min(len(frame), _MOST_ROWS)
        at = np.linspace(0, len(frame) - 1, most).round().astype(int)
        self.rows, self.seed = frame.iloc[at], seed
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


def _counts(rows: pd.DataFrame, column: str) -> RowNumbers:
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


@dataclass(frozen=True)
class RowQuestion:
    """A column, and a quantity that is averaged over rows with the column set to values.

    Attributes:
        variable: the column.
        levels: the values of a column whose effects are by level; None for other columns.
        predict: from rows to the draws of the quantity of each.
        quantity: its name.
        frame: all rows.
        average: over the rows.
        level: level of the intervals.
        effects: averages over the "population" of the rows, or over these rows, the "sample".
        part: which rows are averaged; by default all.
    """

    variable: str
    levels: Sequence[Any] | None
    predict: Predict
    quantity: str
    frame: pd.DataFrame
    average: RowAverage
    level: float
    effects: str
    part: Bool[np.ndarray, "n"] | None = None

    def _averages(
        self,
        labels: Sequence[Any],
        draws: Float[np.ndarray, "S m"],
        comparison: str = "",
        null: float = 0.0,
    ) -> Averages:
        quantity = f"{comparison}, {self.quantity}" if comparison else self.quantity
        return Averages(
            self.variable, tuple(labels), draws, self.level, quantity, null, self.effects
        )

    def _means(self, chosen: Sequence[Any]) -> Float[np.ndarray, "S m"]:
        """The average at each value."""
        rows = [set_to(self.average.rows, self.variable, value) for value in chosen]
        return np.stack([self.average(self.predict(at), self.part) for at in rows], 1)

    def by_group(self, by: str | None, ask: Callable[[RowQuestion], Averages]) -> Averages:
        """The answer to a question, or one for the rows of each value of a column."""
        if by is None:
            return ask(self)
        rows = self.average.rows
        check_choice("by", by, tuple(map(str, rows.columns)))
        groups = levels_of(rows[by])
        found = [ask(replace(self, part=(rows[by] == group).to_numpy())) for group in groups]
        labels = [
            f"{v}, {by}={g}" for g, own in zip(groups, found, strict=True) for v in own.labels
        ]
        draws = np.concatenate([own.draws for own in found], 1)
        return replace(found[0], name=f"{self.variable} by {by}", labels=tuple(labels), draws=draws)

    def means(self, values: Iterable[Any] | None) -> Averages:
        """The averages; see `Results.marginal_means`."""
        chosen = chosen_values(self.variable, self.frame, self.levels, values)
        return self._averages(chosen, self._means(chosen))

    def contrasts(self, pairs: Iterable[Any] | str | None, comparison: str) -> Averages:
        """Comparisons of the averages; see `Results.contrast`."""
        check_choice("comparison", comparison, tuple(_COMPARISONS))
        if isinstance(pairs, str) and pairs == "pairwise":
            chosen = chosen_values(self.variable, self.frame, self.levels, None)
            pairs = [(b, a) for a, b in itertools.combinations(chosen, 2)]
            note = (
                f"{len(pairs)} comparisons, each with an interval of its own: that all of them "
                "hold at once is less probable than that one does."
            )
            return replace(self.contrasts(pairs, comparison), note=note)
        if pairs is None:
            first_level, *others = chosen_values(self.variable, self.frame, self.levels, None)
            pairs = [(value, first_level) for value in others]
        pairs = list(pairs)
        if not pairs or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
            fail("levels", "pairs of levels, such as [('b', 'a')]", repr(pairs))
        given = dict.fromkeys(value for pair in pairs for value in pair)
        needed = chosen_values(self.variable, self.frame, self.levels, given, "levels")
        means = self._means(needed)
        first, second = (means[:, [needed.index(pair[i]) for pair in pairs]] for i in (0, 1))
        labels = [_COMPARISONS[comparison].format(a, b) for a, b in pairs]
        if comparison == "difference":
            return self._averages(labels, first - second, comparison)
        if means.min() <= 0:
            got, remedy = f"means down to {means.min():.4g}", "Compare by 'difference'"
            fail("comparison", f"means above 0 for a comparison by {comparison!r}", got, remedy)
        if comparison == "odds ratio":
            if means.max() >= 1:
                got = f"means up to {means.max():.4g}"
                remedy = "Compare by 'ratio', or set trials to 1 in data= for the odds of a trial"
                fail("comparison", "means below 1 for an odds ratio", got, remedy)
            first, second = first / (1 - first), second / (1 - second)
        return self._averages(labels, first / second, comparison, null=1.0)

    def slopes(self, by: str | None) -> Averages:
        """Average slopes in a column of numbers; see `Results.marginal_slopes`."""
        variable, rows = self.variable, self.average.rows
        check_choice("variable", variable, tuple(map(str, rows.columns)))
        if self.levels is not None:
            got = f"{variable!r}, whose values are levels: {listed_first(self.levels)}"
            remedy = "Use contrast or marginal_means: levels have no slope"
            fail("variable", "a column whose effect is one of numbers", got, remedy)
        if not has_numbers(rows[variable]):
            remedy = "Use contrast or marginal_means for levels"
            fail("variable", "a column of numbers", f"dtype {rows[variable].dtype}", remedy)
        x = rows[variable].to_numpy(dtype=np.float64)
        step = _STEP * float(np.std(x)) or _STEP
        low, high = x - step, x + step
        if x.min() < x.max():  # within splines
            low, high = np.maximum(low, x.min()), np.minimum(high, x.max())
        up, down = (self.predict(rows.assign(**{variable: at})) for at in (high, low))
        slopes = (up - down) / (high - low)
        if by is None:
            return self._averages(["average"], self.average(slopes)[:, None], "slope")
        check_choice("by", by, tuple(map(str, rows.columns)))
        groups = levels_of(rows[by])
        draws = [self.average(slopes, (rows[by] == group).to_numpy()) for group in groups]
        found = self._averages(groups, np.stack(draws, 1), "slope")
        return replace(found, name=f"{variable} by {by}")
