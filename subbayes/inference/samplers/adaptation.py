r"""Step size and mass matrix of gradient-based kernels, adapted in warm-up, chain by chain.

The step size follows dual averaging towards a target acceptance (Hoffman & Gelman 2014, section
3.2). The inverse mass matrix is the covariance of the draws of windows that double in length, as
in Stan, shrunk towards the prior's scale. Each chain adapts separately, so that its draws do not
depend on the other chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from subbayes.inference.density import Density, prior_scale
from subbayes.inference.samplers.shapes import ChainCounts, ChainPoints, ChainValues, SomeChains
from subbayes.utils.checks import fail

Metric = Literal["diagonal", "dense"]

_GAMMA, _DELAY, _KAPPA = 0.05, 10.0, 0.75
_DENSE = 50  # coordinates
_SHRINKAGE_DRAWS = 5.0
LEAST_VARIANCE = 1e-20  # in units of the prior's, for coordinates that have not moved


@dataclass(frozen=True)
class Adaptation:
    r"""State of each chain's adaptation, which kernels extend with their own state."""

    count: ChainCounts  # draws finished
    step: ChainValues  # step size in use
    log_step_mean: ChainValues  # running mean of its logarithm
    centre: ChainValues  # towards which dual averaging shrinks the logarithm
    excess: ChainValues  # running mean of target minus acceptance
    updates: ChainCounts  # since dual averaging was restarted
    window: ChainCounts  # draws in the current window
    window_mean: ChainPoints
    window_spread: Float[
        np.ndarray, "chains *kk"
    ]  # scatter: (chains, k), or (chains, k, k) if dense
    factor: Float[np.ndarray, "chains *kk"]  # L of the inverse mass matrix LL', diagonal or dense
    target: Float[np.ndarray, "chains *kk"]  # covariance that windows shrink to; 0 if unknown


@dataclass(frozen=True)
class Schedule:
    """The adaptation windows of a warm-up.

    Attributes:
        first: draws before the first window.
        ends: number of finished draws at which a window closes.
    """

    first: int
    ends: tuple[int, ...]

    @classmethod
    @cache
    def of(cls, warmup: int) -> Schedule:
        """20 draws, windows of 20, 40, 80, ..., then 50 draws for the step size; fewer if short.

        Windows double as in Stan but start early, since trajectories are long until the first
        window closes.
        """
        if warmup < 20:
            return cls(warmup, ())
        first, window, last = 20, 20, 50
        if first + window + last > warmup:
            first, last = int(0.15 * warmup), int(0.1 * warmup)
            window = warmup - first - last
        ends, at = [], first
        while at + window <= warmup - last:
            if at + 3 * window > warmup - last:
                window = warmup - last - at
            at += window
            ends.append(at)
            window *= 2
        return cls(first, tuple(ends))


def preferred_metric(rank: int) -> Metric:
    """The default mass matrix: dense where it costs little compared with a gradient."""
    return "dense" if rank <= _DENSE else "diagonal"


def begin(s: Any, scale: Float[np.ndarray, "k"], step: float | None) -> None:
    """Set the first step size, and the mass matrix of the prior's scale, in place.

    The default step size is $k^{-1/4}$, which fits a standard normal.

    Args:
        s: the state.
        scale: the prior's scale.
        step: the first step size; None takes the default.
    """
    s.log_step_mean[:] = np.log(float(step or len(scale) ** -0.25))
    s.step[:] = np.exp(s.log_step_mean)
    s.centre[:] = s.log_step_mean + np.log(2)
    s.factor[:] = scale if s.factor.ndim == 2 else np.diag(scale)


def matrix_shape(metric: str, k: int) -> tuple[int, ...]:
    """The axes of the mass matrix of a chain of k coordinates."""
    return (k, k) if metric == "dense" else (k,)


def apply_factor(factor: Float[np.ndarray, "chains *kk"], p: ChainPoints) -> ChainPoints:
    """L p of each chain: from standard normal momenta to velocities in z."""
    if factor.ndim == 2:
        return factor * p
    return np.asarray((factor @ p[:, :, None])[:, :, 0])


def apply_transposed_factor(factor: Float[np.ndarray, "chains *kk"], g: ChainPoints) -> ChainPoints:
    r"""$L^\top g$ of each chain, the adjoint of `apply_factor`."""
    if factor.ndim == 2:
        return factor * g
    return np.asarray((g[:, None, :] @ factor)[:, 0])


