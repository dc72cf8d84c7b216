r"""Step size, length and mass matrix of MCLMC, tuned in warm-up, chain by chain.

The energy error $\Delta$ of a step has a variance that grows like $\epsilon^6$, so that the step
size at which $\mathrm{Var}[\Delta] / d$ is the target $\tau$ is estimated from every step,

$$ \epsilon^6 = \tau \Big/ \sum_i \omega_i \frac{\Delta_i^2}{d\, \epsilon_i^6}, \qquad
   \omega_i \propto \Bigl(\tfrac{149}{151}\Bigr)^{n - i}
   \exp\Bigl[-\tfrac12 \bigl(\tfrac19 \log \tfrac{\Delta_i^2}{d \tau}\bigr)^2\Bigr], $$

with weights that forget old steps and trust errors far from the target less. The mass matrix is the
covariance of two windows, and the length over which directions are forgotten $\sqrt{d}$ in its
coordinates, then 0.4 times the autocorrelation length of the last fifth of the warm-up.

Robnik and Seljak (2024), *Fluctuation without dissipation*, section 4; Sommer et al. (2025),
*Microcanonical Langevin ensembles*, for targets that fall linearly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float, Int

from subbayes.diagnostics import ess_mean
from subbayes.inference.density import Density, GradientDensity, prior_scale
from subbayes.inference.samplers.adaptation import (
    LEAST_VARIANCE,
    cholesky,
    matrix_shape,
    shrunk_covariance,
    update_window,
)
from subbayes.inference.samplers.chains import Rngs
from subbayes.inference.samplers.laplace_start import start_chains
from subbayes.inference.samplers.shapes import (
    ChainCounts,
    ChainMask,
    ChainPoints,
    ChainValues,
    SomeChains,
)
from subbayes.inference.samplers.states import blank_state

_DECAY = 149 / 151  # of weights in a step: about 150 steps count
_FAST_DECAY = 9 / 11  # before the first window, where chains come from start points far out
_EARLY_TARGET = 0.02
_TRUST = 9.0  # of the logarithm of squared errors over their target
_LEAST_ERROR = 1e-8  # squared, over the target
_SEED_WEIGHT, _RESTART_WEIGHT = 1.0, 20.0  # of a step size that is set, in steps
_SMALLEST, _LARGEST = 1e-40, 1e40  # step sizes, whose sixth powers are finite
_TRACE, _TRACED = 512, 32  # points and coordinates of the autocorrelation
_SHARE = 0.4  # of the autocorrelation length
_WIDEST = 10.0  # factor between the tuned length and that of the scale
_CORRELATED = 20.0  # steps of a window that count as one draw
_S = TypeVar("_S")


@dataclass(frozen=True)
class Tuning:
    """State of each chain's tuning, which the kernel extends with its own state."""

    count: ChainCounts  # steps finished
    step: ChainValues  # step size in use
    length: ChainValues  # distance over which directions are forgotten
    error_sum: ChainValues  # weighted squared errors over d and step size^6
    weight_sum: ChainValues
    window: ChainCounts  # steps in the current window
    window_mean: ChainPoints
    window_spread: Float[np.ndarray, "chains *kk"]  # scatter: (chains, k), or (chains, k, k)
    factor: Float[np.ndarray, "chains *kk"]  # L of the inverse mass matrix, diagonal or dense
    target: Float[np.ndarray, "chains *kk"]  # covariance that windows shrink to; 0 if unknown
    trace: Float[np.ndarray, "chains points coordinates"]  # for the autocorrelation


