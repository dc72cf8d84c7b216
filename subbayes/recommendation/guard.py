r"""Candidates compared on held-out rows, and the guard that keeps what does not surely gain.

Each candidate has a temperature $\tau$, fitted like that of temperature scaling (Guo et al. 2017).
Their predictive distributions are stacked (Yao et al. 2018),

$$ p(y \mid x) = \sum_k w_k\, p_k(y \mid x; \tau_k) , $$

with temperatures and weights of the largest log score of held-out rows. The gain over the
reference, $g_n = \log p(y_n \mid x_n) - \log p_0(y_n \mid x_n)$, is cross-fitted: all that is
fitted on four fifths of the rows is scored on the others. The stack is shipped if the mean of g
exceeds two standard errors, else the reference.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from subbayes.diagnostics.stacking import maximise_log_score
from subbayes.diagnostics.standard_errors import mean_and_error
from subbayes.likelihoods import Likelihood
from subbayes.predictions.output_temperature import log_prior
from subbayes.utils.types import Outputs, RowNumbers, Targets

_LOG_STEP, _STEPS = math.log(1.04), 53  # of the grid of temperatures, from 1/8 to 8
_SPLITS, _FOLDS = 2, 5  # random divisions of the rows held out, and their parts
_ERRORS = 2.0  # standard errors that a gain has to exceed
_LEAST_WEIGHT = 0.05  # in a stack, below which a candidate is left out


class Candidate(ABC):
    """Predictions of held-out rows at several settings, of which held-out rows choose one.

    Attributes:
        name: what the table calls it.
        settings: what is chosen among.
        log_prior: log prior density of each setting.
        stacks: whether it can be part of a stack.
    """

    name: str
    settings: Sequence[Any]
    log_prior: Float[np.ndarray, "T"] | float = 0.0
    stacks: bool = True

    @cached_property
    def log_densities(self) -> Float[np.ndarray, "T N"]:
        """Log density of each row at each setting."""
        return np.stack([self._at(setting) for setting in self.settings])

    @abstractmethod
    def _at(self, setting: Any) -> RowNumbers:
        """Log density of each row at a setting."""

    def best(self, rows: Int[np.ndarray, "m"], counts: RowNumbers) -> int:
        """Index of the setting of the largest posterior density, given some rows."""
        return int(np.argmax(self.log_densities[:, rows] @ counts[rows] + self.log_prior))


class Scaled(Candidate):
    """Outputs of one network or more, divided by a temperature.

    Args:
        name: what the table calls it.
        outputs: of the held-out rows, an equal mixture over the first axis.
        likelihood: p(y | f).
        y: targets of the rows.
        has_temperature: whether there is a temperature.
        stacks: as for `Candidate`.
    """

    def __init__(
        self,
        name: str,
        outputs: Outputs,
        likelihood: Likelihood,
        y: Targets,
        has_temperature: bool = True,
        stacks: bool = True,
    ) -> None:
        steps = _STEPS if has_temperature else 0
        self.name, self.outputs, self.likelihood, self.y = name, outputs, likelihood, y
        self.settings = np.exp(_LOG_STEP * np.arange(-steps, steps + 1)).tolist()
        self.log_prior = np.array([log_prior(tau) for tau in self.settings])
        self.stacks = stacks

    def _at(self, setting: float) -> RowNumbers:
        return mixture_log_prob(self.likelihood, self.outputs / setting, self.y)


def mixture_log_prob(likelihood: Likelihood, outputs: Outputs, y: Targets) -> RowNumbers:
    """Log density of each row under the equal mixture over the first axis."""
    each = likelihood.log_prob(outputs, y)
    return (each.logsumexp(0) - math.log(len(each))).numpy()


class Noisy(Candidate):
    """Means of a regression with epistemic variances, which are scaled, and noise.

    Args:
        name: what the table calls it.
        mean: of the held-out rows, an equal mixture over the first axis.
        variance: epistemic, of the rows; None for point estimates.
        noise: variance of the noise, which is scaled too.
        y: targets of the rows.
    """

    def __init__(
        self,
        name: str,
        mean: Float[np.ndarray, "S N T"],
        variance: Float[np.ndarray, "S N T"] | None,
        noise: Float[np.ndarray, "N T"],
        y: Float[np.ndarray, "N T"],
    ) -> None:
        self.name, self.squares, self.noise = name, (y - mean) ** 2, noise
        self.variance = np.zeros_like(noise) if variance is None else variance
        factors = np.exp(_LOG_STEP * np.arange(-2 * _STEPS, _STEPS // 2))
        scales = [1.0] if variance is None else 2.0 ** np.arange(-4, 6.5, 0.5)
        self.settings = [(float(f), float(scale)) for scale in scales for f in factors]

    def _at(self, setting: tuple[float, float]) -> RowNumbers:
        factor, scale = setting
        total = factor**2 * self.noise + scale**2 * self.variance
        each = -0.5 * (np.log(2 * math.pi * total) + self.squares / total).sum(-1)
        return np.logaddexp.reduce(each, axis=0) - math.log(len(each))


@dataclass(frozen=True)
class Verdict:
    """What the guard decided.

    Attributes:
        weights: of the candidates; only the first one's is not 0 if the reference is kept.
        settings: of the candidates.
        scores: mean log density of the held-out rows under each candidate, not cross-fitted.
        gain: cross-fitted mean gain of the stack over the reference, in nats a row.
        error: its standard error.
        ships: whether the stack is shipped.
    """

    weights: tuple[float, ...]
    settings: tuple[Any, ...]
    scores: tuple[float, ...]
    gain: float
    error: float
    ships: bool


def judge(
    candidates: Sequence[Candidate], counts: RowNumbers, seed: int = 0, *, mix: bool = True
) -> Verdict:
    """Stack candidates if that surely gains over the first of them, the reference.

    Args:
        candidates: the reference and others.
        counts: how many times each held-out row counts.
        seed: of the random divisions of the rows.
        mix: stack the candidates, instead of choosing the best one.
    """
    n, reference = len(counts), candidates[0]
    every, generator, gains = np.arange(n), np.random.default_rng(seed), np.zeros(n)
    for _ in range(_SPLITS if len(candidates) > 1 else 0):
        for scored in np.array_split(generator.permutation(n), _FOLDS):
            fitted = np.setdiff1d(every, scored)
            chosen, weights = _fit(candidates, fitted, counts, mix)
            stacked = _log_mixture(_columns(candidates, chosen, scored), weights)
            gains[scored] += stacked - reference.log_densities[chosen[0], scored]
    gain, error = mean_and_error(gains / _SPLITS, counts)
    ships = len(candidates) > 1 and gain > _ERRORS * error
    chosen, weights = _fit(candidates, every, counts, mix)
    if ships:  # of which the reference may be no part
        least = min(_LEAST_WEIGHT, weights.max())  # which many candidates alike may all be below
        weights = np.where(weights < least, 0.0, weights)
        weights /= weights.sum()
    else:
        weights = np.eye(len(candidates))[0]
    return Verdict(
        weights=tuple(weights.tolist()),
        settings=tuple(c.settings[t] for c, t in zip(candidates, chosen, strict=True)),
        scores=tuple(
            float(c.log_densities[t] @ counts / counts.sum())
            for c, t in zip(candidates, chosen, strict=True)
        ),
        gain=gain,
        error=error,
        ships=ships,
    )


def _fit(
    candidates: Sequence[Candidate], rows: Int[np.ndarray, "m"], counts: RowNumbers, mix: bool
) -> tuple[list[int], Float[np.ndarray, "k"]]:
    chosen = [candidate.best(rows, counts) for candidate in candidates]
    columns = _columns(candidates, chosen, rows)
    if mix:
        apart = [not candidate.stacks for candidate in candidates]
        return chosen, maximise_log_score(np.where(apart, -np.inf, columns), counts[rows])
    return chosen, np.eye(len(candidates))[np.argmax(counts[rows] @ columns)]


def _columns(
    candidates: Sequence[Candidate], chosen: Sequence[int], rows: Int[np.ndarray, "m"]
) -> Float[np.ndarray, "m k"]:
    pairs = zip(candidates, chosen, strict=True)
    return np.stack([candidate.log_densities[t, rows] for candidate, t in pairs], 1)


def _log_mixture(
    log_densities: Float[np.ndarray, "m k"], weights: Float[np.ndarray, "k"]
) -> Float[np.ndarray, "m"]:
    with np.errstate(divide="ignore"):
        return np.logaddexp.reduce(log_densities + np.log(weights), axis=1)
