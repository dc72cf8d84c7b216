r"""Bases of smooth functions of one or two columns, with their penalties.

- "ps": B-splines with second differences as the penalty (Eilers and Marx 1996, "Flexible
  smoothing with B-splines and penalties");
- "cr": natural cubic splines by their values at knots, with $\int (f'')^2$ (Wood 2017, section
  5.3.1);
- "cc": the same for periodic functions, whose values and first two derivatives are equal at the
  ends of the period;
- "tp": thin-plate regression splines of one or two columns (Wood 2003, "Thin plate regression
  splines"): the functions $\sum_j \delta_j\, \eta(\lVert x - x_j \rVert)$ plus a linear function,
  with the penalty $\delta^\top E \delta$, restricted to the eigenvectors of E with the
  largest absolute eigenvalues. $\eta(r)$ is $r^3 / 12$ for one column and $r^2 \log r / 8 \pi$
  for two.

Functions that the penalty does not see are constants and the columns of `linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.interpolate import BSpline, CubicSpline
from scipy.linalg import solve_triangular
from scipy.spatial.distance import cdist

from subbayes.regression.shapes import Point, Points, TermColumns
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers

BASES = ("ps", "cr", "cc", "tp")
_SPLINES, _FEWEST = 10, 4  # P-splines by default, and the fewest distinct values of a column
_MOST_CENTRES = 400  # distinct rows of which a thin-plate spline takes the eigenvectors


class Basis(ABC):
    r"""A basis with a penalty.

    Attributes:
        root: R with the penalty $R^\top R$.
        periodic: whether straight lines are not among the functions.
    """

    root: Float[np.ndarray, "m K"]
    periodic: bool = False

    @property
    def penalty(self) -> Float[np.ndarray, "K K"]:
        """The penalty."""
        return self.root.T @ self.root

    @property
    def rank(self) -> int:
        """The rank of the penalty: constants are combinations of periodic functions."""
        return len(self.root) - self.periodic

    @abstractmethod
    def evaluate(self, x: Points) -> Float[np.ndarray, "n K"]:
        """The functions of the basis at rows, continued outside the training rows."""

    def linear(self, x: Points) -> Float[np.ndarray, "n l"]:
        """The functions apart from constants that the penalty does not see."""
        return x[:, :0] if self.periodic else x


def basis_of(kind: str, x: Points, k: int, call: str, degree: int = 3) -> Basis:
    """A basis of k functions for training rows.

    Args:
        kind: one of `BASES`.
        x: the rows.
        k: number of functions.
        call: the term, for errors.
        degree: of P-splines.

    Raises:
        InputError: fewer distinct rows than the basis needs.
    """
    distinct = len(np.unique(x, axis=0))
    least = {"ps": _FEWEST, "cr": 3, "cc": 4, "tp": x.shape[1] + 2}[kind]
    if k < least:
        fail(call, f"k= of at least {least} for bs={kind!r}", k)
    # the penalty of P-splines determines those of the default number that the values do not
    needed = _FEWEST if kind == "ps" and k <= _SPLINES else k
    if distinct < needed:
        remedy = f"Pass k={distinct}" if distinct >= least else "Use C(...) for a factor"
        fail(call, f"at least {needed} distinct values", distinct, remedy)
    if kind == "tp":
        return ThinPlate.of(x, k)
    values = x[:, 0]
    if kind == "ps":
        return PSpline.of(values, k, degree)
    knots = np.quantile(np.unique(values), np.linspace(0, 1, k))
    return Cubic.of(knots, periodic=kind == "cc")


@dataclass(frozen=True)
class PSpline(Basis):
    """B-splines on evenly spaced knots."""

    knots: Float[np.ndarray, "l"]
    root: Float[np.ndarray, "m K"]
    degree: int

    @classmethod
    def of(cls, x: RowNumbers, k: int, degree: int) -> PSpline:
        """K splines over the range of x."""
        step = float(np.ptp(x)) / (k - degree)
        knots = x.min() + step * np.arange(-degree, k + 1)
        return cls(knots, np.diff(np.eye(k), 2, axis=0), degree)

    def evaluate(self, x: Points) -> Float[np.ndarray, "n K"]:
        """B-splines, continued linearly."""
        low, high = self.knots[self.degree], self.knots[-self.degree - 1]
        spline = BSpline(self.knots, np.eye(self.root.shape[1]), self.degree)
        inside = np.clip(x[:, 0], low, np.nextafter(high, low))
        found = spline(inside) + (x[:, 0] - inside)[:, None] * spline(inside, nu=1)
        return np.asarray(found)


@dataclass(frozen=True)
class Cubic(Basis):
    """Cubic splines by their values at knots, natural or periodic."""

    knots: Float[np.ndarray, "l"]
    root: Float[np.ndarray, "m K"]
    periodic: bool

    @classmethod
    def of(cls, knots: Float[np.ndarray, "l"], *, periodic: bool) -> Cubic:
        r"""The splines with these knots.

        Second derivatives at the knots are $B^{-1} D$ times the values there, with the products
        $B$ of functions that are linear between the knots, and those of their derivatives, $D$, so
        that the penalty is $D^\top B^{-1} D$.
        """
        values = _at_knots(len(knots), periodic)
        second = values if periodic else values[:, 1:-1]  # which is 0 at the ends
        step, slope = np.diff(knots), np.diff(np.eye(len(knots)), axis=0)
        mass = np.diag(np.append(step, 0) + np.append(0, step)) / 3
        mass += (np.diag(step, 1) + np.diag(step, -1)) / 6
        difference = second.T @ slope.T @ (slope / step[:, None]) @ values
        half = np.linalg.cholesky(second.T @ mass @ second)
        return cls(knots, solve_triangular(half, difference, lower=True), periodic)

    def evaluate(self, x: Points) -> Float[np.ndarray, "n K"]:
        """The splines, continued linearly or periodically."""
        spline, (low, high) = _cardinal(self.knots, self.periodic), self.knots[[0, -1]]
        values = x[:, 0]
        if self.periodic:
            return np.asarray(spline(low + np.mod(values - low, high - low)))
        inside = np.clip(values, low, high)
        return np.asarray(spline(inside) + (values - inside)[:, None] * spline(inside, 1))


def _cardinal(knots: Float[np.ndarray, "l"], periodic: bool) -> CubicSpline:
    """The splines that are 1 at one knot and 0 at the others."""
    ends = "periodic" if periodic else "natural"
    return CubicSpline(knots, _at_knots(len(knots), periodic), bc_type=ends)


def _at_knots(count: int, periodic: bool) -> Float[np.ndarray, "l K"]:
    """The values of the splines at the knots."""
    every = np.eye(count)
    return np.vstack([every[:-1, :-1], every[:1, :-1]]) if periodic else every


@dataclass(frozen=True)
class ThinPlate(Basis):
    """Thin-plate regression splines of one or two columns.

    Attributes:
        centres: distinct training rows, scaled.
        turn: from the radial functions to the basis.
        middle: of distinct rows, and `size`, the largest standard deviation of a column among
            them: one for all, so that the penalty is isotropic.
    """

    centres: Float[np.ndarray, "c d"]
    turn: Float[np.ndarray, "c r"]
    root: Float[np.ndarray, "m K"]
    middle: Point
    size: float

    @classmethod
    def of(cls, x: Points, k: int) -> ThinPlate:
        """The space of dimension k that approximates the full spline best."""
        distinct = np.unique(x, axis=0)
        middle, size = distinct.mean(0), float(distinct.std(0).max())
        centres = (distinct - middle) / size
        if len(centres) > _MOST_CENTRES:
            centres = centres[np.linspace(0, len(centres) - 1, _MOST_CENTRES).round().astype(int)]
        radial = _radial(centres, centres)
        values, vectors = np.linalg.eigh(radial)
        largest = np.argsort(-np.abs(values), kind="stable")[:k]
        values, vectors = values[largest], vectors[:, largest]
        line = np.column_stack([np.ones(len(centres)), centres])
        full = np.linalg.qr(vectors.T @ line, mode="complete")[0]
        null = full[:, line.shape[1] :]  # coefficients that are orthogonal to linear functions
        own, turn = np.linalg.eigh(null.T @ (values[:, None] * null))
        root = np.sqrt(own.clip(0.0))[:, None] * turn.T
        return cls(centres, vectors @ null, root, middle, size)

    def evaluate(self, x: Points) -> Float[np.ndarray, "n K"]:
        """The functions apart from linear ones."""
        return _radial((x - self.middle) / self.size, self.centres) @ self.turn


def _radial(x: Points, centres: Float[np.ndarray, "c d"]) -> TermColumns:
    r = cdist(x, centres)
    if x.shape[1] == 1:
        return np.asarray(r**3 / 12)
    return np.asarray(r**2 * np.log(np.where(r > 0, r, 1.0)) / (8 * np.pi))


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
