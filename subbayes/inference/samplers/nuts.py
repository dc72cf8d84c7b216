r"""The no-U-turn sampler (Hoffman & Gelman 2014), multinomial (Betancourt 2017), over chains.

Hamiltonian trajectories in z double in length until they make a U-turn; a draw is chosen from a
trajectory with probabilities $\propto \exp(-H)$. The tree is walked leaf by leaf without recursion:
for the U-turn criterion of every subtree it is enough to keep one momentum and one momentum sum per
level (Phan, Pradhan & Jankowiak 2019, appendix A).

The state machine: one batched gradient is one leapfrog step of every chain, each in its own
trajectory. A chain whose trajectory ends draws its next momentum at once and does not wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Bool, Float, Int

from subbayes.inference.density import GradientDensity
from subbayes.inference.samplers import hamiltonian
from subbayes.inference.samplers.chains import Info, Rngs
from subbayes.inference.samplers.hamiltonian import HamiltonianKernel, Point
from subbayes.inference.samplers.shapes import ChainCounts, ChainPoints, ChainValues
from subbayes.inference.samplers.states import take
from subbayes.utils.checks import check_count

_LOG_HALF = np.log(0.5)
_UNIFORMS = 3  # per leapfrog step: within the subtree, between subtrees, the next direction


@dataclass(frozen=True)
class State(hamiltonian.State):
    """The current trajectory of each chain, and the subtree that is being added to it."""

    ends: Float[np.ndarray, "chains 2 columns"]  # of the trajectory; see hamiltonian.Point
    side: ChainCounts  # end that grows, 0 or 1
    depth: ChainCounts  # doublings done
    leaf: ChainCounts  # leaves of the subtree so far
    log_weight: ChainValues  # log of the summed weights of the trajectory
    p_sum: ChainPoints  # sum of its momenta
    proposal: Float[np.ndarray, "chains columns"]  # point chosen from it
    sub_log_weight: ChainValues  # the same of the subtree
    sub_p_sum: ChainPoints
    sub: Float[np.ndarray, "chains columns"]
    # Of the leaf at which an open subtree of each level began: its momentum p, and the sum of
    # momenta up to there minus p / 2.
    levels: Float[np.ndarray, "chains levels 2 k"]


@dataclass(frozen=True)
class Kernel(HamiltonianKernel):
    """The transition: `init` and `step` on a density with gradients."""

    max_depth: int

    name = "nuts"
    state_type = State

    def init(self, posterior: GradientDensity, z: ChainPoints, rngs: Rngs) -> State:
        """The state at start points z, each chain with a new momentum."""
        rows = _chains(len(z))
        s = self.start_state(State, posterior, z, rngs, levels=self.max_depth + 1)
        log_u = np.log(take(s, "uniforms", rngs, rows)[:, 0])
        _new_trajectories(s, rows, rngs)
        _new_subtrees(s, rows >= 0, log_u)
        return s

    def step(self, posterior: GradientDensity, state: State, rngs: Rngs) -> tuple[State, Info]:
        """One leapfrog step of every chain, in place."""
        s, c = state, Point.of(state.z.shape[1])
        chains = _chains(len(s.side))
        log_u = np.log(take(s, "uniforms", rngs, chains, _UNIFORMS))
        leaf = hamiltonian.leapfrog(
            posterior, s, s.ends[chains, s.side], np.where(s.side, s.step, -s.step)
        )
        s.ends[chains, s.side] = leaf
        _choose_leaf(s, leaf, leaf[:, c.log_weight], log_u[:, 0])
        diverged = leaf[:, c.log_weight] < -hamiltonian.DIVERGENCE
        stopped = diverged | _subtree_turned(s, leaf[:, c.p])
        np.add(s.leaf, 1, out=s.leaf)
        full = ~stopped & (s.leaf == 1 << s.depth)
        _merge_subtree(s, full, log_u[:, 1])
        ended = stopped | (full & (_turned(s, c) | (s.depth >= self.max_depth)))
        info = self._finish(posterior, s, ended, diverged, rngs)
        _new_subtrees(s, full | ended, log_u[:, 2])
        return s, info

    def _finish(
        self,
        posterior: GradientDensity,
        s: State,
        ended: np.ndarray,
        diverged: np.ndarray,
        rngs: Rngs,
    ) -> Info:
        """Store the draws of ended trajectories, adapt, and draw new momenta."""
        rows = ended.nonzero()[0]
        if not rows.size:
            return Info(ended, {})
        hamiltonian.set_current(s, rows, s.proposal[rows])
        energy = s.start_energy - s.proposal[:, Point.of(s.z.shape[1]).log_weight]
        stats = hamiltonian.stats(s, diverged, energy)
        stats["depth"] = s.depth.copy()
        self.adapt(posterior, s, rows)
        _new_trajectories(s, rows, rngs)
        return Info(ended, stats)


@cache
def _chains(n: int) -> Int[np.ndarray, "n"]:
    return np.arange(n)


def _new_trajectories(s: State, rows: np.ndarray, rngs: Rngs) -> None:
    """Start trajectories of a single point with new momenta."""
    point = hamiltonian.new_trajectories(s, rows, rngs)
    s.ends[rows] = point[:, None]
    s.proposal[rows] = point
    s.p_sum[rows] = point[:, Point.of(s.z.shape[1]).p]
    s.depth[rows] = 0
    s.log_weight[rows] = 0.0


def _new_subtrees(s: State, where: np.ndarray, log_u: np.ndarray) -> None:
    """Choose the end at which the trajectory grows next."""
    np.copyto(s.side, log_u < _LOG_HALF, where=where)
    s.leaf[where] = 0
    s.sub_log_weight[where] = -np.inf
    s.sub_p_sum[where] = 0.0


def _choose_leaf(s: State, leaf: np.ndarray, log_weight: np.ndarray, log_u: np.ndarray) -> None:
    """Take the new leaf as the subtree's draw with probability weight / summed weights."""
    total = np.logaddexp(s.sub_log_weight, log_weight, out=s.sub_log_weight)
    np.copyto(s.sub, leaf, where=(log_u + total < log_weight)[:, None])