@dataclass(frozen=True)
class Phases:
    """The phases of a warm-up, as numbers of finished steps.

    Attributes:
        begin: the first window begins.
        ends: the windows end; empty for a warm-up of fewer than 100 steps.
        trace: the recording for the autocorrelation begins.
        stride: steps between its points.
        points: number of its points.
    """

    begin: int
    ends: tuple[int, ...]
    trace: int
    stride: int
    points: int

    @classmethod
    def of(cls, warmup: int, traced: bool = True) -> Phases:
        """Windows from 10 to 30 % and to 70 % of a warm-up, and a trace from 80 % to its end.

        Example:
            >>> Phases.of(1000)
            Phases(begin=100, ends=(300, 700), trace=800, stride=1, points=200)
        """
        if warmup < 100:
            return cls(warmup, (), warmup, 1, 0)
        start = int(0.8 * warmup)
        stride = -(-(warmup - start) // _TRACE)
        points = (warmup - start) // stride if traced else 0
        return cls(int(0.1 * warmup), (int(0.3 * warmup), int(0.7 * warmup)), start, stride, points)


@dataclass(frozen=True)
class Tuner:
    """Settings of the tuning; see `MCLMC`.

    Attributes:
        warmup: steps in which a chain is tuned.
        metric: "prior", "diagonal" or "dense".
        first_target: of the variance of the energy error per coordinate, at the start.
        last_target: at the end of the warm-up and after it.
        step_size: the first step size; None finds one.
        length: the length; None for the square root of the number of coordinates.
        traced: tune the length by the autocorrelation.
    """

    warmup: int
    metric: str
    first_target: float
    last_target: float
    step_size: float | None
    length: float | None
    traced: bool

    @property
    def phases(self) -> Phases:
        """The phases of the warm-up."""
        return Phases.of(self.warmup, self.traced)

    def target(self, count: SomeChains) -> Float[np.ndarray, "c"]:
        """The target after some finished steps, which changes linearly over the warm-up.

        Before the first window it is at least 0.02: steps on the way from a start point far out may
        be larger.
        """
        done = np.minimum(count / self.warmup, 1.0) if self.warmup else np.ones(len(count))
        target = self.first_target + done * (self.last_target - self.first_target)
        early = count < (self.phases.begin if self.phases.ends else 0)
        return np.where(early, np.maximum(target, _EARLY_TARGET), target)

    def first_step(self, k: int) -> float:
        """A step size that fits a standard normal density of k coordinates."""
        return float(self.step_size or 0.5 * np.sqrt(k) * self.first_target ** (1 / 6))

    def start_state(
        self, kind: type[_S], posterior: GradientDensity, z: ChainPoints, rngs: Rngs
    ) -> _S:
        """A state at start points z, which a warm-up moves as in HMC.

        Args:
            kind: the class of the state, with the fields of `Tuning`.
            posterior: the density.
            z: the start points.
            rngs: a generator per chain.
        """
        (chains, k), scale = z.shape, prior_scale(posterior)
        s: Any = blank_state(
            kind,
            chains=chains,
            k=k,
            kk=matrix_shape(self.metric, k),
            points=self.phases.points,
            coordinates=min(k, _TRACED),
        )
        s.factor[:] = scale if s.factor.ndim == 2 else np.diag(scale)
        start_chains(posterior, s, z, rngs, self.warmup > 0 and self.metric != "prior")
        s.length[:] = self.length or np.sqrt(k)
        self.set_step(s, slice(None), np.full(chains, self.first_step(k)))
        return s

    def set_step(self, s: Any, rows: Any, step: Any, weight: float = _SEED_WEIGHT) -> None:
        """Set step sizes of the chains `rows`, as if `weight` steps had suggested them."""
        s.step[rows] = np.clip(step, _SMALLEST, _LARGEST)
        s.weight_sum[rows] = weight
        s.error_sum[rows] = self.target(s.count[rows]) * weight / s.step[rows] ** 6

    def halve_step(self, s: Any, rows: ChainMask) -> None:
        """Halve the step sizes of chains whose step has failed."""
        self.set_step(s, rows, 0.5 * s.step[rows], _RESTART_WEIGHT)

    def update(
        self, posterior: Density, s: Any, finished: ChainMask, error: ChainValues
    ) -> SomeChains:
        """Count the steps that have finished, and tune in warm-up, in place.

        Args:
            posterior: the density.
            s: the state.
            finished: chains whose step has not failed.
            error: energy errors, of steps of the size `s.step`.

        Returns:
            Chains with a new mass matrix, in whose units the step size has to be searched again.
        """
        tuned = finished & (s.count < self.warmup)
        np.add(s.count, finished, out=s.count)
        rows = tuned.nonzero()[0]
        changed = rows[:0]
        if not rows.size:
            return changed
        self._tune_step(s, rows, error[rows])
        phases, count = self.phases, s.count[rows]
        if phases.ends:
            inside = (count > phases.begin) & (count <= phases.ends[-1])
            if inside.any():
                update_window(s, rows[inside])
                closing = rows[np.isin(count, phases.ends)]
                if closing.size:
                    self._close_window(s, closing, prior_scale(posterior))
                    changed = closing if self.metric != "prior" else changed
        if phases.points and (count > phases.trace).any():
            self._record(s, rows, phases)
        return changed

    def _tune_step(self, s: Any, rows: SomeChains, error: Float[np.ndarray, "c"]) -> None:
        k, target = s.z.shape[1], self.target(s.count[rows])
        square = np.maximum(np.square(error) / k, _LEAST_ERROR * target)
        weight = np.exp(-0.5 * np.square(np.log(square / target) / _TRUST))
        decay = np.where(s.count[rows] <= self.phases.begin, _FAST_DECAY, _DECAY)
        total = decay * s.error_sum[rows] + weight * square / s.step[rows] ** 6
        weights = decay * s.weight_sum[rows] + weight
        step = np.clip((target * weights / total) ** (1 / 6), _SMALLEST, _LARGEST)
        s.weight_sum[rows] = weights
        s.error_sum[rows] = target * weights / step**6
        s.step[rows] = step

    def _close_window(self, s: Any, rows: SomeChains, scale: Float[np.ndarray, "k"]) -> None:
        """Set the mass matrix, or the length in units of the prior's, from a window."""
        k, dense = len(scale), s.window_spread.ndim == 3
        if self.metric != "prior":
            draws = _CORRELATED * (k if dense else 1)
            covariance = shrunk_covariance(s, rows, scale, draws)
            if not dense:
                covariance = np.maximum(covariance, LEAST_VARIANCE * scale**2)
            s.factor[rows] = cholesky(covariance) if dense else np.sqrt(covariance)
            self.set_step(s, rows, self.step_size or self.first_step(k))
        elif self.length is None:
            variance = s.window_spread[rows] / np.maximum(s.window[rows, None] - 1.0, 1)
            length = np.sqrt((variance / np.square(scale)).sum(1))
            s.length[rows] = np.maximum(length, 1e-3 * np.sqrt(k))
        for name in ("window", "window_mean", "window_spread"):
            getattr(s, name)[rows] = 0

    def _record(self, s: Any, rows: SomeChains, phases: Phases) -> None:
        """Record points, and set the length when the warm-up ends."""
        place, phase = np.divmod(s.count[rows] - phases.trace, phases.stride)
        due = (phase == 0) & (place >= 1) & (place <= phases.points)
        which = _traced_coordinates(s.z.shape[1])
        s.trace[rows[due], place[due] - 1] = s.z[rows[due]][:, which]
        for c in rows[s.count[rows] == self.warmup]:
            steps = phases.points * phases.stride
            size = np.asarray(ess_mean(s.trace[c][None]))
            size = size[np.isfinite(size) & (size > 0)]
            if size.size and self.length is None:
                length = _SHARE * s.step[c] * float(np.mean(steps / size))
                s.length[c] = np.clip(length, s.length[c] / _WIDEST, s.length[c] * _WIDEST)
            s.trace[c] = 0.0


def _traced_coordinates(k: int) -> Int[np.ndarray, "coordinates"]:
    """Coordinates of the autocorrelation, evenly spaced."""
    return np.arange(min(k, _TRACED)) * k // min(k, _TRACED)
