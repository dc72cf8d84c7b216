"""Asymmetric Laplace responses: quantile regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.family import Family, diagonal, family, moment
from subbayes.likelihoods.tails.tails import Tails
from subbayes.utils.checks import check_fraction
from subbayes.utils.types import Curvatures, Outputs, Predictors


@family("asymmetric-laplace", "asym-laplace", "quantile")
@dataclass(frozen=True, repr=False)
class AsymmetricLaplaceFamily(Family):
    r"""Quantile regression: $P(y \le \mu) = \tau$ (Yu and Moyeed 2001).

    $p(y) = \tau (1 - \tau) / \sigma\; e^{-\rho_\tau((y - \mu) / \sigma)}$ with the check function
    $\rho_\tau(z) = z (\tau - 1\{z < 0\})$. This density is rarely that of the responses, so that
    the intervals of effects are corrected where the model allows it, and `fit` warns where it does
    not; see `subbayes.regression.questions.working_likelihood`. Marginal means, contrasts, slopes
    and
    conditional effects are about the quantile; `predict(...).mean`, intervals and draws of
    responses are those of this density.

    Args:
        quantile: $\tau$, strictly between 0 and 1.

    Example:
        >>> AsymmetricLaplaceFamily(quantile=0.9).cdf(torch.zeros(1, 2), torch.zeros(1))
        tensor([[0.9000]])
    """

    quantile: float = 0.5
    is_working = True
    allowed = {"mu": ("identity",), "sigma": ("log",)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("quantile", self.quantile)

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        z = (y - eta[0]) * (-eta[1]).exp()
        height = math.log(self.quantile * (1 - self.quantile))
        return height - eta[1] - torch.where(z < 0, (self.quantile - 1) * z, self.quantile * z)

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        z = (y - eta[0]) * (-eta[1]).exp()
        tau = self.quantile
        low = math.log(tau) + (1 - tau) * z.clamp_max(0)
        high = math.log(1 - tau) - tau * z.clamp_min(0)
        below = torch.where(z < 0, low, torch.log(-torch.expm1(high)))
        return below, torch.where(z < 0, torch.log(-torch.expm1(low)), high)

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """The responses with these log tails."""
        tau = self.quantile
        low, high = math.log(tau), math.log(1 - tau)
        z = torch.where(below < low, (below - low) / (1 - tau), (high - above) / tau)
        return eta[0] + eta[1].exp() * z

    def kinks(self, eta: Predictors) -> tuple[Tensor, ...]:
        """The quantile, at which the density has its peak."""
        return (eta[0],)

    def mean(self, outputs: Outputs) -> Moments:
        """The mean, which is not mu unless tau = 1/2."""
        values, tau = self.values(outputs), self.quantile
        return moment(values["mu"] + values["sigma"] * (1 - 2 * tau) / (tau * (1 - tau)))

    def averaged(self, outputs: Outputs) -> Moments:
        """The quantile, mu."""
        return moment(self.values(outputs)["mu"])

    @property
    def average_name(self) -> str:
        """The quantile."""
        return f"{self.quantile:g} quantile"

    @override
    def variance(self, outputs: Outputs) -> Moments:
        tau = self.quantile
        factor = (1 - 2 * tau + 2 * tau**2) / (tau * (1 - tau)) ** 2
        return moment(self.values(outputs)["sigma"].square() * factor)

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$\tau (1 - \tau) / \sigma^2$ and 1 on the diagonal."""
        tau = self.quantile
        first = tau * (1 - tau) / self.values(outputs)["sigma"].square()
        return diagonal(first, torch.ones_like(first))

    def __repr__(self) -> str:
        return f"asymmetric-laplace(quantile={self.quantile:g})"
