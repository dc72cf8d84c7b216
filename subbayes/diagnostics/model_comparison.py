r"""Posteriors on one scale, without a refit: leave-one-out scores and log evidence from draws.

$$ \mathrm{elpd} = \sum_n \log p(y_n \mid y_{-n}) $$

is estimated by PSIS-LOO (Vehtari, Gelman & Gabry 2017). Another temperature T' or prior p' needs no
draws of its own where it is close by: those of $p_T(z \mid D)$ are weighted by

$$ \omega(z) = \frac{p(D \mid z)^{1/T'}\, p'(z)}{p(D \mid z)^{1/T}\, p(z)} $$

and the Pareto k of the weights says whether that can be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes import diagnostics
from subbayes.diagnostics import LooResult
from subbayes.draws import Draws
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.utils.checks import check_count, check_positive, fail, fail_type

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Choice", "Row", "compare", "reweighted"]

_MOST_DRAWS, _MOST_NUMBERS = 4000, 2**27
_BAD_K = 0.7
_LINEARISED = "laplace-linearised"


@dataclass(frozen=True)
class Row:
    """One candidate.

    Attributes:
        name: what it is called.
        elpd: expected log predictive density of all observations, in nats; higher is better.
        se: its standard error.
        difference: `elpd` less that of the best reliable candidate.
        difference_se: standard error of the difference, from the paired observations.
        p_loo: effective number of parameters.
        n_bad: observations whose Pareto k is too large for their terms to be trusted.
        weights_k: Pareto k of the weights that make the draws those of the candidate; NaN for
            draws of the candidate itself.
        log_evidence: of the tempered posterior, where the engine knows it; comparable at one
            temperature only. NaN where it does not.
        log_evidence_error: its standard error, where known.
        temperature: T.
        rank: number of coordinates.
        sampler: the engine.
        draws: number of draws behind the row.
        reliable: whether no Pareto k of weights or of the engine's approximation is above 0.7, and
            the model predicts by the density that is scored (linearised Laplace does not).
    """

    name: str
    elpd: float
    se: float
    difference: float
    difference_se: float
    p_loo: float
    n_bad: int
    weights_k: float
    log_evidence: float
    log_evidence_error: float
    temperature: float
    rank: int
    sampler: str
    draws: int
    reliable: bool


@dataclass(frozen=True)
class Choice:
    """Candidates side by side, best first, unreliable ones last.

    Attributes:
        rows: one per candidate.
        n: number of observations.
    """

    rows: tuple[Row, ...]
    n: int

    @property
    def best(self) -> str:
        """The name of the reliable candidate with the highest score."""
        return self.rows[0].name

    def __getitem__(self, name: str) -> Row:
        """The row of a candidate."""
        found = {row.name: row for row in self.rows}
        if name not in found:
            fail("name", f"one of {', '.join(found)}", repr(name))
        return found[name]

    def to_frame(self) -> pd.DataFrame:
        """A table with one row for each candidate, indexed by name."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows]).set_index("name")

    def to_dict(self) -> dict[str, Any]:
        """The rows as JSON-able values; unknown numbers are None."""
        rows = [
            {
                key: None if isinstance(value, float) and not np.isfinite(value) else value
                for key, value in asdict(row).items()
            }
            for row in self.rows
        ]
        return {"n": self.n, "best": self.best, "rows": rows}

    def to_text(self) -> str:
        """A table in plain text."""
        heads = ["", "elpd", "difference", "p_loo", "bad k", "log evidence", ""]
        cells = [
            heads,
            *(
                [
                    row.name,
                    f"{row.elpd:.1f} ± {row.se:.1f}",
                    f"{row.difference:.1f} ± {row.difference_se:.1f}",
                    f"{row.p_loo:.1f}",
                    str(row.n_bad),
                    _evidence_text(row),
                    _remark(row),
                ]
                for row in self.rows
            ),
        ]
        widths = [max(len(row[j]) for row in cells) for j in range(len(heads))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if j in (0, len(heads) - 1) else cell.rjust(width)
                for j, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        )

    def __repr__(self) -> str:
        return self.to_text()


def _evidence_text(row: Row) -> str:
    if not np.isfinite(row.log_evidence):
        return "-"
    error = f" ± {row.log_evidence_error:.1f}" if np.isfinite(row.log_evidence_error) else ""
    return f"{row.log_evidence:.1f}{error}"


