r"""The no-U-turn sampler (Hoffman & Gelman 2014), multinomial (Betancourt 2017), over chains.

Hamiltonian trajectories in z double in length until they turn back; a draw is chosen from a
trajectory with probabilities $\propto \exp(-H)$. The tree is walked leaf by leaf without recursion:
for the U-turn criterion of every subtree it is enough to keep one momentum and one momentum sum per
level (Phan, Pradhan & Jankowiak 2019, appendix A).

The state machine: one batched gradient is one leapfrog step of every chain, each in its own
trajectory. A chain whose trajectory ends draws its next momentum at once; none waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from subbayes.checks import check_count
from subbayes.draws import Draws
from subbayes.inference import hamiltonian
from subbayes.inference.adaptation import Metric, preferred
from subbayes.inference.chains import Info, Rngs, run
from subbayes.inference.hamiltonian import GradientDensity

__all__ = ["NUTS", "State", "nuts"]

_UNIFORMS = 3  # per leapfrog step: within the subtree, between subtrees, the next direction


@dataclass(frozen=True)
class State(hamiltonian.State):
    """A draw under way in each chain: the trajectory, and the subtree that is being added to it.

    Attributes:
        ends_z: positions of the trajectory's two ends, shape (chains, 2, k).
        ends_r: their momenta.
        ends_g: their gradients.
        side: the end that grows, 0 or 1, shape (chains,).
        depth: doublings done, shape (chains,).
        leaf: leaves of the new subtree so far, shape (chains,).
        log_weight: log of the summed weights of the trajectory, shape (chains,).
        r_sum: sum of its momenta, shape (chains, k).
        proposal_z: draw chosen from the trajectory so far.
        proposal_value: its log density.
        proposal_g: its gradient.
        proposal_energy: its energy.
        sub_log_weight: log of the summed weights of the new subtree.
        sub_r_sum: sum of its momenta.
        sub_z: draw chosen from the new subtree.
        sub_value: its log density.
        sub_g: its gradient.
        sub_energy: its energy.
        levels_r: momentum at which an open subtree of each level began, (chains, depth, k).
        levels_sum: sum of momenta up to there, itself included, (chains, depth, k).
    """

    ends_z: Float[np.ndarray, "chains 2 k"]
    ends_r: Float[np.ndarray, "chains 2 k"]
    ends_g: Float[np.ndarray, "chains 2 k"]
    side: Int[np.ndarray, "chains"]
    depth: Int[np.ndarray, "chains"]
    leaf: Int[np.ndarray, "chains"]
    log_weight: Float[np.ndarray, "chains"]
    r_sum: Float[np.ndarray, "chains k"]
    proposal_z: Float[np.ndarray, "chains k"]
    proposal_value: Float[np.ndarray, "chains"]
    proposal_g: Float[np.ndarray, "chains k"]
    proposal_energy: Float[np.ndarray, "chains"]
    sub_log_weight: Float[np.ndarray, "chains"]
    sub_r_sum: Float[np.ndarray, "chains k"]
    sub_z: Float[np.ndarray, "chains k"]
    sub_value: Float[np.ndarray, "chains"]
    sub_g: Float[np.ndarray, "chains k"]
    sub_energy: Float[np.ndarray, "chains"]
    levels_r: Float[np.ndarray, "chains levels k"]
    levels_sum: Float[np.ndarray, "chains levels k"]


@dataclass(frozen=True)
class NUTS(hamiltonian.Settings):
    """The kernel: `init` and `step` on a density with gradients.

    Attributes:
        max_depth: doublings at most; a trajectory has up to 2^max_depth - 1 leapfrog steps.
    """

    max_depth: int = 10

    name = "nuts"
    state_type = State

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_depth", self.max_depth)

    def init(
        self, posterior: GradientDensity, z: Float[np.ndarray, "chains k"], rngs: Rngs
    ) -> State:
        """The state at start points z, each chain with a fresh momentum."""
        chains, k = z.shape
        fields = hamiltonian.begin(self, posterior, z)
        none = np.zeros(chains, dtype=np.int64)
        rows, ends = np.zeros((chains, k)), np.zeros((chains, 2, k))
        levels, blank = np.zeros((chains, self.max_depth, k)), np.zeros(chains)
        s = hamiltonian.copied(State(
            **fields, ends_z=ends, ends_r=ends.copy(), ends_g=ends.copy(), side=none,
            depth=none.copy(), leaf=none.copy(), log_weight=blank, r_sum=rows,
            proposal_z=rows.copy(), proposal_value=blank.copy(), proposal_g=rows.copy(),
            proposal_energy=blank.copy(), sub_log_weight=blank.copy(), sub_r_sum=rows.copy(),
            sub_z=rows.copy(), sub_value=blank.copy(), sub_g=rows.copy(),
            sub_energy=blank.copy(), levels_r=levels, levels_sum=levels.copy()))
        u = hamiltonian.uniforms(s, rngs, 1)
        _new_trajectories(s, np.arange(chains), rngs, u[:, 0])
        return s

    def step(self, posterior: GradientDensity, state: State, rngs: Rngs) -> tuple[State, Info]:
        """One leapfrog step of every chain, in place."""
        s = state
        u = hamiltonian.uniforms(s, rngs, _UNIFORMS)
        r, log_weight = _leap(posterior, s)
        diverged = log_weight < -hamiltonian.DIVERGENCE
        _choose_leaf(s, r, log_weight, np.log(u[:, 0]))
        stopped = diverged | _turned_inside(s, r)
        s.leaf[:] += 1
        full = (~stopped & (s.leaf == 1 << s.depth)).nonzero()[0]
        ended = stopped
        if full.size:
            _join(s, full, np.log(u[full, 1]))
            ended[full] = (s.depth[full] >= self.max_depth) | _turned(s, full)
            going_on = full[~ended[full]]
            _new_subtrees(s, going_on, u[going_on, 2])
        return s, self._finish(posterior, s, ended.nonzero()[0], diverged, rngs, u[:, 2])

    def _finish(
        self, posterior: GradientDensity, s: State, rows: np.ndarray, diverged: np.ndarray,
        rngs: Rngs, u: np.ndarray,
    ) -> Info:
        """End the trajectories of `rows`: their draws, adaptation and new momenta."""
        finished = np.zeros(len(diverged), dtype=bool)
        if not rows.size:
            return Info(finished, {})
        finished[rows] = True
        s.z[rows] = s.proposal_z[rows]
        s.value[rows] = s.proposal_value[rows]
        s.gradient[rows] = s.proposal_g[rows]
        stats = hamiltonian.stats(posterior, s, diverged, s.proposal_energy)
        stats["depth"] = s.depth.copy()
        hamiltonian.adapt(self, posterior, s, rows)
        _new_trajectories(s, rows, rngs, u[rows])
        return Info(finished, stats)


def _new_trajectories(s: State, rows: np.ndarray, rngs: Rngs, u: np.ndarray) -> None:
    """Fresh momenta: trajectories of a single point."""
    r = hamiltonian.refresh(s, rows, rngs)
    for ends, values in ((s.ends_z, s.z), (s.ends_g, s.gradient)):
        ends[rows] = values[rows, None]
    s.ends_r[rows] = r[:, None]
    s.r_sum[rows] = r
    s.depth[rows] = 0
    s.log_weight[rows] = 0.0
    s.proposal_z[rows] = s.z[rows]
    s.proposal_value[rows] = s.value[rows]
    s.proposal_g[rows] = s.gradient[rows]
    s.proposal_energy[rows] = s.start_energy[rows]
    _new_subtrees(s, rows, u)


def _new_subtrees(s: State, rows: np.ndarray, u: np.ndarray) -> None:
    """Choose the end that grows next."""
    s.side[rows] = u < 0.5
    s.leaf[rows] = 0
    s.sub_log_weight[rows] = -np.inf
    s.sub_r_sum[rows] = 0.0


def _leap(posterior: GradientDensity, s: State) -> tuple[np.ndarray, np.ndarray]:
    """Move the growing ends by one leapfrog step: their momenta, and log weights exp(H0 - H)."""
    chains = np.arange(len(s.side))
    at = 2 * chains + s.side
    z, r, g = (ends.reshape(-1, ends.shape[-1])[at] for ends in (s.ends_z, s.ends_r, s.ends_g))
    z, r, value, g, log_weight = hamiltonian.leapfrog(
        posterior, s, z, r, g, np.where(s.side, s.step, -s.step))
    s.ends_z[chains, s.side], s.ends_r[chains, s.side] = z, r
    s.ends_g[chains, s.side] = g
    s.leaf_value[:] = value
    return r, log_weight


def _choose_leaf(s: State, r: np.ndarray, log_weight: np.ndarray, log_u: np.ndarray) -> None:
    """Take the new leaf as the subtree's draw with probability weight / summed weights."""
    total = np.logaddexp(s.sub_log_weight, log_weight)
    take = (log_u < log_weight - np.where(np.isneginf(total), 0.0, total)).nonzero()[0]
    side = s.side[take]
    s.sub_z[take] = s.ends_z[take, side]
    s.sub_g[take] = s.ends_g[take, side]
    s.sub_value[take] = s.leaf_value[take]
    s.sub_energy[take] = s.start_energy[take] - log_weight[take]
    s.sub_log_weight[:] = total
    s.sub_r_sum[:] += r


