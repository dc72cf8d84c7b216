r"""Start points and mass matrices of chains from a Laplace approximation of each chain's mode.

A chain climbs from its start point by Newton steps. The curvature comes from differences of the
gradient over one standard deviation of the current approximation $N(z, DD^\top)$, along the columns
of D, which start at the prior's scale:

$$ D^\top A D \approx \bigl[\nabla \log p(z) - \nabla \log p(z + d_j)\bigr]_j^\top D, \qquad
   D \leftarrow D\, U |\Lambda|^{-1/2} \quad\text{with}\quad D^\top A D = U \Lambda U^\top . $$

Steps as long as the approximation is wide measure the scale on which the density varies, not its
second derivative at a point: they find the scale of a density that is not quadratic, of one with
kinks, and from a start far out in the tails of a vague prior.

Each row of a batch belongs to its chain, and no chain depends on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from subbayes.inference.density import Differentiable, GradientDensity, prior_scale
from subbayes.inference.samplers.adaptation import apply_factor
from subbayes.inference.samplers.chains import Rngs
from subbayes.inference.samplers.shapes import ChainMask, ChainPoints, ChainValues
from subbayes.utils.checks import fail

CURVATURE = 50  # coordinates up to which chains start from a Laplace approximation
_ROUNDS = 50
_TRIALS = 12  # of a line search
_SUFFICIENT = 1e-4  # share of the predicted gain that a step has to reach
_CLOSE = 0.5  # squared distance from the mode in standard deviations
# Eigenvalues beyond these bounds change D by these in one round: a difference over too long a
# distance may be off by any factor, as of a density that falls like exp(-exp(z)).
_FLAT, _STEEP = 1e-2, 1e6
_STABLE = 10.0  # eigenvalues below this and above its inverse: D hardly changes
_IMPOSSIBLE = 100.0  # curvature along a column whose end has zero density


@dataclass(frozen=True)
class Points:
    """A point of each chain with its log density and gradient."""

    z: ChainPoints
    value: ChainValues
    gradient: ChainPoints

    @classmethod
    def at(cls, posterior: Differentiable, z: ChainPoints) -> Points:
        """Evaluate the density; points at which it is not finite have a value of -inf."""
        value, gradient = posterior.value_and_grad(z)
        possible = np.isfinite(value) & np.isfinite(gradient).all(1)
        return cls(
            z, np.where(possible, value, -np.inf), np.where(possible[:, None], gradient, 0.0)
        )

    @classmethod
    def start(cls, posterior: Differentiable, z: ChainPoints) -> Points:
        """The same at start points.

        Raises:
            InputError: a density or a gradient that is not finite there.
        """
        points = cls.at(posterior, z)
        bad = ~np.isfinite(points.value)
        if bad.any():
            fail(
                "initial",
                "start points where the gradient of the log density is finite",
                f"one that is not at {int(bad.sum())} of {len(z)}",
                "Start elsewhere, or use EllipticalSlice, which needs no gradient",
            )
        return points

    def where(self, chosen: ChainMask, other: Points) -> Points:
        """These points for the chosen chains, and `other` for the rest."""
        rows = chosen[:, None]
        return Points(
            np.where(rows, self.z, other.z),
            np.where(chosen, self.value, other.value),
            np.where(rows, self.gradient, other.gradient),
        )


def start_chains(
    posterior: GradientDensity, s: Any, z: ChainPoints, rngs: Rngs, adapts: bool
) -> None:
    """Set points, mass matrices, and the covariances that windows shrink to, in place.

    Args:
        posterior: the density.
        s: the state, whose mass matrices are those of the prior.
        z: start points, which a warm-up moves; see `laplace_start`.
        rngs: a generator per chain.
        adapts: whether there is a warm-up that adapts the mass matrix.

    Raises:
        InputError: a density that is not finite at the start points.
    """
    start = Points.start(posterior, z)
    if adapts and z.shape[1] <= CURVATURE:
        start, factors, known = laplace_start(posterior, start, prior_scale(posterior), rngs)
        d = factors[known]
        if s.factor.ndim == 3:
            s.target[known], s.factor[known] = d @ d.transpose(0, 2, 1), d
        else:
            s.target[known] = np.square(d).sum(2)
            s.factor[known] = np.sqrt(s.target[known])
    s.z[:], s.value[:], s.gradient[:] = start.z, start.value, start.gradient


def laplace_start(
    posterior: GradientDensity, start: Points, scale: Float[np.ndarray, "k"], rngs: Rngs
) -> tuple[Points, Float[np.ndarray, "chains k k"], ChainMask]:
    """Start points, D of the covariance $DD^T$ of each chain's approximation, and if it was found.

    A chain that starts where draws of its approximation lie stays there. Others start at a draw of
    it, or at the mode if that draw is far below. Where no mode is found, the start point and the
    prior's scale remain.

    Args:
        posterior: the density.
        start: start points of finite density.
        scale: the prior's scale.
        rngs: a generator per chain.
    """
    chains, k = start.z.shape
    mode, factor, has_mode = climb(posterior, start, scale)
    eps = np.stack([rng.standard_normal(k) for rng in rngs])
    drawn = Points.at(
        posterior, np.where(has_mode[:, None], mode.z + apply_factor(factor, eps), start.z)
    )
    # Of a Gaussian, mode minus draw is half a chi-squared variable: mean k / 2, variance k / 2.
    typical = 0.5 * k + 4 * np.sqrt(0.5 * k) + 3
    low = has_mode & (mode.value - start.value > typical)
    moved = drawn.where(mode.value - drawn.value <= 2 * typical, mode)
    return moved.where(low, start), factor, has_mode


def climb(
    posterior: GradientDensity, start: Points, scale: Float[np.ndarray, "k"]
) -> tuple[Points, Float[np.ndarray, "chains k k"], ChainMask]:
    """Modes, factors of their covariances, and whether each chain has reached its mode.

    Args:
        posterior: the density.
        start: start points of finite density.
        scale: the prior's scale.
    """
    chains, k = start.z.shape
    unknown = np.broadcast_to(np.diag(scale), (chains, k, k))
    points, factor, has_mode = start, unknown.copy(), np.zeros(chains, dtype=bool)
    for _ in range(_ROUNDS):
        curvature = _curvature(posterior, points, factor)
        eigenvalues, vectors = np.linalg.eigh(curvature)
        size = np.clip(np.abs(eigenvalues), _FLAT, _STEEP)
        stable = ((size < _STABLE) & (size > 1 / _STABLE)).all(1)
        factor = np.where(
            has_mode[:, None, None], factor, factor @ (vectors / np.sqrt(size)[:, None, :])
        )
        slope = np.einsum("cij,ci->cj", factor, points.gradient)
        gain = np.einsum("cj,cj->c", slope, slope)
        has_mode |= stable & (gain <= _CLOSE)
        if has_mode.all():
            break
        waits = has_mode | (size == _STEEP).any(1)
        points, reached = _line_search(posterior, points, apply_factor(factor, slope), gain, waits)
        # If no point along the step is higher, the curvature belongs to too long a distance.
        factor[~reached] *= 0.5
    return points, np.where(has_mode[:, None, None], factor, unknown), has_mode


def _curvature(
    posterior: GradientDensity, points: Points, factor: Float[np.ndarray, "chains k k"]
) -> Float[np.ndarray, "chains k k"]:
    """Negative Hessians in the coordinates of `factor`, by differences along its columns."""
    chains, k = points.z.shape
    rows = np.zeros((chains, k, k))
    impossible = np.zeros((chains, k), dtype=bool)
    for j in range(k):
        column = factor[:, :, j]
        upward = np.where(np.einsum("ck,ck->c", column, points.gradient) < 0, -1.0, 1.0)[:, None]
        end = Points.at(posterior, points.z + upward * column)
        impossible[:, j] = ~np.isfinite(end.value)
        rows[:, j] = np.einsum("ck,ckj->cj", upward * (points.gradient - end.gradient), factor)
    impossible |= ~np.isfinite(rows).all(2)
    rows[impossible] = 0.0
    rows = 0.5 * (rows + rows.transpose(0, 2, 1))
    rows[impossible[:, :, None] | impossible[:, None, :]] = 0.0
    rows[impossible[:, :, None] & np.eye(k, dtype=bool)] = _IMPOSSIBLE
    return rows


def _line_search(
    posterior: GradientDensity,
    points: Points,
    step: ChainPoints,
    gain: ChainValues,
    waits: ChainMask,
) -> tuple[Points, ChainMask]:
    """The first of the points at 1, 1/4, 1/16, ... of each step that is sufficiently higher."""
    share, reached = np.ones(len(waits)), waits.copy()
    if waits.all():
        return points, reached
    for _ in range(_TRIALS):
        trial = Points.at(posterior, points.z + np.where(reached, 0.0, share)[:, None] * step)
        higher = ~reached & (trial.value >= points.value + _SUFFICIENT * share * gain)
        points = trial.where(higher, points)
        reached |= higher
        if reached.all():
            break
        share = np.where(reached, share, 0.25 * share)
    return points, reached
