"""Functions of a column that learn from training rows: centres, polynomials and splines.

`bs` are B-splines, `cr` natural and `cc` periodic cubic splines by their values at knots, with the
knots of patsy: quantiles of the rows, or those that are given. The functions of `poly` are
orthonormal polynomials over the rows, with positive leading coefficients as in R.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.polynomial.chebyshev import chebvander
from scipy.interpolate import BSpline

from subbayes.regression.shapes import TermColumns
from subbayes.regression.terms.bases import Cubic
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers

Transform = Callable[[Any], Any]
"""A function as learned from training rows."""


def _scaled(x: Any, centre: Any, unit: Any) -> Any:
    return (x - centre) / unit


def scaled(x: Any, center: bool = True, scale: bool = True, ddof: float = 1.0) -> Transform:
    """By the mean, and the standard deviation; without centring by the root of mean squares."""
    centre = x.mean(0) if center else 0.0
    unit = np.sqrt(np.square(x - centre).sum(0) / (len(x) - ddof)) if scale else 1.0
    return partial(_scaled, centre=centre, unit=unit)


def _standardized(
    x: Any, center: bool = True, rescale: bool = True, ddof: float = 0.0
) -> Transform:
    return scaled(x, center, rescale, ddof)


def _powers(x: RowNumbers, degree: int) -> TermColumns:
    return np.asarray(x[:, None] ** np.arange(1, degree + 1))


def _polynomials(
    x: RowNumbers, ends: Float[np.ndarray, "2"], turn: Float[np.ndarray, "d c"]
) -> TermColumns:
    low, high = ends
    return np.asarray(chebvander((2 * x - low - high) / (high - low), len(turn) - 1) @ turn)


def polynomials(x: RowNumbers, degree: int = 1, raw: bool = False) -> Transform:
    """Polynomials without the constant, by the Chebyshev polynomials of the range of the rows."""
    if raw:
        return partial(_powers, degree=degree)
    ends = np.array([x.min(), x.max()])
    root = np.linalg.qr(_polynomials(x, ends, np.eye(degree + 1)))[1]
    signs = np.diag(np.sign(root.diagonal()))
    return partial(_polynomials, ends=ends, turn=np.linalg.solve(root, signs)[:, 1:])


def _splines(
    x: RowNumbers,
    basis: BSpline | Cubic,
    turn: Float[np.ndarray, "K c"],
    ends: Float[np.ndarray, "2"],
    extrapolation: str,
) -> TermColumns:
    """Splines, and what they are outside the ends."""
    inside = x.clip(*ends)
    outside = x != inside
    if extrapolation == "raise" and outside.any():
        raise ValueError(f"values outside {ends[0]:g} to {ends[1]:g}")
    x = x if extrapolation == "extend" else inside
    found = (basis(x) if isinstance(basis, BSpline) else basis.evaluate(x[:, None])) @ turn
    if extrapolation in ("na", "zero"):
        found[outside] = np.nan if extrapolation == "na" else 0.0
    return found


def splines(
    kind: str,
    x: RowNumbers,
    df: int | None = None,
    knots: Sequence[float] | None = None,
    degree: int = 3,
    include_intercept: bool = False,
    lower_bound: float | None = None,
    upper_bound: float | None = None,
    constraints: str | None = None,
    extrapolation: str | None = None,
) -> Transform:
    """Splines "bs", "cr" or "cc" with df columns, or with some knots between the bounds.

    Raises:
        InputError: both df and knots, or knots that are not distinct or too few.
    """
    low = x.min() if lower_bound is None else lower_bound
    high = x.max() if upper_bound is None else upper_bound
    inside = x[(low <= x) & (x <= high)]
    if kind == "bs":
        count = 0 if df is None else df - degree - include_intercept
    else:
        count = (df or 0) - 2 + (constraints is not None) + (kind == "cc")
        inside = np.unique(inside)
    if knots is None and count >= 0 and len(inside):
        knots = np.quantile(inside, np.linspace(0, 1, count + 2)[1:-1]).tolist()
    elif knots is None or df is not None:
        fail("formula", f"{kind}(...) with df= large enough, or knots=", f"df={df}, knots={knots}")
    every = np.sort([low, *knots, high])
    if kind == "bs":
        turn = np.eye(len(every) + degree - 1)
        basis: Any = BSpline(np.pad(every, degree, mode="edge"), turn, degree)
        turn = turn[:, int(not include_intercept) :]
    else:
        if not (np.diff(every) > 0).all():
            fail("formula", f"{len(every)} distinct knots", "fewer", "Use a smaller df=")
        basis = Cubic(every, np.empty((0, 0)), periodic=kind == "cc")
        turn = np.eye(len(every) - basis.periodic)
    learned = partial(
        _splines,
        basis=basis,
        turn=turn,
        ends=np.array([low, high], dtype=np.float64),
        extrapolation=extrapolation or ("raise" if kind == "bs" else "extend"),
    )
    if constraints is not None:
        turn = np.linalg.qr(learned(x).mean(0)[:, None], mode="complete")[0][:, 1:]
    return partial(learned, turn=turn)


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "center": partial(scaled, scale=False),
    "scale": scaled,
    "standardize": _standardized,
    "poly": polynomials,
    "bs": partial(splines, "bs"),
    "cr": partial(splines, "cr"),
    "cs": partial(splines, "cr"),
    "cc": partial(splines, "cc"),
}
"""What learns each function from the numbers of training rows and its options."""
