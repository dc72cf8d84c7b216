"""Counts: Poisson, and negative binomial for more variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.base import Kind, Moments
from subbayes.likelihoods.families.base import ScipyFamily, moment
from subbayes.utils.types import Outputs

__all__ = ["NegativeBinomialFamily", "PoissonFamily"]


class _CountFamily(ScipyFamily):
    kind: ClassVar[Kind] = "count"
    support = "counts (whole numbers of at least 0)"

    def allows(self, y: Tensor) -> Tensor:
        """Whole numbers of at least 0."""
        return torch.isfinite(y) & (y >= 0) & (y == y.floor())


@dataclass(frozen=True, repr=False)
class PoissonFamily(_CountFamily):
    r"""Counts, $y \sim \mathrm{Poisson}(\mu)$."""

    label = "poisson"
    allowed = {"mu": ("log",)}

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log probability of counts."""
        return y * eta[0] - eta[0].exp() - torch.lgamma(y + 1)

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """The rate."""
        return torch.diag_embed(outputs.exp())

    def variance(self, outputs: Outputs) -> Moments:
        """The rate."""
        return outputs.exp()

    def distribution(self, mu: np.ndarray) -> Any:  # type: ignore[override]
        """The Poisson distribution."""
        from scipy import stats

        return stats.poisson(mu)


@dataclass(frozen=True, repr=False)
class NegativeBinomialFamily(_CountFamily):
    r"""Overdispersed counts: mean $\mu$, variance $\mu + \mu^2 / r$ with the shape r."""

    label = "negative-binomial"
    allowed = {"mu": ("log",), "shape": ("log",)}

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log probability of counts."""
        log_mu, log_r = eta
        r, total = log_r.exp(), torch.logaddexp(log_mu, log_r)
        return (
            torch.lgamma(y + r)
            - torch.lgamma(r)
            - torch.lgamma(y + 1)
            + r * (log_r - total)
            + y * (log_mu - total)
        )

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""$\mu / (1 + \mu / r)$ for the mean; for the shape the mean squared score.

        The latter over 1024 quantiles of the counts: it has no closed form.
        """
        values = self.values(outputs)
        u = torch.linspace(0, 1, 2049, dtype=torch.float64)[1::2].reshape(
            -1, *[1] * (outputs.ndim - 1)
        )
        y = torch.from_numpy(self._distribution_at(outputs).ppf(u.numpy())).to(outputs)
        r, mu = values["shape"], values["mu"]
        score = r * (
            torch.digamma(y + r) - torch.digamma(r) + torch.log(r / (r + mu)) + (mu - y) / (r + mu)
        )
        first = mu / (1 + mu / r)
        return torch.diag_embed(torch.stack([first, score.square().mean(0)], -1))

    def variance(self, outputs: Outputs) -> Moments:
        """mu + mu^2 / shape."""
        values = self.values(outputs)
        return moment(values["mu"] + values["mu"].square() / values["shape"])

    def distribution(self, mu: np.ndarray, shape: np.ndarray) -> Any:  # type: ignore[override]
        """The negative binomial distribution."""
        from scipy import stats

        return stats.nbinom(shape, shape / (shape + mu))
