"""Log-normal responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.families.normal import NormalFamily
from subbayes.likelihoods.family import Family, family, moment
from subbayes.likelihoods.tails.tails import Tails
from subbayes.utils.types import Curvatures, Outputs, Predictors, RowNumbers

_OF_LOG = NormalFamily()


@family("log-normal", "lognormal")
@dataclass(frozen=True, repr=False)
class LogNormalFamily(Family):
    r"""$\log y \sim N(\mu, \sigma^2)$, with mean $e^{\mu + \sigma^2 / 2}$.

    Example:
        >>> LogNormalFamily().mean(torch.tensor([[0.0, 0.0]]))
        tensor([[1.6487]])
    """

    bounds = (0.0, math.inf)
    allowed = {"mu": ("identity",), "sigma": ("log",)}

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        return _OF_LOG.log_density(y.log(), eta) - y.log()

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        return _OF_LOG.log_tails(y.log(), eta)

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """The responses with these log tails."""
        return _OF_LOG.from_log_tails(below, above, eta).exp()

    def location_values(self, y: RowNumbers) -> RowNumbers:
        """Their logarithms."""
        return np.log(y)

    def mean(self, outputs: Outputs) -> Moments:
        """exp(mu + sigma^2 / 2)."""
        values = self.values(outputs)
        return moment((values["mu"] + 0.5 * values["sigma"].square()).exp())

    def variance(self, outputs: Outputs) -> Moments:
        """(exp(sigma^2) - 1) times the square of the mean."""
        spread = torch.expm1(self.values(outputs)["sigma"].square())
        return moment(spread) * self.mean(outputs).square()

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$1 / \sigma^2$ and 2 on the diagonal."""
        return _OF_LOG.curvature(outputs)
