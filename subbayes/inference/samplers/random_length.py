"""Trajectories of a random number of steps whose end is accepted or not, as in HMC and MAMS."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from subbayes.inference.samplers import hamiltonian
from subbayes.inference.samplers.adaptation import Schedule
from subbayes.inference.samplers.chains import GradientDensity, Info, Rngs
from subbayes.inference.samplers.hamiltonian import HamiltonianKernel, Point
from subbayes.inference.samplers.random_numbers import copy_state, uniforms
from subbayes.utils.checks import check_count, check_positive

_UNADAPTED_STEPS = 20


@dataclass(frozen=True)
class State(hamiltonian.State):
    """The current trajectory of each chain."""

    end: Float[np.ndarray, "chains columns"]  # its newest point; see hamiltonian.Point
    steps: Int[np.ndarray, "chains"]  # its number of steps


@dataclass(frozen=True)
class RandomLengthSampler(hamiltonian.HamiltonianSampler):
    """Settings of a sampler with trajectories of random lengths; see `HamiltonianSampler`.

    Attributes:
        length: mean length of a trajectory in units of the posterior's scale; pi / 2 takes a
            standard normal to an independent draw.
        max_steps: maximal number of steps of a trajectory.
    """

    length: float = np.pi / 2
    max_steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("length", self.length)
        check_count("max_steps", self.max_steps)


@dataclass(frozen=True)
class RandomLengthKernel(HamiltonianKernel, ABC):
    """A step of every trajectory at once; a chain whose trajectory ends starts its next one."""

    length: float
    max_steps: int

    state_type: ClassVar[type[State]] = State

    @property
    def gradients(self) -> int:
        """Gradients of a step."""
        return 1

    def new_state(self, fields: dict[str, Any], points: Float[np.ndarray, "chains columns"]) -> Any:
        """A state with the fields of `State`, before its first trajectory."""
        steps = np.ones(len(points), dtype=np.int64)
        return self.state_type(**fields, end=points, steps=steps)

    def start(self, s: Any, rows: Int[np.ndarray, "c"], rngs: Rngs) -> None:
        """Start a trajectory of each given chain."""
        s.end[rows] = hamiltonian.new_trajectories(s, rows, rngs)

    @abstractmethod
    def advance(self, posterior: GradientDensity, s: Any) -> None:
        """Move the newest point of every trajectory by one step."""

    @abstractmethod
    def stats(
        self, s: Any, diverged: np.ndarray, moved: Int[np.ndarray, "m"], log_weight: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The statistics of the trajectories that end."""

    def init(self, posterior: GradientDensity, z: Float[np.ndarray, "chains k"], rngs: Rngs) -> Any:
        """The state at start points z, each chain with a new trajectory."""
        points = np.zeros((len(z), Point.of(z.shape[1]).size))
        fields = self.initial_fields(posterior, z, rngs)
        s = copy_state(self.new_state(fields, points))
        self._start(s, np.arange(len(z)), rngs, uniforms(s, rngs, 1)[:, 0])
        return s

    def step(self, posterior: GradientDensity, state: Any, rngs: Rngs) -> tuple[Any, Info]:
        """One step of every trajectory, in place."""
        s = state
        u = uniforms(s, rngs, 2)
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

    def _start(
        self, s: Any, rows: Int[np.ndarray, "c"], rngs: Rngs, u: Float[np.ndarray, "c"]
    ) -> None:
        """Start trajectories of lengths between 0.5 and 1.5 times the mean."""
        self.start(s, rows, rngs)
        s.steps[rows] = self._steps(s, rows, s.count, u)

    def _steps(
        self,
        s: Any,
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
