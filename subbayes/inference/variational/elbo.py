r"""Maximisation of the evidence lower bound by stochastic gradients.

$$ \mathcal L(q) = E_q[\log p_T(D, z) - \log q(z)] \le \log p_T(D) $$

Adam (Kingma & Ba 2015) with a constant learning rate while the bound rises, then with one that
decays to zero; the iterates of the second half of the decay are averaged (Polyak & Juditsky 1992).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from subbayes.draws import Moments
from subbayes.inference.variational.gaussians import Reparameterised
from subbayes.utils.checks import fail

Vector = Float[np.ndarray, "p"]
Rows = Float[np.ndarray, "S k"]
Target = Callable[[Rows], tuple[Float[np.ndarray, "S"], Rows]]
_WINDOWS, _SHORTEST = 20, 25


@runtime_checkable
class Family(Protocol):
    """A member of a variational family, as a transformation of standard normal draws."""

    @property
    def rank(self) -> int:
        """Number of coordinates k."""

    def log_prob(self, z: Rows) -> Float[np.ndarray, "S"]:
        """Normalised log density."""

    def reparameterise(self, eps: Rows) -> Reparameterised:
        """z at standard normal draws, log q there, and a function from slopes to a gradient.

        The slopes are the gradients of the log density in z; the function returns the path
        derivative of the ELBO in the step's coordinates.
        """

    def moments(self) -> Moments | None:
        """Mean and spread of a Gaussian."""

    def with_step(self, step: Vector) -> Any:
        """The member after a step."""

    def parameters_vector(self) -> Vector:
        """The parameters that are averaged."""

    def with_parameters(self, parameters_vector: Vector) -> Any:
        """The member with these parameters."""


@dataclass(frozen=True)
class Ascent:
    """The result of a maximisation."""

    member: Any  # average of the last iterates
    elbo: Float[np.ndarray, "steps"]  # the bound at each step, from the draws of that step
    converged: bool  # before the learning rate decayed


@dataclass
class _Adam:
    """Adam with a short memory of squared gradients, which shrink as q narrows."""

    first: Any = 0.0
    second: Any = 0.0
    count: int = 0

    def step(self, gradient: Vector, rate: float) -> Vector:
        b1, b2 = 0.9, 0.98
        self.count += 1
        self.first = b1 * self.first + (1 - b1) * gradient
        self.second = b2 * self.second + (1 - b2) * gradient**2
        mean, square = self.first / (1 - b1**self.count), self.second / (1 - b2**self.count)
        return rate * mean / (np.sqrt(square) + 1e-12)


def ascend(
    member: Family,
    target: Target,
    *,
    steps: int,
    samples: int,
    rate: float,
    rng: np.random.Generator,
    callback: Callable[[], object],
) -> Ascent:
    """Maximise the ELBO, starting from a member of a family.

    Args:
        member: the start.
        target: log density and gradient, or unbiased estimates of them, at points (S, k).
        steps: maximal number of steps. The learning rate decays over the last quarter of them,
            earlier if the bound has converged.
        samples: draws of q per step, S.
        rate: learning rate.
        rng: of the draws.
        callback: called after each step.

    Raises:
        InputError: values or gradients that are not finite where q draws.
    """
    adam, history = _Adam(), np.empty(steps)
    finish, window = max(steps // 4, 1), max(steps // _WINDOWS, _SHORTEST)
    fall, converged, step = steps - finish, False, 0
    total, averaged = np.zeros_like(member.parameters_vector()), 0
    while step < fall + finish:
        z, log_q, gradient = member.reparameterise(rng.standard_normal((samples, member.rank)))
        value, slope = target(z)
        _check(value, slope, step)
        history[step] = float((value - log_q).mean())
        share = min(1.0, (fall + finish - step) / finish)
        member = member.with_step(adam.step(gradient(slope), rate * share))
        step += 1
        callback()
        if step >= fall + finish // 2:
            total, averaged = total + member.parameters_vector(), averaged + 1
        windowed = step < fall and step % window == 0
        if windowed and _has_converged(history[:step].reshape(-1, window)):
            fall, converged = step, True
    return Ascent(member.with_parameters(total / averaged), history[:step], converged)


def _has_converged(history: Float[np.ndarray, "windows window"]) -> bool:
    """Whether the bound rose by less than its noise over two windows, twice in a row."""
    return len(history) >= 5 and _has_stalled(history[:-1]) and _has_stalled(history)


def _has_stalled(history: Float[np.ndarray, "windows window"]) -> bool:
    rise = float(history[-2:].mean() - history[-4:-2].mean())
    noise = history[-4:].var(1).mean() / history[-2:].size
    return rise < float(np.sqrt(2 * noise))


def _check(value: Float[np.ndarray, "S"], slope: Rows, step: int) -> None:
    bad = ~(np.isfinite(value) & np.isfinite(slope).all(1))
    if bad.any():
        fail(
            "posterior",
            "finite log densities and gradients where the approximation draws",
            f"others at {int(bad.sum())} of {len(bad)} points in step {step + 1}",
            "Lower learning_rate, narrow the prior, or check the data and the trained weights",
        )
