"""Gamma responses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.family import Family, diagonal, family, moment
from subbayes.likelihoods.tails.incomplete_integrals import gamma_log_tails, scaled_trigamma
from subbayes.likelihoods.tails.tails import Tails
from subbayes.utils.types import Curvatures, Outputs, Predictors


@family("gamma")
@dataclass(frozen=True, repr=False)
class GammaFamily(Family):
    r"""Positive responses: mean $\mu$, variance $\mu^2 / a$ with the shape a."""

    is_mean = True
    bounds = (0.0, math.inf)
    allowed = {"mu": ("log",), "shape": ("log",)}

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        log_mu, log_a = eta
        a = log_a.exp()
        return a * (log_a - log_mu) + (a - 1) * y.log() - a * y * (-log_mu).exp() - torch.lgamma(a)

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        return gamma_log_tails(y.log() - eta[0], eta[1])

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""a and $a^2 \psi'(a) - a$ on the diagonal."""
        a = outputs[..., 1].double().exp()
        second = scaled_trigamma(a) - a
        return diagonal(a, second).to(outputs)

    def variance(self, outputs: Outputs) -> Moments:
        """mu^2 / shape."""
        values = self.values(outputs)
        return moment(values["mu"].square() / values["shape"])

    @override
    def distribution(self, mu: np.ndarray, shape: np.ndarray) -> Any:  # type: ignore[override]
        from scipy import stats

        return stats.gamma(shape, scale=mu / shape)
