r"""State, momenta, leapfrog step and settings that HMC and NUTS share.

$H(z, r) = -\log p_T(z \mid D) + \tfrac12 r^\top M^{-1} r$; see Neal (2011). With $M^{-1} =
LL^\top$ the stored momentum is $p = L^\top r$, a standard normal vector:

$$ p \leftarrow p + \tfrac{\epsilon}{2} L^\top \nabla, \qquad z \leftarrow z + \epsilon L p, \qquad
   H = -\log p_T(z \mid D) + \tfrac12 p^\top p, \qquad v^\top r' = p^\top p' . $$

A point with all its quantities is one row of an array, so that selecting a point is one operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float
from typing_extensions import override

from subbayes.diagnostics import ebfmi
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.density import Density, GradientDensity, check_gradient, prior_scale
from subbayes.inference.samplers import adaptation
from subbayes.inference.samplers.adaptation import (
    Adaptation,
    Metric,
    apply_factor,
    apply_transposed_factor,
    preferred_metric,
)
from subbayes.inference.samplers.chains import Rngs, Sampler
from subbayes.inference.samplers.laplace_start import start_chains
from subbayes.inference.samplers.reparameterisation import run_reparameterised
from subbayes.inference.samplers.shapes import ChainCounts, ChainPoints, ChainValues, SomeChains
from subbayes.inference.samplers.states import blank_state, take
from subbayes.utils.checks import check_choice, check_positive, fail

DIVERGENCE = 1000.0
_AHEAD, _AHEAD_NORMALS = 96, 16
_S = TypeVar("_S")


@dataclass(frozen=True)
class State(Adaptation):
    """The current draw of each chain, its trajectory's start, and pre-drawn random numbers."""

    z: ChainPoints  # current draw
    value: ChainValues  # its log density
    gradient: ChainPoints
    start_energy: ChainValues  # H0, at the start of the trajectory
    acceptance: ChainValues  # sum of min(1, exp(H0 - H)) over the trajectory
    evaluations: ChainCounts  # leapfrog steps of the trajectory
    uniforms: Float[np.ndarray, "chains ahead"]  # drawn ahead from each chain's own stream
    normals: Float[np.ndarray, "chains ahead_normals k"]
    n_uniforms: ChainCounts  # used so far
    n_normals: ChainCounts


@dataclass(frozen=True)
class Point:
    r"""Columns of the array that holds points of trajectories."""

    z: slice  # position
    p: slice  # momentum
    h: slice  # gradient for p, L' nabla
    g: slice  # gradient in z
    value: int  # log density
    log_weight: int  # H0 - H
    size: int  # number of columns

    @classmethod
    @cache
    def of(cls, k: int) -> Point:
        """The columns for k coordinates."""
        z, p, h, g = (slice(i * k, (i + 1) * k) for i in range(4))
        return cls(z, p, h, g, value=4 * k, log_weight=4 * k + 1, size=4 * k + 2)


@dataclass(frozen=True)
class HamiltonianSampler(Sampler):
    """Settings and warm-up that `HMC` and `NUTS` share.

    The default warm-up is as long as the chain after it, `draws * thin`, at least 200. The draws
    have the stats "log_density", "log_likelihood" (at temperature 1), "energy", "acceptance",
    "step_size", "evaluations" and "divergent"; thinned ones also have two of all transitions, which
    warnings use: "divergences", their number since the draw before, and "ebfmi" of the chain.

    Attributes:
        target_acceptance: mean acceptance that the step size aims at; higher is slower and safer.
        metric: "diagonal" or "dense" mass matrix; None takes a dense one up to 50 coordinates.
        step_size: the first step size, in units of the mass matrix, without a warm-up the prior's.

    Raises:
        InputError: start points of zero density or with gradients that are not finite, a singular
            mass matrix, a density without gradients, or a checkpoint of another run.
    """

    any_density: ClassVar[bool] = True
    target_acceptance: float = 0.8
    metric: Metric | None = None
    step_size: float | None = None

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, (None, "diagonal", "dense"))
        if not 0 < self.target_acceptance < 1:
            fail("target_acceptance", "a number between 0 and 1", self.target_acceptance)
        if self.step_size is not None:
            check_positive("step_size", self.step_size)

    def default_warmup(self, sampling: Sampling) -> int:
        """`draws * thin`, at least 200."""
        return max(sampling.draws * sampling.thin, 200)

    def shared_settings(self, posterior: GradientDensity, warmup: int) -> dict[str, Any]:
        """The fields of `HamiltonianKernel` for this posterior."""
        return {
            "warmup": warmup,
            "metric": self.metric or preferred_metric(posterior.rank),
            "target_acceptance": self.target_acceptance,
            "step_size": self.step_size,
        }

    @override
    def run(self, posterior: GradientDensity, sampling: Sampling) -> Draws:
        check_gradient(posterior)
        draws = run_reparameterised(super().run, posterior, sampling)
        return with_log_likelihood(draws, posterior)

    @classmethod
    @override
    def warnings(cls, draws: Draws) -> list[str]:
        stats, found = draws.stats, []
        count, transitions = stats.get("divergent"), draws.n_chains * draws.n_draws
        if "divergences" in stats:
            count = stats["divergences"]
            transitions *= int(draws.meta.get("thin", 1))
        if count is not None and (n := int(count.sum())):
            found.append(
                f"{n} of {transitions} trajectories diverged: raise target_acceptance=..., or "
                "lower the rank"
            )
        if "energy" in stats:
            fractions = stats["ebfmi"] if "ebfmi" in stats else ebfmi(stats["energy"])
            if (low := float(np.nanmin(fractions))) < 0.3:
                found.append(
                    f"E-BFMI is {low:.2f}, below 0.3: the tails are reached slowly; run "
                    "longer (draws=...), or warm up longer (warmup=...)"
                )
        return found


