"""Beta responses: shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.family import Family, family, moment
from subbayes.likelihoods.links import bernoulli_variance
from subbayes.likelihoods.tails.incomplete_integrals import beta_log_tails, scaled_trigamma
from subbayes.likelihoods.tails.tails import Tails
from subbayes.utils.types import Curvatures, Outputs, Predictors

_SMALLEST_SHAPE = 1e-300  # of SciPy's beta distribution, which is NaN for a shape of 0


@family("beta")
@dataclass(frozen=True, repr=False)
class BetaFamily(Family):
    r"""Shares: mean $\mu$, precision $\phi$; $y \sim \mathrm{Beta}(\mu\phi, (1 - \mu)\phi)$."""

    is_mean = True
    allowed = {"mu": ("logit",), "precision": ("log",)}
    bounds = (0.0, 1.0)

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        precision = eta[1].exp()
        a, b = eta[0].sigmoid() * precision, (-eta[0]).sigmoid() * precision
        # log Gamma(a) = log Gamma(1 + a) - log a, which is finite where a underflows
        log_product = F.logsigmoid(eta[0]) + F.logsigmoid(-eta[0]) + eta[1]
        return (
            torch.lgamma(1 + precision)
            - torch.lgamma(1 + a)
            - torch.lgamma(1 + b)
            + log_product
            + (a - 1) * y.log()
            + (b - 1) * torch.log1p(-y)
        )

    @staticmethod
    def _log_shapes(eta: Predictors) -> Tails:
        """Logarithms of both shapes."""
        return F.logsigmoid(eta[0]) + eta[1], F.logsigmoid(-eta[0]) + eta[1]

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        logit = y.log() - torch.log1p(-y) + 0 * eta[0]
        return beta_log_tails(logit, *self._log_shapes(eta))

    def curvature(self, outputs: Outputs) -> Curvatures:
        """The Fisher information (Ferrari & Cribari-Neto 2004, section 2), in the predictors."""
        eta = outputs.double()
        mu, rest, phi = eta[..., 0].sigmoid(), (-eta[..., 0]).sigmoid(), eta[..., 1].exp()
        a, b = scaled_trigamma(mu * phi), scaled_trigamma(rest * phi)
        first = rest.square() * a + mu.square() * b
        both, second = rest * a - mu * b, a + b - scaled_trigamma(phi)
        rows = [torch.stack([first, both], -1), torch.stack([both, second], -1)]
        return torch.stack(rows, -2).to(outputs)

    def variance(self, outputs: Outputs) -> Moments:
        """mu (1 - mu) / (1 + precision)."""
        return moment(bernoulli_variance("logit", outputs[..., 0]) / (1 + outputs[..., 1].exp()))

    def _distribution_at(self, outputs: Outputs) -> Any:
        from scipy import stats

        if type(self) is not BetaFamily:  # which may have another distribution
            return super()._distribution_at(outputs)
        shapes = (part.exp() for part in self._log_shapes(outputs.double().cpu().unbind(-1)))
        return stats.beta(*(part.clamp_min(_SMALLEST_SHAPE).numpy() for part in shapes))

    @override
    def distribution(self, mu: np.ndarray, precision: np.ndarray) -> Any:  # type: ignore[override]
        from scipy import stats

        return stats.beta(mu * precision, (1 - mu) * precision)
