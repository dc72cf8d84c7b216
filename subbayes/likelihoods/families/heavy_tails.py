"""Responses with outliers: Student's t, and the asymmetric Laplace for quantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Moments, in_float64
from subbayes.likelihoods.families.base import Family, family, moment
from subbayes.likelihoods.families.links import LINKS
from subbayes.likelihoods.families.tails import (
    exponential_moments,
    joined_moments,
    student_from_log_tails,
    student_log_constant,
    student_log_tails,
)
from subbayes.utils.checks import check_fraction
from subbayes.utils.types import Outputs


@family("student-t", "student", "t")
@dataclass(frozen=True, repr=False)
class StudentTFamily(Family):
    r"""$y = \mu + \sigma t_\nu$ with $\nu > 1$ degrees of freedom: a normal with outliers.

    Its variance $\sigma^2 \nu / (\nu - 2)$ is infinite for $\nu \le 2$.

    Example:
        >>> family = StudentTFamily()
        >>> eta = torch.tensor([[1.0, 0.0, math.log(4.0)]])  # mu = 1, sigma = 1, nu = 5
        >>> family.variance(eta)
        tensor([[1.6667]])
    """

    is_mean = True
    allowed = {"mu": ("identity", "log"), "sigma": ("log",), "nu": ("logm1",)}

    @override
    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        residual, nu = y - LINKS[self.links[0]][1](eta[0]), 1 + eta[2].exp()
        return (
            student_log_constant(nu)
            - eta[1]
            - 0.5 * (nu + 1) * self._log_distance(residual, eta[1], nu)
        )

    @staticmethod
    def _log_distance(residual: Tensor, log_sigma: Tensor, nu: Tensor) -> Tensor:
        r"""$\log(1 + z^2 / \nu)$, far out by the logarithm of z, whose square overflows."""
        z = residual * (-log_sigma).exp()
        near = z.abs() < torch.finfo(z.dtype).max ** 0.25
        square = torch.where(near, z, 0.0).square()
        log_z = torch.where(near, 1.0, residual.abs()).log() - log_sigma
        far = -F.logsigmoid(nu.log() - 2 * log_z)
        return torch.where(near, torch.log1p(square / nu), far)

    def log_tails(self, y: Tensor, eta: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Log P(Y <= y) and log P(Y > y)."""
        mean = LINKS[self.links[0]][1](eta[0])
        return student_log_tails((y - mean) * (-eta[1]).exp(), 1 + eta[2].exp())

    def from_log_tails(self, below: Tensor, above: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """The responses with these log tails."""
        t = student_from_log_tails(below, above, 1 + eta[2].exp())
        return LINKS[self.links[0]][1](eta[0]) + eta[1].exp() * t

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """For more degrees of freedom than the order."""
        return (self.values(outputs)["nu"] > order).unsqueeze(-1)

    def variance(self, outputs: Outputs) -> Moments:
        """sigma^2 nu / (nu - 2), infinite for nu <= 2."""
        values = self.values(outputs)
        nu = values["nu"]
        found = values["sigma"].square() * nu / (nu - 2)
        return moment(torch.where(nu > 2, found, torch.full_like(found, math.inf)))

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """The Fisher information (Lange, Little and Taylor 1989), in the predictors."""
        values = self.values(in_float64(outputs))
        nu, slope = values["nu"], values["nu"] - 1
        location = values["mu"] if self.links[0] == "log" else torch.ones_like(nu)
        first = (location / values["sigma"]).square() * (nu + 1) / (nu + 3)
        second = 2 * nu / (nu + 3)
        both = -2 / ((nu + 1) * (nu + 3)) * slope
        trigamma = torch.polygamma(1, nu / 2) - torch.polygamma(1, (nu + 1) / 2)
        third = trigamma / 4 - (nu + 5) / (2 * nu * (nu + 1) * (nu + 3))
        zero = torch.zeros_like(nu)
        rows = [
            [first, zero, zero],
            [zero, second, both],
            [zero, both, third.clamp_min(0) * slope.square()],
        ]
        return torch.stack([torch.stack(row, -1) for row in rows], -2).to(outputs)

    @override
    def distribution(  # type: ignore[override]
        self, mu: np.ndarray, sigma: np.ndarray, nu: np.ndarray
    ) -> Any:
        from scipy import stats

        return stats.t(nu, mu, sigma)


@family("asymmetric-laplace", "asym-laplace", "quantile")
@dataclass(frozen=True, repr=False)
class AsymmetricLaplaceFamily(Family):
    r"""Quantile regression: $P(y \le \mu) = \tau$ (Yu and Moyeed 2001).

    $p(y) = \tau (1 - \tau) / \sigma\; e^{-\rho_\tau((y - \mu) / \sigma)}$ with the check function
    $\rho_\tau(z) = z (\tau - 1\{z < 0\})$. This density is rarely that of the responses, so that
    the intervals of effects are corrected where the model allows it, and `fit` warns where it does
    not; see `subbayes.semistructured.working_likelihood`. Marginal means, contrasts, slopes and
    conditional effects are about the quantile; `predict(...).mean`, intervals and draws of
    responses are those of this density.

    Args:
        quantile: $\tau$, strictly between 0 and 1.

    Example:
        >>> AsymmetricLaplaceFamily(quantile=0.9).cdf(torch.zeros(1, 2), torch.zeros(1))
        tensor([[0.9000]])
    """

    quantile: float = 0.5
    allowed = {"mu": ("identity",), "sigma": ("log",)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("quantile", self.quantile)

    @override
    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        z = (y - eta[0]) * (-eta[1]).exp()
        height = math.log(self.quantile * (1 - self.quantile))
        return height - eta[1] - torch.where(z < 0, (self.quantile - 1) * z, self.quantile * z)

    def log_tails(self, y: Tensor, eta: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Log P(Y <= y) and log P(Y > y)."""
        z = (y - eta[0]) * (-eta[1]).exp()
        tau = self.quantile
        low = math.log(tau) + (1 - tau) * z.clamp_max(0)
        high = math.log(1 - tau) - tau * z.clamp_min(0)
        below = torch.where(z < 0, low, torch.log(-torch.expm1(high)))
        return below, torch.where(z < 0, torch.log(-torch.expm1(low)), high)

    def from_log_tails(self, below: Tensor, above: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """The responses with these log tails."""
        tau = self.quantile
        low, high = math.log(tau), math.log(1 - tau)
        z = torch.where(below < low, (below - low) / (1 - tau), (high - above) / tau)
        return eta[0] + eta[1].exp() * z

    def kinks(self, eta: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The quantile, at which the density has its peak."""
        return (eta[0],)

    def truncated_moments(
        self, lower: Tensor, upper: Tensor, eta: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of responses between two bounds."""
        peak = eta[0].clamp(lower, upper)
        width = torch.stack([peak - lower, upper - peak], -1)
        factors = torch.tensor([1 - self.quantile, self.quantile], dtype=peak.dtype)
        rate = factors * (-eta[1]).exp().unsqueeze(-1)
        log_share, mean, variance = exponential_moments(rate, width)
        sides = mean * torch.tensor([-1.0, 1.0], dtype=peak.dtype)
        mean, variance = joined_moments(log_share - rate.log(), sides, variance)
        return peak + mean, variance

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

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""$\tau (1 - \tau) / \sigma^2$ and 1 on the diagonal."""
        tau = self.quantile
        first = tau * (1 - tau) / self.values(outputs)["sigma"].square()
        return torch.diag_embed(torch.stack([first, torch.ones_like(first)], -1))

    @override
    def distribution(self, mu: np.ndarray, sigma: np.ndarray) -> Any:  # type: ignore[override]
        from scipy import stats

        tau = self.quantile
        kappa = math.sqrt(tau / (1 - tau))
        return stats.laplace_asymmetric(kappa, mu, sigma / math.sqrt(tau * (1 - tau)))

    def __repr__(self) -> str:
        return f"asymmetric-laplace(quantile={self.quantile:g})"
