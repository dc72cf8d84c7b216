r"""What Hamiltonian kernels share: their settings, momenta, the leapfrog step, and statistics.

$H(z, r) = -\log p_T(z \mid D) + \tfrac12 r^\top M^{-1} r$; see Neal (2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from subbayes.checks import check_choice, check_count, check_positive, fail
from subbayes.inference import adaptation
from subbayes.inference.adaptation import Adaptation, Metric, Schedule, velocity
from subbayes.inference.chains import Density, Rngs
from subbayes.inference.streams import copied, uniforms

__all__ = ["GradientDensity", "Settings", "State", "copied", "uniforms"]

DIVERGENCE = 1000.0
_AHEAD, _AHEAD_NORMALS = 96, 16


@runtime_checkable
class GradientDensity(Density, Protocol):
    """A density with gradients; `Posterior` is one."""

    def value_and_grad(
        self, z: Float[np.ndarray, "chains k"]
    ) -> tuple[Float[np.ndarray, "chains"], Float[np.ndarray, "chains k"]]:
        """Tempered log density and its gradient at each chain's point."""


@dataclass(frozen=True)
class State(Adaptation):
    """The current draw of each chain, its trajectory's start, and random numbers drawn ahead.

    Attributes:
        z: current draw, shape (chains, k).
        value: its log density, shape (chains,).
        gradient: the gradient there, shape (chains, k).
        start_energy: H at the start of the trajectory, shape (chains,).
        leaf_value: log density at the trajectory's newest point, shape (chains,).
        acceptance: sum of min(1, exp(H0 - H)) over the trajectory, shape (chains,).
        evaluations: leapfrog steps of the trajectory, shape (chains,).
        uniforms: uniform numbers drawn ahead, shape (chains, ahead).
        normals: standard normal vectors drawn ahead, shape (chains, ahead, k).
        n_uniforms: how many of the uniforms are used, shape (chains,).
        n_normals: how many of the normals are used, shape (chains,).
    """

    z: Float[np.ndarray, "chains k"]
    value: Float[np.ndarray, "chains"]
    gradient: Float[np.ndarray, "chains k"]
    start_energy: Float[np.ndarray, "chains"]
    leaf_value: Float[np.ndarray, "chains"]
    acceptance: Float[np.ndarray, "chains"]
    evaluations: Int[np.ndarray, "chains"]
    uniforms: Float[np.ndarray, "chains ahead"]
    normals: Float[np.ndarray, "chains ahead_normals k"]
    n_uniforms: Int[np.ndarray, "chains"]
    n_normals: Int[np.ndarray, "chains"]


@dataclass(frozen=True)
class Settings:
    """Settings of a Hamiltonian kernel.

    Attributes:
        warmup: draws per chain in which step size and mass matrix adapt.
        target_acceptance: mean acceptance that the step size aims at.
        metric: "diagonal" or "dense" mass matrix.
        step_size: the first step size, in units of the prior's scale.
    """

    warmup: int
    target_acceptance: float = 0.8
    metric: Metric = "diagonal"
    step_size: float | None = None

    def __post_init__(self) -> None:
        check_count("warmup", self.warmup, 0)
        check_choice("metric", self.metric, ("diagonal", "dense"))
        if not 0 < self.target_acceptance < 1:
            fail("target_acceptance", "a number between 0 and 1", self.target_acceptance)
        if self.step_size is not None:
            check_positive("step_size", self.step_size)


