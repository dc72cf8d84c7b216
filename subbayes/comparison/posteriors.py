r"""Compare posteriors without refitting: leave-one-out scores and log evidence from draws.

$$ \mathrm{elpd} = \sum_n \log p(y_n \mid y_{-n}) $$

is estimated by PSIS-LOO (Vehtari, Gelman & Gabry 2017). A nearby temperature T' or prior p' needs
no new draws: draws of $p_T(z \mid D)$ are weighted by

$$ \omega(z) = \frac{p(D \mid z)^{1/T'}\, p'(z)}{p(D \mid z)^{1/T}\, p(z)} $$

and the Pareto k of the weights tells whether the result is reliable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.diagnostics.function_space import LEAST_IN_CHAIN
from subbayes.diagnostics.leave_one_out import LooResult, loo, psis
from subbayes.diagnostics.loo_comparison import LooComparison, same_row_weights, stacking_weights
from subbayes.diagnostics.monte_carlo import errors_of_means
from subbayes.priors import Normal
from subbayes.utils.checks import check_choice, check_positive, fail, fail_type
from subbayes.utils.text_table import json_value, text_table
from subbayes.utils.trees import leaves

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.draws import Draws
    from subbayes.posterior import Posterior


_MOST_DRAWS, _MOST_NUMBERS = 4000, 2**27
_BAD_K = 0.7


@dataclass(frozen=True)
class ModelScore(LooComparison):
    """The leave-one-out score of one posterior, with the fields of `LooComparison`.

    `difference` is relative to the best reliable posterior, and `weight` is among the reliable
    ones, 0 for others; if there are none, among all.

    Attributes:
        weights_k: Pareto k of the importance weights from `reweight`; NaN for draws of the
            posterior itself.
        log_evidence: log evidence of the tempered posterior, comparable at one temperature only;
            NaN where the inference engine does not estimate it.
        log_evidence_error: its standard error, NaN if unknown.
        temperature: temperature T.
        rank: number of coordinates.
        sampler: name of the inference engine.
        draws: number of draws used.
        linearised: whether the model predicts by the linearised network, which is not scored.
        n_rows: number of rows of weight above 0, of which `n_bad` have an unreliable term.
        reliable: whether the Pareto k of the weights and of the engine's approximation are at most
            0.7, at most half of the rows have an unreliable term, and the model predicts by the
            density that is scored (linearised Laplace does not).
    """

    weights_k: float
    log_evidence: float
    log_evidence_error: float
    temperature: float
    rank: int
    sampler: str
    draws: int
    linearised: bool
    n_rows: int
    reliable: bool


@dataclass(frozen=True)
class ModelComparison:
    """Scores of posteriors, best first; unreliable scores come last.

    Attributes:
        rows: one score per posterior.
        n: number of observations, or the sum of their weights.
    """

    rows: tuple[ModelScore, ...]
    n: float

    @property
    def best(self) -> str:
        """The name of the reliable posterior with the highest score."""
        return self.rows[0].name

    def __getitem__(self, name: str) -> ModelScore:
        """The score of the posterior called `name`."""
        scores = {row.name: row for row in self.rows}
        check_choice("name", name, scores)
        return scores[name]

    def to_frame(self) -> pd.DataFrame:
        """A data frame with one row per posterior, indexed by name."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows]).set_index("name")

    def to_dict(self) -> dict[str, Any]:
        """The scores as values that JSON can hold; unknown numbers are None."""
        rows = [asdict(row) for row in self.rows]
        return json_value({"n": self.n, "best": self.best, "rows": rows})

    def to_text(self) -> str:
        """A plain-text table."""
        heads = ["", "elpd", "difference", "weight", "p_loo", "bad k", "log evidence"]
        cells = [
            [
                row.name,
                f"{row.elpd:.1f} ± {row.se:.1f}",
                f"{row.difference:.1f} ± {row.difference_se:.1f}",
                f"{row.weight:.2f}",
                f"{row.p_loo:.1f}",
                str(row.n_bad),
                _evidence_text(row),
            ]
            for row in self.rows
        ]
        remarks = [f"{row.name}: {_remark(row)}." for row in self.rows if _remark(row)]
        return "\n".join([text_table(heads, cells), *remarks])

    def __repr__(self) -> str:
        return self.to_text()


