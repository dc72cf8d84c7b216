r"""Metropolis-adjusted microcanonical sampling (Robnik, Cohn-Gordon and Seljak 2025), vectorised.

A trajectory follows isokinetic dynamics, see `microcanonical`, from a uniform direction, for a
random number of steps, and its end is accepted with probability $\min(1, e^{-\Delta})$, where
$\Delta$ is the error of the energy: the change of $-\log p$ and of the kinetic energy

$$ \Delta = \log p(z) - \log p(z') + \Delta K . $$

The step is reversible and $e^{\Delta K}$ is the change of its volume, so that the draws are exact
for every step size. A step of the kernel is one step of every trajectory; a chain whose trajectory
ends starts its next one at once. Sizes and lengths are those of `HMC`: the speed is $\sqrt{d}$ in
the coordinates of the mass matrix.

Robnik, Cohn-Gordon and Seljak (2025), *Metropolis adjusted microcanonical Hamiltonian Monte Carlo*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from subbayes.inference.samplers import hamiltonian
from subbayes.inference.samplers.adaptation import Schedule, apply_transposed_factor
from subbayes.inference.samplers.chains import Density, Info, Rngs
from subbayes.inference.samplers.hamiltonian import GradientDensity, HamiltonianKernel, Point
from subbayes.inference.samplers.microcanonical import (
    INTEGRATORS,
    Integrator,
    check_rank,
    gradients_per_step,
    isokinetic_step,
    unit_vectors,
)
from subbayes.inference.samplers.state_limits import between, close, finite
from subbayes.utils.checks import check_choice, check_count, check_positive

if TYPE_CHECKING:
    from subbayes.inference.samplers.chain_storage import Store

__all__ = ["MAMS", "Kernel", "State"]

_UNADAPTED_STEPS = 20


@dataclass(frozen=True)
class State(hamiltonian.State):
    """The current trajectory of each chain."""

    # Its newest point; see hamiltonian.Point, whose momenta are directions here.
    end: Float[np.ndarray, "chains columns"]
    kinetic: Float[np.ndarray, "chains"]  # change of the kinetic energy since its start
    steps: Int[np.ndarray, "chains"]  # its number of steps


@dataclass(frozen=True)
class Kernel(HamiltonianKernel):
    """The transition: `init` and `step` on a density with gradients."""

    length: float
    max_steps: int
    integrator: Integrator

    name = "mams"
    statistics: ClassVar[dict[str, type]] = {
        "log_density": float,
        "energy_error": float,
        "acceptance": float,
        "step_size": float,
        "evaluations": int,
        "divergent": bool,
    }
    state_type = State

    def limits(self, posterior: Density, s: State, store: Store) -> dict[str, Any]:
        """Whether the arrays of a state can be those of a run, by name."""
        c, size = Point.of(s.z.shape[1]), np.abs(s.value) + np.abs(s.kinetic)
        log_weight = s.end[:, c.value] - s.value - s.kinetic
        h = apply_transposed_factor(s.factor, s.end[:, c.g])
        terms = apply_transposed_factor(np.abs(s.factor), np.abs(s.end[:, c.g]))
        least, most = (self._steps(s, np.arange(len(s.step)), store.count, u) for u in (0.0, 1.0))
        begun = s.evaluations > 0
        start = (s.end[:, c.z] == s.z).all(1) & (s.end[:, c.value] == s.value)
        possible = (
            finite(s.end).all(1)
            & close(np.square(s.end[:, c.p]).sum(1), 1.0)
            & close(s.end[:, c.h], h, terms + 1e-300).all(1)
            & close(s.end[:, c.log_weight], log_weight, 1 + size + np.abs(s.end[:, c.value]))
            & (s.end[:, c.log_weight] >= -hamiltonian.DIVERGENCE)
        )
        limits = self.shared_limits(s, store)
        return limits | {
            "evaluations": limits["evaluations"] & (s.evaluations < s.steps),
            "end": possible & (start | begun),
            "kinetic": finite(s.kinetic) & ((s.kinetic == 0) | begun),
            "steps": between(s.steps, least, most),
        }

    def init(
        self, posterior: GradientDensity, z: Float[np.ndarray, "chains k"], rngs: Rngs
    ) -> State:
        """The state at start points z, each chain with a new direction."""
        s = hamiltonian.copy_state(
            State(
                **self.initial_fields(posterior, z, rngs),
                end=np.zeros((len(z), Point.of(z.shape[1]).size)),
                kinetic=np.zeros(len(z)),
                steps=np.ones(len(z), dtype=np.int64),
            )
        )
        self._start(s, np.arange(len(z)), rngs, hamiltonian.uniforms(s, rngs, 1)[:, 0])
        return s

    def step(self, posterior: GradientDensity, state: State, rngs: Rngs) -> tuple[State, Info]:
        """One step of every trajectory, in place."""
        s, c = state, Point.of(state.z.shape[1])
        u, gradients = hamiltonian.uniforms(s, rngs, 2), gradients_per_step(self.integrator)
        self._advance(posterior, s, c)
        log_weight = s.end[:, c.log_weight]
        diverged = log_weight < -hamiltonian.DIVERGENCE
        finished = diverged | (s.evaluations >= s.steps)
        if not finished.any():
            return s, Info(finished, {}, gradients)
        rows = finished.nonzero()[0]
        error = -log_weight
        moved = rows[np.log(u[rows, 0]) < log_weight[rows]]
        hamiltonian.set_current(s, moved, s.end[moved])
        s.acceptance[rows] = np.exp(np.minimum(log_weight[rows], 0.0)) * s.evaluations[rows]
        stats = hamiltonian.stats(s, diverged, error)
        stats["energy_error"] = stats.pop("energy")
        stats["evaluations"] *= gradients
        self.adapt(posterior, s, rows)
        self._start(s, rows, rngs, u[rows, 1])
        return s, Info(finished, stats, gradients)

    def _advance(self, posterior: GradientDensity, s: State, c: Point) -> None:
        point = s.end
        with np.errstate(over="ignore", invalid="ignore"):
            new = isokinetic_step(
                posterior,
                point[:, c.z],
                point[:, c.p],
                point[:, c.value],
                point[:, c.h],
                s.factor,
                s.step * np.sqrt(s.z.shape[1]),
                self.integrator,
            )
            np.add(s.kinetic, new.kinetic, out=s.kinetic)
            log_weight = np.fmax(new.value - s.value - s.kinetic, -np.inf)  # NaN to -inf
        point[:, c.z], point[:, c.p], point[:, c.h] = new.z, unit_vectors(new.u), new.h
        point[:, c.g], point[:, c.value], point[:, c.log_weight] = (
            new.gradient,
            new.value,
            log_weight,
        )
        np.add(s.evaluations, 1, out=s.evaluations)

    def _start(
        self, s: State, rows: Int[np.ndarray, "c"], rngs: Rngs, u: Float[np.ndarray, "c"]
    ) -> None:
        """Draw new directions, and lengths between 0.5 and 1.5 times the mean."""
        point, c = hamiltonian.new_trajectories(s, rows, rngs), Point.of(s.z.shape[1])
        point[:, c.p] = unit_vectors(point[:, c.p].copy())
        s.end[rows] = point
        s.kinetic[rows] = 0.0
        s.steps[rows] = self._steps(s, rows, s.count, u)

    def _steps(
        self,
        s: State,
        rows: Int[np.ndarray, "c"],
        count: Int[np.ndarray, "chains"],
        u: Float[np.ndarray, "c"] | float,
    ) -> Int[np.ndarray, "c"]:
        steps = np.ceil((0.5 + u) * self.length / s.step[rows])
        limit = np.where(count[rows] < self.adapted_draws, _UNADAPTED_STEPS, self.max_steps)
        return np.clip(steps, 1, limit).astype(np.int64)

    @property
    def adapted_draws(self) -> int:
        """Draws after which the mass matrix is adapted and the length has meaningful units."""
        ends = Schedule.of(self.warmup).ends
        return ends[0] if ends else 0


@dataclass(frozen=True)
class MAMS(hamiltonian.HamiltonianSampler):
    r"""Metropolis-adjusted microcanonical sampling, with adaptation in warm-up.

    See `HamiltonianSampler` for the other settings, the warm-up and the errors. The stats are
    those of HMC, with the error of the energy over the trajectory, "energy_error", in place of the
    energy.

    Attributes:
        length: mean length of a trajectory in units of the posterior's scale; $\pi / 2$ takes a
            standard normal of many coordinates to an independent draw.
        max_steps: maximal number of steps of a trajectory.
        integrator: "minimal-norm" (two gradients a step) or "leapfrog" (one).

    Raises:
        InputError: one coordinate, whose direction cannot turn.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> MAMS().sample(posterior, draws=100, chains=2, warmup=100, progress=False).z.shape
        (2, 100, 2)
    """

    name = "mams"
    target_acceptance: float = 0.9
    length: float = np.pi / 2
    max_steps: int = 1000
    integrator: Integrator = "minimal-norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("length", self.length)
        check_count("max_steps", self.max_steps)
        check_choice("integrator", self.integrator, INTEGRATORS)

    def check(self, rank: int | None = None) -> None:
        """Check that there are at least 2 coordinates."""
        check_rank(rank, self.name)

    def kernel(self, posterior: GradientDensity, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        check_rank(posterior.rank, self.name)
        settings = self.shared_settings(posterior, warmup)
        return Kernel(*settings, self.length, self.max_steps, self.integrator)
