"""Student's t responses: a normal with outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_exporting
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Moments, in_float64
from subbayes.likelihoods.family import Family, family, moment
from subbayes.likelihoods.links import LINKS
from subbayes.likelihoods.tails.incomplete_integrals import student_log_tails
from subbayes.likelihoods.tails.tails import Tails, student_log_constant
from subbayes.utils.types import Curvatures, Outputs, Predictors


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
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
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

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        mean = LINKS[self.links[0]][1](eta[0])
        z, nu = (y - mean) * (-eta[1]).exp(), 1 + eta[2].exp()
        return _log_tails_in_graphs(z, nu) if is_exporting() else student_log_tails(z, nu)

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """For more degrees of freedom than the order."""
        return (self.values(outputs)["nu"] > order).unsqueeze(-1)

    def variance(self, outputs: Outputs) -> Moments:
        """sigma^2 nu / (nu - 2), infinite for nu <= 2."""
        values = self.values(outputs)
        nu = values["nu"]
        found = values["sigma"].square() * nu / (nu - 2)
        return moment(torch.where(nu > 2, found, torch.full_like(found, math.inf)))

    @override
    def scale_of_quantiles(self, outputs: Outputs) -> Moments:
        return moment(self.values(outputs)["sigma"])

    def curvature(self, outputs: Outputs) -> Curvatures:
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


def _log_tails_in_graphs(t: Tensor, nu: Tensor) -> Tails:
    r"""Log tails by a rule of 64 points, for graphs without special functions.

    With $t = \sqrt\nu \tan\theta$ and $w = \tan(\theta / 2)$ the density of w is proportional to
    $\cos^{\nu - 1}\theta / (1 + w^2)$, where $\cos\theta = (1 - w^2) / (1 + w^2)$.
    """
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(64))

    def integral(end: Tensor) -> Tensor:
        square = (end.unsqueeze(-1) * (0.5 * nodes + 0.5)).square()
        log_cosine = (1 - square).log() - (1 + square).log()
        height = (log_cosine * (nu.unsqueeze(-1) - 1)).exp() / (1 + square)
        return end * (height * weights).sum(-1)

    slope = t.abs() / nu.sqrt()
    end = slope / (1 + (1 + slope.square()).sqrt())
    share = (0.5 * integral(end) / integral(torch.ones_like(t))).clamp_max(0.5)
    above, below = 0.5 + share, 0.5 - share
    return torch.where(t < 0, below, above).log(), torch.where(t < 0, above, below).log()