def begin(
    settings: Settings, posterior: GradientDensity, z: Float[np.ndarray, "chains k"]
) -> dict[str, Any]:
    """The fields of `State` at start points z.

    Raises:
        InputError: a density without gradients, or one that is not finite there.
    """
    if not isinstance(posterior, GradientDensity):
        fail("posterior", "a density with value_and_grad", type(posterior).__name__,
             "Use elliptical_slice, which needs no gradient")
    chains, k = z.shape
    value, gradient = posterior.value_and_grad(z)
    bad = ~(np.isfinite(value) & np.isfinite(gradient).all(1))
    if bad.any():
        fail("initial", "start points where the gradient of the log density is finite",
             f"one that is not at {int(bad.sum())} of {chains}",
             "Start elsewhere, or use elliptical_slice, which needs no gradient")
    none, blank = np.zeros(chains, dtype=np.int64), np.zeros(chains)
    return adaptation.begin(chains, _scale(posterior), settings.metric, settings.step_size) | {
        "z": z.copy(), "value": value, "gradient": gradient, "start_energy": blank,
        "leaf_value": blank.copy(), "acceptance": blank.copy(), "evaluations": none,
        "uniforms": np.zeros((chains, _AHEAD)), "normals": np.zeros((chains, _AHEAD_NORMALS, k)),
        "n_uniforms": none + _AHEAD, "n_normals": none + _AHEAD_NORMALS}


def _scale(posterior: Density) -> Float[np.ndarray, "k"]:
    return np.broadcast_to(posterior.prior.scale, (posterior.rank,)).astype(np.float64)


def refresh(s: State, rows: Int[np.ndarray, "c"], rngs: Rngs) -> Float[np.ndarray, "c k"]:
    """Fresh momenta of the chains `rows`, whose trajectories begin anew."""
    for c in rows[s.n_normals[rows] >= s.normals.shape[1]]:
        s.normals[c] = rngs[c].standard_normal(s.normals[c].shape)
        s.n_normals[c] = 0
    r = adaptation.momentum(s.momentum_factor[rows], s.normals[rows, s.n_normals[rows]])
    s.n_normals[rows] += 1
    kinetic = 0.5 * (r * velocity(s.inverse_mass[rows], r)).sum(-1)
    s.start_energy[rows] = kinetic - s.value[rows]
    s.acceptance[rows] = 0.0
    s.evaluations[rows] = 0
    return r


def leapfrog(
    posterior: GradientDensity, s: State, z: np.ndarray, r: np.ndarray, g: np.ndarray,
    step: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One step of every chain: z, r, value and gradient there, and log weight H0 - H.

    A point that is impossible has weight 0, and a gradient of 0 so that nothing spreads.
    """
    half = 0.5 * step[:, None]
    r = r + half * g
    z = z + step[:, None] * velocity(s.inverse_mass, r)
    value, g = posterior.value_and_grad(z)
    possible = np.isfinite(value) & np.isfinite(g).all(1)
    if not possible.all():
        value, g = np.where(possible, value, -np.inf), np.where(possible[:, None], g, 0.0)
    r = r + half * g
    kinetic = 0.5 * (r * velocity(s.inverse_mass, r)).sum(-1)
    log_weight = s.start_energy + value - kinetic
    log_weight = np.where(np.isnan(log_weight), -np.inf, log_weight)
    s.acceptance[:] += np.exp(np.minimum(log_weight, 0.0))
    s.evaluations[:] += 1
    return z, r, value, g, log_weight


def stats(
    posterior: GradientDensity, s: State, diverged: np.ndarray, energy: np.ndarray
) -> dict[str, np.ndarray]:
    """What is noted of a draw."""
    prior = posterior.prior.log_prob(s.z)
    return {"log_density": s.value.copy(), "energy": energy.copy(),
            "log_likelihood": posterior.temperature * (s.value - prior),
            "acceptance": s.acceptance / np.maximum(s.evaluations, 1), "step_size": s.step.copy(),
            "evaluations": s.evaluations.copy(), "divergent": diverged.copy()}


def adapt(
    settings: Settings, posterior: GradientDensity, s: State, rows: Int[np.ndarray, "c"]
) -> None:
    """Count the finished draws, and adapt in warm-up."""
    if settings.warmup == 0:
        s.count[rows] += 1
        return
    adaptation.update(
        s, rows, s.acceptance[rows] / s.evaluations[rows], target=settings.target_acceptance,
        warmup=settings.warmup, schedule=Schedule.of(settings.warmup),
        scale=lambda: _scale(posterior))
