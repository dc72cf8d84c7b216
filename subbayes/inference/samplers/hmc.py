r"""Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), vectorised over chains.

Trajectories have a given mean length in units of the posterior's scale (the mass matrix is adapted)
and a random number of leapfrog steps, which avoids resonance with a period of the density. A step
of the kernel is one batched gradient, one leapfrog step of every chain; a chain whose trajectory
ends accepts or rejects and starts its next one at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from subbayes.inference.samplers import hamiltonian
from subbayes.inference.samplers.adaptation import Schedule
from subbayes.inference.samplers.chains import Density, Info, Rngs
from subbayes.inference.samplers.hamiltonian import GradientDensity, HamiltonianKernel
from subbayes.inference.samplers.state_limits import between
from subbayes.utils.checks import check_count, check_positive

if TYPE_CHECKING:
    from subbayes.inference.samplers.chain_storage import Store

__all__ = ["HMC", "Kernel", "State"]

_UNADAPTED_STEPS = 20


@dataclass(frozen=True)
class State(hamiltonian.State):
    """The current trajectory of each chain."""

    end: Float[np.ndarray, "chains columns"]  # its newest point; see hamiltonian.Point
    steps: Int[np.ndarray, "chains"]  # its number of leapfrog steps


@dataclass(frozen=True)
class Kernel(HamiltonianKernel):
    """The transition: `init` and `step` on a density with gradients."""

    length: float
    max_steps: int

    name = "hmc"
    statistics: ClassVar[dict[str, type]] = hamiltonian.STATISTICS
    state_type = State

    def limits(self, posterior: Density, s: State, store: Store) -> dict[str, Any]:
        """Whether the arrays of a state can be those of a run, by name."""
        start = hamiltonian.is_start(s, s.end)
        least, most = (self._steps(s, np.arange(len(s.step)), store.count, u) for u in (0.0, 1.0))
        limits = self.shared_limits(s, store)
        return limits | {
            "evaluations": limits["evaluations"] & (s.evaluations < s.steps),
            "end": hamiltonian.is_possible(s, s.end) & (start | (s.evaluations > 0)),
            "steps": between(s.steps, least, most),
        }

    def init(
        self, posterior: GradientDensity, z: Float[np.ndarray, "chains k"], rngs: Rngs
    ) -> State:
        """The state at start points z, each chain with a new momentum."""
        s = hamiltonian.copy_state(
            State(
                **self.initial_fields(posterior, z, rngs),
                end=np.zeros((len(z), hamiltonian.Point.of(z.shape[1]).size)),
                steps=np.ones(len(z), dtype=np.int64),
            )
        )
        self._start(s, np.arange(len(z)), rngs, hamiltonian.uniforms(s, rngs, 1)[:, 0])
        return s

    def step(self, posterior: GradientDensity, state: State, rngs: Rngs) -> tuple[State, Info]:
        """One leapfrog step of every chain, in place."""
        s = state
        u = hamiltonian.uniforms(s, rngs, 2)
        s.end[:] = hamiltonian.leapfrog(posterior, s, s.end, s.step)
        log_weight = s.end[:, hamiltonian.Point.of(s.z.shape[1]).log_weight]
        diverged = log_weight < -hamiltonian.DIVERGENCE
        finished = diverged | (s.evaluations >= s.steps)
        if not finished.any():
            return s, Info(finished, {})
        rows = finished.nonzero()[0]
        energy = np.where(s.evaluations > 0, s.start_energy, 0.0)
        moved = rows[np.log(u[rows, 0]) < log_weight[rows]]
        energy[moved] -= log_weight[moved]
        # A diverged trajectory ends early; its end point has practically no weight.
        hamiltonian.set_current(s, moved, s.end[moved])
        s.acceptance[rows] = np.exp(np.minimum(log_weight[rows], 0.0)) * s.evaluations[rows]
        stats = hamiltonian.stats(s, diverged, energy)
        self.adapt(posterior, s, rows)
        self._start(s, rows, rngs, u[rows, 1])
        return s, Info(finished, stats)

    def _start(self, s: State, rows: np.ndarray, rngs: Rngs, u: np.ndarray) -> None:
        """Draw new momenta, and lengths between 0.5 and 1.5 times the mean."""
        s.end[rows] = hamiltonian.new_trajectories(s, rows, rngs)
        s.steps[rows] = self._steps(s, rows, s.count, u)

    def _steps(
        self, s: State, rows: np.ndarray, count: np.ndarray, u: np.ndarray | float
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
class HMC(hamiltonian.HamiltonianSampler):
    r"""Hamiltonian Monte Carlo, with adaptation in warm-up.

    See `HamiltonianSampler` for the other settings, the warm-up, the stats and the errors.

    Attributes:
        length: mean length of a trajectory in units of the posterior's scale; $\pi / 2$ takes a
            standard normal to an independent draw.
        max_steps: maximal number of leapfrog steps of a trajectory.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> HMC().sample(posterior, draws=100, chains=2, warmup=100, progress=False).z.shape
        (2, 100, 2)
    """

    name = "hmc"
    length: float = np.pi / 2
    max_steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("length", self.length)
        check_count("max_steps", self.max_steps)

    def kernel(self, posterior: GradientDensity, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        return Kernel(*self.shared_settings(posterior, warmup), self.length, self.max_steps)
