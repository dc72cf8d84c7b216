r"""Penalised terms of a formula: smooth functions and random effects.

A smooth $s(x)$ is a cubic B-spline with a penalty on its second differences (Eilers & Marx 1996,
"Flexible smoothing with B-splines and penalties"), in the form of a mixed model: with the
basis B (n, K), the difference matrix D and the eigenvectors of $D^\top D = U \Lambda U^\top$,

$$ s(x) = x\,\beta + B\, U_+ \Lambda_+^{-1/2} u, \qquad u \sim N(0, \tau^2 I), $$

so that $\tau \to 0$ gives a straight line and the smoothing variance $\tau^2$ is an ordinary
parameter (Wood 2017, "Generalized additive models", section 5.8). All columns have mean zero over
the training rows: the intercept holds the level of the function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from formulaic.materializers.types import FactorValues
from formulaic.utils.stateful_transforms import stateful_transform
from jaxtyping import Float

from subbayes.data.levels import levels_of
from subbayes.utils.checks import check_count, fail

WEIGHTS = "__weights__"  # of rows, in the context of formulas
_SPLINES, _FEWEST = 10, 4
_MOST = 1000  # B-splines of a smooth, whose matrices have the square of this number of entries


def penalised(expression: str) -> str | None:
    """The kind of penalised term of an expression: "s", "re", or None."""
    text = expression.replace(" ", "")
    return next((kind for kind in ("s", "re") if text.startswith(f"{kind}(")), None)


def check_distinct(call: str, distinct: int, k: int) -> None:
    """Raise `InputError` for too few distinct values of a column for k P-splines.

    The penalty determines those of the default number that the values do not.

    Example:
        >>> check_distinct("s(x, k=10)", 6, 10)
        >>> check_distinct("s(x, k=20)", 6, 20)
        Traceback (most recent call last):
        ...
        subbayes.InputError: s(x, k=20): expected at least 20 distinct values, got 6. Pass k=6.
    """
    least = k if k > _SPLINES else _FEWEST
    if distinct < least:
        remedy = f"Pass k={distinct}" if distinct >= _FEWEST else "Use C(...) for a factor"
        fail(call, f"at least {least} distinct values", distinct, remedy)


def whitened(call: str, root: Float[np.ndarray, "m K"], rank: int) -> Float[np.ndarray, "K r"]:
    r"""Functions that a penalty sees, each with the penalty 1: $U_+ \Lambda_+^{-1/2}$.

    The rank is given rather than estimated: eigenvalues of a penalty differ by many orders of
    magnitude where values of a column do, so that a threshold would take the smoothest functions
    for unpenalised ones.

    Args:
        call: the term, for errors.
        root: R with the penalty $R^\top R = U \Lambda U^\top$.
        rank: of the penalty.

    Raises:
        InputError: the penalty of a function is rounding.

    Example:
        >>> found = whitened("s(x)", np.diff(np.eye(5), 2, axis=0), 3)
        >>> np.linalg.norm(np.diff(found, 2, axis=0), axis=0)
        array([1., 1., 1.])
    """
    _, sizes, vectors = np.linalg.svd(root, full_matrices=False)
    if not sizes[rank - 1] > sizes[0] * len(root) * np.finfo(np.float64).eps:
        expected = "values at distances that differ by fewer orders of magnitude"
        got = f"penalties that differ by a factor of {(sizes[0] / sizes[rank - 1]) ** 2:.0e}"
        fail(call, expected, got, "Take the logarithm of the column, or use bs='ps'")
    return np.asarray(vectors[:rank].T / sizes[:rank])


@stateful_transform
def s(
    x: Any,
    df: int = _SPLINES,
    degree: int = 3,
    _state: dict[str, Any] | None = None,
    _context: Mapping[str, Any] | None = None,
) -> FactorValues[dict[str, Any]]:
    """A smooth function of a column, in a formula: `s(age)`, `s(age, df=20)`.

    Args:
        x: a numeric column.
        df: number of B-splines, from 4 to 1000, which limits how nonlinear the function can be.
        degree: degree of the splines.

    Raises:
        InputError: fewer than four distinct values or, above the default, than splines; or fewer
            splines than the degree allows.
    """
    state = {} if _state is None else _state
    values = np.asarray(x, dtype=np.float64)
    if not state:
        call = f"s({getattr(x, 'name', None) or '...'})"
        weights = (_context or {}).get(WEIGHTS)
        counts = np.ones(len(values)) if weights is None else weights
        df, degree = check_count("df", df, 4), check_count("degree", degree)
        state |= _spline(call, values, df, degree, counts)
    columns = _columns(values, state)
    names = ["linear", *(f"wiggle{j}" for j in range(1, columns.shape[1]))]
    return FactorValues(
        dict(zip(names, columns.T, strict=True)),
        kind="numerical",
        spans_intercept=False,
        format="{name}[{field}]",
    )


def _spline(
    call: str, x: Float[np.ndarray, "n"], df: int, degree: int, counts: Float[np.ndarray, "n"]
) -> dict[str, Any]:
    """Knots, centre and the map from B-splines to columns."""
    x, counts = x[np.isfinite(x)], counts[np.isfinite(x)]
    check_distinct(call, len(np.unique(x)), df)
    if df > _MOST:
        fail("df", f"at most {_MOST} splines", df)
    if df <= degree:
        fail("df", f"more than the degree, {degree}", df)
    low, high = float(x.min()), float(x.max())
    inner = np.linspace(low, high, df - degree + 1)
    step = inner[1] - inner[0]
    knots = low + step * np.arange(-degree, df + 1)
    difference = np.diff(np.eye(df), 2, axis=0)
    mean = float(np.average(x, weights=counts))
    scale = float(np.sqrt(np.average((x - mean) ** 2, weights=counts)))
    state = {
        "knots": knots.tolist(),
        "degree": degree,
        "low": low,
        "high": high,
        "turn": whitened(call, difference, len(difference)).tolist(),
        "scale": scale,
        "linear": mean,
    }
    wiggles = _basis(x, state) @ np.array(state["turn"])
    # make the nonlinear columns orthogonal to straight lines over the rows
    line = np.column_stack([np.ones_like(x), (x - mean) / scale])
    root = np.sqrt(counts)[:, None]
    level = np.linalg.lstsq(root * line, root * wiggles, rcond=None)[0]
    rest = wiggles - line @ level
    state["level"] = level.tolist()
    state["size"] = float(np.sqrt(np.average((rest**2).sum(1), weights=counts)))
    return state


def _basis(x: Float[np.ndarray, "n"], state: dict[str, Any]) -> Float[np.ndarray, "n K"]:
    """B-splines, continued linearly outside the range of the training rows."""
    from scipy.interpolate import BSpline

    knots, degree = np.array(state["knots"]), state["degree"]
    spline = BSpline(knots, np.eye(len(knots) - degree - 1), degree)
    inside = np.clip(x, state["low"], np.nextafter(state["high"], state["low"]))
    beyond = x - inside
    values = spline(inside)
    if beyond.any():
        values = values + beyond[:, None] * spline(inside, nu=1)
    return np.asarray(values)


def _columns(x: Float[np.ndarray, "n"], state: dict[str, Any]) -> Float[np.ndarray, "n c"]:
    line = np.column_stack([np.ones_like(x), (x - state["linear"]) / state["scale"]])
    wiggles = _basis(x, state) @ np.array(state["turn"]) - line @ np.array(state["level"])
    return np.column_stack([x - state["linear"], wiggles / state["size"]])


@stateful_transform
def re(x: Any, _state: dict[str, Any] | None = None) -> FactorValues[dict[str, Any]]:
    """A random intercept for each level of a factor, in a formula: `re(school)`.

    Their standard deviation is a parameter. Levels unseen in training have the effect 0.
    """
    state = {} if _state is None else _state
    given = pd.Series(x)
    if "levels" not in state:
        state["levels"] = levels_of(given.dropna())
    values = given.astype("object")
    columns = {
        str(level): (values == level).to_numpy(dtype=np.float64) for level in state["levels"]
    }
    return FactorValues(columns, kind="numerical", spans_intercept=False, format="{name}[{field}]")


TRANSFORMS = {"s": s, "re": re}
"""Transforms of formulas in addition to those of formulaic."""
