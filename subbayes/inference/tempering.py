r"""Choice of the temperature by held-out data or by leave-one-out cross-validation.

The posterior is sampled at each candidate T and scored by the mean log-likelihood of a new
observation: on validation data, or by PSIS-LOO, where leaving out observation n re-weights a draw
by $p(y_n \mid z)^{-1/T}$. Where rows have weights, a row of weight a counts as a observations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from subbayes import diagnostics
from subbayes.data.data import Data
from subbayes.diagnostics.leave_one_out import sum_se
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine, engine_of
from subbayes.likelihoods import Weighted
from subbayes.likelihoods.target_parts import held_out_has_weights, split_targets
from subbayes.networks.validation import check_fit
from subbayes.posterior import Posterior
from subbayes.utils.checks import check_choice, check_positive, fail
from subbayes.utils.progress import progress_bar

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TemperatureChoice", "choose_temperature"]


@dataclass(frozen=True)
class TemperatureChoice:
    """Scores of the candidate temperatures.

    Attributes:
        temperatures: candidates, ascending.
        scores: estimated mean log-likelihood of a new observation at each.
        standard_errors: of the scores.
        pareto_k: largest Pareto k at each candidate (NaN for validation); above 0.7 the
            leave-one-out score is unreliable.
        by: "loo" or "validation".
    """

    temperatures: tuple[float, ...]
    scores: tuple[float, ...]
    standard_errors: tuple[float, ...]
    pareto_k: tuple[float, ...]
    by: str

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> TemperatureChoice:
        """The choice with these entries, in which lists stand for tuples as JSON has none."""
        values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in entries.items()}
        return cls(**values)

    @property
    def best(self) -> float:
        """The temperature of the highest score."""
        return self.temperatures[int(np.argmax(self.scores))]

    def to_frame(self) -> pd.DataFrame:
        """A table with one row per candidate."""
        import pandas as pd

        return pd.DataFrame(
            {
                "temperature": self.temperatures,
                "score": self.scores,
                "se": self.standard_errors,
                "pareto_k": self.pareto_k,
            }
        )


def choose_temperature(
    posterior: Posterior,
    temperatures: Sequence[float] = (1.0, 3.0, 10.0, 30.0, 100.0),
    *,
    by: str = "loo",
    validation: Any = None,
    inference: str | Engine | Callable[[Any, Sampling], Draws] = "elliptical-slice",
    draws: int = 200,
    chains: int = 8,
    seed: int = 0,
    progress: bool | None = None,
) -> TemperatureChoice:
    r"""Score candidate temperatures on draws of the posterior at each.

    Args:
        posterior: the posterior; its own temperature is ignored.
        temperatures: candidates above 0.
        by: "loo" (PSIS-LOO) or "validation".
        validation: held-out data, for `by="validation"`; weights of rows weight the mean.
        inference: a name, an engine, or a function (posterior, sampling) -> Draws.
        draws: draws per chain at each candidate.
        chains: number of chains.
        seed: seed of the sampler.
        progress: show a progress bar; None shows it on a terminal.

    Raises:
        InputError: no candidates, an unknown criterion, or validation data that are missing or do
            not fit the network and the likelihood.

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> posterior = Posterior(net, Gaussian(1.0), data,
        ...                       subbayes.subspace.FullSubspace(net.weights))
        >>> choose_temperature(posterior, [1, 1e4], draws=50).best
        1.0
    """
    check_choice("by", by, ("loo", "validation"))
    engine = engine_of(inference)
    candidates = sorted({check_positive("temperatures", t) for t in temperatures})
    if not candidates:
        fail("temperatures", "at least one candidate", "none")
    if len(candidates) > 1000:
        fail("temperatures", "at most 1000 candidates", len(candidates))
    held_out = _held_out(posterior, validation) if by == "validation" else None
    rows = []
    with progress_bar(len(candidates), "Choosing a temperature", progress, "temperatures") as steps:
        for temperature in candidates:
            tempered = posterior.with_temperature(temperature)
            sample = engine.sample(tempered, draws=draws, chains=chains, seed=seed, progress=False)
            if held_out is None:
                rows.append(_loo_score(tempered, sample))
            else:
                rows.append(_validation_score(tempered, sample, held_out))
            steps.update(1)
    scores, errors, ks = (tuple(float(v) for v in column) for column in zip(*rows, strict=True))
    return TemperatureChoice(tuple(candidates), scores, errors, ks, by)


def _held_out(posterior: Posterior, validation: Any) -> Data:
    """Validation data that fit the network and the likelihood."""
    if validation is None:
        fail("validation", "held-out data for by='validation'", None, "Pass data, or use by='loo'")
    data, likelihood = Data.of(validation, "validation"), posterior.likelihood.unweighted
    weighted = held_out_has_weights(posterior.likelihood, posterior.data, data)
    check_fit(posterior.network, Weighted(likelihood) if weighted else likelihood, data)
    return data


def _loo_score(posterior: Posterior, draws: Draws) -> tuple[float, float, float]:
    """Mean leave-one-out log density of an observation, its error and the worst Pareto k."""
    found = diagnostics.loo(
        posterior.pointwise(draws.flat()),
        temperature=posterior.temperature,
        row_weights=posterior.row_weights,
        quiet=True,
    )
    n = found.n_observations
    return found.elpd / n, found.se / n, float(found.pareto_k.max())


def _validation_score(posterior: Posterior, draws: Draws, data: Data) -> tuple[float, float, float]:
    """Mean log density of a held-out observation, its error and NaN."""
    weighted = held_out_has_weights(posterior.likelihood, posterior.data, data)
    found = []
    for inputs, y in data.batches(4096):
        parts = split_targets(y, weighted)
        predictive = posterior.predict(draws, inputs, noise=parts.noise)
        found.append((predictive.log_prob(parts.values), parts.counts))
    terms, counts = (np.concatenate(part) for part in zip(*found, strict=True))
    terms, counts = terms[counts > 0], counts[counts > 0]
    n = counts.sum()
    return counts @ terms / n, sum_se(terms, counts) / n, np.nan
