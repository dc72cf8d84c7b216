r"""Independence Metropolis-Hastings (Tierney 1994), all at once.

The proposals do not depend on the state of a chain: the target is evaluated at all of them in a few
batched calls, and a chain moves from z to z' with probability $\min(1, w(z') / w(z))$,
w = target / q. Where w is bounded, chains are uniformly ergodic; see
`subbayes.regression.integrals.proposals`, which are fixed before the chains begin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.chains import chain_generators
from subbayes.regression.integrals.proposals import Distribution, LogDensityFunction
from subbayes.utils.types import RowNumbers

_LEAST_EFFICIENCY = 0.5  # of the pilot's weights, for one proposal a draw
_ENOUGH = 0.7  # efficiency for one proposal a draw where the target is cheap
_PATIENT_SHARE = 5.0  # proposals for each that counts, whose weights have long tails there
_WARMUP = 50
_HOPE = 0.5  # share of the effective draws, by the largest number of proposals, below which to stop


def proposals_per_draw(efficiency: float, *, cheap: bool, patient: bool = False) -> int:
    """How many proposals chains with proposals of an efficiency begin with, for each draw.

    Args:
        efficiency: of the pilot's weights.
        cheap: the target is cheap, so that an efficiency below 0.7 has several proposals.
        patient: weights have long tails: five times as many.

    Example:
        >>> proposals_per_draw(0.6, cheap=False), proposals_per_draw(0.1, cheap=True)
        (1, 10)
    """
    if cheap and efficiency < _ENOUGH:
        return math.ceil((_PATIENT_SHARE if patient else 1) / efficiency)
    return math.ceil(_LEAST_EFFICIENCY / efficiency)


def independence_chains(
    target: LogDensityFunction,
    proposals: Distribution,
    sampling: Sampling,
    repeats: int,
    efficiency: float,
    numbers: Callable[[], Sequence[np.ndarray]] = tuple,
    into: Sequence[np.ndarray] = (),
    block: int | None = None,
) -> Draws:
    """Draws of chains with independent proposals.

    Each chain has its own random numbers, so that its draws do not depend on the others. The target
    is called once, with the proposals of all chains, chain by chain, or with blocks of them. It may
    be an unbiased estimate of the density from random numbers of its own (Andrieu and Roberts 2009,
    "The pseudo-marginal approach for efficient Monte Carlo computations").

    Args:
        target: log density up to a constant.
        proposals: the distribution of proposals.
        sampling: draws, chains, thinning, seed and warm-up, by default 50.
        repeats: number of proposals for each draw.
        efficiency: of the proposals, which is reported.
        numbers: what else belongs to the points of the last call of the target, such as coordinates
            that it integrates out, which may be too large to keep for all: arrays (points, ...).
        into: arrays (chains, draws, ...) to which those of the draws are written.
        block: proposals of each chain that are evaluated at once; by default all.
    """
    started = time.perf_counter()
    warmup, thin = _WARMUP if sampling.warmup is None else sampling.warmup, sampling.thin * repeats
    n = warmup + sampling.draws * thin
    rngs = chain_generators(sampling.seed, sampling.chains)
    drawn = [proposals.draw(n, rng) for rng in rngs]
    log_u = np.log([rng.random(n) for rng in rngs])
    z, log_q = (np.stack(part) for part in zip(*drawn, strict=True))
    value, kept = np.empty(z.shape[:2]), np.empty(z.shape[:2], dtype=np.int64)
    states = [(0, -math.inf)] * len(z)
    times = np.arange(warmup + thin - 1, n, thin)  # of the draws
    rows, last = np.arange(len(z))[:, None], [np.zeros_like(array[:, :1]) for array in into]
    for start in range(0, n, block or n):
        now = slice(start, min(start + (block or n), n))
        value[:, now] = target(np.concatenate(z[:, now])).reshape(len(z), -1)
        log_w = np.where(np.isnan(value[:, now]), -np.inf, value[:, now]) - log_q[:, now]
        for chain, state in enumerate(states):
            kept[chain, now], states[chain] = _accepted(
                log_w[chain], log_u[chain, now], start, state
            )
        which = np.flatnonzero((times >= now.start) & (times < now.stop))
        # the first place is that of a proposal of an earlier block
        places = np.maximum(kept[:, [*times[which], now.stop - 1]] - start + 1, 0)
        for i, (array, of_block) in enumerate(zip(into, numbers(), strict=True)):
            with_last = np.concatenate([last[i], of_block.reshape(len(z), -1, *array.shape[2:])], 1)
            array[:, which] = with_last[rows, places[:, :-1]]
            last[i] = with_last[rows, places[:, -1:]]
    kept = kept[:, times]
    moved = np.diff(kept, axis=1, prepend=-1) != 0
    return Draws(
        z[rows, kept],
        {
            "log_density": value[rows, kept],
            "acceptance": moved.astype(np.float64),
            "evaluations": np.full(kept.shape, thin),
        },
        {
            "seed": sampling.seed,
            "warmup": warmup,
            "thin": sampling.thin,
            "efficiency": efficiency,
            "seconds": time.perf_counter() - started,
        },
        engine="independence-metropolis",
    )


def mixed_draws(
    draw: Callable[[int], Draws],
    mixed_share: Callable[[Draws], float],
    repeats: int,
    most_repeats: int,
) -> Draws | None:
    """Draws with twice as many proposals each until they have mixed; None if they do not.

    Which number that is depends on the draws alone. It ends early where, by the draws so far, the
    largest number would give less than half of the effective draws that are asked for.

    Args:
        draw: draws of all coordinates with a number of proposals each.
        mixed_share: the share of the effective draws that are asked for, 1 where they have mixed.
        repeats: the first number.
        most_repeats: the largest number.
    """
    while repeats <= most_repeats:
        draws = draw(repeats)
        share = mixed_share(draws)
        if share >= 1:
            return draws
        if share * most_repeats < _HOPE * repeats:
            return None
        repeats *= 2
    return None


def _accepted(
    log_w: RowNumbers, log_u: RowNumbers, start: int, state: tuple[int, float]
) -> tuple[np.ndarray, tuple[int, float]]:
    """The position of the proposal at which a chain is, after each of those from `start` on.

    `state` is the position of the proposal before them, and its log weight.
    """
    kept = np.empty(len(log_w), dtype=np.int64)
    at, weight = state
    for i, (new, u) in enumerate(zip(log_w.tolist(), log_u.tolist(), strict=True)):
        if u < new - weight or weight == -math.inf:
            at, weight = start + i, new
        kept[i] = at
    return kept, (at, weight)
