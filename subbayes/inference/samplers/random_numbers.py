"""Random numbers drawn ahead, in each chain's own stream, for kernels that step all chains at once.

One call to a generator costs as much as many numbers of it; a block per chain, refilled when it is
used up, keeps the streams apart and the cost small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

__all__ = ["copied", "only_where", "rebuilt", "refilled", "uniforms"]

_S = TypeVar("_S")
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


def copied(state: _S) -> _S:
    """The same state in arrays of its own, to be changed in place."""
    return rebuilt(state, {name: array.copy() for name, array in vars(state).items()})


def rebuilt(state: _S, arrays: dict[str, Any]) -> _S:
    """A state of the same class with these arrays, as fast as an object can be made."""
    other = object.__new__(type(state))
    vars(other).update(arrays)
    return other


def only_where(active: np.ndarray, moved: Any, state: Any) -> Any:
    """The new state of active chains; the others stay where they are."""
    if active.all():
        return moved
    rows = {
        name: np.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, getattr(state, name))
        for name, new in vars(moved).items()
    }
    return rebuilt(moved, rows)


def uniforms(s: Any, rngs: list[np.random.Generator], n: int) -> Float[np.ndarray, "chains n"]:
    """The next n uniform numbers of each chain's stream, from the block that its state keeps.

    Args:
        s: a state with `uniforms`, shape (chains, ahead), and `n_uniforms`; changed in place.
        rngs: a generator per chain.
        n: how many.
    """
    for c in (s.n_uniforms > s.uniforms.shape[1] - n).nonzero()[0]:
        s.uniforms[c] = rngs[c].random(s.uniforms.shape[1])
        s.n_uniforms[c] = 0
    chains, ahead = s.uniforms.shape
    first = np.arange(0, chains * ahead, ahead) + s.n_uniforms
    s.n_uniforms[:] += n
    return np.asarray(s.uniforms.reshape(-1)[first[:, None] + np.arange(n)])