def with_log_likelihood(draws: Draws, posterior: Density) -> Draws:
    """Draws with the log-likelihood of each, from their log densities."""
    prior = posterior.prior.log_prob(draws.z)
    value = posterior.temperature * (draws.stats["log_density"] - prior)
    return replace(draws, stats=draws.stats | {"log_likelihood": value})


@dataclass(frozen=True)
class HamiltonianKernel:
    """Settings (see `HamiltonianSampler`) and adaptation of a Hamiltonian kernel."""

    warmup: int
    metric: Metric
    target_acceptance: float
    step_size: float | None

    def start_state(
        self, kind: type[_S], posterior: GradientDensity, z: ChainPoints, rngs: Rngs, **sizes: int
    ) -> _S:
        """A state at start points z, which a warm-up moves, before its first trajectory.

        Args:
            kind: the class of the state, with the fields of `State`.
            posterior: the density.
            z: the start points.
            rngs: a generator per chain.
            sizes: of axes that other fields have; see `blank_state`.
        """
        chains, k = z.shape
        s: Any = blank_state(
            kind,
            chains=chains,
            k=k,
            kk=adaptation.matrix_shape(self.metric, k),
            columns=Point.of(k).size,
            ahead=_AHEAD,
            ahead_normals=_AHEAD_NORMALS,
            **sizes,
        )
        adaptation.begin(s, prior_scale(posterior), self.step_size)
        start_chains(posterior, s, z, rngs, self.warmup > 0)
        s.n_uniforms[:], s.n_normals[:] = _AHEAD, _AHEAD_NORMALS
        return s

    def adapt(self, posterior: GradientDensity, s: State, rows: SomeChains) -> None:
        """Count the finished draws, and adapt in warm-up."""
        adaptation.update(
            posterior,
            s,
            rows,
            s.acceptance[rows] / s.evaluations[rows],
            target=self.target_acceptance,
            warmup=self.warmup,
        )


def new_trajectories(s: State, rows: SomeChains, rngs: Rngs) -> Float[np.ndarray, "c columns"]:
    """Start points of new trajectories with new momenta, for the chains `rows`."""
    p = take(s, "normals", rngs, rows)[:, 0]
    g = s.gradient[rows]
    value = s.value[rows]
    s.start_energy[rows] = 0.5 * np.einsum("ck,ck->c", p, p) - value
    s.acceptance[rows] = 0.0
    s.evaluations[rows] = 0
    c = Point.of(p.shape[1])
    point = np.zeros((len(rows), c.size))
    point[:, c.z], point[:, c.p], point[:, c.h] = (
        s.z[rows],
        p,
        apply_transposed_factor(s.factor[rows], g),
    )
    point[:, c.g], point[:, c.value] = g, value
    return point


def leapfrog(
    posterior: GradientDensity,
    s: State,
    point: Float[np.ndarray, "chains columns"],
    step: ChainValues,
) -> Float[np.ndarray, "chains columns"]:
    """One leapfrog step of every chain; the gradient at a point of zero density counts as 0."""
    c, new = Point.of(s.z.shape[1]), np.empty_like(point)
    step = step[:, None]
    half = 0.5 * step
    p = point[:, c.p] + half * point[:, c.h]
    z = point[:, c.z] + step * apply_factor(s.factor, p)
    value, g = posterior.value_and_grad(z)
    possible = np.isfinite(value) & np.isfinite(g).all(1)
    if not possible.all():
        value, g = np.where(possible, value, -np.inf), np.where(possible[:, None], g, 0.0)
    h = apply_transposed_factor(s.factor, g)
    p += half * h
    log_weight = s.start_energy + value - 0.5 * np.einsum("ck,ck->c", p, p)
    log_weight = np.fmax(log_weight, -np.inf)  # NaN to -inf
    new[:, c.z], new[:, c.p], new[:, c.h], new[:, c.g] = z, p, h, g
    new[:, c.value], new[:, c.log_weight] = value, log_weight
    np.add(s.acceptance, np.exp(np.minimum(log_weight, 0.0)), out=s.acceptance)
    np.add(s.evaluations, 1, out=s.evaluations)
    return new


def set_current(s: State, rows: SomeChains, point: Float[np.ndarray, "c columns"]) -> None:
    """Set the points, values and gradients of some chains, in place."""
    c = Point.of(s.z.shape[1])
    s.z[rows], s.gradient[rows] = point[:, c.z], point[:, c.g]
    s.value[rows] = point[:, c.value]


def stats(s: State, diverged: np.ndarray, energy: np.ndarray) -> dict[str, np.ndarray]:
    """What a transition reports."""
    return {
        "log_density": s.value,
        "energy": energy,
        "acceptance": s.acceptance / np.maximum(s.evaluations, 1),
        "step_size": s.step.copy(),
        "evaluations": s.evaluations.copy(),
        "divergent": diverged,
    }
