"""Normal responses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.family import Family, diagonal, family, moment
from subbayes.likelihoods.gaussian import NormalLikelihood
from subbayes.likelihoods.links import LINKS
from subbayes.likelihoods.tails.tails import (
    Tails,
    normal_from_log_tails,
    normal_log_density,
    normal_log_tails,
    truncated_normal_moments,
)
from subbayes.utils.types import Curvatures, Outputs, Predictors


@family("normal", "gaussian")
@dataclass(frozen=True, repr=False)
class NormalFamily(NormalLikelihood, Family):
    r"""$y \sim N(\mu, \sigma^2)$."""

    is_mean = True
    is_for_networks = False
    allowed = {"mu": ("identity", "log"), "sigma": ("log",)}

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        return normal_log_density(self._z(y, eta), eta[1])

    def _z(self, y: Tensor, eta: Predictors) -> Tensor:
        return (y - LINKS[self.links[0]][1](eta[0])) * (-eta[1]).exp()

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        return normal_log_tails(self._z(y, eta))

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """The responses with these log tails."""
        return LINKS[self.links[0]][1](eta[0]) + eta[1].exp() * normal_from_log_tails(below, above)

    def truncated_moments(self, lower: Tensor, upper: Tensor, eta: tuple[Tensor, ...]) -> Tails:
        """Mean and variance of responses between two bounds."""
        return truncated_normal_moments(
            LINKS[self.links[0]][1](eta[0]), eta[1].exp(), (lower, upper)
        )

    @override
    def variance(self, outputs: Outputs) -> Moments:
        return moment(self.values(outputs)["sigma"].square())

    @override
    def _sd(self, outputs: Outputs) -> Moments:
        return moment(self.values(outputs)["sigma"])

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$(\mu')^2 / \sigma^2$ and 2 on the diagonal."""
        values = self.values(outputs)
        slope = values["mu"] if self.links[0] == "log" else torch.ones_like(values["mu"])
        first = (slope / values["sigma"]).square()
        return diagonal(first, torch.full_like(first, 2.0))
