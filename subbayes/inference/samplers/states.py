"""States of chains: blank ones, copies, and blocks of pre-drawn random numbers.

A state is a frozen dataclass of arrays whose first axis is the chain. Random numbers are drawn in
blocks: one generator call per block and chain, not per number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import numpy as np
from jaxtyping import Float, Int

from subbayes.inference.samplers.shapes import SomeChains

_S = TypeVar("_S")
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def blank_state(kind: type[_S], **sizes: int | tuple[int, ...]) -> _S:
    """A state of zeros, of the shapes and dtypes with which its fields are annotated.

    Args:
        kind: the class of the state.
        sizes: of the axes, by the names in the annotations; of a variadic axis a tuple.
    """
    arrays = {}
    for name, annotation in get_type_hints(kind).items():
        shape: tuple[int, ...] = ()
        for axis in annotation.dim_str.split():
            size = int(axis) if axis.isdigit() else sizes[axis.lstrip("*")]
            shape += size if isinstance(size, tuple) else (size,)
        arrays[name] = np.zeros(shape, np.int64 if annotation.dtype is Int else np.float64)
    return kind(**arrays)


def refill(
    block: np.ndarray, used: np.ndarray, limit: int, draw: Draw, rngs: list[np.random.Generator]
) -> tuple[np.ndarray, np.ndarray]:
    """Refill the blocks (chains, ahead, ...) of which `limit` entries are used, in copies."""
    empty = np.flatnonzero(used >= limit)
    if not empty.size:
        return block, used
    block, used = block.copy(), used.copy()
    for c in empty:
        block[c] = draw(rngs[c], block[c].shape)
    used[empty] = 0
    return block, used


def copy_state(state: _S) -> _S:
    """A copy of a state whose arrays may be changed in place."""
    return with_arrays(state, {name: array.copy() for name, array in vars(state).items()})


def with_arrays(state: _S, arrays: dict[str, Any]) -> _S:
    """A state of the same class with these arrays, without the slow `__init__` of a dataclass."""
    other = object.__new__(type(state))
    vars(other).update(arrays)
    return other


def select_chains(active: np.ndarray, moved: Any, state: Any) -> Any:
    """The new state of active chains and the old state of the others."""
    if active.all():
        return moved
    rows = {
        name: np.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, getattr(state, name))
        for name, new in vars(moved).items()
    }
    return with_arrays(moved, rows)


def take(
    s: Any, name: str, rngs: list[np.random.Generator], rows: SomeChains, n: int = 1
) -> Float[np.ndarray, "c n ..."]:
    """The next n entries of the chains `rows` from a block of a state, which changes in place.

    Args:
        s: the state, with the block and the number of its entries that are used.
        name: of the block: "normals" are normal, others uniform.
        rngs: a generator per chain.
        rows: chains.
        n: entries of each.
    """
    block, used = getattr(s, name), getattr(s, f"n_{name}")
    first = used[rows]
    for c in rows[first > block.shape[1] - n]:
        rng = rngs[c]
        block[c] = (rng.standard_normal if name == "normals" else rng.random)(block[c].shape)
        used[c] = 0
    first = used[rows]
    used[rows] = first + n
    return np.asarray(block[rows[:, None], first[:, None] + np.arange(n)])
