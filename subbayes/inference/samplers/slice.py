r"""Slice sampling along lines, with stepping out and shrinkage (Neal 2003), vectorised over chains.

Along a line $z + t d$ through the current point: draw a height
$\log h = \log p_T(z) + \log u$; place an interval of length 1 around $t = 0$ at random and step
its ends out, one length at a time, until both are below $h$ (Neal 2003, figure 3); then draw $t$
from the interval, shrinking it towards 0, until $\log p_T(z + td) \ge \log h$ (figure 5). A draw
is a sweep over k lines: the coordinates, or the columns of the Cholesky factor of the posterior's
covariance, along which a Gaussian posterior is independent.

The state machine: one batched evaluation tries one point for every chain, an end of its interval
or a point inside. No chain waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from subbayes.inference.configuration import Sampling
from subbayes.inference.density import Density, prior_scale
from subbayes.inference.samplers import adaptation
from subbayes.inference.samplers.adaptation import Adaptation, Metric, apply_factor
from subbayes.inference.samplers.chains import Info, Rngs, Sampler
from subbayes.inference.samplers.shapes import ChainCounts, ChainPoints, ChainValues, SomeChains
from subbayes.inference.samplers.states import blank_state, take
from subbayes.priors import reject_undefined
from subbayes.utils.checks import check_choice

_AHEAD = 96
_LEFT, _RIGHT, _INSIDE = 0, 1, 2
_STEPS = 100  # Neal's m: maximal number of lengths of an interval
_WIDTH = 2.3  # standard deviations: the adapted length on a Gaussian
_COLLAPSED = 1e-13


@dataclass(frozen=True)
class State(Adaptation):
    """The point of each chain, and the interval it searches on the line z + t d through it."""

    z: ChainPoints
    value: ChainValues  # log density at z
    log_likelihood: ChainValues  # at temperature 1
    direction: ChainPoints  # d
    coordinate: ChainCounts  # number of the line in the sweep
    phase: ChainCounts  # _LEFT and _RIGHT step out, _INSIDE shrinks
    threshold: ChainValues  # log height of the slice
    trial: ChainValues  # t to try next
    low: ChainValues  # interval of t
    high: ChainValues
    left: ChainCounts  # steps that the left end may still take
    right: ChainCounts
    expansions: ChainCounts  # steps out in the sweep so far
    contractions: ChainCounts  # points rejected in the sweep so far
    evaluations: ChainCounts  # in the sweep so far
    uniforms: Float[np.ndarray, "chains ahead"]  # drawn ahead from each chain's own stream
    n_uniforms: ChainCounts  # used so far


@dataclass(frozen=True)
class Kernel:
    """The transition: `init` and `step` on any density."""

    warmup: int  # draws per chain in which lengths and directions adapt
    metric: Metric = "diagonal"  # "dense": along uncorrelated directions

    name = "slice"
    state_type = State

    def init(self, posterior: Density, z: ChainPoints, rngs: Rngs) -> State:
        """The state at start points z, each chain on its first line."""
        chains, k = z.shape
        axes = adaptation.matrix_shape(self.metric, k)
        s = blank_state(State, chains=chains, k=k, kk=axes, ahead=_AHEAD)
        adaptation.begin(s, prior_scale(posterior), None)
        s.z[:], s.n_uniforms[:] = z, _AHEAD
        s.value[:], s.log_likelihood[:] = _evaluate(posterior, z)
        rows = np.arange(chains)
        u = take(s, "uniforms", rngs, rows, 4)
        _new_line(s, rows, u)
        _next_trial(s, u[:, 3])
        return s

    def step(self, posterior: Density, state: State, rngs: Rngs) -> tuple[State, Info]:
        """Try one point of every chain's line, in place."""
        s = state
        u = take(s, "uniforms", rngs, np.arange(len(s.z)), 4)
        left, right, inside = (s.phase == phase for phase in (_LEFT, _RIGHT, _INSIDE))
        point = s.z + s.trial[:, None] * s.direction
        value, log_likelihood = _evaluate(posterior, point)
        within = value >= s.threshold
        s.evaluations[:] += 1
        _step_out(s, left, within, s.low, s.left, -1)
        _step_out(s, right, within, s.high, s.right, 1)
        accepted = inside & within
        s.z[accepted] = point[accepted]
        s.value[accepted] = value[accepted]
        s.log_likelihood[accepted] = log_likelihood[accepted]
        _shrink(s, inside & ~within)
        rows = (accepted | (inside & (s.high - s.low < _COLLAPSED))).nonzero()[0]
        s.coordinate[rows] += 1
        finished = s.coordinate == s.z.shape[1]
        info = Info(
            finished,
            {
                "log_likelihood": s.log_likelihood.copy(),
                "log_density": s.value.copy(),
                "evaluations": s.evaluations.copy(),
            }
            if finished.any()
            else {},
        )
        self._end_sweep(posterior, s, finished.nonzero()[0])
        _new_line(s, rows, u[rows])
        _next_trial(s, u[:, 3])
        return s, info

    def _end_sweep(self, posterior: Density, s: State, rows: SomeChains) -> None:
        """Adapt the interval lengths until expansions are as frequent as contractions."""
        if not rows.size:
            return
        out, back = s.expansions[rows], s.contractions[rows]
        share = np.where(out + back > 0, out / np.maximum(out + back, 1), 0.5)
        adaptation.update(posterior, s, rows, share, target=0.5, warmup=self.warmup)
        for counter in (s.coordinate, s.expansions, s.contractions, s.evaluations):
            counter[rows] = 0


