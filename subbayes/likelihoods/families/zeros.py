r"""Counts with more or fewer zeros: zero-inflated and hurdle models of a family of counts.

Zero-inflated (Lambert 1992): with probability $\pi$ the count is 0, otherwise that of the family.
Hurdle (Mullahy 1986): with probability $\pi$ the count is 0, otherwise that of the family given
that it is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.families.base import log_sum, moment
from subbayes.likelihoods.families.counts import CountFamily, NegativeBinomialFamily, PoissonFamily
from subbayes.utils.types import Outputs

__all__ = [
    "HurdleNegativeBinomialFamily",
    "HurdlePoissonFamily",
    "ZeroInflatedNegativeBinomialFamily",
    "ZeroInflatedPoissonFamily",
]


@dataclass(frozen=True, repr=False)
class _ZeroFamily(CountFamily):
    """Base class of counts with a probability of zeros, the last parameter.

    Attributes:
        base: the family of the counts.
        zero: name of the parameter.
    """

    base: CountFamily = field(default_factory=PoissonFamily, init=False)
    zero: ClassVar[str]

    def to_config(self) -> dict[str, Any]:
        """Name and links, for JSON."""
        return {"name": self.label, "links": list(self.links)}

    def _parts(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Probability of the zeros; mean and variance of the family, and its P(Y = 0)."""
        inner = outputs[..., :-1]
        zero = torch.zeros((), dtype=outputs.dtype, device=outputs.device)
        none = self.base.log_density(zero, inner.unbind(-1)).exp()
        mean, variance = self.base.mean(inner)[..., 0], self.base.variance(inner)[..., 0]
        return outputs[..., -1].sigmoid(), mean, variance, none

    def _scale(self, share: Tensor, none: Tensor) -> Tensor:
        """What the probabilities of the family are multiplied by, above 0."""
        return 1 - share

    def mean(self, outputs: Outputs) -> Moments:
        """Mean of the counts."""
        share, mean, _, none = self._parts(outputs)
        return moment(self._scale(share, none) * mean)

    def variance(self, outputs: Outputs) -> Moments:
        """Variance of the counts."""
        share, mean, variance, none = self._parts(outputs)
        factor = self._scale(share, none)
        return moment(factor * (variance + mean.square()) - (factor * mean).square())

    def distribution(self, **values: np.ndarray) -> Any:
        """The distribution, with `cdf` and `ppf`."""
        share = values.pop(self.zero)
        inner = self.base.distribution(**values)
        none = torch.from_numpy(np.asarray(inner.pmf(0)))
        factor = self._scale(torch.from_numpy(np.asarray(share)), none).numpy()
        return _WithZeros(inner, factor)


@dataclass(frozen=True)
class _WithZeros:
    """A distribution of counts whose probabilities above 0 are multiplied by a factor."""

    inner: Any
    factor: np.ndarray

    def cdf(self, y: np.ndarray) -> np.ndarray:
        """P(Y <= y)."""
        return np.where(np.asarray(y) < 0, 0.0, 1 - self.factor * self.inner.sf(np.floor(y)))

    def ppf(self, q: np.ndarray | float) -> np.ndarray:
        """The least count with at least this probability."""
        level = 1 - (1 - np.asarray(q)) / self.factor
        return np.where(level <= 0, 0.0, np.maximum(self.inner.ppf(np.clip(level, 0, 1)), 0.0))


class _ZeroInflated(_ZeroFamily):
    zero = "zi"

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log probability of counts."""
        count = F.logsigmoid(-eta[-1]) + self.base.log_density(y, eta[:-1])
        return torch.where(y == 0, log_sum(F.logsigmoid(eta[-1]), count), count)


class _Hurdle(_ZeroFamily):
    zero = "hu"

    def _scale(self, share: Tensor, none: Tensor) -> Tensor:
        return (1 - share) / (1 - none)

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log probability of counts."""
        none = self.base.log_density(torch.zeros_like(y), eta[:-1])
        positive = self.base.log_density(y, eta[:-1]) - torch.log(-torch.expm1(none))
        zero = F.logsigmoid(eta[-1])
        return torch.where(y == 0, zero, F.logsigmoid(-eta[-1]) + positive)

    def initial_predictors(self, y: Float[np.ndarray, "n"]) -> tuple[float, ...]:
        """Predictors that suit responses, with the share of zeros."""
        share = float(np.clip(np.mean(y == 0), 0.01, 0.99))
        return (*super().initial_predictors(y)[:-1], float(np.log(share / (1 - share))))


@dataclass(frozen=True, repr=False)
class ZeroInflatedPoissonFamily(_ZeroInflated):
    r"""Poisson counts with rate $\mu$, or 0 with probability $\pi$ (`zi`)."""

    label = "zero-inflated-poisson"
    allowed = {"mu": ("log",), "zi": ("logit",)}


@dataclass(frozen=True, repr=False)
class ZeroInflatedNegativeBinomialFamily(_ZeroInflated):
    r"""Negative binomial counts with mean $\mu$, or 0 with probability $\pi$ (`zi`)."""

    base: CountFamily = field(default_factory=NegativeBinomialFamily, init=False)
    label = "zero-inflated-negative-binomial"
    allowed = {"mu": ("log",), "shape": ("log",), "zi": ("logit",)}


@dataclass(frozen=True, repr=False)
class HurdlePoissonFamily(_Hurdle):
    r"""0 with probability $\pi$ (`hu`), else Poisson counts above 0 with rate $\mu$."""

    label = "hurdle-poisson"
    allowed = {"mu": ("log",), "hu": ("logit",)}


@dataclass(frozen=True, repr=False)
class HurdleNegativeBinomialFamily(_Hurdle):
    r"""0 with probability $\pi$ (`hu`), else negative binomial counts above 0."""

    base: CountFamily = field(default_factory=NegativeBinomialFamily, init=False)
    label = "hurdle-negative-binomial"
    allowed = {"mu": ("log",), "shape": ("log",), "hu": ("logit",)}
