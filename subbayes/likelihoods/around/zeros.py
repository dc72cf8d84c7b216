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
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.families.counts import NegativeBinomialFamily, Poisson
from subbayes.likelihoods.family import Family, family, log_sum, moment
from subbayes.likelihoods.links import logit_of_share
from subbayes.utils.types import Outputs, Predictors, RowNumbers

_BELOW_ONE = 1 - 2.0**-53


@dataclass(frozen=True, repr=False)
class _ZeroFamily(Family):
    """Base class of counts with a probability of zeros, the last parameter.

    Attributes:
        base: the family of the counts.
        zero: name of the parameter.
    """

    base: Any = field(default_factory=Poisson, init=False)
    kind = "count"
    zero: ClassVar[str]

    def _seen(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor]:
        """Share of the counts of the family; their mean, and what their mean square is times it."""
        inner = outputs[..., :-1]
        mean, variance = self.base.mean(inner)[..., 0], self.base.variance(inner)[..., 0]
        spread = torch.where(mean > 0, variance / mean, 1.0)
        return (-outputs[..., -1]).sigmoid(), mean, spread + mean

    @override
    def mean(self, outputs: Outputs) -> Moments:
        share, mean, _ = self._seen(outputs)
        return moment(share * mean)

    @override
    def variance(self, outputs: Outputs) -> Moments:
        share, mean, ratio = self._seen(outputs)
        return moment((share * mean * (ratio - share * mean)).clamp_min(0.0))

    def _seen_above_zero(self, share: np.ndarray, above: np.ndarray) -> np.ndarray:
        """P(Y > 0), from the share of the counts of the family and its P(Y > 0)."""
        return share * above

    @override
    def distribution(self, **values: np.ndarray) -> Any:
        share = 1 - values.pop(self.zero)
        values["mu"] = np.maximum(values["mu"], np.finfo(np.float64).tiny)
        logs = tuple(torch.from_numpy(np.log(value)) for value in values.values())
        above = self.base.log_above_zero(logs).exp().numpy()
        seen = self._seen_above_zero(share, above)
        return _WithZeros(self.base.distribution(**values), seen, seen / above)


@dataclass(frozen=True)
class _WithZeros:
    """A distribution of counts whose probabilities above 0 are multiplied by a factor.

    Attributes:
        inner: the distribution.
        seen: P(Y > 0).
        factor: the factor.
    """

    inner: Any
    seen: np.ndarray
    factor: np.ndarray

    def cdf(self, y: np.ndarray) -> np.ndarray:
        """P(Y <= y)."""
        y = np.floor(y)
        above = np.where(y < 1, self.seen, self.factor * self.inner.sf(np.maximum(y, 1.0)))
        return np.where(y < 0, 0.0, 1 - above)

    def ppf(self, q: np.ndarray | float) -> np.ndarray:
        """The least count with at least this probability."""
        rest = 1 - np.asarray(q)
        level = np.clip(1 - rest / self.factor, 0.0, np.where(rest > 0, _BELOW_ONE, 1.0))
        found = np.maximum(self.inner.ppf(level), 1.0)
        found = np.where(self.factor * self.inner.sf(1) <= rest, np.minimum(found, 1.0), found)
        return np.where(self.seen <= rest, 0.0, found)


class _ZeroInflated(_ZeroFamily):
    zero = "zi"

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        count = F.logsigmoid(-eta[-1]) + self.base.log_density(y, eta[:-1])
        return torch.where(y == 0, log_sum(F.logsigmoid(eta[-1]), count), count)


class _Hurdle(_ZeroFamily):
    zero = "hu"

    def _seen(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor]:
        share, _, ratio = super()._seen(outputs)
        log_mean = outputs[..., 0] - self.base.log_above_zero(outputs[..., :-1].unbind(-1))
        return share, log_mean.exp(), ratio

    def _seen_above_zero(self, share: np.ndarray, above: np.ndarray) -> np.ndarray:
        return share

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        positive = self.base.log_density(y, eta[:-1]) - self.base.log_above_zero(eta[:-1])
        zero = F.logsigmoid(eta[-1])
        return torch.where(y == 0, zero, F.logsigmoid(-eta[-1]) + positive)

    def initial_predictors(self, y: RowNumbers) -> tuple[float, ...]:
        """Predictors that suit responses, with the share of zeros."""
        return (*super().initial_predictors(y)[:-1], logit_of_share(y == 0))


@family("zero-inflated-poisson", "zip")
@dataclass(frozen=True, repr=False)
class ZeroInflatedPoissonFamily(_ZeroInflated):
    r"""Poisson counts with rate $\mu$, or 0 with probability $\pi$ (`zi`)."""

    allowed = {"mu": ("log",), "zi": ("logit",)}


@family("zero-inflated-negative-binomial", "zinb", "zero-inflated-negbinomial")
@dataclass(frozen=True, repr=False)
class ZeroInflatedNegativeBinomialFamily(_ZeroInflated):
    r"""Negative binomial counts with mean $\mu$, or 0 with probability $\pi$ (`zi`)."""

    base: Any = field(default_factory=NegativeBinomialFamily, init=False)
    allowed = {"mu": ("log",), "shape": ("log",), "zi": ("logit",)}


@family("hurdle-poisson")
@dataclass(frozen=True, repr=False)
class HurdlePoissonFamily(_Hurdle):
    r"""0 with probability $\pi$ (`hu`), else Poisson counts above 0 with rate $\mu$."""

    allowed = {"mu": ("log",), "hu": ("logit",)}


@family("hurdle-negative-binomial", "hurdle-negbinomial")
@dataclass(frozen=True, repr=False)
class HurdleNegativeBinomialFamily(_Hurdle):
    r"""0 with probability $\pi$ (`hu`), else negative binomial counts above 0."""

    base: Any = field(default_factory=NegativeBinomialFamily, init=False)
    allowed = {"mu": ("log",), "shape": ("log",), "hu": ("logit",)}
