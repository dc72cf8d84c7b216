r"""The transition of MCLMC with gradients of minibatches.

Each step draws the next minibatch of an epoch, the same for all chains, and integrates the dynamics
of its density, the log-likelihood of b rows times N / b, between two halves of the partial
refreshment: O B A B O. The gradient has a noise $\xi$ of variance $\sigma^2$ per coordinate of the
mass matrix, and turns the direction by $\epsilon (I - u u^\top) \xi / (d - 1)$. The generator of
such turns, of a covariance $\Sigma$ per unit of time, applied to the uniform density of directions
gives

$$ \tfrac12 \sum_i \Sigma_{ii} (d - 1) (d\, u_i^2 - 1), $$

in the axes of the noise: zero if it is isotropic, which is one more refreshment and no bias, and
not zero otherwise. A mass matrix of the posterior makes it isotropic where the Fisher information
is the curvature, since its covariance is then that of the posterior, inverted. The refreshment is
scaled down by what the noise adds already,

$$ \nu^2 = \max\Bigl(\frac{e^{2 \epsilon / L} - 1}{d}
   - \frac{\epsilon^2 \sigma^2}{(d - 1)^2}, 0\Bigr), $$

and the step size is at most $2 (d - 1)^2 / (d \sigma^2 L)$, at which the noise alone forgets
directions over the length L, at most $\sqrt d$, and $\alpha (d - 1) / (\sigma \sqrt d)$, at which
it turns them by an angle $\alpha = 0.1$: noise and gradient of a step act at once, which has a bias
of the order $\alpha^2$. $\sigma^2$ is measured from the gradients of successive minibatches at the
same point.

Sommer, Diao, Robnik, Seljak and Rügamer (2026), *Can microcanonical Langevin dynamics leverage
mini-batch gradient noise?*, for the bias of anisotropic noise and preconditioning against it. The
scaling, the limit and the measurement of the noise are derived here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int
from typing_extensions import override

from subbayes.inference.samplers.adaptation import apply_transposed_factor
from subbayes.inference.samplers.chains import FinishedChain, GradientDensity, Info, Rngs
from subbayes.inference.samplers.mclmc_kernel import Kernel, State
from subbayes.inference.samplers.microcanonical import unit_vectors
from subbayes.utils.checks import fail

_FORGET = 0.98  # share of the measured noise that a step keeps
_ANGLE = 0.1  # by which the noise of a minibatch turns a direction
_LONGEST = 300.0  # steps as shares of the length


@dataclass(frozen=True)
class BatchState(State):
    """The state of `MCLMC`, the number of steps, and the measured noise of gradients."""

    steps: Int[np.ndarray, "chains"]  # of the run, with those that failed
    noise: Float[np.ndarray, "chains"]  # variance per coordinate of the mass matrix


@dataclass(frozen=True)
class BatchDensity:
    """A posterior of which only some rows are evaluated.

    Attributes:
        posterior: the posterior.
        rows: positions of the observations.
    """

    posterior: Any
    rows: Int[np.ndarray, "b"]

    def value_and_grad(
        self, z: Float[np.ndarray, "chains k"]
    ) -> tuple[Float[np.ndarray, "chains"], Float[np.ndarray, "chains k"]]:
        """Estimates of the log density and its gradient."""
        value, gradient = self.posterior.value_and_grad(z, self.rows)
        return value, gradient


def check_batches(posterior: Any, batch_size: int) -> None:
    """Check that minibatches of a density can be evaluated.

    Raises:
        InputError: a density of your own, streamed data, or a batch size above the number of rows.
    """
    data = getattr(posterior, "data", None)
    if data is None or not getattr(data, "in_memory", False):
        got = "a density of your own" if data is None else "streamed data"
        fail("batch_size", "None but for a Posterior with data in memory", got, "Leave it out")
    if batch_size > posterior.n:
        fail("batch_size", f"at most {posterior.n}, the number of rows", batch_size, "Lower it")


@lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> Int[np.ndarray, "n"]:
    return np.random.default_rng([seed, epoch]).permutation(n)


def minibatch(n: int, batch_size: int, seed: int, step: int) -> Int[np.ndarray, "b"]:
    """The rows of a step: parts of a new order in every epoch, whose last rows may be left out.

    Args:
        n: number of rows.
        batch_size: rows of each step, at most n.
        seed: of the orders.
        step: number of the step, from 0.

    Example:
        >>> first, second = (minibatch(5, 2, seed=0, step=i) for i in (0, 1))
        >>> len({*first.tolist(), *second.tolist()})
        4
    """
    epoch, part = divmod(step, n // batch_size)
    return _order(n, seed, epoch)[part * batch_size : (part + 1) * batch_size]


@dataclass(frozen=True)
class BatchKernel(Kernel):
    """The transition: `init` and `step`.

    Attributes:
        batch_size: rows of each step.
        decay: exponent of the step size after the warm-up.
        seed: of the minibatches.
    """

    batch_size: int
    decay: float
    seed: int

    state_type: ClassVar[type[State]] = BatchState

    def first_search(self, posterior: GradientDensity, s: Any) -> None:
        """Search the first step size of every chain, on the first minibatch."""
        self._search_on(self._density(posterior, 0), s, np.arange(len(s.z)))

    def _search_on(self, density: Any, s: Any, chains: Int[np.ndarray, "c"]) -> None:
        """Search step sizes of chains on a minibatch."""
        if self.step_size is None and chains.size:
            value, gradient = density.value_and_grad(s.z)
            self._search_step(density, replace(s, value=value, gradient=gradient), chains)

    def _density(self, posterior: Any, step: int) -> Any:
        return BatchDensity(posterior, minibatch(posterior.n, self.batch_size, self.seed, step))

    def step(self, posterior: GradientDensity, state: Any, rngs: Rngs) -> tuple[Any, Info]:
        """One step of every chain, in place; a step that fails is not a draw.

        A longer run goes on from steps that failures have made unequal: chains with more of them
        wait for the others, since a step is that of one minibatch.
        """
        first = int(state.steps.min())
        waiting = np.flatnonzero(state.steps > first)
        held = [(c, FinishedChain.of(state, rngs, c)) for c in waiting]
        _, info = self._step(posterior, state, rngs, self._density(posterior, first))
        for c, chain in held:
            chain.restore(state, rngs, c)
        info.finished[waiting] = False
        return state, info

    def _step(
        self, posterior: GradientDensity, s: Any, rngs: Rngs, density: Any
    ) -> tuple[Any, Info]:
        """One step of every chain on a minibatch."""
        value, gradient = density.value_and_grad(s.z)
        self._measure_noise(s, gradient)
        used = self._step_sizes(s)
        s.value[:] = value
        s.gradient[:] = gradient
        self._refresh(s, rngs, used)
        error, failed, stats = self._advance(density, s, used)
        self._refresh(s, rngs, used)
        s.steps[:] += 1
        stats |= self._recover(posterior, s, failed, rngs)
        # the error grows with the cube of the step size, which tuning takes as that of the state
        share = used / s.step
        self._search_on(density, s, self.update(posterior, s, ~failed, error / share**3, share))
        return s, Info(~failed, stats, self.gradients)

    @property
    @override
    def gradients(self) -> int:
        return super().gradients + 1

    def _measure_noise(self, s: Any, gradient: Float[np.ndarray, "chains k"]) -> None:
        """Update the variance of gradients, by the minibatch before at the same point."""
        if not s.steps.any():
            return
        change = apply_transposed_factor(s.factor, gradient - s.gradient)
        variance = np.minimum(np.square(change).mean(1) / 2, 1e299)
        first = s.noise == 0
        s.noise[:] = np.where(first, variance, _FORGET * s.noise + (1 - _FORGET) * variance)

    def _step_sizes(self, s: Any) -> Float[np.ndarray, "chains"]:
        """Step sizes in use: also limited by the noise, and decaying after the warm-up."""
        d = s.z.shape[1]
        past = np.maximum(s.count - self.warmup, 0) / max(self.warmup, 1000)
        with np.errstate(divide="ignore"):
            angle = _ANGLE * (d - 1) / np.sqrt(d * s.noise)
            forgets = 2 * (d - 1) ** 2 / (d * s.noise * np.minimum(s.length, np.sqrt(d)))
        limited = np.minimum(super()._step_sizes(s), np.minimum(angle, forgets))
        return np.asarray(limited * (1 + past) ** -self.decay)

    def _refresh(self, s: Any, rngs: Rngs, used: Float[np.ndarray, "chains"]) -> None:
        """Half of the partial refreshment, without what the noise of gradients adds."""
        d = s.z.shape[1]
        share = np.minimum(used / s.length, _LONGEST)
        variance = np.expm1(share) / d - np.square(used) * s.noise / (2 * (d - 1) ** 2)
        noise = np.stack([rng.standard_normal(d) for rng in rngs])
        s.direction[:] += noise * np.sqrt(np.maximum(variance, 0.0))[:, None]
        unit_vectors(s.direction)
