r"""Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), vectorised over chains.

Trajectories have a given mean length in units of the posterior's scale (the mass matrix is adapted)
and a random number of leapfrog steps, which avoids resonance with a period of the density. A step
of the kernel is one batched gradient, one leapfrog step of every chain; a chain whose trajectory
ends accepts or rejects and starts its next one at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from subbayes.inference.density import GradientDensity
from subbayes.inference.samplers import hamiltonian
from subbayes.inference.samplers.adaptation import Schedule
from subbayes.inference.samplers.chains import Info, Rngs
from subbayes.inference.samplers.hamiltonian import HamiltonianKernel, Point
from subbayes.inference.samplers.shapes import ChainCounts, ChainPoints, SomeChains
from subbayes.inference.samplers.states import take
from subbayes.utils.checks import check_count, check_positive

_UNADAPTED_STEPS = 20


@dataclass(frozen=True)
class State(hamiltonian.State):
    """The current trajectory of each chain."""

    end: Float[np.ndarray, "chains columns"]  # its newest point; see hamiltonian.Point
    steps: ChainCounts  # its number of steps


@dataclass(frozen=True)
class Kernel(HamiltonianKernel):
    """The transition: `init` and `step` on a density with gradients."""

    length: float
    max_steps: int

    name = "hmc"
    state_type: ClassVar[type[State]] = State
    gradients: ClassVar[int] = 1
    """Gradients of a step."""

    def start(self, s: Any, rows: SomeChains, rngs: Rngs) -> None:
        """Start a trajectory of each given chain."""
        s.end[rows] = hamiltonian.new_trajectories(s, rows, rngs)

    def advance(self, posterior: GradientDensity, s: Any) -> None:
        """Move the newest point of every trajectory by one leapfrog step."""
        s.end[:] = hamiltonian.leapfrog(posterior, s, s.end, s.step)

    def stats(
        self, s: Any, diverged: np.ndarray, moved: Int[np.ndarray, "m"], log_weight: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The statistics of the trajectories that end."""
        energy = np.where(s.evaluations > 0, s.start_energy, 0.0)
        energy[moved] -= log_weight[moved]
        return hamiltonian.stats(s, diverged, energy)

    def init(self, posterior: GradientDensity, z: ChainPoints, rngs: Rngs) -> Any:
        """The state at start points z, each chain with a new trajectory."""
        s = self.start_state(self.state_type, posterior, z, rngs)
        rows = np.arange(len(z))
        self._start(s, rows, rngs, take(s, "uniforms", rngs, rows)[:, 0])
        return s

    def step(self, posterior: GradientDensity, state: Any, rngs: Rngs) -> tuple[Any, Info]:
        """One step of every trajectory, in place; a chain whose trajectory ends starts its next."""
        s = state
        u = take(s, "uniforms", rngs, np.arange(len(s.z)), 2)
        self.advance(posterior, s)
        log_weight = s.end[:, Point.of(s.z.shape[1]).log_weight]
        diverged = log_weight < -hamiltonian.DIVERGENCE
        finished = diverged | (s.evaluations >= s.steps)
        if not finished.any():
            return s, Info(finished, {}, self.gradients)
        rows = finished.nonzero()[0]
        # A diverged trajectory ends early; its end point has practically no weight.
        moved = rows[np.log(u[rows, 0]) < log_weight[rows]]
        hamiltonian.set_current(s, moved, s.end[moved])
        s.acceptance[rows] = np.exp(np.minimum(log_weight[rows], 0.0)) * s.evaluations[rows]
        stats = self.stats(s, diverged, moved, log_weight)
        self.adapt(posterior, s, rows)
        self._start(s, rows, rngs, u[rows, 1])
        return s, Info(finished, stats, self.gradients)

    def _start(self, s: Any, rows: SomeChains, rngs: Rngs, u: Float[np.ndarray, "c"]) -> None:
        """Start trajectories of lengths between 0.5 and 1.5 times the mean."""
        self.start(s, rows, rngs)
        steps = np.ceil((0.5 + u) * self.length / s.step[rows])
        # Before the first window closes, the length has no meaningful units.
        ends = Schedule.of(self.warmup).ends
        adapted = s.count[rows] >= (ends[0] if ends else 0)
        limit = np.where(adapted, self.max_steps, _UNADAPTED_STEPS)
        s.steps[rows] = np.clip(steps, 1, limit).astype(np.int64)


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
    label = "HMC"
    length: float = np.pi / 2
    max_steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("length", self.length)
        check_count("max_steps", self.max_steps)

    def kernel(self, posterior: GradientDensity, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        shared = self.shared_settings(posterior, warmup)
        return Kernel(**shared, length=self.length, max_steps=self.max_steps)
