"""Draws of subspace coordinates, with statistics and diagnostics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import numpy as np
from jaxtyping import Bool, Float
from msgspec import structs
from torch import Tensor

from subbayes import diagnostics
from subbayes.artifacts.arrays import LARGEST, Array, Arrays
from subbayes.artifacts.facts import Count, Facts, Line, Positive, check_known
from subbayes.artifacts.tensors import strip_prefix
from subbayes.data.arrays import evenly_spaced
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.registry import ENGINES
from subbayes.utils.text_table import printable

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MAX_PARETO_K", "Draws", "Moments"]

MAX_PARETO_K = 0.7
"""Above it, importance sampling is unreliable (Vehtari et al. 2024)."""

_ELSEWHERE = "start them elsewhere (initial=...), or use another engine (inference='slice')"
_IMPROPER = 1e15  # coordinates of chains that disagree, where the density has no finite integral

Validity = Literal["exact", "approximation", "ensemble"]
Prediction = Literal["network", "linearised"]


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of a Gaussian approximation.

    Attributes:
        mean: shape (k,).
        sd: standard deviations, shape (k,).
        covariance: shape (k, k); None for independent coordinates.
    """

    mean: Float[np.ndarray, "k"]
    sd: Float[np.ndarray, "k"]
    covariance: Float[np.ndarray, "k k"] | None = None

    @classmethod
    def of(cls, mean: Float[np.ndarray, "k"], covariance: Float[np.ndarray, "k k"]) -> Moments:
        """The moments of N(mean, covariance)."""
        return cls(mean, np.sqrt(np.diag(covariance)), covariance)


