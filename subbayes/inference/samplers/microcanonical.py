r"""Isokinetic dynamics and its integrator, which MCLMC and MAMS share.

With the density $p$ of $d$ coordinates and a unit direction $u$, the flow

$$ \dot z = u, \qquad \dot u = \frac{(I - u u^\top) \nabla \log p(z)}{d - 1} $$

keeps $(d - 1) \log|\Pi| - \log p$ constant for the momentum $|\Pi| u$, and averages of $z$ along it
are those under $p$. Under a gradient held for a time $t$, with $e = \nabla \log p / |\nabla \log
p|$, $\delta = t |\nabla \log p| / (d - 1)$, $c = e^\top u$ and $\zeta = e^{-\delta}$,

$$ u' = \frac{2 \zeta u + (1 - \zeta)(1 + c + (1 - c) \zeta)\, e}{1 + c + (1 - c) \zeta^2}, \qquad
   \Delta K = (d - 1) \bigl[\delta - \log 2 + \log(1 + c + (1 - c) \zeta^2)\bigr], $$

the forms with $\cosh$ and $\sinh$ of $\delta$ multiplied by $2 \zeta$, which do not overflow.

Robnik, De Luca, Silverstein and Seljak (2023), *Microcanonical Hamiltonian Monte Carlo*; Robnik and
Seljak (2024), *Fluctuation without dissipation: Microcanonical Langevin Monte Carlo*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from subbayes.inference.density import Differentiable
from subbayes.inference.samplers.adaptation import apply_factor, apply_transposed_factor
from subbayes.inference.samplers.shapes import ChainMask, ChainPoints, ChainValues
from subbayes.utils.checks import fail

GRADIENTS = 2
"""Gradients of a step of the minimal-norm integrator."""
_LAMBDA = 0.1931833275037836  # minimises the norm of the error (Omelyan et al. 2003)
_TURNS = (_LAMBDA, 1 - 2 * _LAMBDA, _LAMBDA)  # of the direction, as shares of a step
_MOVES = (0.5, 0.5)  # of the point, between them
_TINY = 1e-300
_OPPOSITE = 1e-15 - 1.0  # where the direction is opposite to the gradient, 0 / 0 for huge steps


@dataclass(frozen=True)
class Moved:
    """The end points of a step of every chain.

    Attributes:
        z: points.
        u: unit directions.
        value: log densities; minus infinity where a value or a gradient on the way is not finite.
        gradient: their gradients, 0 where they are not finite.
        h: gradients in the coordinates of the mass matrix, $L^T g$.
        error: the error of the energy, potential and kinetic.
        kinetic: the change of the kinetic energy.
    """

    z: ChainPoints
    u: ChainPoints
    value: ChainValues
    gradient: ChainPoints
    h: ChainPoints
    error: ChainValues
    kinetic: ChainValues


def check_rank(rank: int | None, engine: str) -> None:
    """Check that there are directions to turn to: one coordinate has none."""
    if rank is not None and rank < 2:
        fail("rank", f"at least 2 coordinates for {engine}", rank, "Use nuts or slice")


def turn(u: ChainPoints, h: ChainPoints, time: ChainValues) -> ChainValues:
    r"""Turn directions under gradients h held for some times, in place.

    Args:
        u: unit directions, which change.
        h: gradients of the log density.
        time: times, of any size.

    Returns:
        The changes of the kinetic energy, $(d - 1) \log(\cosh \delta + c \sinh \delta)$.

    Example:
        >>> u = np.array([[1.0, 0.0]])
        >>> turn(u, np.array([[0.0, 2.0]]), np.array([0.5])).round(3), u.round(3)
        (array([0.434]), array([[0.648, 0.762]]))
    """
    freedom = u.shape[1] - 1
    norm = np.sqrt(_dots(h, h))
    safe = np.maximum(norm, _TINY)
    c = np.minimum(np.maximum(_dots(u, h) / safe, _OPPOSITE), 1.0)  # faster than np.clip
    delta = time * norm / freedom
    zeta = np.exp(-delta)
    ahead, behind = 1 + c, (1 - c) * zeta
    scale = ahead + behind * zeta
    u *= (2 * zeta / scale)[:, None]
    u += h * ((1 - zeta) * (ahead + behind) / (scale * safe))[:, None]
    return np.asarray(freedom * (delta - math.log(2) + np.log(scale)))


def _dots(a: ChainPoints, b: ChainPoints) -> ChainValues:
    """Inner products of rows, by the dot product of BLAS: twice as fast as einsum."""
    return np.asarray((a[:, None, :] @ b[:, :, None])[:, 0, 0])


def isokinetic_step(
    posterior: Differentiable,
    z: ChainPoints,
    u: ChainPoints,
    value: ChainValues,
    h: ChainPoints,
    factor: Float[np.ndarray, "chains *kk"],
    step: ChainValues,
) -> Moved:
    """One step of the minimal-norm integrator of every chain, in two batched gradients.

    Args:
        posterior: the density.
        z: points.
        u: unit directions.
        value: log densities of the points.
        h: gradients there in the coordinates of the mass matrix.
        factor: L of the inverse mass matrix $LL^T$, diagonal or dense.
        step: step sizes in the coordinates of the mass matrix.
    """
    u, possible = u.copy(), None
    kinetic = turn(u, h, _TURNS[0] * step)
    for time, distance in zip(_TURNS[1:], _MOVES, strict=True):
        z = z + apply_factor(factor, u * (distance * step)[:, None])
        new, g = posterior.value_and_grad(z)
        possible = _where_finite(new, g, possible)
        if possible is not None:
            new, g = np.where(possible, new, -np.inf), np.where(possible[:, None], g, 0.0)
        h = apply_transposed_factor(factor, g)
        kinetic += turn(u, h, time * step)
    return Moved(z, u, new, g, h, value - new + kinetic, kinetic)


def _where_finite(
    value: ChainValues, gradient: ChainPoints, before: ChainMask | None
) -> ChainMask | None:
    """Chains whose values and gradients were finite so far; None if they are all."""
    # A sum is finite only if its terms are, and it takes one pass.
    finite = np.isfinite(value + gradient.sum(1))
    if before is None and finite.all():
        return None
    finite = np.isfinite(value) & np.isfinite(gradient).all(1)
    if before is not None:
        finite &= before
    return None if finite.all() else finite


def unit_vectors(x: ChainPoints) -> ChainPoints:
    """Scale rows to length 1, in place; normal numbers become uniform directions."""
    x /= np.sqrt(_dots(x, x))[:, None]
    return x


def partial_refreshment(u: ChainPoints, noise: ChainPoints, share: ChainValues) -> ChainPoints:
    r"""Mix noise into directions, in place: $u \leftarrow (u + \nu \xi) / |u + \nu \xi|$.

    With $\nu^2 = (e^{2 \epsilon / L} - 1) / d$ directions are forgotten over a distance L.

    Args:
        u: unit directions, which change.
        noise: standard normal numbers, which change.
        share: the steps as shares of the length, $\epsilon / L$.
    """
    noise *= np.sqrt(np.expm1(2 * np.minimum(share, 300.0)) / u.shape[1])[:, None]
    u += noise
    return unit_vectors(u)
