"""Columns that formulaic computes for a right-hand side, and the same columns for new rows."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from formulaic import ModelSpec
from formulaic.errors import DataMismatchWarning, FormulaicError
from jaxtyping import Bool, Float

from subbayes.semistructured.formula_checks import check_different
from subbayes.semistructured.formula_grammar import formula_errors
from subbayes.semistructured.formula_numbers import factor_column, model_matrix
from subbayes.semistructured.smooth import TRANSFORMS, penalised
from subbayes.utils.checks import InputError, fail
from subbayes.utils.warning import filtered_warnings

__all__ = [
    "are_constant",
    "check_defined",
    "column_scales",
    "evaluate",
    "factors",
    "is_categorical",
    "kind_of_term",
    "learn",
    "prior_scales",
    "remaining_scales",
]

_ROWS, _OTHERS = 1000, 1000  # that regressions on the columns of other terms take
_ROUNDING = 1e-12  # of a column relative to its largest value, in which constants differ
_CONTEXT = {**TRANSFORMS, "np": np, "offset": lambda x: x}


def learn(argument: str, text: str, frame: pd.DataFrame, columns: Sequence[str]) -> ModelSpec:
    """Evaluate a checked right-hand side on training rows, and return what was learned from them.

    Args:
        argument: name of the argument, for errors.
        text: the right-hand side, which `check_formula` has checked.
        frame: the rows.
        columns: columns of the data frame that the text reads. The others are not passed on, as
            they could have the names of functions.

    Raises:
        InputError: a formula that formulaic cannot evaluate, a factor with one level, or effects
            with the same name.
    """
    with formula_errors(argument, text), np.errstate(all="ignore"):
        matrix = model_matrix(text, frame[list(columns)], _CONTEXT)
    spec: ModelSpec = matrix.model_spec
    for expression, levels, _ in factors(spec):
        if len(levels) == 1:
            remedy = "Leave it out of the formula"
            fail(factor_column(expression), "at least 2 levels of a factor", levels[0], remedy)
    check_different(argument, "effects", map(str, spec.column_names))
    return spec


def evaluate(
    spec: ModelSpec, frame: pd.DataFrame, columns: Sequence[str]
) -> Float[np.ndarray, "n columns"]:
    """All columns of rows, which are not finite where they are undefined.

    Raises:
        FormulaicError, ValueError: values that a term does not accept.
        InputError: levels of an expression, as in `C(np.floor(x))`, that are undefined or new.
    """
    spec = copy.deepcopy(spec)  # evaluation changes its state
    # unseen levels are reported by check_levels
    with filtered_warnings("ignore", DataMismatchWarning), np.errstate(all="ignore"):
        try:
            matrix = model_matrix(spec, frame[list(columns)], _CONTEXT)
        except FormulaicError as error:
            if isinstance(error.__cause__, InputError):
                raise error.__cause__ from None
            raise
    return np.array(matrix, dtype=np.float64).reshape(len(frame), -1)


def check_defined(values: Float[np.ndarray, "n c"], terms: Sequence[str]) -> None:
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


def is_categorical(spec: ModelSpec, term: Any) -> bool:
    """Whether a term has a factor with levels."""
    known = [spec.encoder_state.get(str(f), ("",))[0] for f in term.factors]
    return any(getattr(kind, "value", "") == "categorical" for kind in known)


def kind_of_term(spec: ModelSpec, term: Any, places: Sequence[int]) -> str:
    """The kind of a term that formulaic evaluates; see `formula.Term`."""
    if str(term) == "1":
        return "intercept"
    names = [str(f) for f in term.factors]
    kinds = {penalised(name) for name in names} - {None}
    if kinds and len(names) == 1:
        return "smooth" if kinds == {"s"} else "random"
    if kinds:
        fail(f"term {str(term)!r}", "s(...) and re(...) on their own", "an interaction")
    if is_categorical(spec, term):
        return "factor"
    return "linear" if len(places) == 1 else "spline"


def factors(spec: ModelSpec) -> Iterator[tuple[str, list[Any], Any]]:
    """The expression, the levels and the contrasts of each factor."""
    for expression, (kind, state) in spec.encoder_state.items():
        if getattr(kind, "value", kind) == "categorical":
            yield str(expression), list(state["categories"]), state["contrasts"].contrasts


def are_constant(
    centred: Float[np.ndarray, "n p"], center: Float[np.ndarray, "p"]
) -> Bool[np.ndarray, "p"]:
    """Whether columns are constant but for rounding, as means of constants are not exact.

    Args:
        centred: the columns less their centres.
        center: their centres; of a column that is not centred, 0, it says whether it is 0.

    Example:
        >>> x = np.column_stack([np.full(300, 0.1), np.arange(300)])
        >>> are_constant(x - x.mean(0), x.mean(0))
        array([ True, False])
    """
    most = np.abs(centred + center).max(0, initial=0.0)
    return np.asarray(np.linalg.norm(centred, axis=0) <= _ROUNDING * np.sqrt(len(centred)) * most)


def column_scales(
    columns: Float[np.ndarray, "n p"], centred: bool = True
) -> Float[np.ndarray, "p"]:
    """Standard deviations of columns, 0 for constants; uncentred, roots of mean squares."""
    center = columns.mean(0) * centred
    scale = np.sqrt(np.square(columns - center).mean(0))
    return np.where(are_constant(columns - center, center), 0.0, scale)


def remaining_scales(
    columns: Float[np.ndarray, "n p"],
    places: Sequence[int],
    others: Sequence[int],
    centred: bool = True,
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

    Example:
        >>> x = np.array([[10.0, 100.0], [11.0, 121.0], [12.0, 144.0]])
        >>> remaining_scales(x, [1], [0]).round(3)  # 1, -2, 1 over 3 less 2 degrees of freedom
        array([0.816])
    """
    scale = column_scales(columns, centred)
    others = [i for i in others if scale[i] > 0]
    n, free = len(columns), len(columns) - centred - len(others)
    if not others or len(others) > _OTHERS or free < 1:
        return scale[list(places)]
    if n > (most := _ROWS + 4 * len(others)):
        columns = columns[np.linspace(0, n - 1, most).round().astype(int)]
        n, free = most, most - centred - len(others)
    unit = np.where(scale > 0, scale, 1.0)
    middle = columns.mean(0) * centred
    own, rest = ((columns[:, i] - middle[i]) / unit[i] for i in (list(places), others))
    left = own - rest @ np.linalg.lstsq(rest, own, rcond=1e-9)[0]
    share = np.sqrt(np.square(left).sum(0) / free)
    return scale[list(places)] * np.where(share > 1e-6, np.minimum(share, 1.0), 1.0)


def prior_scales(
    columns: Float[np.ndarray, "n p"], terms: Sequence[Any], centred: Collection[str]
) -> Float[np.ndarray, "p"]:
    """The scale of each column in default priors.

    That of linear effects and factors is what the other ones of the same variables leave of it; see
    `remaining_scales`.

    Args:
        columns: the design matrix; without rows all scales are 1.
        terms: the terms, as of `formula.Design`.
        centred: the parameters whose predictor has an intercept.
    """
    found = column_scales(columns) if len(columns) else np.ones(columns.shape[1])
    plain = [t for t in terms if t.kind in ("linear", "factor", "spline")]
    for term in plain if len(columns) else ():
        near = [
            i
            for t in plain
            if t is not term and t.parameter == term.parameter
            for i in t.columns
            if set(t.variables) & set(term.variables)
        ]
        own = list(term.columns)
        found[own] = remaining_scales(columns, own, near, term.parameter in centred)
    return found