def _evidence_text(row: ModelScore) -> str:
    if not np.isfinite(row.log_evidence):
        return "-"
    error = f" ± {row.log_evidence_error:.1f}" if np.isfinite(row.log_evidence_error) else ""
    return f"{row.log_evidence:.1f}{error}"


def _remark(row: ModelScore) -> str:
    if row.weights_k > _BAD_K:
        return f"unreliable: Pareto k of the weights {row.weights_k:.2f}; sample it"
    if row.linearised:
        return "scored through the network, but predicts by its linearisation: score held-out rows"
    if 2 * row.n_bad > row.n_rows:
        what = f"Pareto k is too large at {row.n_bad} of {row.n_rows} rows"
        return f"unreliable: {what}; score held-out rows"
    return "" if row.reliable else "unreliable: the approximation misses a part"


@dataclass(frozen=True)
class _Candidate:
    """A posterior to be scored; `terms` are log densities of one copy of each row, by draw."""

    name: str
    terms: Float[np.ndarray, "chains draws N"]
    temperature: float
    rank: int
    draws: Draws
    row_weights: Float[np.ndarray, "N"] | None
    log_weights: Float[np.ndarray, "S"] | None = None

    def score(self) -> tuple[ModelScore, LooResult]:
        """The score, without the difference from the best."""
        result = loo(
            self.terms,
            temperature=self.temperature,
            row_weights=self.row_weights,
            log_weights=self.log_weights,
            quiet=True,
        )
        evidence, error, k = self._evidence()
        linearised = self.draws.prediction != "network"
        mostly_bad = 2 * result.n_bad > result.n_rows
        unreliable = k > _BAD_K or self.draws.pareto_k > _BAD_K or linearised or mostly_bad
        score = ModelScore(
            name=self.name,
            elpd=result.elpd,
            se=result.se,
            difference=0.0,
            difference_se=0.0,
            p_loo=result.p_loo,
            n_bad=result.n_bad,
            weight=0.0,
            weights_k=k,
            log_evidence=evidence,
            log_evidence_error=error,
            temperature=self.temperature,
            rank=self.rank,
            sampler=self.draws.engine or "unknown",
            draws=result.n_draws,
            linearised=linearised,
            n_rows=result.n_rows,
            reliable=not unreliable,
        )
        return score, result

    def _evidence(self) -> tuple[float, float, float]:
        """Log evidence, its error and the Pareto k of the weights, whose mean corrects it."""
        evidence, error = self.draws.log_evidence, self.draws.log_evidence_error
        if self.log_weights is None:
            return evidence, error, float("nan")
        smoothed, k = psis(self.log_weights[:, None])
        weights = np.exp(smoothed[:, 0]) * len(smoothed)
        chains, each, independent = *self.terms.shape[:2], self.draws.independent
        spread = np.full((), np.nan)  # unknown for chains that are too short
        if each >= LEAST_IN_CHAIN or independent:
            spread, _ = errors_of_means(weights, chains, independent)
        mean = np.logaddexp.reduce(self.log_weights) - np.log(len(weights))
        return evidence + float(mean), float(np.hypot(error, spread)), float(k[0])


