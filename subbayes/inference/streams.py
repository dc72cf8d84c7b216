"""Random numbers drawn ahead, in each chain's own stream, for kernels that step all chains at once.

One call to a generator costs as much as many numbers of it; a block per chain, refilled when it is
used up, keeps the streams apart and the cost small.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["refilled"]

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def refilled(
    block: np.ndarray, used: np.ndarray, limit: int, draw: Draw, rngs: list[np.random.Generator]
) -> tuple[np.ndarray, np.ndarray]:
    """The blocks, drawn anew for chains that have used up `limit` of theirs, and the counts.

    Args:
        block: numbers drawn ahead, shape (chains, ahead, ...).
        used: how many of them each chain has used, shape (chains,).
        limit: refill at this many used.
        draw: draws an array of a given shape from a generator.
        rngs: a generator per chain.
    """
    empty = np.flatnonzero(used >= limit)
    if not empty.size:
        return block, used
    block, used = block.copy(), used.copy()
    for c in empty:
        block[c] = draw(rngs[c], block[c].shape)
    used[empty] = 0
    return block, used