def _turned_inside(s: State, r: np.ndarray) -> np.ndarray:
    """Whether a subtree that ends at this leaf turned; even leaves open subtrees instead."""
    top = _ONES[s.leaf >> 1]
    opening = (s.leaf & 1 == 0).nonzero()[0]
    s.levels_r[opening, top[opening]] = r[opening]
    s.levels_sum[opening, top[opening]] = s.sub_r_sum[opening]
    turned = np.zeros(len(top), dtype=bool)
    closing = (s.leaf & 1).nonzero()[0]
    if not closing.size:
        return turned
    top = top[closing]
    bottom = top - _TRAILING[s.leaf[closing]] + 1
    levels = np.arange(top.max() + 1)
    first, last = s.levels_r[closing, :len(levels)], r[closing, None]
    between = s.sub_r_sum[closing, None] - s.levels_sum[closing, :len(levels)] + first
    back = _against(s.inverse_mass[closing], first, last, between)
    turned[closing] = (back & (levels >= bottom[:, None]) & (levels <= top[:, None])).any(1)
    return turned


def _turned(s: State, rows: np.ndarray) -> np.ndarray:
    """Whether the whole trajectory turned."""
    ends = s.ends_r[rows]
    return _against(s.inverse_mass[rows], ends[:, :1], ends[:, 1:], s.r_sum[rows, None])[:, 0]