def _remark(row: Row) -> str:
    if row.weights_k > _BAD_K:
        return f"unreliable: Pareto k of the weights {row.weights_k:.2f}; sample it"
    if row.sampler == _LINEARISED:
        return "scored through the network, but predicts by its linearisation: score held-out rows"
    return "" if row.reliable else "unreliable: the approximation misses a part"


@dataclass(frozen=True)
class _Candidate:
    """What a row is computed from; `terms` are the pointwise log-likelihoods."""

    name: str
    terms: Float[np.ndarray, "chains draws N"]
    temperature: float
    rank: int
    meta: Mapping[str, Any]
    log_weights: Float[np.ndarray, "S"] | None = None

    def row(self) -> tuple[Row, LooResult]:
        """The row, but for its difference from the best."""
        found = diagnostics.loo(
            self.terms, temperature=self.temperature, quiet=True, log_weights=self.log_weights
        )
        evidence, error, k = self._evidence()
        own = float(self.meta.get("pareto_k", np.nan))
        sampler = str(self.meta.get("sampler", "unknown"))
        return Row(
            self.name,
            found.elpd,
            found.se,
            0.0,
            0.0,
            found.p_loo,
            found.n_bad,
            k,
            evidence,
            error,
            self.temperature,
            self.rank,
            sampler,
            found.n_draws,
            not (k > _BAD_K or own > _BAD_K or sampler == _LINEARISED),
        ), found

    def _evidence(self) -> tuple[float, float, float]:
        """Log evidence, its error and Pareto k; weighted by the mean of the weights."""
        known = float(self.meta.get("log_evidence", np.nan))
        error = float(self.meta.get("log_evidence_error", np.nan))
        if self.log_weights is None:
            return known, error, float("nan")
        smoothed, k = diagnostics.psis(self.log_weights[:, None])
        share = np.exp(smoothed[:, 0])
        spread = float(np.sqrt(max(np.square(share).sum() - 1 / len(share), 0.0)))
        mean = np.logaddexp.reduce(self.log_weights) - np.log(len(share))
        return known + float(mean), float(np.hypot(error, spread)), float(k[0])


def compare(models: Mapping[str, Any], *, most_draws: int | None = None) -> Choice:
    """Compare posteriors of the same observations by the draws at hand.

    Args:
        models: by name, a pair (posterior, draws), or a `FittedModel` with its data. They may
            differ in subspace, rank, prior, temperature, likelihood, network and engine.
        most_draws: use this many evenly spaced draws of each; by default 4000, fewer where they
            would take more than 1 GiB.

    Returns:
        A table, best first. The score of draws of an approximation (Laplace, variational) takes
        them for draws of the posterior; where the engine has noted a Pareto k above 0.7 the row
        is marked unreliable.

    Raises:
        InputError: no models, other observations, or another posterior than that of the draws.

    Source: Vehtari, Gelman and Gabry (2017), Statistics and Computing 27.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(3, 1))
        >>> x, y = torch.randn(40, 3), torch.randn(40)
        >>> found = {}
        >>> for rank in (1, 2):
        ...     space = subbayes.subspace.RandomSubspace(net.weights, rank)
        ...     posterior = Posterior(net, Gaussian(1.0), (x, y), space)
        ...     draws = subbayes.inference.elliptical_slice(posterior, draws=50)
        ...     found[f"rank {rank}"] = posterior, draws
        >>> sorted(row.rank for row in compare(found).rows)
        [1, 2]
    """
    if not isinstance(models, Mapping):
        fail_type(
            "models", "a dict from names to pairs (posterior, draws) or fitted models", models
        )
    if not models:
        fail("models", "at least one posterior with its draws", "none")
    pairs = {name: _pair(name, model) for name, model in models.items()}
    _check_same_observations({name: posterior for name, (posterior, _) in pairs.items()})
    return _ranked(
        [
            _Candidate(
                name,
                _terms(posterior, draws, most_draws)[0],
                posterior.temperature,
                posterior.rank,
                draws.meta,
            )
            for name, (posterior, draws) in pairs.items()
        ]
    )