def compare_posteriors(models: Mapping[str, Any]) -> ModelComparison:
    """Compare posteriors of the same observations by leave-one-out scores of their draws.

    A row of weight a counts as a observations.

    Args:
        models: a dict from names to pairs (posterior, draws) or fitted models with their data. The
            posteriors may differ in subspace, rank, prior, temperature, likelihood, network and
            inference engine.

    Returns:
        The scores, best first. Draws of an approximation (Laplace, variational) are treated as
        draws of the posterior; a score is marked unreliable if the engine reported a Pareto k above
        0.7, or if the terms of more than half of the rows are unreliable.

    Raises:
        InputError: `models` is empty, the observations differ, draws do not belong to their
            posterior, or are members of a deep ensemble, whose importance weights are unknown.

    Source: Vehtari, Gelman and Gabry (2017), Statistics and Computing 27.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(3, 1))
        >>> x, y = torch.randn(40, 3), torch.randn(40)
        >>> models = {}
        >>> for rank in (1, 2):
        ...     space = subbayes.subspace.RandomSubspace(net.weights, rank)
        ...     posterior = subbayes.Posterior(net, Gaussian(1.0), (x, y), space)
        ...     draws = subbayes.inference.EllipticalSlice().sample(posterior, draws=50)
        ...     models[f"rank {rank}"] = posterior, draws
        >>> sorted(row.rank for row in compare_posteriors(models).rows)
        [1, 2]
    """
    pairs = {name: _pair(name, model) for name, model in models.items()}
    _check_same_observations({name: posterior for name, (posterior, _) in pairs.items()})
    candidates = []
    for name, (posterior, draws) in pairs.items():
        terms, _ = _terms(f"models[{name!r}]", posterior, draws)
        candidates.append(_candidate(name, posterior, draws, terms))
    return _rank(candidates)


def reweight(
    posterior: Posterior,
    draws: Draws,
    *,
    temperatures: float | Sequence[float] | None = None,
    prior_scales: float | Sequence[float] | None = None,
) -> ModelComparison:
    r"""Score other temperatures and priors by importance weights on draws of one posterior.

    Args:
        posterior: the posterior that was sampled.
        draws: its draws.
        temperatures: temperatures T' to score; by default that of the posterior.
        prior_scales: scales s of priors $N(m, s^2 I)$ to score, with the mean m of the
            posterior's prior; by default the prior itself. If both are given, all pairs are scored.

    Returns:
        Leave-one-out scores, best first, with that of the sampled posterior under the name "as
        sampled". A score whose weights have a Pareto k above 0.7 is marked unreliable: sample that
        posterior instead. `log_evidence_error` contains the autocorrelation of the weights along
        chains, unless the draws are independent; NaN for chains of fewer than 4 draws.

    Raises:
        InputError: draws of another posterior, members of a deep ensemble, or temperatures or
            scales that are not positive.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(2, 1))
        >>> data = torch.randn(40, 2), torch.randn(40)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(1.0), data, space)
        >>> draws = subbayes.inference.EllipticalSlice().sample(posterior, draws=50)
        >>> sorted(row.name for row in reweight(posterior, draws, temperatures=[2, 4]).rows)
        ['T = 2', 'T = 4', 'as sampled']
    """
    _check_match("draws", posterior, draws)
    terms, z = _terms("draws", posterior, draws)
    rows, weights = terms.reshape(len(z), -1), posterior.row_weights
    total = rows.sum(1) if weights is None else rows[:, weights > 0] @ weights[weights > 0]
    log_density = total / posterior.temperature + posterior.prior.log_prob(z)
    sampled = _candidate("as sampled", posterior, draws, terms)
    candidates = [sampled]
    for temperature in [posterior.temperature] if temperatures is None else _list(temperatures):
        check_positive("temperatures", temperature)
        for scale in [None] if prior_scales is None else _list(prior_scales):
            prior, parts = posterior.prior, []
            if temperatures is not None:
                parts.append(f"T = {temperature:g}")
            if scale is not None:
                prior = Normal(check_positive("prior_scales", scale), mean=posterior.prior.mean)
                parts.append(f"prior scale {scale:g}")
            log_weights = total / temperature + prior.log_prob(z) - log_density
            if np.ptp(log_weights) > 0:
                candidates.append(
                    replace(
                        sampled,
                        name=", ".join(parts),
                        temperature=float(temperature),
                        log_weights=log_weights,
                    )
                )
    return _rank(candidates)


def _candidate(
    name: str, posterior: Posterior, draws: Draws, terms: Float[np.ndarray, "chains draws N"]
) -> _Candidate:
    return _Candidate(
        name, terms, posterior.temperature, posterior.rank, draws, posterior.row_weights
    )


def _list(values: float | Sequence[float]) -> Sequence[float]:
    return values if isinstance(values, Sequence) else np.atleast_1d(values).tolist()