def _against(
    inverse_mass: np.ndarray, first: np.ndarray, last: np.ndarray, total: np.ndarray
) -> np.ndarray:
    """Whether the velocity at either end points against the way between, (chains, levels)."""
    way = total - 0.5 * (first + last)
    moved = inverse_mass[:, None] * way if inverse_mass.ndim == 2 else way @ inverse_mass
    return ((first * moved).sum(-1) <= 0) | ((last * moved).sum(-1) <= 0)


def _join(s: State, rows: np.ndarray, log_u: np.ndarray) -> None:
    """Add finished subtrees to their trajectories; the newer half is favoured."""
    take = rows[log_u < s.sub_log_weight[rows] - s.log_weight[rows]]
    s.proposal_z[take] = s.sub_z[take]
    s.proposal_g[take] = s.sub_g[take]
    s.proposal_value[take] = s.sub_value[take]
    s.proposal_energy[take] = s.sub_energy[take]
    s.log_weight[rows] = np.logaddexp(s.log_weight[rows], s.sub_log_weight[rows])
    s.r_sum[rows] += s.sub_r_sum[rows]
    s.depth[rows] += 1


class _Bits:
    """A table of a function of whole numbers that grows with what is asked of it."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.table = np.array([function(n) for n in range(1024)])

    def __getitem__(self, n: np.ndarray) -> np.ndarray:
        while n.max(initial=0) >= len(self.table):
            size = len(self.table)
            more = [self.function(i) for i in range(size, 2 * size)]
            self.table = np.concatenate([self.table, more])
        return np.asarray(self.table[n])


_ONES = _Bits(lambda n: n.bit_count())
_TRAILING = _Bits(lambda n: ((n + 1) & ~n).bit_length() - 1)


def nuts(
    posterior: GradientDensity,
    *,
    draws: int = 1000,
    chains: int = 4,
    warmup: int | None = None,
    thin: int = 1,
    seed: int = 0,
    initial: str | np.ndarray = "prior",
    target_acceptance: float = 0.8,
    max_depth: int = 10,
    metric: Metric | None = None,
    step_size: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    progress: bool | None = None,
) -> Draws:
    """Sample a posterior by the no-U-turn sampler, multinomial, with adaptation in warm-up.

    Args:
        posterior: the density, with `value_and_grad`.
        draws: draws to keep per chain.
        chains: number of chains, evaluated together.
        warmup: draws per chain to adapt in and drop; by default as many as are kept, at least
            200.
        thin: keep every `thin`-th draw.
        seed: seed; each chain has its own stream.
        initial: "prior", "shift" (z = 0), or start points of shape (chains, k).
        target_acceptance: mean acceptance that the step size aims at; higher is slower and safer.
        max_depth: doublings of a trajectory at most.
        metric: "diagonal" or "dense" mass matrix; None takes a dense one up to 50 coordinates.
        step_size: the first step size, in units of the prior's scale.
        checkpoint: directory to save the run in and resume it from, bit for bit.
        checkpoint_seconds: time between checkpoints.
        progress: show a bar; None shows it on a terminal.

    Returns:
        Draws with stats "log_density", "log_likelihood" (at temperature 1), "energy",
        "acceptance", "step_size", "depth", "evaluations" and "divergent" per draw.

    Raises:
        InputError: start points of zero density or with gradients that are not finite, a singular
            mass matrix, a density without gradients, or a checkpoint of another run.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.Gaussian(noise=1.0), data, space)
        >>> nuts(posterior, draws=100, chains=2, warmup=100, progress=False).z.shape
        (2, 100, 2)
    """
    warmup = max(draws * thin, 200) if warmup is None else warmup
    kernel = NUTS(warmup=warmup, target_acceptance=target_acceptance,
                  metric=metric or preferred(posterior.rank), step_size=step_size,
                  max_depth=max_depth)
    return run(kernel, posterior, draws=draws, chains=chains, warmup=warmup, thin=thin, seed=seed,
               initial=initial, checkpoint=checkpoint, checkpoint_seconds=checkpoint_seconds,
               progress=progress)
