r"""Choice of the temperature by held-out data or by leave-one-out cross-validation.

The posterior is sampled at each candidate T and scored by the mean log-likelihood of a new
observation: on validation data, or by PSIS-LOO, where leaving out observation n re-weights a draw
by $p(y_n \mid z)^{-1/T}$. Where rows have weights, a row of weight a counts as a observations.
Validation data also choose the temperature of the logits of classes at each T, and are compared
with no posterior at all, which is the limit T = 0 around a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from subbayes import diagnostics
from subbayes.artifacts.facts import NonNegative, Positive
from subbayes.data.data import Data
from subbayes.diagnostics.leave_one_out import sum_se
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine, engine_of
from subbayes.inference.importance_sampling import log_ratios
from subbayes.likelihoods import Weighted
from subbayes.likelihoods.target_parts import held_out_has_weights, split_targets
from subbayes.networks.validation import check_fit
from subbayes.posterior import Posterior
from subbayes.predictions.output_temperature import best_temperature
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import InputError, check_choice, check_positive, fail
from subbayes.utils.progress import progress_bar
from subbayes.utils.types import Inputs
from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TemperatureChoice:
    """Scores of the candidate temperatures.

    Attributes:
        temperatures: candidates, ascending; 0 is no posterior, but the centre of the subspace.
        scores: estimated mean log-likelihood of a new observation at each.
        standard_errors: of the scores.
        pareto_k: largest Pareto k at each candidate (NaN for validation).
        by: "loo" or "validation".
        n_bad: number of rows at each candidate whose Pareto k is too large, so that their terms of
            the score are unreliable, and usually too high; 0 for validation, None if unknown.
        output_temperatures: what the logits of classes are divided by at each candidate; None for
            "loo".
    """

    temperatures: tuple[NonNegative, ...]
    scores: tuple[float, ...]
    standard_errors: tuple[float, ...]
    pareto_k: tuple[float, ...]
    by: Literal["loo", "validation"]
    n_bad: tuple[int, ...] | None = None
    output_temperatures: tuple[Positive, ...] | None = None

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> TemperatureChoice:
        """The choice with these entries, with tuples for the lists that JSON has."""
        values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in entries.items()}
        return cls(**values)

    @property
    def best(self) -> float:
        """The temperature of the highest score."""
        return self.temperatures[self._place]

    @property
    def best_output_temperature(self) -> float:
        """What the logits are divided by at `best`."""
        return self.output_temperatures[self._place] if self.output_temperatures else 1.0

    @property
    def n_bad_of_best(self) -> int:
        """Number of rows with an unreliable term in the score of `best`; 0 if unknown."""
        return self.n_bad[self._place] if self.n_bad else 0

    @property
    def _place(self) -> int:
        return int(np.argmax(self.scores))

    def to_frame(self) -> pd.DataFrame:
        """A table with one row per candidate; columns that are unknown are missing."""
        import pandas as pd

        return pd.DataFrame(
            {
                "temperature": self.temperatures,
                "score": self.scores,
                "se": self.standard_errors,
                "pareto_k": self.pareto_k,
                **({"n_bad": self.n_bad} if self.n_bad else {}),
                **(
                    {"output_temperature": self.output_temperatures}
                    if self.output_temperatures
                    else {}
                ),
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
        temperatures: candidates above 0. With "validation" there is one more, 0 for no posterior.
        by: "loo" (PSIS-LOO) or "validation". Draws of an approximation with a known density, such
            as "vi" and "laplace", are weighted to the posterior for "loo".
        validation: held-out data, for `by="validation"`; weights of rows weight the mean.
        inference: a name, an engine, or a function (posterior, sampling) -> Draws.
        draws: draws per chain at each candidate.
        chains: number of chains.
        seed: seed of the sampler.
        progress: show a progress bar; None shows it on a terminal.

    Raises:
        InputError: an unknown criterion, validation data that are missing or do
            not fit the network and the likelihood, or "loo" for linearised Laplace, whose
            draws are not those of a posterior of the network itself.

    Warns:
        UserWarning: a leave-one-out score of the best candidate with unreliable terms; held-out
            data that prefer the largest candidate.

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
    held_out = _held_out(posterior, validation) if by == "validation" else None
    if held_out is not None:
        candidates = [0.0, *candidates]
    rows: list[tuple[float, ...]] = []
    loo_results: list[diagnostics.LooResult] = []
    with progress_bar(len(candidates), "Choosing a temperature", progress, "temperatures") as steps:
        for temperature in candidates:
            tempered = posterior.with_temperature(temperature or 1.0)
            options: dict[str, Any] = {"draws": draws, "chains": chains, "seed": seed}
            sample = (
                engine.sample(tempered, **options, progress=False)
                if temperature
                else no_posterior(posterior.rank)
            )
            if held_out is None:
                loo_results.append(_loo_result(tempered, sample))
                n = loo_results[-1].n_observations
                k = float(loo_results[-1].pareto_k.max())
                rows.append((loo_results[-1].elpd / n, loo_results[-1].se / n, k, 1.0))
            else:
                rows.append(_validation_score(tempered, sample, held_out))
            steps.update(1)
    scores, errors, ks, taus = (tuple(map(float, column)) for column in zip(*rows, strict=True))
    bad = tuple(one.n_bad for one in loo_results) or (0,) * len(candidates)
    rule: Any = by
    known = None if held_out is None else taus
    choice = TemperatureChoice(tuple(candidates), scores, errors, ks, rule, bad, known)
    if held_out is not None and choice.best == candidates[-1] > candidates[1]:
        warn_user(
            f"temperature: the best, {choice.best:g}, is the largest of those tried: held-out rows "
            "prefer a wider posterior, or none. Compare with temperature scaling of the network"
        )
    if choice.n_bad_of_best:
        by_n = ", ".join(f"{n} at T = {t:g}" for t, n in zip(candidates, bad, strict=True))
        warn_user(
            f"temperature: the leave-one-out score of the best, T = {choice.best:g}, is "
            f"unreliable, and probably too high; numbers of unreliable terms are {by_n}. Choose by "
            "held-out data instead (by='validation', of fit temperature='validation'). At T = "
            f"{choice.best:g} {loo_results[candidates.index(choice.best)].reliability()}"
        )
    return choice


def no_posterior(rank: int) -> Draws:
    """The centre of a subspace as a draw.

    Example:
        >>> no_posterior(2).z
        array([[[0., 0.]]])
    """
    point = np.zeros((1, 1, rank))
    facts: dict[str, Any] = {"validity": "approximation", "independent": True}
    return Draws(point, {}, {"thinned_from": 1}, engine="no-posterior", **facts)


def _held_out(posterior: Posterior, validation: Any) -> Data:
    """Validation data that fit the network and the likelihood."""
    data, likelihood = Data.of(validation, "validation"), posterior.likelihood.unweighted
    weighted = held_out_has_weights(posterior.likelihood, posterior.data, data)
    check_fit(posterior.network, Weighted(likelihood) if weighted else likelihood, data)
    return data


def _loo_result(posterior: Posterior, draws: Draws) -> diagnostics.LooResult:
    """The leave-one-out score, with the effective sample sizes of chains.

    Draws of an approximation q are weighted by the ratio of the posterior to q.
    """
    if draws.prediction != "network":
        fail(
            "by",
            "'validation' for an engine that linearises the network",
            "'loo'",
            "Its draws are not those of a posterior of the network itself",
        )
    log_weights = None
    if "log_q" in draws.stats:
        log_weights = log_ratios(draws.stats["log_density"], draws.stats["log_q"])
    terms = posterior.pointwise(draws.flat())
    if not draws.independent:
        terms = terms.reshape(draws.n_chains, draws.n_draws, -1)
    return diagnostics.loo(
        terms,
        temperature=posterior.temperature,
        row_weights=posterior.row_weights,
        log_weights=log_weights,
        quiet=True,
    )


def _predict(posterior: Posterior, draws: Draws, inputs: Inputs, noise: Any) -> Predictive:
    """The predictions of a model with these draws, as `FittedModel.predict` makes them."""
    if draws.prediction == "network":
        return posterior.predict(draws, inputs, noise=noise)
    from subbayes.inference.laplace.linearised import predict_linearised

    likelihood, subspace = posterior.likelihood.unweighted, posterior.subspace
    return predict_linearised(posterior.network, likelihood, subspace, draws, inputs, noise=noise)


def _validation_score(posterior: Posterior, draws: Draws, data: Data) -> tuple[float, ...]:
    """Mean log density of a held-out observation, its error, NaN, and the output temperature."""
    weighted = held_out_has_weights(posterior.likelihood, posterior.data, data)
    predicted = []
    for inputs, y in data.batches(4096):
        split = split_targets(y, weighted)
        predicted.append((_predict(posterior, draws, inputs, split.noise), split))
    counts = np.concatenate([split.counts for _, split in predicted])

    def log_densities(tau: float) -> Float[np.ndarray, "n"]:
        """Of the held-out rows with logits divided by tau."""
        return np.concatenate([p.scaled(1 / tau).log_prob(y.values) for p, y in predicted])

    tau = 1.0
    if posterior.likelihood.kind == "classification":
        with suppress(InputError):  # rows that determine none
            tau = best_temperature(log_densities, counts)
    terms, counts = log_densities(tau)[counts > 0], counts[counts > 0]
    n = counts.sum()
    return counts @ terms / n, sum_se(terms, counts) / n, np.nan, tau
