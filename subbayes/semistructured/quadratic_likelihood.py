r"""A quadratic approximation of the log-likelihood in coefficients, around the posterior.

With u the coefficients of all predictors and the thresholds,

$$ \log p(D \mid u) \approx \ell_0 + s^\top (u - u_0) - \tfrac12 (u - u_0)^\top H (u - u_0) . $$

The posterior under it has its coefficients integrated out in closed form, as for a normal response:
`subbayes.semistructured.collapsed_normal`. Its draws are proposals for the exact posterior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.semistructured.effects_likelihood import EffectsLikelihood

__all__ = ["QuadraticRows"]

_ROUNDING = 1e-13


@dataclass(frozen=True)
class QuadraticRows:
    """The approximation, in place of the rows.

    Attributes:
        centre: $u_0$.
        value_there: $l_0$.
        slope: s.
        hessian: H.
        entries: places of u in B, flattened: columns, then thresholds.
        location: 1 for all columns.
    """

    centre: Float[Tensor, "m"]
    value_there: float
    slope: Float[Tensor, "m"]
    hessian: Float[Tensor, "m m"]
    entries: Int[Tensor, "m"]
    location: Float[Tensor, "p"]

    @classmethod
    def around(cls, likelihood: EffectsLikelihood, points: Float[Tensor, "S P"]) -> QuadraticRows:
        """Around one point, or the mean of many, of which slope and curvature are means too.

        Means over a distribution close to the posterior make the best normal approximation of it
        (Opper and Archambeau 2009, "The variational Gaussian approximation revisited", eq. 16).

        Raises:
            LinAlgError: a curvature that is not finite.
        """
        structured, rows = likelihood.map.structured, likelihood.rows
        b = likelihood.map.coefficients(points)
        _, q, c = b.shape
        placement = structured.placement
        columns = torch.arange(len(placement)) * c + placement.argmax(1)
        cuts = (q - 1) * c + torch.arange(placement.shape[1], c)
        entries = torch.cat([columns, cuts])
        with torch.no_grad():
            value, slope = rows.value_and_grad(b)
            hessian = b.new_zeros(len(entries), len(entries))
            for one in b:
                flat = rows.curvature(one).permute(2, 0, 3, 1).reshape(q * c, q * c)
                hessian += flat[entries][:, entries] / len(b)
        own = _without_negative(hessian)
        return cls(
            b.flatten(1)[:, entries].mean(0),
            float(value.mean()),
            slope.flatten(1)[:, entries].mean(0),
            own,
            entries,
            torch.ones(len(placement), dtype=torch.float64),
        )

    @property
    def gram(self) -> Float[Tensor, "p p"]:
        """The part of H of the columns."""
        p = len(self.location)
        return self.hessian[:p, :p]

    def _parts(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """The distance from the centre, and the slope there."""
        d = b.flatten(1)[:, self.entries] - self.centre
        return d, self.slope - d @ self.hessian

    def conditional(self, b: Float[Tensor, "S q C"]) -> tuple[Tensor, Tensor]:
        """The slope in the coefficients, shape (S, p), and the factor 1 of `gram`."""
        return self._parts(b)[1][:, : len(self.location)], b.new_ones(len(b))

    def value(self, b: Float[Tensor, "S q C"]) -> Float[Tensor, "S"]:
        """The log-likelihood at each point."""
        d, slope = self._parts(b)
        return self.value_there + 0.5 * (d * (self.slope + slope)).sum(-1)


def _without_negative(matrix: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """A symmetric matrix with negative eigenvalues set to 0.

    Without this the approximation would not be a density for large standard deviations.
    """
    matrix = (matrix + matrix.T) / 2
    if not bool(matrix.isfinite().all()):
        raise np.linalg.LinAlgError("a curvature that is not finite")
    values, vectors = torch.linalg.eigh(matrix)
    if float(values[0]) >= -_ROUNDING * len(values) * float(values[-1]):
        return matrix
    return (vectors * values.clamp_min(0)) @ vectors.T
