r"""Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), vectorised over chains.

Trajectories of a given length in units of the posterior's own scale (the mass matrix is adapted),
each with a random number of leapfrog steps so that none is in step with a period of the density.
One batched gradient is one leapfrog step of every chain; a chain whose trajectory is over accepts
or rejects and begins its next one at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from subbayes.inference.samplers import hamiltonian
from subbayes.inference.samplers.adaptation import Schedule, preferred_metric
from subbayes.inference.samplers.chains import Info, Rngs
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.utils.checks import check_count, check_positive

__all__ = ["HMC", "Kernel", "State"]

_UNADAPTED_STEPS = 20


@dataclass(frozen=True)
class State(hamiltonian.State):
    """A trajectory under way in each chain.

    Attributes:
        end: its newest point, shape (chains, columns).
        steps: leapfrog steps it is to have, shape (chains,).
    """

    end: Float[np.ndarray, "chains columns"]
    steps: Int[np.ndarray, "chains"]


@dataclass(frozen=True)
class Kernel(hamiltonian.Settings):
    r"""The transition: `init` and `step` on a density with gradients.

    Attributes:
        length: mean length of a trajectory.
        max_steps: leapfrog steps of a trajectory at most.
    """

    length: float
    max_steps: int

    name = "hmc"
    state_type = State

    def init(
        self, posterior: GradientDensity, z: Float[np.ndarray, "chains k"], rngs: Rngs
    ) -> State:
        """The state at start points z, each chain with a fresh momentum."""
        fields = hamiltonian.initial_fields(self, posterior, z)
        s = hamiltonian.copy_state(
            State(
                **fields,
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
        # A trajectory that is cut short where it diverges has all but no weight there.
        hamiltonian.set_current(s, moved, s.end[moved])
        s.acceptance[rows] = np.exp(np.minimum(log_weight[rows], 0.0)) * s.evaluations[rows]
        stats = hamiltonian.stats(s, diverged, energy)
        hamiltonian.adapt(self, posterior, s, rows)
        self._start(s, rows, rngs, u[rows, 1])
        return s, Info(finished, stats)

    def _start(self, s: State, rows: np.ndarray, rngs: Rngs, u: np.ndarray) -> None:
        """Fresh momenta, and lengths between half and one and a half of the mean."""
        s.end[rows] = hamiltonian.new_trajectories(s, rows, rngs)
        steps = np.ceil((0.5 + u) * self.length / s.step[rows])
        limit = np.where(s.count[rows] < self.adapted_draws, _UNADAPTED_STEPS, self.max_steps)
        s.steps[rows] = np.clip(steps, 1, limit).astype(np.int64)

    @property
    def adapted_draws(self) -> int:
        """Draws after which the mass matrix fits: before, a length in its units means nothing."""
        ends = Schedule.of(self.warmup).ends
        return ends[0] if ends else 0


@dataclass(frozen=True)
class HMC(hamiltonian.HamiltonianSampler):
    r"""Hamiltonian Monte Carlo, with adaptation in warm-up.

    The warm-up is as long as the draws kept by default, at least 200. The draws have the stats
    "log_density", "log_likelihood" (at temperature 1), "energy", "acceptance", "step_size",
    "evaluations" and "divergent".

    Attributes:
        target_acceptance: mean acceptance that the step size aims at; higher is slower and safer.
        metric: "diagonal" or "dense" mass matrix; None takes a dense one up to 50 coordinates.
        step_size: the first step size, in units of the prior's scale.
        length: mean length of a trajectory in units of the posterior's scale; $\pi / 2$ takes a
            standard normal to an independent draw.
        max_steps: leapfrog steps of a trajectory at most.

    Raises:
        InputError: start points of zero density or with gradients that are not finite, a singular
            mass matrix, a density without gradients, or a checkpoint of another run.

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
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
        return Kernel(
            warmup,
            self.metric or preferred_metric(posterior.rank),
            self.target_acceptance,
            self.step_size,
            self.length,
            self.max_steps,
        )
