"""Columns that formulaic computes for a right-hand side, and the same columns for new rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from formulaic import ModelSpec
from formulaic.errors import DataMismatchWarning, FormulaicError
from jaxtyping import Bool, Float, Int

from subbayes.regression.formula.grammar import check_formula, formula_errors
from subbayes.regression.formula.numbers import factor_column, model_matrix
from subbayes.regression.shapes import DesignColumns, TermColumns
from subbayes.utils.checks import InputError, fail
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import filtered_warnings

_ROWS, _OTHERS = 1000, 1000  # that regressions on the columns of other terms take
_ROUNDING = 1e-12  # of a column relative to its largest value, in which constants differ
_CONTEXT = {"np": np, "offset": lambda x: x}


@dataclass(frozen=True)
class FormulaColumns:
    """The columns of a right-hand side without terms of this package, and those of new rows.

    Attributes:
        spec: what formulaic has learned from training rows.
        read: columns of the data frame that are read. The others are not passed on, as they could
            have the names of functions.
    """

    spec: ModelSpec
    read: tuple[str, ...]

    @classmethod
    def learn(cls, argument: str, text: str, frame: pd.DataFrame) -> FormulaColumns:
        """Check a right-hand side, and evaluate it on training rows.

        Args:
            argument: name of the argument, for errors.
            text: the right-hand side.
            frame: the rows.

        Raises:
            InputError: a formula that formulaic cannot evaluate, or a factor with one level.
        """
        with formula_errors(argument, text), np.errstate(all="ignore"):
            read = check_formula(argument, text, frame)
            learned = cls(model_matrix(text, frame[list(read)], _CONTEXT).model_spec, read)
        for expression, levels, _ in learned.factors():
            if len(levels) == 1:
                remedy = "Leave it out of the formula"
                fail(factor_column(expression), "at least 2 levels of a factor", levels[0], remedy)
        return learned

    @property
    def names(self) -> list[str]:
        """Name of each column."""
        return list(map(str, self.spec.column_names))

    def factors(self) -> Iterator[tuple[str, list[Any], Any]]:
        """The expression, the levels and the contrasts of each factor."""
        for expression, (kind, state) in self.spec.encoder_state.items():
            if getattr(kind, "value", kind) == "categorical":
                yield str(expression), list(state["categories"]), state["contrasts"].contrasts

    def levels(self) -> dict[str, list[Any]]:
        """Levels of each factor, by the column of the data frame or the expression."""
        return {factor_column(expression): levels for expression, levels, _ in self.factors()}

    def kind(self, term: Any, places: Sequence[int]) -> str:
        """The kind of a term, as of `design.Term`."""
        if str(term) == "1":
            return "intercept"
        factors = {expression for expression, _, _ in self.factors()}
        if not factors.isdisjoint(map(str, term.factors)):
            return "factor"
        return "linear" if len(places) == 1 else "spline"

    def evaluate(self, frame: pd.DataFrame) -> Float[np.ndarray, "n columns"]:
        """All columns of rows, which are not finite where they are undefined.

        Raises:
            FormulaicError, ValueError: values that a term does not accept.
            InputError: levels of an expression, as in `C(np.floor(x))`, that are undefined or new.
        """
        spec = copy.deepcopy(self.spec)  # evaluation changes its state
        # unseen levels are reported by check_levels
        with filtered_warnings("ignore", DataMismatchWarning), np.errstate(all="ignore"):
            try:
                matrix = model_matrix(spec, frame[list(self.read)], _CONTEXT)
            except FormulaicError as error:
                if isinstance(error.__cause__, InputError):
                    raise error.__cause__ from None
                raise
        return np.array(matrix, dtype=np.float64).reshape(len(frame), -1)


def check_defined(values: TermColumns, terms: Sequence[str]) -> None:
    """Raise `InputError` for columns without a number in some rows, such as the logarithm of 0.

    Levels of a factor that training has not seen have the number 0.

    Args:
        values: the columns of rows.
        terms: the term of each column, for the error.

    Example:
        >>> check_defined(np.array([[0.0], [-np.inf]]), ["np.log(x)"])
        Traceback (most recent call last):
        ...
        subbayes.InputError: term 'np.log(x)': expected finite numbers, got 1 rows without one, ...
    """
    undefined = ~np.isfinite(values)
    for place in np.flatnonzero(undefined.any(0)):
        rows = np.flatnonzero(undefined[:, place])
        got = f"{len(rows)} rows without one, the first at position {rows[0]}"
        remedy = "Drop these rows, or transform the column another way"
        fail(f"term {terms[int(place)]!r}", "finite numbers", got, remedy)


def are_constant(centred: DesignColumns, center: Float[np.ndarray, "p"]) -> Bool[np.ndarray, "p"]:
    """Whether columns are constant but for rounding, as means of constants are not exact.

    Args:
        centred: the columns less their centres.
        center: their centres; of a column that is not centred, 0, it says whether it is 0.

    Example:
        >>> x = np.column_stack([np.full(300, 0.1), np.arange(300)])
        >>> are_constant(x - x.mean(0), x.mean(0))
        array([ True, False])
    """
    most = np.maximum(centred.max(0, initial=0.0), -centred.min(0, initial=0.0)) + np.abs(center)
    return np.asarray(np.linalg.norm(centred, axis=0) <= _ROUNDING * np.sqrt(len(centred)) * most)


def column_means(
    columns: Float[np.ndarray, "n *p"], weights: RowNumbers | None = None
) -> Float[np.ndarray, "*p"]:
    """Means over rows, each of which counts as often as its weight says."""
    found = columns.mean(0) if weights is None else weights @ columns / weights.sum()
    return np.asarray(found)


def column_scales(
    columns: DesignColumns, centred: bool = True, weights: RowNumbers | None = None
) -> Float[np.ndarray, "p"]:
    """Standard deviations of columns, 0 for constants; uncentred, roots of mean squares.

    Args:
        columns: the columns.
        centred: whether their means are subtracted.
        weights: how many times each row counts.

    Example:
        >>> column_scales(np.array([[0.0], [1.0]]), weights=np.array([3.0, 1.0])).round(3)
        array([0.433])
    """
    center = column_means(columns, weights) * centred
    deviations = columns - center
    scale = np.sqrt(column_means(np.square(deviations), weights))
    return np.where(are_constant(deviations, center), 0.0, scale)


def remaining_scales(
    columns: DesignColumns,
    places: Sequence[int],
    others: Sequence[int],
    centred: bool = True,
    weights: RowNumbers | None = None,
) -> Float[np.ndarray, "k"]:
    """Standard deviations that a linear regression on other columns leaves, in float64.

    Without an intercept they are roots of mean squares instead. Columns that others determine keep
    their own. More than 1000 other columns are not taken out, and of many rows evenly spaced ones
    are taken.

    Args:
        columns: the design matrix.
        places: positions of the columns.
        others: positions of the columns that are taken out.
        centred: whether the predictor has an intercept.
        weights: how many times each row counts; of many rows those are taken that would be if each
            were repeated as often.

    Example:
        >>> x = np.array([[10.0, 100.0], [11.0, 121.0], [12.0, 144.0]])
        >>> remaining_scales(x, [1], [0]).round(3)  # 1, -2, 1 over 3 less 2 degrees of freedom
        array([0.816])
    """
    places, others = list(places), list(others)
    scale = column_scales(columns[:, places], centred, weights)
    scale_of_others = column_scales(columns[:, others], centred, weights)
    others = [i for i, own in zip(others, scale_of_others, strict=True) if own > 0]
    scale_of_others = scale_of_others[scale_of_others > 0]
    n = float(len(columns) if weights is None else weights.sum())
    free = n - centred - len(others)
    if not others or len(others) > _OTHERS or free < 1:
        return scale
    if max(n, len(columns)) > (most := _ROWS + 4 * len(others)):
        rows, weights = _evenly_spaced(most, len(columns), weights)
        columns = columns[rows]
        free = min(free, most - centred - len(others))
    root = 1.0 if weights is None else np.sqrt(weights)[:, None]
    own, rest = (
        (columns[:, i] - column_means(columns[:, i], weights) * centred) / unit * root
        for i, unit in ((places, np.where(scale > 0, scale, 1.0)), (others, scale_of_others))
    )
    left = own - rest @ np.linalg.lstsq(rest, own, rcond=1e-9)[0]
    share = np.sqrt(np.square(left).sum(0) / free)
    return scale * np.where(share > 1e-6, np.minimum(share, 1.0), 1.0)


def _evenly_spaced(
    most: int, n: int, weights: RowNumbers | None
) -> tuple[Int[np.ndarray, "m"], Float[np.ndarray, "m"] | None]:
    """Evenly spaced rows among n, or among their repetitions, and how many times each counts."""
    total = n if weights is None else float(weights.sum())
    if weights is not None and total > most:
        at = np.searchsorted(np.cumsum(weights), np.linspace(0, total - 1, most).round(), "right")
        return np.minimum(at, n - 1), None
    rows = np.linspace(0, n - 1, most).round().astype(int)
    if weights is None:
        return rows, None
    return rows, weights[rows] * (total / weights[rows].sum())
