r"""Microcanonical Langevin Monte Carlo (Robnik and Seljak 2024), vectorised over chains.

A chain follows isokinetic dynamics, see `microcanonical`, and after each step its direction is
partially refreshed,

$$ u \leftarrow \frac{u + \nu \xi}{|u + \nu \xi|}, \qquad \xi \sim \mathcal{N}(0, I), \qquad
   \nu = \sqrt{(e^{2 \epsilon / L} - 1) / d} . $$

No step is rejected: every step is a draw, for two gradients with the minimal-norm integrator. The
draws have a bias that the variance of the energy error bounds, so they are an approximation; `MAMS`
is the exact version. A step of the kernel is a step of every chain.

Robnik and Seljak (2024), *Fluctuation without dissipation: Microcanonical Langevin Monte Carlo*;
Sommer, Robnik, Nozadze, Seljak and Rügamer (2025), *Microcanonical Langevin ensembles:
advancing the sampling of Bayesian neural networks*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.adaptation import apply_transposed_factor, preferred_metric
from subbayes.inference.samplers.chains import Density, Info, Rngs, Sampler
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.inference.samplers.laplace_start import Points
from subbayes.inference.samplers.mclmc_tuning import Tuner, Tuning
from subbayes.inference.samplers.microcanonical import (
    INTEGRATORS,
    Integrator,
    Moved,
    check_rank,
    gradients_per_step,
    isokinetic_step,
    partial_refreshment,
    unit_vectors,
)
from subbayes.inference.samplers.random_numbers import copy_state
from subbayes.inference.samplers.state_limits import MOST_EVALUATIONS, between, close, finite
from subbayes.utils.checks import check_choice, check_positive, fail

if TYPE_CHECKING:
    from subbayes.inference.samplers.chain_storage import Store

__all__ = ["MCLMC", "Kernel", "Metric", "State"]

Metric = Literal["prior", "diagonal", "dense"]

_HUGE = 1000.0  # energy error, and as much again for every 1000 coordinates
_SEARCHES = 40  # rounds of the search for a first step size
_MOST_HALVINGS = 30


@dataclass(frozen=True)
class State(Tuning):
    """The current point and direction of each chain, and where it started."""

    z: Float[np.ndarray, "chains k"]
    direction: Float[np.ndarray, "chains k"]  # of length 1
    value: Float[np.ndarray, "chains"]  # log density
    gradient: Float[np.ndarray, "chains k"]
    start: Float[np.ndarray, "chains k"]
    restarts: Int[np.ndarray, "chains"]  # after steps that failed


@dataclass(frozen=True)
class Kernel(Tuner):
    """The transition: `init` and `step` on a density with gradients."""

    integrator: Integrator

    name = "mclmc"
    statistics: ClassVar[dict[str, type]] = {
        "log_density": float,
        "energy_error": float,
        "step_size": float,
        "length": float,
        "evaluations": int,
        "restarts": int,
    }
    state_type = State

    def limits(self, posterior: Density, s: State, store: Store) -> dict[str, Any]:
        """Whether the arrays of a state can be those of a run, by name."""
        size = np.square(s.direction).sum(1, keepdims=True)
        return self.tuning_limits(posterior, s, store) | {
            "z": finite(s.z),
            "direction": finite(s.direction) & close(size, 1.0),
            "value": finite(s.value),
            "gradient": finite(s.gradient),
            "start": finite(s.start),
            "restarts": between(s.restarts, 0, min(store.evaluations, MOST_EVALUATIONS)),
        }

    def init(
        self, posterior: GradientDensity, z: Float[np.ndarray, "chains k"], rngs: Rngs
    ) -> State:
        """The state at start points z, each chain with a uniform direction."""
        start, fields = self.initial_fields(posterior, z, rngs)
        s = copy_state(
            State(
                **fields,
                z=start.z,
                direction=_directions(rngs, z.shape[1]),
                value=start.value,
                gradient=start.gradient,
                start=start.z,
                restarts=np.zeros(len(z), dtype=np.int64),
            )
        )
        everyone = np.arange(len(z))
        self.set_step(s, everyone, s.step)
        if self.warmup and self.step_size is None:
            self._search_step(posterior, s)
        return s

    def step(self, posterior: GradientDensity, state: State, rngs: Rngs) -> tuple[State, Info]:
        """One step of every chain, in place; a chain whose step fails restarts without a draw."""
        s = state
        new = self._move(posterior, s)
        failed = self._failed(new, s.z.shape[1])
        restarted = bool(failed.any())
        stats = {
            "log_density": new.value,
            "energy_error": new.error,
            "step_size": s.step.copy(),
            "length": s.length.copy(),
            "evaluations": np.full(len(failed), gradients_per_step(self.integrator)),
        }
        keep = np.flatnonzero(~failed) if restarted else slice(None)
        s.z[keep], s.direction[keep] = new.z[keep], new.u[keep]
        s.value[keep], s.gradient[keep] = new.value[keep], new.gradient[keep]
        partial_refreshment(s.direction, _normals(rngs, s.z.shape[1]), s.step / s.length)
        if restarted:
            self._restart(posterior, s, failed, rngs)
        stats["restarts"] = s.restarts.copy()
        self.update(posterior, s, ~failed, new.error)
        return s, Info(~failed, stats, gradients_per_step(self.integrator))

    def _move(self, posterior: GradientDensity, s: State) -> Moved:
        h = apply_transposed_factor(s.factor, s.gradient)
        with np.errstate(over="ignore", invalid="ignore"):
            return isokinetic_step(
                posterior, s.z, s.direction, s.value, h, s.factor, s.step, self.integrator
            )

    def _failed(self, new: Moved, k: int) -> Bool[np.ndarray, "chains"]:
        """Chains with an energy error that is NaN or huge."""
        return np.asarray(~(np.abs(new.error) <= _HUGE + k))

    def _search_step(self, posterior: GradientDensity, s: State) -> None:
        """Change first step sizes until the energy error is near its target."""
        k, searching = s.z.shape[1], np.ones(len(s.z), dtype=bool)
        for _ in range(_SEARCHES):
            new = self._move(posterior, s)
            with np.errstate(over="ignore", invalid="ignore"):
                square = np.square(new.error) / (k * self.target(s.count))
            square = np.where(self._failed(new, k), np.inf, np.maximum(square, 1e-8))
            searching &= (square > 10.0) | (square < 1e-3)
            if not searching.any():
                break
            rows = searching.nonzero()[0]
            factor = np.clip(square[rows] ** (-1 / 6), 0.1, 2.0)
            self.set_step(s, rows, s.step[rows] * factor)

    def _restart(
        self, posterior: GradientDensity, s: State, failed: Bool[np.ndarray, "chains"], rngs: Rngs
    ) -> None:
        """Return chains to their start points, with new directions and half the step size."""
        rows = failed.nonzero()[0]
        again = Points.at(posterior, np.where(failed[:, None], s.start, s.z))
        s.z[rows], s.value[rows] = again.z[rows], again.value[rows]
        s.gradient[rows] = again.gradient[rows]
        s.direction[rows] = _directions([rngs[c] for c in rows], s.z.shape[1])
        s.restarts[rows] += 1
        self.halve_step(s, failed & (s.restarts <= _MOST_HALVINGS))


def _normals(rngs: Rngs, k: int) -> Float[np.ndarray, "chains k"]:
    noise = np.empty((len(rngs), k))
    for rng, row in zip(rngs, noise, strict=True):
        rng.standard_normal(out=row)
    return noise


def _directions(rngs: Rngs, k: int) -> Float[np.ndarray, "chains k"]:
    return unit_vectors(_normals(rngs, k))


@dataclass(frozen=True)
class MCLMC(Sampler):
    r"""Microcanonical Langevin Monte Carlo without Metropolis steps, tuned in warm-up.

    A draw is one step, for two gradients, so that neighbouring draws are close: thin them
    (`thin=10`). The default warm-up is half as long as the steps kept, at least 2000. The draws
    have the stats "log_density", "log_likelihood" (at temperature 1), "energy_error", "step_size",
    "length", "evaluations" (gradients of the step) and "restarts" (of the chain so far).

    The variance of the energy error of a step per coordinate meets a target $\tau$, which bounds
    the bias: with $\tau = 5 \cdot 10^{-4}$ it is a few per cent of the posterior's variances. For
    networks, Sommer et al. (2025) let the target fall from 0.5 to 0.1 over the warm-up,
    `MCLMC(target=(0.5, 0.1), metric="prior")`.

    A chain whose energy error is NaN or huge restarts from its start point with half the step size.
    Densities with jumps or with regions of zero density need `MAMS`, NUTS or slice sampling.

    Attributes:
        target: of the variance of the energy error per coordinate, or its values at the start and
            at the end of the warm-up, between which it changes linearly.
        length: L, the distance in the coordinates of the mass matrix over which directions are
            forgotten; "scale" for $\sqrt{d}$; "autocorrelation" for 0.4 times the autocorrelation
            length of the last fifth of the warm-up.
        metric: "diagonal" or "dense" mass matrix, adapted in warm-up, or "prior" for the prior's
            scale; None takes a dense one up to 50 coordinates and a diagonal one above.
        step_size: the first step size, in units of the mass matrix; None finds one.
        integrator: "minimal-norm" (two gradients a step) or "leapfrog" (one).

    Raises:
        InputError: one coordinate, start points of zero density or with gradients that are not
            finite, a density without gradients, or a checkpoint of another run.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> draws = MCLMC().sample(posterior, draws=20, chains=2, progress=False)
        >>> draws.z.shape, draws.validity
        ((2, 20, 2), 'approximation')
    """

    name = "mclmc"
    validity = "approximation"
    target: float | tuple[float, float] = 5e-4
    length: float | Literal["scale", "autocorrelation"] = "autocorrelation"
    metric: Metric | None = None
    step_size: float | None = None
    integrator: Integrator = "minimal-norm"

    def __post_init__(self) -> None:
        if isinstance(self.target, (tuple, list)):
            if len(self.target) != 2:
                fail("target", "a number, or two of them", f"{len(self.target)} numbers")
            for value in self.target:
                check_positive("target", value)
        else:
            check_positive("target", self.target)
        if isinstance(self.length, str):
            check_choice("length", self.length, ("scale", "autocorrelation"))
        else:
            check_positive("length", self.length)
        check_choice("metric", self.metric, (None, "prior", "diagonal", "dense"))
        if self.step_size is not None:
            check_positive("step_size", self.step_size)
        check_choice("integrator", self.integrator, INTEGRATORS)

    def check(self, rank: int | None = None) -> None:
        """Check that there are at least 2 coordinates."""
        check_rank(rank, self.name)

    def default_warmup(self, sampling: Sampling) -> int:
        """Half of the steps kept, at least 2000."""
        return max(sampling.draws * sampling.thin // 2, 2000)

    def kernel(self, posterior: GradientDensity, warmup: int) -> Kernel:
        """The transition, which is tuned in the warm-up."""
        check_rank(posterior.rank, self.name)
        target = self.target if isinstance(self.target, (tuple, list)) else (self.target,) * 2
        return Kernel(
            warmup=warmup,
            metric=self.metric or preferred_metric(posterior.rank),
            first_target=float(target[0]),
            last_target=float(target[1]),
            step_size=self.step_size,
            length=None if isinstance(self.length, str) else float(self.length),
            traced=self.length == "autocorrelation",
            integrator=self.integrator,
        )

    def run(self, posterior: GradientDensity, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        draws = super().run(posterior, sampling)
        prior = posterior.prior.log_prob(draws.z)
        draws.stats["log_likelihood"] = posterior.temperature * (draws.stats["log_density"] - prior)
        return replace(draws, validity=self.validity)
