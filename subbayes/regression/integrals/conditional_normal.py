r"""Coefficients given their standard deviations, around their own mode there.

Few rows of counts or classes say little about the coefficients of a smooth or of groups: how far
these reach depends on their standard deviations, and the log-likelihood is not quadratic over that
range. Given the coordinates h of standard deviations and the like, the coefficients' log-likelihood
is expanded around the mode $\hat\zeta(h)$ instead of around one point for all h (Rue, Martino and
Chopin 2009, "Approximate Bayesian inference for latent Gaussian models", section 3):

$$ \log p(D \mid h) \approx \log p(D \mid \hat\zeta(h), h) - \tfrac12 |\hat\zeta(h)|^2
   - \tfrac12 \log\det P(h) . $$

The mode is found in a fixed number of steps, so that proposals depend on h alone.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.integrals.coefficient_likelihood import CanonicalRows, GeneralRows
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.quadratic_likelihood import QuadraticRows
from subbayes.regression.shapes import EffectPoints, PointValues
from subbayes.regression.terms.group_elimination import BlockFactor

__all__ = ["ConditionalNormal"]

_STEPS = 4  # of Newton's method, by Fisher's information
_LONGEST = 2.0  # step, in standard deviations of the prior
_MOST_PRODUCTS = 2**18  # of rows and pairs of columns, for each point and step


class ConditionalNormal(CollapsedNormal):
    """As `CollapsedNormal`, with the coefficients' curvature at their mode given each h.

    Args:
        likelihood: the log-likelihood of few rows; see `applies_to`.
        mode: all coordinates at the mode.
    """

    def __init__(self, likelihood: EffectsLikelihood, mode: Float[Tensor, "P"]) -> None:
        self.likelihood = likelihood
        placement = likelihood.map.structured.placement
        self._predictors = placement.argmax(1)
        super().__init__(likelihood.map, QuadraticRows.around(likelihood, mode[None]))

    @staticmethod
    def applies_to(likelihood: EffectsLikelihood) -> bool:
        """Whether the rows are few enough for a curvature at each point."""
        columns, rows = len(likelihood.map.structured.placement), likelihood.rows
        known = isinstance(rows, (CanonicalRows, GeneralRows))
        return known and likelihood.n_rows * columns**2 <= _MOST_PRODUCTS

    def _conditional(self, h: Tensor, rows: object) -> tuple[Tensor, Tensor, BlockFactor]:
        """Coordinates with the conditional modes, these modes, and the factor of P there."""
        assert isinstance(self.rows, QuadraticRows)
        _, mode, _ = super()._conditional(h, self.rows)
        slopes = self._affine(h)[1]
        for _ in range(_STEPS):
            factor, right = self._expansion(h, mode, slopes)
            step = torch.cat([part.flatten(1) for part in factor.backward(*right)], 1)
            longest = step.abs().amax(1, keepdim=True)
            mode = mode + step / (longest / _LONGEST).clamp_min(1.0)
        return self._whole(h, mode), mode, self._expansion(h, mode, slopes)[0]

    def _expansion(
        self, h: Tensor, linear: Float[Tensor, "S c"], slopes: Tensor
    ) -> tuple[BlockFactor, tuple[Tensor, Tensor]]:
        """The factor L of P at each point, and L^-1 of the gradient."""
        assert isinstance(self.likelihood.rows, (CanonicalRows, GeneralRows))
        b = self.map.coefficients(self._whole(h, linear))
        score, whole = self.likelihood.rows.expansion(b, self._predictors)
        groups, others = self.groups, self._others
        gram = (
            whole[:, groups[:, :, None], groups[:, None, :]],
            whole[:, groups[:, :, None], others],
            whole[:, others][:, :, others],
        )
        return self._factor(slopes, score, gram, h.new_ones(len(h)), linear)

    def _value(self, zeta: EffectPoints) -> PointValues:
        return self.likelihood.value(zeta)

    def _elements(self) -> int:
        """Numbers of each point."""
        predictors = self.likelihood.map.structured.placement.shape[1]
        return super()._elements() + self.likelihood.n_rows * predictors**2 + self.size**2