def reweighted(
    posterior: Posterior,
    draws: Draws,
    *,
    temperatures: Sequence[float] | None = None,
    prior_scales: Sequence[float] | None = None,
    most_draws: int | None = None,
) -> Choice:
    """Other temperatures and priors, by weights on the draws at hand; see `Posterior.compare`."""
    _check_own("draws", posterior, draws)
    terms, z = _terms(posterior, draws, most_draws)
    total = terms.reshape(len(z), -1).sum(1)
    here = total / posterior.temperature + posterior.prior.log_prob(z)
    as_sampled = _Candidate("as sampled", terms, posterior.temperature, posterior.rank, draws.meta)
    found = [as_sampled]
    for temperature in [posterior.temperature] if temperatures is None else _several(temperatures):
        check_positive("temperatures", temperature)
        for scale in [None] if prior_scales is None else _several(prior_scales):
            prior = (
                posterior.prior
                if scale is None
                else Normal(check_positive("prior_scales", scale), mean=posterior.prior.mean)
            )
            weights = total / temperature + prior.log_prob(z) - here
            if np.ptp(weights) > 0:
                name = ", ".join(
                    part
                    for part, asked in (
                        (f"T = {temperature:g}", temperatures is not None),
                        (f"prior scale {scale:g}" if scale is not None else "", scale is not None),
                    )
                    if asked
                )
                found.append(
                    replace(
                        as_sampled, name=name, temperature=float(temperature), log_weights=weights
                    )
                )
    return _ranked(found)


def _several(values: float | Sequence[float]) -> Sequence[float]:
    """The values; one alone counts as a list of one."""
    return values if isinstance(values, Sequence) else np.atleast_1d(values).tolist()


def _ranked(candidates: Sequence[_Candidate]) -> Choice:
    pairs = sorted(
        (candidate.row() for candidate in candidates),
        key=lambda pair: (not pair[0].reliable, -pair[0].elpd),
    )
    best = pairs[0][1]
    rows = [
        replace(
            row,
            difference=found.elpd - best.elpd,
            difference_se=diagnostics.sum_se(found.pointwise - best.pointwise),
        )
        for row, found in pairs
    ]
    return Choice(tuple(rows), len(best.pointwise))


def _terms(
    posterior: Posterior, draws: Draws, most: int | None
) -> tuple[Float[np.ndarray, "chains draws N"], Float[np.ndarray, "S k"]]:
    """Pointwise log-likelihoods of evenly spaced draws of every chain, and these draws."""
    if most is None:
        most = min(_MOST_DRAWS, max(_MOST_NUMBERS // posterior.data.n, 100))
    each = min(max(check_count("most_draws", most) // draws.n_chains, 1), draws.n_draws)
    rows = np.linspace(0, draws.n_draws - 1, each).round().astype(int)
    z = np.ascontiguousarray(draws.z[:, rows]).reshape(-1, draws.rank)
    return posterior.pointwise(z).reshape(draws.n_chains, each, -1), z


def _pair(name: str, model: Any) -> tuple[Posterior, Draws]:
    pair = (
        model
        if isinstance(model, tuple)
        else (getattr(model, "posterior", None), getattr(model, "draws", None))
    )
    if len(pair) != 2 or not isinstance(pair[0], Posterior) or not isinstance(pair[1], Draws):
        fail_type(
            f"models[{name!r}]",
            "a pair (posterior, draws), or a fitted model with data",
            model,
            "Load models with load(path, data=...)",
        )
    _check_own(f"models[{name!r}]", *pair)
    return pair


def _check_own(argument: str, posterior: Posterior, draws: Draws) -> None:
    """Draws of another posterior, as far as can be seen, are refused."""
    if draws.rank != posterior.rank:
        fail(argument, f"draws of rank {posterior.rank}, as the posterior", draws.rank)
    sampled = draws.meta.get("temperature", posterior.temperature)
    if sampled != posterior.temperature:
        fail(
            argument,
            f"draws at temperature {posterior.temperature:g}, as the posterior",
            f"{sampled:g}",
            "Pass the posterior they were drawn from",
        )


def _check_same_observations(posteriors: Mapping[str, Posterior]) -> None:
    first, *others = posteriors
    expected = _targets(posteriors[first])
    for name in others:
        found = _targets(posteriors[name])
        if found.shape != expected.shape or not torch.equal(found, expected):
            fail(
                f"models[{name!r}]",
                f"the observations of {first!r}, in their order",
                "others"
                if found.shape == expected.shape
                else f"{len(found)} instead of {len(expected)}",
                "Fit all to the same rows",
            )


def _targets(posterior: Posterior) -> Tensor:
    y = posterior.data.targets()
    y = (y if isinstance(y, Tensor) else y[0]).cpu()
    return y.double() if y.is_floating_point() else y