def _subtree_turned(s: State, p: np.ndarray) -> np.ndarray:
    """Whether a subtree that ends at this leaf made a U-turn; even leaves end no subtree."""
    np.add(s.sub_p_sum, p, out=s.sub_p_sum)
    halfway, levels = s.sub_p_sum - 0.5 * p, max(1, int(s.leaf.max()).bit_length())
    opens, ends = _tables(max(levels, 10))
    chains, slot = _chains(len(p)), opens[s.leaf]
    s.levels[chains, slot, 0], s.levels[chains, slot, 1] = p, halfway
    here = ends[s.leaf, :levels]
    way = halfway[:, None] - s.levels[:, :levels, 1]
    along = np.minimum(
        np.einsum("clk,clk->cl", s.levels[:, :levels, 0], way), np.einsum("ck,clk->cl", p, way)
    )
    return np.asarray(((along <= 0) & here).any(1))


def _merge_subtree(s: State, full: np.ndarray, log_u: np.ndarray) -> None:
    """Add complete subtrees to their trajectories, with biased progressive sampling."""
    take = full & (log_u < s.sub_log_weight - s.log_weight)
    np.copyto(s.proposal, s.sub, where=take[:, None])
    np.copyto(s.log_weight, np.logaddexp(s.log_weight, s.sub_log_weight), where=full)
    np.add(s.p_sum, s.sub_p_sum, out=s.p_sum, where=full[:, None])
    np.add(s.depth, full, out=s.depth)


def _turned(s: State, c: Point) -> np.ndarray:
    """Whether the whole trajectory made a U-turn."""
    p = s.ends[:, :, c.p]
    way = s.p_sum - 0.5 * (p[:, 0] + p[:, 1])
    return np.asarray((np.einsum("cek,ck->ce", p, way) <= 0).any(1))


@cache
def _tables(bits: int) -> tuple[Int[np.ndarray, "leaves"], Bool[np.ndarray, "leaves levels"]]:
    """For each leaf, the level that it opens (-1: none) and the levels of subtrees that it ends."""
    leaf, level = np.arange(1 << bits), np.arange(bits)
    binary = leaf[:, None] >> level & 1
    ones, odd, trailing = binary.sum(1), binary[:, 0], np.cumprod(binary, 1).sum(1)
    top = ones - odd
    ends = (level > (top - trailing)[:, None]) & (level <= top[:, None]) & (odd[:, None] == 1)
    return np.where(odd, -1, ones), ends


@dataclass(frozen=True)
class NUTS(hamiltonian.HamiltonianSampler):
    """The no-U-turn sampler, multinomial, with adaptation in warm-up.

    See `HamiltonianSampler` for the other settings, the warm-up, the stats (here also "depth") and
    the errors.

    Attributes:
        max_depth: maximal number of doublings of a trajectory.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> NUTS().sample(posterior, draws=100, chains=2, warmup=100, progress=False).z.shape
        (2, 100, 2)
    """

    name = "nuts"
    label = "NUTS"
    max_depth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_depth", self.max_depth)

    def kernel(self, posterior: GradientDensity, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        return Kernel(**self.shared_settings(posterior, warmup), max_depth=self.max_depth)