@dataclass(frozen=True)
class Draws:
    """Draws of z from several chains.

    Attributes:
        z: coordinates, shape (chains, draws, k), float64.
        stats: statistics per draw, each of shape (chains, draws), such as "log_likelihood".
        meta: details of the run for display, such as "seed", "warmup" and "seconds".
        engine: name of the engine, for display.
        validity: "exact" for draws that converge to the posterior, "approximation" for draws of
            an approximation, "ensemble" for separately trained networks.
        independent: whether all draws are independent, like those of an approximation.
        prediction: "network" averages the network's predictions over the draws; "linearised"
            predicts in closed form by the linearised network, from `moments`.
        temperature: T of the posterior.
        pareto_k: Pareto k of the importance ratios of an approximation; NaN if unknown.
        converged: whether an optimisation converged; None if there is none.
        log_evidence: estimate of the log evidence of the tempered posterior; NaN if unknown.
        log_evidence_error: its standard error; NaN if unknown.
        moments: mean and covariance of a Gaussian approximation.

    Example:
        >>> draws = Draws(np.random.default_rng(0).normal(size=(4, 500, 2)))
        >>> bool((draws.rhat() < 1.01).all())
        True
    """

    z: Float[np.ndarray, "chains draws k"]
    stats: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    engine: str = ""
    validity: Validity = "exact"
    independent: bool = False
    prediction: Prediction = "network"
    temperature: float = 1.0
    pareto_k: float = math.nan
    converged: bool | None = None
    log_evidence: float = math.nan
    log_evidence_error: float = math.nan
    moments: Moments | None = None

    def __post_init__(self) -> None:
        check_choice("validity", self.validity, ("exact", "approximation", "ensemble"))
        check_choice("prediction", self.prediction, get_args(Prediction))
        if self.z.ndim != 3:
            fail("z", "shape (chains, draws, k)", self.z.shape)
        # files of tensors have an order of their own: draws that were saved or resumed equal others
        object.__setattr__(self, "stats", dict(sorted(self.stats.items())))
        for name, values in self.stats.items():
            if values.shape != self.z.shape[:2]:
                fail(f"stats[{name!r}]", f"shape {self.z.shape[:2]}", values.shape)

    @property
    def n_chains(self) -> int:
        """Number of chains."""
        return self.z.shape[0]

    @property
    def n_draws(self) -> int:
        """Draws per chain."""
        return self.z.shape[1]

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return self.z.shape[2]

    def flat(self, n: int | None = None) -> Float[np.ndarray, "S k"]:
        """All draws as rows, shape (chains x draws, k), or n evenly spaced ones."""
        rows = self.z.reshape(-1, self.rank)
        return rows if n is None else evenly_spaced(rows, n)

    def thin(self, n: int) -> Draws:
        """About n draws, evenly spaced within each chain; the same at every call.

        Predictions from them are those with `n_draws=n`, if n is a multiple of the number of
        chains. `warnings` are those of all draws.

        Args:
            n: number of draws over all chains, of which each has `n // n_chains`; if there are
                fewer than chains, one draw of each of n chains.

        Example:
            >>> draws = Draws(np.arange(20.0).reshape(2, 10, 1))
            >>> draws.thin(5).z[..., 0]
            array([[ 2.,  7.],
                   [12., 17.]])
        """
        if check_count("n_draws", n) >= self.n_chains * self.n_draws:
            return self
        chains = evenly_spaced(np.arange(self.n_chains), n)
        which = evenly_spaced(np.arange(self.n_draws), max(1, n // self.n_chains))
        rows = np.ix_(chains, which)
        known = {"warnings": self.warnings(), "thinned_from": self.n_chains * self.n_draws}
        return replace(
            self,
            z=self.z[rows],
            stats={name: values[rows] for name, values in self.stats.items()},
            meta={**known, **self.meta},
        )

    def mean(self) -> Float[np.ndarray, "k"]:
        """Mean of all draws, shape (k,)."""
        return self.flat().mean(0)

    def covariance(self) -> Float[np.ndarray, "k k"]:
        """Covariance of all draws, shape (k, k)."""
        return np.cov(self.flat(), rowvar=False).reshape(self.rank, self.rank)

    def rhat(self) -> Float[np.ndarray, "k"]:
        """Rank-normalised split R-hat of each coordinate; below 1.01 is good."""
        return np.asarray(diagnostics.rhat(self.z))

    def ess_bulk(self) -> Float[np.ndarray, "k"]:
        """Bulk effective sample size of each coordinate."""
        return np.asarray(diagnostics.ess_bulk(self.z))

    def ess_tail(self) -> Float[np.ndarray, "k"]:
        """Tail effective sample size of each coordinate."""
        return np.asarray(diagnostics.ess_tail(self.z))

    def summary(self) -> pd.DataFrame:
        """A table with mean, sd, quantiles, R-hat and effective sample sizes per coordinate."""
        import pandas as pd

        flat = self.flat()
        low, high = np.quantile(flat, [0.025, 0.975], axis=0)
        return pd.DataFrame(
            {
                "mean": flat.mean(0),
                "sd": flat.std(0, ddof=1),
                "2.5%": low,
                "97.5%": high,
                "ess_bulk": self.ess_bulk(),
                "ess_tail": self.ess_tail(),
                "rhat": self.rhat(),
            },
            index=pd.Index([f"z[{i}]" for i in range(self.rank)], name="coordinate"),
        )

    def warnings(self, separate: bool = False) -> list[str]:
        """Problems of the run, each with a remedy.

        Args:
            separate: chains sample modes of their own, so that they are not compared.
        """
        if "thinned_from" in self.meta:
            return [printable(line) for line in self.meta.get("warnings", ())]
        if self.n_draws < 4:
            return ["fewer than 4 draws per chain: run longer (draws=...)"]
        found = self._drift_warnings() if separate else []
        if not (separate or self.independent):
            found = self._chain_warnings()
        if self.pareto_k > MAX_PARETO_K:
            found.append(
                f"Pareto k of the approximation is {self.pareto_k:.2f}, above 0.7: "
                "it misses a part of the posterior; use inference='nuts'"
            )
        if self.converged is False:
            found.append("the ELBO was still rising at the last step: raise steps=...")
        return found + (ENGINES[self.engine].warnings(self) if self.engine in ENGINES else [])

    def _chain_warnings(self) -> list[str]:
        """Problems of mixing."""
        found = []
        rhat, ess = self.rhat(), self.ess_bulk()
        known = ~np.isnan(rhat)
        if self._still.all() and known.any():
            return [f"none of the {self.n_chains} chains moved from its start: {_ELSEWHERE}"]
        if not known.all():
            found.append(
                f"{int((~known).sum())} of {self.rank} coordinates never moved or are not "
                "finite: start elsewhere (initial=...) or check the prior"
            )
        worst = float(rhat[known].max(initial=1.0))
        least, enough = float(ess[known].min(initial=np.inf)), 100 * self.n_chains
        about = round_up(self.n_draws * max(2.0, enough / least))
        high = np.ceil(worst * 1e3) / 1e3  # the displayed value exceeds the threshold too
        if worst > 1.2 and (largest := float(np.nanmax(np.abs(self.z)))) > _IMPROPER:
            return [
                f"draws reach {largest:.0e} and {self._compared} disagree (R-hat is {worst:.3f}): "
                "the density seems to have no finite integral, so that no engine can sample it; "
                "give its coordinates a proper prior"
            ]
        found += self._stuck_warnings(worst)
        if worst > 1.2 and not found:
            found.append(
                f"R-hat is {high:.3f}, above 1.01: {self._compared} are in different places; "
                f"{self._gradient_remedy}lower the rank, raise the temperature or warm up longer "
                "(warmup=...)"
            )
        elif 1.01 < worst <= 1.2:
            found.append(
                f"R-hat is {high:.3f}, above 1.01: {self._compared} disagree; run longer "
                f"(draws=..., about {about}), {self._gradient_remedy}or lower the rank"
            )
        if least < enough:
            found.append(
                f"bulk effective sample size is {least:.0f}, below {enough}: run longer "
                f"(draws=..., about {about})"
            )
        return found

    def _drift_warnings(self) -> list[str]:
        """Chains whose log density still changes, each by itself."""
        heights = self.stats.get("log_density", self.stats.get("log_likelihood"))
        if heights is None:
            return []
        rhat = np.array([diagnostics.rhat(one[None, :, None])[0] for one in heights])
        n = int((rhat > 1.2).sum())
        if not n:
            return []
        return [
            f"the log density of {n} of {self.n_chains} chains still changes (split R-hat up to "
            f"{np.nanmax(rhat):.3f}, above 1.2): warm up longer (warmup=...)"
        ]

    def _stuck_warnings(self, worst: float) -> list[str]:
        """Some chains that never moved, and groups of chains in separate modes."""
        n = int(self._still.sum())
        if n and n < self.n_chains:
            return [
                f"{n} of {self.n_chains} chains never moved (the first is chain "
                f"{int(self._still.argmax())}): {_ELSEWHERE}"
            ]
        if n or not worst > 1.2:
            return []
        heights = self.stats.get("log_density", self.stats.get("log_likelihood"))
        if heights is not None and not np.isfinite(heights).all():
            heights = None
        x = self.z if heights is None else np.concatenate([self.z, heights[..., None]], 2)
        groups = diagnostics.separate_groups(x)
        if len(groups) == 1:
            return []
        sizes = " and ".join(str(len(group)) for group in groups[:4])
        where = (
            ""
            if heights is None
            else ", of mean log density "
            + " and ".join(f"{heights[group].mean():.1f}" for group in groups[:4])
        )
        return [
            f"chains are stuck in {len(groups)} modes ({sizes} chains{where}; R-hat is "
            f"{worst:.3f}): their shares are not to be trusted; sample with inference='smc' or "
            "'parallel-tempering', raise the temperature, or lower the rank"
        ]

    @property
    def _still(self) -> Bool[np.ndarray, "chains"]:
        """Which chains never moved."""
        return np.asarray(np.ptp(self.z, axis=1).max(1, initial=0) == 0)

    @property
    def _compared(self) -> str:
        """What R-hat compares."""
        return "chains" if self.n_chains > 1 else "the halves of the chain"

    @property
    def _gradient_remedy(self) -> str:
        """A remedy for samplers without gradients."""
        return "follow gradients (inference='nuts'), " if self.engine == "elliptical-slice" else ""

    def state(self) -> tuple[dict[str, np.ndarray], DrawsFacts]:
        """The draws as named arrays and facts; for `from_state`."""
        arrays = {"z": self.z} | {f"stats.{name}": values for name, values in self.stats.items()}
        for f in () if self.moments is None else fields(self.moments):
            if (values := getattr(self.moments, f.name)) is not None:
                arrays[f"moments.{f.name}"] = values
        facts = {name: getattr(self, name) for name in DrawsFacts.__struct_fields__}
        return arrays, DrawsFacts(**facts)

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], facts: DrawsFacts) -> Draws:
        """Rebuild draws from `state`, saved as tensors; other tensors are ignored."""
        stats, moments = (
            {k: v.cpu().numpy() for k, v in strip_prefix(part, tensors).items()}
            for part in ("stats", "moments")
        )
        found = Moments(**moments) if moments else None
        return cls(tensors["z"].cpu().numpy(), stats, **structs.asdict(facts), moments=found)

    def __repr__(self) -> str:
        how = "; ".join(self.warnings()) or "no warnings"
        return f"Draws(chains={self.n_chains}, draws={self.n_draws}, rank={self.rank}; {how})"