def _evaluate(posterior: Density, z: ChainPoints) -> tuple[ChainValues, ChainValues]:
    """Tempered log density and log-likelihood, minus infinity where they are undefined."""
    log_likelihood = reject_undefined(posterior.log_likelihood(z))
    value = log_likelihood / posterior.temperature + posterior.prior.log_prob(z)
    return reject_undefined(value), log_likelihood


def _step_out(
    s: State, chosen: np.ndarray, within: np.ndarray, end: np.ndarray, budget: np.ndarray, by: int
) -> None:
    """Move an end (`low` or `high`) on the slice by one length; otherwise go to the next phase."""
    onward = chosen & within
    end[onward] += by
    budget[onward] -= 1
    s.expansions[onward] += 1
    s.phase[chosen & (~within | (budget == 0))] += 1


def _shrink(s: State, refused: np.ndarray) -> None:
    """Shrink the interval to a rejected point."""
    s.low[:] = np.where(refused & (s.trial < 0), s.trial, s.low)
    s.high[:] = np.where(refused & (s.trial >= 0), s.trial, s.high)
    s.contractions[refused] += 1


def _directions(s: State, rows: SomeChains, coordinate: SomeChains) -> Float[np.ndarray, "c k"]:
    width = _WIDTH * s.z.shape[1] ** 0.25 * s.step[rows]
    axis = np.zeros((len(rows), s.z.shape[1]))
    axis[np.arange(len(rows)), coordinate] = 1.0
    return np.asarray(width[:, None] * apply_factor(s.factor[rows], axis))


def _new_line(s: State, rows: SomeChains, u: Float[np.ndarray, "c 4"]) -> None:
    """Draw a line, height and interval, and split the step budget at random (Neal's J, K)."""
    if not rows.size:
        return
    s.direction[rows] = _directions(s, rows, s.coordinate[rows])
    s.threshold[rows] = s.value[rows] + np.log1p(-u[:, 0])
    s.low[rows], s.high[rows] = -u[:, 1], 1 - u[:, 1]
    s.left[rows] = np.floor(_STEPS * u[:, 2]).astype(np.int64)
    s.right[rows] = _STEPS - 1 - s.left[rows]
    s.phase[rows] = np.where(s.left[rows] > 0, _LEFT, _RIGHT)


def _next_trial(s: State, u: ChainValues) -> None:
    s.phase[(s.phase == _RIGHT) & (s.right == 0)] = _INSIDE
    s.trial[:] = np.choose(s.phase, [s.low, s.high, s.low + u * (s.high - s.low)])


@dataclass(frozen=True)
class SliceSampling(Sampler):
    """Slice sampling with stepping out and shrinkage (Neal 2003); a draw is a sweep over k lines.

    The default warm-up is half as long as the chain after it, `draws * thin // 2`, at least 100.
    The draws have the stats "log_likelihood" (at temperature 1), "log_density" and "evaluations".

    Attributes:
        metric: "diagonal" moves along the coordinates; "dense" along directions in which the
            draws of the warm-up are uncorrelated.

    Raises:
        InputError: start points of zero density, a singular covariance (dense), or a checkpoint
            of another run.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> SliceSampling().sample(posterior, draws=50, chains=4, progress=False).z.shape
        (4, 50, 2)
    """

    name = "slice"
    any_density = True
    metric: Metric = "diagonal"

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, ("diagonal", "dense"))

    def default_warmup(self, sampling: Sampling) -> int:
        """`draws * thin // 2`, at least 100."""
        return max(sampling.draws * sampling.thin // 2, 100)

    def kernel(self, posterior: Density, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        return Kernel(warmup, self.metric)
