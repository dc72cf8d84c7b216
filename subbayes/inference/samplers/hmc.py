r"""Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), vectorised over chains.

Trajectories of a given length in units of the posterior's own scale (the mass matrix is adapted),
each with a random number of leapfrog steps so that none is in step with a period of the density.
One batched gradient is one leapfrog step of every chain; a chain whose trajectory is over accepts
or rejects and begins its next one at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from subbayes.draws import Draws
from subbayes.inference.samplers import hamiltonian
from subbayes.inference.samplers.adaptation import Metric, Schedule, preferred
from subbayes.inference.samplers.chains import Info, Rngs, run
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.utils.checks import check_count, check_positive

__all__ = ["HMC", "State", "hmc"]

_UNSETTLED_STEPS = 20


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
class HMC(hamiltonian.Settings):
    r"""The kernel: `init` and `step` on a density with gradients.

    Attributes:
        length: mean length of a trajectory; $\pi / 2$ takes a standard normal to an independent
            draw.
        max_steps: leapfrog steps at most.
    """

    length: float = np.pi / 2
    max_steps: int = 1000

    name = "hmc"
    state_type = State

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("length", self.length)
        check_count("max_steps", self.max_steps)

    def init(
        self, posterior: GradientDensity, z: Float[np.ndarray, "chains k"], rngs: Rngs
    ) -> State:
        """The state at start points z, each chain with a fresh momentum."""
        fields = hamiltonian.begin(self, posterior, z)
        s = hamiltonian.copied(
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
        hamiltonian.settle(s, moved, s.end[moved])
        s.acceptance[rows] = np.exp(np.minimum(log_weight[rows], 0.0)) * s.evaluations[rows]
        stats = hamiltonian.stats(s, diverged, energy)
        hamiltonian.adapt(self, posterior, s, rows)
        self._start(s, rows, rngs, u[rows, 1])
        return s, Info(finished, stats)

    def _start(self, s: State, rows: np.ndarray, rngs: Rngs, u: np.ndarray) -> None:
        """Fresh momenta, and lengths between half and one and a half of the mean."""
        s.end[rows] = hamiltonian.refresh(s, rows, rngs)
        steps = np.ceil((0.5 + u) * self.length / s.step[rows])
        limit = np.where(s.count[rows] < self.settled, _UNSETTLED_STEPS, self.max_steps)
        s.steps[rows] = np.clip(steps, 1, limit).astype(np.int64)

    @property
    def settled(self) -> int:
        """Draws after which the mass matrix fits: before, a length in its units means nothing."""
        ends = Schedule.of(self.warmup).ends
        return ends[0] if ends else 0


def hmc(
    posterior: GradientDensity,
    *,
    draws: int = 1000,
    chains: int = 4,
    warmup: int | None = None,
    thin: int = 1,
    seed: int = 0,
    initial: str | np.ndarray = "prior",
    length: float = np.pi / 2,
    target_acceptance: float = 0.8,
    max_steps: int = 1000,
    metric: Metric | None = None,
    step_size: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    progress: bool | None = None,
) -> Draws:
    """Sample a posterior by Hamiltonian Monte Carlo, with adaptation in warm-up.

    Args:
        posterior: the density, with `value_and_grad`.
        draws: draws to keep per chain.
        chains: number of chains, evaluated together.
        warmup: draws per chain to adapt in and drop; by default as many as are kept, at least
            200.
        thin: keep every `thin`-th draw.
        seed: seed; each chain has its own stream.
        initial: "prior", "shift" (z = 0), or start points of shape (chains, k).
        length: mean length of a trajectory in units of the posterior's scale.
        target_acceptance: mean acceptance that the step size aims at.
        max_steps: leapfrog steps of a trajectory at most.
        metric: "diagonal" or "dense" mass matrix; None takes a dense one up to 50 coordinates.
        step_size: the first step size, in units of the prior's scale.
        checkpoint: directory to save the run in and resume it from, bit for bit.
        checkpoint_seconds: time between checkpoints.
        progress: show a bar; None shows it on a terminal.

    Returns:
        Draws with stats "log_density", "log_likelihood" (at temperature 1), "energy",
        "acceptance", "step_size", "evaluations" and "divergent" per draw.

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
        >>> hmc(posterior, draws=100, chains=2, warmup=100, progress=False).z.shape
        (2, 100, 2)
    """
    warmup = max(draws * thin, 200) if warmup is None else warmup
    kernel = HMC(
        warmup=warmup,
        target_acceptance=target_acceptance,
        metric=metric or preferred(posterior.rank),
        step_size=step_size,
        length=length,
        max_steps=max_steps,
    )
    return hamiltonian.with_likelihood(
        posterior,
        run(
            kernel,
            posterior,
            draws=draws,
            chains=chains,
            warmup=warmup,
            thin=thin,
            seed=seed,
            initial=initial,
            checkpoint=checkpoint,
            checkpoint_seconds=checkpoint_seconds,
            progress=progress,
        ),
    )