class _Meta(TypedDict, total=False):
    """What is computed with among the details of a run."""

    seed: int
    warmup: int | None
    thin: Count
    seconds: float
    thinned_from: Count
    proposals: int
    effective_proposals: float
    proposals_k: float
    target: Positive
    warnings: list[str]


class DrawsFacts(Facts):
    """`Draws` but for their arrays."""

    meta: dict[str, Any]
    engine: Line
    validity: Validity
    independent: bool
    prediction: Prediction
    temperature: Positive
    pareto_k: float
    converged: bool | None
    log_evidence: float
    log_evidence_error: float

    def __post_init__(self) -> None:
        check_known(self.meta, _Meta)

    def arrays(self, rank: int) -> Arrays:
        """Draws, their statistics, and moments, which linearised predictions require."""
        missing = "" if self.prediction == "linearised" else "?"
        shown = Array("chains", "draws", dtype="any", below=1e15)
        counted = Array("chains", "draws", dtype="whole", low=0, below=1e15)
        return {
            "z": Array("chains", "draws", rank, dtype="float64", least=1, below=LARGEST),
            **{f"stats.{name}?": shown for name in ("divergent", "least_swap_rate", "barrier")},
            **{f"stats.{name}?": counted for name in _COUNTED},
            "stats.*": Array("chains", "draws", dtype="any", finite=False),
            f"moments.mean{missing}": Array(rank, dtype="float64", below=LARGEST),
            f"moments.sd{missing}": Array(rank, dtype="float64", low=0, below=LARGEST),
            f"moments.covariance{missing}": Array(rank, rank, dtype="float64", below=LARGEST**2),
        }


_COUNTED = ("divergences", "evaluations", "round_trips", "failures", "restarts")


def round_up(n: float) -> int:
    """Round up to two digits.

    Example:
        >>> round_up(1234.5), round_up(80)
        (1300, 80)
    """
    unit = 10 ** max(math.floor(math.log10(n)) - 1, 0)
    return math.ceil(n / unit) * unit
