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
from typing_extensions import override

from subbayes.regression.integrals.coefficient_likelihood import GeneralRows, QuadraticRows
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.shapes import EffectPoints, PointValues, RestPoints
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
        super().__init__(likelihood.map, likelihood.quadratic(mode[None]))

    @staticmethod
    def applies_to(likelihood: EffectsLikelihood) -> bool:
        """Whether the rows are few enough for a curvature at each point."""
        columns = len(likelihood.structured.placement)
        few = likelihood.n_rows * columns**2 <= _MOST_PRODUCTS
        return few and isinstance(likelihood.rows, GeneralRows)

    def _modes(self, h: RestPoints) -> tuple[EffectPoints, Float[Tensor, "S c"], BlockFactor]:
        """Coordinates with the conditional modes, these modes, and the factor of P there."""
        zeta, _ = super().coordinates(h, h.new_zeros(len(h), len(self.linear)))
        mode, (_, slopes) = zeta[:, self.linear], self._affine(h)
        for _ in range(_STEPS):
            factor, right = self._expansion(h, mode, slopes)
            step = torch.cat([part.flatten(1) for part in factor.backward(*right)], 1)
            longest = step.abs().amax(1, keepdim=True)
            mode = mode + step / (longest / _LONGEST).clamp_min(1.0)
        return self._whole(h, mode), mode, self._expansion(h, mode, slopes)[0]

    def _expansion(
        self, h: RestPoints, linear: Float[Tensor, "S c"], slopes: Tensor
    ) -> tuple[BlockFactor, tuple[Tensor, Tensor]]:
        """The factor L of P at each point, and L^-1 of the gradient."""
        assert isinstance(self.likelihood.rows, GeneralRows)
        b = self.map.coefficients(self._whole(h, linear))
        score, gram = self.likelihood.rows.expansion(b)
        groups, free = self.groups, self._free
        return self._factor(
            slopes,
            h.new_ones(len(h)),
            (
                gram[:, groups[:, :, None], groups[:, None, :]],
                gram[:, groups][..., free],
                score[:, groups],
            ),
            (gram[:, free][..., free], score[:, free]),
            (
                linear[:, : groups.numel()].reshape(len(h), *groups.shape),
                linear[:, groups.numel() :],
            ),
        )

    @override
    def log_marginal(self, h: RestPoints, rows: QuadraticRows | None = None) -> PointValues:
        zeta, mode, factor = self._modes(h)
        value = self.likelihood.value(zeta) - 0.5 * mode.square().sum(1)
        return value - factor.half_log_det()

    @override
    def coordinates(
        self, h: RestPoints, eps: Float[Tensor, "S c"], rows: QuadraticRows | None = None
    ) -> tuple[EffectPoints, PointValues]:
        _, mode, factor = self._modes(h)
        first = self.groups.numel()
        spread = factor.backward(eps[:, :first].reshape(len(h), *self.groups.shape), eps[:, first:])
        zeta = self._whole(h, mode + torch.cat([spread[0].flatten(1), spread[1]], 1))
        return zeta, -factor.half_log_det()

    @override
    def at_once(self, groups: int | None = None) -> int:
        columns, predictors = self.likelihood.structured.placement.shape
        numbers = self.likelihood.n_rows * predictors**2 + columns**2
        return max(1, min(super().at_once(), 2**20 // numbers))
