"""Counts: Poisson, negative binomial for more variance, and binomial."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import (
    DiagonalCurvature,
    Likelihood,
    Moments,
    column,
    n_targets,
    refuse_rows,
)
from subbayes.likelihoods.families.classes import Bernoulli
from subbayes.likelihoods.family import Family, diagonal, family, moment
from subbayes.likelihoods.links import (
    PROBABILITY_LINKS,
    bernoulli_variance,
    fisher_information,
    log_odds,
    log_probabilities,
)
from subbayes.likelihoods.tails.incomplete_integrals import (
    binomial_log_tails,
    negative_binomial_log_tails,
)
from subbayes.likelihoods.tails.tails import Tails, exponential_log_below, poisson_log_tails
from subbayes.utils.checks import check_count
from subbayes.utils.types import Curvatures, Outputs, Predictors, RowColumns, RowNumbers, Targets

_HUGE = 2.0**53  # rates whose counts are not all numbers of float64
_LOG_LARGE = 7.0  # of shapes for which Stirling's series has one term


@family("poisson")
@dataclass(frozen=True, repr=False)
class Poisson(DiagonalCurvature, Family):
    r"""Counts, $y \sim \mathrm{Poisson}(\mu)$.

    Networks may have an output for each of T targets, which are independent.
    """

    kind = "count"
    is_mean = True
    most_columns = math.inf
    allowed = {"mu": ("log",)}
    check_outputs = Likelihood.check_outputs
    check_parameters = Likelihood.check_parameters

    def n_outputs(self, y: Targets) -> int:
        """One output per target."""
        return n_targets(y)

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        return y * eta[0] - torch.lgamma(y + 1) - eta[0].exp()

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        return poisson_log_tails(y, eta[0])

    def log_above_zero(self, eta: Predictors) -> Tensor:
        """Log P(Y > 0), of which small rates keep their digits."""
        return exponential_log_below(eta[0])

    def mean(self, outputs: Outputs) -> Moments:
        """The rate."""
        return outputs.exp()

    variance = mean
    information = mean

    @override
    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        count = column(y, outputs).floor()
        inside = torch.special.gammaincc(count.clamp_min(0) + 1, outputs.exp())
        return torch.where(count < 0, torch.zeros_like(inside), inside)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One count per output, shape (..., N, T); of huge rates a rounded normal number."""
        rate = outputs.exp().cpu()
        found = torch.poisson(rate.clamp_max(_HUGE), generator=generator)
        if bool((rate > _HUGE).any()):  # torch would return negative numbers
            eps = torch.randn(rate.shape, generator=generator, dtype=rate.dtype)
            near = torch.where(rate.isinf(), rate, (rate + rate.sqrt() * eps).round())
            found = torch.where(rate > _HUGE, near, found)
        return found

    @override
    def distribution(self, mu: np.ndarray) -> Any:  # type: ignore[override]
        from scipy import stats

        return stats.poisson(mu)