def update(
    posterior: Density,
    s: Any,
    rows: SomeChains,
    acceptance: Float[np.ndarray, "c"],
    *,
    target: float,
    warmup: int,
) -> None:
    """Update the adaptation of the chains `rows` after a finished draw, in place."""
    s.count[rows] += 1
    adapting = s.count[rows] <= warmup
    if not adapting.any():
        return
    schedule = Schedule.of(warmup)
    rows, acceptance = rows[adapting], acceptance[adapting]
    _dual_averaging(s, rows, target - acceptance)
    update_window(s, rows[s.count[rows] > schedule.first])
    closing = rows[[count in schedule.ends for count in s.count[rows].tolist()]]
    if closing.size:
        _new_metric(s, closing, prior_scale(posterior))
    done = rows[s.count[rows] == warmup]
    s.step[done] = np.exp(s.log_step_mean[done])


def _dual_averaging(s: Any, rows: np.ndarray, excess: np.ndarray) -> None:
    s.updates[rows] += 1
    t = s.updates[rows].astype(np.float64)
    weight = 1 / (t + _DELAY)
    s.excess[rows] += weight * (excess - s.excess[rows])
    log_step = s.centre[rows] - np.sqrt(t) / _GAMMA * s.excess[rows]
    mix = t**-_KAPPA
    s.log_step_mean[rows] += mix * (log_step - s.log_step_mean[rows])
    s.step[rows] = np.exp(log_step)


def update_window(s: Any, rows: SomeChains) -> None:
    """Add points to the windows of the chains `rows`: Welford's update of mean and scatter."""
    if not rows.size:
        return
    s.window[rows] += 1
    before = s.z[rows] - s.window_mean[rows]
    s.window_mean[rows] += before / s.window[rows, None]
    after = s.z[rows] - s.window_mean[rows]
    dense = s.window_spread.ndim == 3
    s.window_spread[rows] += before[:, :, None] * after[:, None, :] if dense else before * after


def _new_metric(s: Any, rows: np.ndarray, scale: Float[np.ndarray, "k"]) -> None:
    """Close a window: set the mass matrix and restart dual averaging."""
    dense, k = s.window_spread.ndim == 3, len(scale)
    covariance = shrunk_covariance(s, rows, scale, _SHRINKAGE_DRAWS)
    s.factor[rows] = cholesky(covariance) if dense else np.sqrt(covariance)
    for name in ("window", "window_mean", "window_spread", "updates", "excess"):
        getattr(s, name)[rows] = 0
    s.step[rows] = k**-0.25
    s.log_step_mean[rows] = np.log(s.step[rows])
    s.centre[rows] = s.log_step_mean[rows] + np.log(2)


def shrunk_covariance(
    s: Any, rows: np.ndarray, scale: Float[np.ndarray, "k"], draws: float
) -> Float[np.ndarray, "c ..."]:
    """Covariances of windows, shrunk towards that of a Laplace approximation or their diagonal.

    Args:
        s: the state, with the windows, and in `target` the covariances of Laplace approximations,
            0 where there is none.
        rows: the chains.
        scale: the prior's scale.
        draws: how many draws the target of the shrinkage counts as.
    """
    dense = s.window_spread.ndim == 3
    n = s.window[rows].astype(np.float64).reshape(-1, *[1] * (s.window_spread.ndim - 1))
    covariance, weight = s.window_spread[rows] / np.maximum(n - 1, 1), n / (n + draws)
    least = LEAST_VARIANCE * (np.diag(scale**2) if dense else scale**2)
    diagonal = np.maximum(covariance * np.eye(len(scale)) if dense else covariance, least)
    target = s.target[rows]
    known = target.reshape(len(rows), -1).any(1).reshape(n.shape)
    return weight * covariance + (1 - weight) * np.where(known, target, diagonal)


def cholesky(covariance: Float[np.ndarray, "c k k"]) -> Float[np.ndarray, "c k k"]:
    """Cholesky factors of covariances of windows.

    Raises:
        InputError: a singular covariance.
    """
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        fail(
            "metric",
            "draws of the warm-up with a positive definite covariance",
            "a singular one",
            "Use metric='diagonal' or a longer warm-up",
        )
