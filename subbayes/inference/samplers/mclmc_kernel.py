r"""The transition of microcanonical Langevin Monte Carlo; see `mclmc`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from subbayes.inference.density import Differentiable, GradientDensity
from subbayes.inference.samplers.adaptation import apply_transposed_factor
from subbayes.inference.samplers.chains import Info, Rngs
from subbayes.inference.samplers.laplace_start import Points
from subbayes.inference.samplers.mclmc_tuning import Tuner, Tuning
from subbayes.inference.samplers.microcanonical import (
    GRADIENTS,
    Moved,
    isokinetic_step,
    partial_refreshment,
    unit_vectors,
)
from subbayes.inference.samplers.shapes import (
    ChainCounts,
    ChainMask,
    ChainPoints,
    ChainValues,
    SomeChains,
)

_HUGE = 1000.0  # energy error, and as much again for every 1000 coordinates
_SEARCHES = 40  # rounds of the search for a first step size
_PATIENCE = 10  # failures in a row, after which a chain restarts


@dataclass(frozen=True)
class State(Tuning):
    """The current point and direction of each chain, and where it started."""

    z: ChainPoints
    direction: ChainPoints  # of length 1
    value: ChainValues  # log density
    gradient: ChainPoints
    start: ChainPoints
    failures: ChainCounts  # steps that failed
    consecutive: ChainCounts  # of them, since a step that did not
    restarts: ChainCounts  # from the start point


@dataclass(frozen=True)
class Kernel(Tuner):
    """The transition: `init` and `step` on a density with gradients."""

    name = "mclmc"
    state_type: ClassVar[type[State]] = State

    def init(self, posterior: GradientDensity, z: ChainPoints, rngs: Rngs) -> Any:
        """The state at start points z, each chain with a uniform direction."""
        s = self.start_state(self.state_type, posterior, z, rngs)
        s.start[:] = s.z
        s.direction[:] = _directions(rngs, z.shape[1])
        if self.warmup:
            self._search_step(posterior, s, np.arange(len(s.z)))
        return s

    def step(self, posterior: GradientDensity, state: State, rngs: Rngs) -> tuple[State, Info]:
        """One step of every chain, in place; a step that fails is not a draw."""
        s, used = state, self._step_sizes(state)
        error, failed, stats = self._advance(posterior, s, used)
        partial_refreshment(s.direction, _normals(rngs, s.z.shape[1]), used / s.length)
        stats |= self._recover(posterior, s, failed, rngs)
        self._search_step(posterior, s, self.update(posterior, s, ~failed, error))
        return s, Info(~failed, stats, GRADIENTS)

    def _advance(
        self, density: Differentiable, s: State, used: ChainValues
    ) -> tuple[ChainValues, ChainMask, dict[str, np.ndarray]]:
        """Move the chains whose steps do not fail; energy errors, failures and statistics."""
        new = self._move(density, s, used)
        failed = self._failed(new, s.z.shape[1])
        keep = np.flatnonzero(~failed) if failed.any() else slice(None)
        s.z[keep], s.direction[keep] = new.z[keep], new.u[keep]
        s.value[keep], s.gradient[keep] = new.value[keep], new.gradient[keep]
        stats = {
            "log_density": new.value,
            "energy_error": new.error,
            "step_size": used,
            "length": s.length.copy(),
            "evaluations": np.full(len(failed), GRADIENTS),
        }
        return new.error, failed, stats

    def _step_sizes(self, s: State) -> ChainValues:
        """Step sizes in use: after the warm-up, halved for each failure in a row."""
        return np.where(s.count < self.warmup, s.step, s.step * 0.5**s.consecutive)

    def _move(self, posterior: Differentiable, s: State, step: ChainValues) -> Moved:
        h = apply_transposed_factor(s.factor, s.gradient)
        with np.errstate(over="ignore", invalid="ignore"):
            return isokinetic_step(posterior, s.z, s.direction, s.value, h, s.factor, step)

    def _failed(self, new: Moved, k: int) -> ChainMask:
        """Chains with an energy error that is NaN or huge."""
        return np.asarray(~(np.abs(new.error) <= _HUGE + k))

    def _search_step(self, posterior: Differentiable, s: State, chains: SomeChains) -> None:
        """Change step sizes of chains until the energy error is near its target."""
        k, searching = s.z.shape[1], np.isin(np.arange(len(s.z)), chains)
        if self.step_size is not None:
            return
        for _ in range(_SEARCHES if searching.any() else 0):
            new = self._move(posterior, s, s.step)
            with np.errstate(over="ignore", invalid="ignore"):
                square = np.square(new.error) / (k * self.target(s.count))
            square = np.where(self._failed(new, k), np.inf, np.maximum(square, 1e-8))
            searching &= (square > 10.0) | (square < 1e-3)
            if not searching.any():
                break
            rows = searching.nonzero()[0]
            factor = np.clip(square[rows] ** (-1 / 6), 0.1, 2.0)
            self.set_step(s, rows, s.step[rows] * factor)

    def _recover(
        self, posterior: Differentiable, s: State, failed: ChainMask, rngs: Rngs
    ) -> dict[str, np.ndarray]:
        """Give chains whose step failed a new direction and half the step size, where they are.

        In the warm-up, which tunes it again, the step size itself is halved; after it, that of the
        next step alone. After 10 failures in a row they return to their start points and keep the
        step size that was halved as often, so that one that is too large everywhere is left.

        Returns:
            The statistics "failures" and "restarts".
        """
        s.failures[:] += failed
        s.consecutive[:] = np.where(failed, s.consecutive + 1, 0)
        rows = failed.nonzero()[0]
        if rows.size:
            s.direction[rows] = _directions([rngs[c] for c in rows], s.z.shape[1])
            self.halve_step(s, failed & (s.count < self.warmup))
        lost = s.consecutive == _PATIENCE
        if lost.any():
            again = Points.at(posterior, np.where(lost[:, None], s.start, s.z))
            s.z[lost], s.value[lost] = again.z[lost], again.value[lost]
            s.gradient[lost] = again.gradient[lost]
            late = lost & (s.count >= self.warmup)
            self.set_step(s, late, s.step[late] * 0.5**_PATIENCE)
            s.consecutive[lost] = 0
            s.restarts[lost] += 1
        return {"failures": s.failures.copy(), "restarts": s.restarts.copy()}


def _normals(rngs: Rngs, k: int) -> ChainPoints:
    noise = np.empty((len(rngs), k))
    for rng, row in zip(rngs, noise, strict=True):
        rng.standard_normal(out=row)
    return noise


def _directions(rngs: Rngs, k: int) -> ChainPoints:
    return unit_vectors(_normals(rngs, k))