@family("negative-binomial", "negbin", "nb", "nbinom", "negativebinomial")
@dataclass(frozen=True, repr=False)
class NegativeBinomialFamily(Family):
    r"""Overdispersed counts: mean $\mu$, variance $\mu + \mu^2 / r$ with the shape r."""

    kind = "count"
    is_mean = True
    allowed = {"mu": ("log",), "shape": ("log",)}

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        log_mu, log_r = eta
        return torch.where(
            log_r < _LOG_LARGE,
            self._of_small_shapes(y, log_mu, log_r.clamp_max(_LOG_LARGE)),
            self._of_large_shapes(y, log_mu, log_r.clamp_min(_LOG_LARGE)),
        ) - torch.lgamma(y + 1)

    @staticmethod
    def _of_small_shapes(y: Tensor, log_mu: Tensor, log_r: Tensor) -> Tensor:
        """The log probability without the term of the count alone."""
        r, total = log_r.exp(), torch.logaddexp(log_mu, log_r)
        # log Gamma(r) = log Gamma(1 + r) - log r, which is finite where r underflows
        ways = torch.lgamma(y.clamp_min(1) + r) - torch.lgamma(1 + r) + log_r
        return torch.where(y == 0, 0.0, ways) + r * (log_r - total) + y * (log_mu - total)

    @staticmethod
    def _of_large_shapes(y: Tensor, log_mu: Tensor, log_r: Tensor) -> Tensor:
        r"""The same from Stirling's series: differences of log gamma functions have no digits left.

        With $v = (y - \mu) / (r + \mu)$ it is $(y + r) \log(1 + v) + y (\log \mu - 1)$, and small
        terms: that of Poisson counts for $r \to \infty$.
        """
        r, total = log_r.exp(), torch.logaddexp(log_mu, log_r)
        log_sum = (y + r).log()
        v = y * (-total).exp() - (log_mu - log_r).sigmoid()
        near = torch.log1p(v.clamp(-0.5, 0.5))
        log_ratio = torch.where(v.abs() < 0.5, near, log_sum - total)
        small = 0.5 * (log_r - log_sum) + ((-log_sum).exp() - (-log_r).exp()) / 12
        return r * log_ratio + y * (log_ratio + log_mu - 1) + small

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        return negative_binomial_log_tails(y, *eta)

    def is_log_concave(self, eta: Predictors) -> Tensor:
        """Whether shapes are at least 1; counts of smaller ones crowd at 0."""
        return eta[1] >= 0

    def log_above_zero(self, eta: Predictors) -> Tensor:
        """Log P(Y > 0), of which small means keep their digits."""
        ratio = eta[0] - eta[1]
        log_hazard = F.softplus(ratio.clamp_min(-30.0)).log() + (ratio + 30.0).clamp_max(0.0)
        return exponential_log_below(eta[1] + log_hazard)

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$\mu / (1 + \mu / r)$ for the mean; for the shape the mean squared score.

        The latter is a sum over counts: it has no closed form.
        """
        values = self.values(outputs)
        first = values["mu"] / (1 + values["mu"] / values["shape"])
        second = super().curvature(outputs.double())[..., 1, 1].to(first)
        return diagonal(first, second)

    def variance(self, outputs: Outputs) -> Moments:
        """mu + mu^2 / shape."""
        values = self.values(outputs)
        return moment(values["mu"] + values["mu"].square() / values["shape"])

    @override
    def distribution(self, mu: np.ndarray, shape: np.ndarray) -> Any:  # type: ignore[override]
        from scipy import stats

        return stats.nbinom(shape, shape / (shape + mu))


@family("binomial")
@dataclass(frozen=True, repr=False)
class BinomialFamily(Family):
    r"""Successes among n trials, $y \sim \mathrm{Bin}(n, \mu)$.

    The second predictor is the number of trials. It is given: of the rows of a data frame by a
    column, or by a number, which counts whatever the predictor is; networks then have one output.

    Args:
        trials: number of trials, or the column of the data frame that has it.

    Example:
        >>> BinomialFamily(trials=10).mean(torch.tensor([[0.0, 10.0]]))
        tensor([[5.]])
    """

    trials: int | str = 1
    kind = "count"
    is_for_networks = False
    remedy = "Give counts of successes, such as shares times trials, or leave the row out"
    allowed = {"mu": PROBABILITY_LINKS, "trials": ("identity",)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.trials, str):
            check_count("trials", self.trials)

    @classmethod
    def from_text(cls, text: str, link: str | None = None) -> Family:
        """As other families; without trials, that of Bernoulli responses."""
        made = super().from_text(text, link)
        return made if "trials" in text else Bernoulli(made.links[:1])

    def allows(self, y: Tensor) -> Tensor:
        """Whole numbers of at least 0, and of at most the trials where these are a number."""
        most = math.inf if isinstance(self.trials, str) else self.trials
        return super().allows(y) & (y <= most)

    @property
    def support(self) -> str:
        """Description of the allowed responses."""
        most = "the trials" if isinstance(self.trials, str) else str(self.trials)
        return f"counts (whole numbers of at least 0) up to {most}"

    @property
    def known(self) -> dict[str, float | str]:
        """The number of trials."""
        return {"trials": self.trials}

    def check_given(self, known: RowColumns) -> None:
        """Raise `InputError` for numbers of trials that are not above 0.

        Means of several rows, at which effects are predicted, need not be whole.
        """
        trials = known["trials"]
        refuse_rows(~(trials > 0), trials, "trials", "numbers above 0")

    def check_known(self, y: RowNumbers, known: RowColumns) -> None:
        """Raise `InputError` for trials that are not whole, or fewer than successes."""
        trials = known["trials"]
        whole = (trials >= 1) & (trials == np.floor(trials))
        refuse_rows(~whole, trials, "trials", "whole numbers of at least 1")
        refuse_rows(y > trials, y, "y", "at most as many successes as trials")

    @override
    def level_values(self, y: RowNumbers, known: RowColumns) -> RowNumbers:
        return y / known["trials"]

    def _trials(self, predictor: Tensor) -> Tensor:
        """The number of trials of each row."""
        given = self.trials
        return predictor if isinstance(given, str) else torch.full_like(predictor, given)

    def values(self, outputs: Outputs) -> dict[str, Tensor]:
        """Probabilities of success, and trials."""
        return super().values(outputs) | {"trials": self._trials(outputs[..., 1])}

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        trials = self._trials(eta[1])
        ways = torch.lgamma(trials + 1) - torch.lgamma(y + 1) - torch.lgamma(trials - y + 1)
        success, failure = log_probabilities(self.links[0], eta[0])
        return ways + _times(y, success) + _times(trials - y, failure)

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        return binomial_log_tails(y, log_odds(self.links[0], eta[0]), self._trials(eta[1]))

    def largest(self, eta: Predictors) -> Tensor:
        """The number of trials."""
        return self._trials(eta[1])

    def mean(self, outputs: Outputs) -> Moments:
        """Trials times probability."""
        values = self.values(outputs)
        return moment(values["mu"] * values["trials"])

    def variance(self, outputs: Outputs) -> Moments:
        """n p (1 - p)."""
        each = bernoulli_variance(self.links[0], outputs[..., 0])
        return moment(self._trials(outputs[..., 1]) * each)

    def curvature(self, outputs: Outputs) -> Curvatures:
        """That of n trials for the probability, 0 for the trials, which are given."""
        first = self.values(outputs)["trials"] * fisher_information(self.links[0], outputs[..., 0])
        return diagonal(first, torch.zeros_like(first))

    @override
    def distribution(self, mu: np.ndarray, trials: np.ndarray) -> Any:  # type: ignore[override]
        from scipy import stats

        return stats.binom(trials, mu)


def _times(count: Tensor, log_probability: Tensor) -> Tensor:
    """Counts times logarithms, 0 where the count is, also beside a probability of 0."""
    return torch.where(count == 0, 0.0, count * log_probability)
