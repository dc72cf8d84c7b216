"""What the states of samplers in a checkpoint have to fulfil: ranges, and relations of arrays.

Each kernel has one dict with an entry for every array of its state, and `wrong_field` refuses a
dict that leaves one out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

__all__ = [
    "LOWEST",
    "MOST_EVALUATIONS",
    "between",
    "bracket",
    "close",
    "finite",
    "near",
    "normals",
    "prior_draws",
    "same_density",
    "uniforms",
    "used",
    "windows",
    "wrong_field",
]

MOST_EVALUATIONS = 2**48
"""More evaluations than any run makes; sums of such counts do not overflow."""
LOWEST = 40.0
"""More than any log height of a slice is below its point: the least uniform is 2^-53."""
_FARTHEST = 40.0  # from 0; the generator draws no normal number beyond 14
_ROUNDING = 1e-6  # relative
_OF_DENSITY = 0.01  # relative, of sums over observations in 16 bits
_WIDEST = 1e6  # of a coordinate in a window, relative to 1 and to the last point


def wrong_field(state: Any, valid: Mapping[str, Any]) -> str | None:
    """The name of the first array of a state with values that no run can have, or None.

    Args:
        state: the state.
        valid: for every array of the state, by name, whether its entries are allowed.

    Example:
        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace(z=np.zeros((2, 1)), count=np.array([0, -1]))
        >>> wrong_field(state, {"z": finite(state.z), "count": state.count >= 0})
        'count'
    """
    assert vars(state).keys() == valid.keys(), vars(state).keys() ^ valid.keys()
    return next((name for name, allowed in valid.items() if not np.all(allowed)), None)


def finite(array: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Whether entries are neither NaN nor infinite."""
    return np.asarray(np.isfinite(array))


def near(points: Float[np.ndarray, "*S k"], mean: Any, scale: Any) -> Bool[np.ndarray, "*S"]:
    """Whether points are within a million standard deviations of a Gaussian that they follow."""
    return np.asarray((np.abs(points - mean) <= _WIDEST * scale).all(-1))


def prior_draws(points: Float[np.ndarray, "*S k"], scale: Any) -> Bool[np.ndarray, "*S"]:
    """Whether points can be draws from a Gaussian around 0 of these standard deviations."""
    widest = _FARTHEST * np.sqrt(points.shape[-1]) * scale  # each is a sum over k normal numbers
    return np.asarray((np.abs(points) <= widest).all(-1))


def between(array: np.ndarray, low: Any, high: Any) -> Bool[np.ndarray, "..."]:
    """Whether entries are in [low, high]; those of NaN are not."""
    return np.asarray((array >= low) & (array <= high))


def close(array: np.ndarray, expected: Any, size: Any = 1.0) -> Bool[np.ndarray, "..."]:
    """Whether entries are the expected ones up to rounding.

    Args:
        array: the entries.
        expected: what they are computed from.
        size: absolute values of the terms of the sum that they are.
    """
    return np.asarray(np.abs(array - expected) <= _ROUNDING * size)


def same_density(stored: Float[np.ndarray, "..."], computed: Any) -> Bool[np.ndarray, "..."]:
    """Whether stored log densities are those computed again, maybe in another batch."""
    size = np.where(np.isfinite(computed), 1 + np.abs(computed), 0)
    return np.asarray((stored == computed) | (np.abs(stored - computed) <= _OF_DENSITY * size))


def uniforms(array: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Whether entries are in [0, 1)."""
    return np.asarray((array >= 0) & (array < 1))


def normals(array: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Whether entries can be draws from a standard normal."""
    return between(array, -_FARTHEST, _FARTHEST)


def used(places: Int[np.ndarray, "..."], block: np.ndarray, least: int) -> Bool[np.ndarray, "..."]:
    """Whether numbers of used entries of a block (*places.shape, ahead, ...) fit its length."""
    return between(places, least, block.shape[places.ndim])


def windows(
    mean: Float[np.ndarray, "chains k"],
    scatter: Float[np.ndarray, "chains k"],
    count: Int[np.ndarray, "chains"],
    z: Float[np.ndarray, "chains k"],
) -> Bool[np.ndarray, "chains k"]:
    """Whether means and scatters of windows can be those of points that a chain has visited.

    Args:
        mean: means of the points of a window.
        scatter: sums of their squared deviations.
        count: numbers of points; a window without points has zeros.
        z: the points where the chains are.
    """
    n = count[:, None]
    widest = _WIDEST * (1 + np.abs(z).max(1, initial=0, keepdims=True))
    least = -1e-9 * (np.square(mean) + np.square(z))
    some = (np.abs(mean) <= widest) & between(scatter, least, n * np.square(widest))
    return np.asarray(np.where(n == 0, (mean == 0) & (scatter == 0), some))


def bracket(low: np.ndarray, high: np.ndarray, widest: float) -> Bool[np.ndarray, "..."]:
    """Whether brackets contain 0 and are at most so wide."""
    return np.asarray((low <= 0) & (high >= 0) & (high - low <= widest * (1 + _ROUNDING)))
