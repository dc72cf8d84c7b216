r"""A quadratic approximation of the log-likelihood in coefficients, around the posterior.

With u the coefficients of all predictors and the thresholds,

$$ \log p(D \mid u) \approx \ell_0 + s^\top (u - u_0) - \tfrac12 (u - u_0)^\top H (u - u_0) . $$

The posterior under it has its coefficients integrated out in closed form, as for a normal response:
`subbayes.regression.integrals.collapsed_normal`. Its draws are proposals for the exact posterior.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.shapes import ByPredictor, EffectPoints, PointValues
from subbayes.regression.terms.group_elimination import GroupedMatrix


@dataclass(frozen=True)
class QuadraticRows:
    """The approximation, in place of the rows.

    Attributes:
        centre: $u_0$.
        value_there: $l_0$.
        slope: s.
        gram: H, with the blocks of groups apart; its first rows are those of the columns.
        entries: places of u in B, flattened: columns, then thresholds.
        location: 1 for all columns.
    """

    centre: Float[Tensor, "m"]
    value_there: float
    slope: Float[Tensor, "m"]
    gram: GroupedMatrix
    entries: Int[Tensor, "m"]
    location: Float[Tensor, "p"]

    @classmethod
    def around(cls, likelihood: EffectsLikelihood, points: EffectPoints) -> QuadraticRows:
        """Around one point, or the mean of many, of which slope and curvature are means too.

        Means over a distribution close to the posterior make the best normal approximation of it
        (Opper and Archambeau 2009, "The variational Gaussian approximation revisited", eq. 16).

        Raises:
            LinAlgError: a curvature that is not finite.
        """
        rows, entries = likelihood.rows, likelihood.map.entries
        b = likelihood.map.coefficients(points)
        with torch.no_grad():
            value, slope = rows.value_and_grad(b)
            hessian = rows.curvature(b[0])
            for one in b[1:]:
                hessian = hessian + rows.curvature(one)
        return cls(
            b.flatten(1)[:, entries].mean(0),
            float(value.mean()),
            slope.flatten(1)[:, entries].mean(0),
            # with negative eigenvalues it would not be a density for large standard deviations
            hessian.scaled(1 / len(b)).without_negative(),
            entries,
            torch.ones(likelihood.map.columns, dtype=torch.float64),
        )

    def _parts(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """The distance from the centre, and the slope there."""
        d = b.flatten(1)[:, self.entries] - self.centre
        return d, self.slope - self.gram.times(d)

    def conditional(self, b: ByPredictor) -> tuple[Tensor, Tensor]:
        """The slope in the coefficients, shape (S, p), and the factor 1 of `gram`."""
        return self._parts(b)[1][:, : len(self.location)], b.new_ones(len(b))

    def value(self, b: ByPredictor) -> PointValues:
        """The log-likelihood at each point."""
        d, slope = self._parts(b)
        return self.value_there + 0.5 * (d * (self.slope + slope)).sum(-1)
