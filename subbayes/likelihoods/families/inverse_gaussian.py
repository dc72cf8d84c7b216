"""Inverse Gaussian responses."""

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
from subbayes.likelihoods.tails.incomplete_integrals import inverse_gaussian_log_tails
from subbayes.likelihoods.tails.tails import Tails
from subbayes.utils.types import Curvatures, Outputs, Predictors, RowNumbers, RowWeights

_LOG_2PI = math.log(2 * math.pi)


@family("inverse-gaussian", "inverse.gaussian", "invgauss", "wald")
@dataclass(frozen=True, repr=False)
class InverseGaussianFamily(Family):
    r"""Mean $\mu$, variance $\mu^3 / \lambda$ with the shape $\lambda$."""

    is_mean = True
    bounds = (0.0, math.inf)
    allowed = {"mu": ("log",), "shape": ("log",)}

    def predictor_prior(
        self, parameter: str, y: RowNumbers, weights: RowWeights = None
    ) -> tuple[float, float]:
        r"""That of other shapes for $\lambda / \mu$: $\lambda$ has the units of y."""
        mean, sd = super().predictor_prior(parameter, y, weights)
        return mean + float(np.log(self.level(y, weights))), sd

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        z = (y * (-eta[0]).exp() - 1) * y.rsqrt() * (0.5 * eta[1]).exp()
        return 0.5 * (eta[1] - _LOG_2PI - 3 * y.log() - z.square())

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        return inverse_gaussian_log_tails(y.log() - eta[0], eta[1] - eta[0])

    def variance(self, outputs: Outputs) -> Moments:
        """mu^3 / shape."""
        values = self.values(outputs)
        return moment(values["mu"].pow(3) / values["shape"])

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$\lambda / \mu$ and 1/2 on the diagonal."""
        values = self.values(outputs)
        first = values["shape"] / values["mu"]
        return diagonal(first, torch.full_like(first, 0.5))

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One response per row (Michael, Schucany and Haas 1976), shape (..., N, 1)."""
        values = self.values(outputs.cpu().double())
        like: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
        normal, u = (f(outputs.shape[:-1], **like) for f in (torch.randn, torch.rand))
        t = values["mu"] / values["shape"] * normal.square() / 2
        small = values["mu"] / (1 + t + (t.square() + 2 * t).sqrt())  # the smaller root
        return moment(
            torch.where(
                u <= values["mu"] / (values["mu"] + small), small, values["mu"].square() / small
            )
        )

    @override
    def distribution(self, mu: np.ndarray, shape: np.ndarray) -> Any:  # type: ignore[override]
        from scipy import stats

        return stats.invgauss(mu / shape, scale=shape)
