"""Responses with outliers: Student's t."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.families.base import LINKS, ScipyFamily, moment
from subbayes.utils.types import Outputs

__all__ = ["StudentTFamily"]


@dataclass(frozen=True, repr=False)
class StudentTFamily(ScipyFamily):
    r"""$y = \mu + \sigma t_\nu$ with $\nu > 1$ degrees of freedom: a normal with outliers.

    Its variance $\sigma^2 \nu / (\nu - 2)$ is infinite for $\nu \le 2$.

    Example:
        >>> family = StudentTFamily()
        >>> eta = torch.tensor([[1.0, 0.0, math.log(4.0)]])  # mu = 1, sigma = 1, nu = 5
        >>> family.variance(eta)
        tensor([[1.6667]])
    """

    label = "student-t"
    allowed = {"mu": ("identity", "log"), "sigma": ("log",), "nu": ("logm1",)}
    support = "real numbers"

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses."""
        mean, nu = LINKS[self.links[0]][1](eta[0]), 1 + eta[2].exp()
        z = (y - mean) * (-eta[1]).exp()
        return (
            torch.lgamma((nu + 1) / 2)
            - torch.lgamma(nu / 2)
            - 0.5 * (nu * math.pi).log()
            - eta[1]
            - 0.5 * (nu + 1) * torch.log1p(z.square() / nu)
        )

    def allows(self, y: Tensor) -> Tensor:
        """Finite numbers."""
        return torch.isfinite(y)

    def variance(self, outputs: Outputs) -> Moments:
        """sigma^2 nu / (nu - 2), infinite for nu <= 2."""
        values = self.values(outputs)
        nu = values["nu"]
        found = values["sigma"].square() * nu / (nu - 2)
        return moment(torch.where(nu > 2, found, torch.full_like(found, math.inf)))

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """The Fisher information (Lange, Little and Taylor 1989), in the predictors."""
        values = self.values(outputs)
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
        return torch.stack([torch.stack(row, -1) for row in rows], -2)

    def distribution(  # type: ignore[override]
        self, mu: np.ndarray, sigma: np.ndarray, nu: np.ndarray
    ) -> Any:
        """The t distribution."""
        from scipy import stats

        return stats.t(nu, mu, sigma)