def _rank(candidates: Sequence[_Candidate]) -> ModelComparison:
    pairs = sorted(
        (candidate.score() for candidate in candidates),
        key=lambda pair: (not pair[0].reliable, -pair[0].elpd),
    )
    best = pairs[0][1]
    stacked = {row.name: one for row, one in pairs if row.reliable == pairs[0][0].reliable}
    weights, rows = stacking_weights(stacked), []
    for row, result in pairs:
        difference, error = result.difference(best)
        weight = weights.get(row.name, 0.0)
        rows.append(replace(row, difference=difference, difference_se=error, weight=weight))
    return ModelComparison(tuple(rows), best.n_observations)


def _terms(
    argument: str, posterior: Posterior, draws: Draws
) -> tuple[Float[np.ndarray, "chains draws N"], Float[np.ndarray, "S k"]]:
    """Log density of one copy of each row at evenly spaced draws of chains, and these draws."""
    most = min(_MOST_DRAWS, max(_MOST_NUMBERS // posterior.data.n, 100))
    each = min(max(most // draws.n_chains, 1), draws.n_draws)
    rows = np.linspace(0, draws.n_draws - 1, each).round().astype(int)
    z = np.ascontiguousarray(draws.z[:, rows]).reshape(-1, draws.rank)
    terms = posterior.pointwise(z).reshape(draws.n_chains, each, -1)
    weights, saved = posterior.row_weights, draws.stats.get("log_likelihood", np.zeros(()))
    counted = terms if weights is None else terms[..., weights > 0]
    for values, what in ((counted, "of the rows"), (saved, "saved with the draws")):
        if np.isnan(values).any():
            got = f"NaN {what} at {int(np.isnan(values).sum())} places"
            remedy = "Sample again, or check the rows and the file that the draws are from"
            fail(argument, "log-likelihoods that are numbers", got, remedy)
    return terms, z


def _pair(name: str, model: Any) -> tuple[Posterior, Draws]:
    """The posterior and the draws of a model, recognised by the attributes that are used."""
    pair = model
    if not isinstance(model, tuple):
        pair = getattr(model, "posterior", None), getattr(model, "draws", None)
    if len(pair) != 2 or not hasattr(pair[0], "pointwise") or not hasattr(pair[1], "n_chains"):
        fail_type(
            f"models[{name!r}]",
            "a pair (posterior, draws), or a fitted model with data",
            model,
            "Load models with load(path, data=...)",
        )
    _check_match(f"models[{name!r}]", *pair)
    return pair


def _check_match(argument: str, posterior: Posterior, draws: Draws) -> None:
    """Check that draws are of a posterior, and have its rank and temperature."""
    if draws.validity == "ensemble":
        remedy = "Score held-out rows with predict(...).log_prob(y)"
        fail(argument, "draws of a posterior for leave-one-out", "a deep ensemble", remedy)
    if draws.temperature != posterior.temperature:
        fail(
            argument,
            f"draws at temperature {posterior.temperature:g}, as the posterior",
            f"{draws.temperature:g}",
            "Pass the posterior they were drawn from",
        )


def _check_same_observations(posteriors: Mapping[str, Posterior]) -> None:
    first, *others = posteriors
    expected, weights = _targets(posteriors[first]), posteriors[first].row_weights
    for name in others:
        found = _targets(posteriors[name])
        if found.shape != expected.shape or not torch.equal(found, expected):
            same = found.shape == expected.shape
            fail(
                f"models[{name!r}]",
                f"the {len(expected):,} observations of {first!r}, in their order",
                "others" if same else f"{len(found):,} observations",
                "Fit all to the same rows",
            )
        if not same_row_weights(weights, posteriors[name].row_weights):
            remedy = "Fit all with the same weights of the rows"
            fail(f"models[{name!r}]", f"the row weights of {first!r}", "others", remedy)


def _targets(posterior: Posterior) -> Tensor:
    y = leaves(posterior.data.targets())[0].cpu()
    return y.double() if y.is_floating_point() else y
