"""Standard normal numbers for many rows, made when they are needed and never kept as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK = 2**14  # numbers of a generator


class RowNoise:
    """Numbers of S draws at any rows, the same however they are asked for.

    Each draw has one generator for every 16,384 rows; the last numbers of each draw are kept, since
    small blocks of rows ask for parts of them.

    Args:
        seed: of the numbers.
        draws: which draws; each has numbers of its own.
        device: of the result.

    Example:
        >>> noise = RowNoise(0, range(3), torch.device("cpu"))
        >>> whole, part = noise(slice(0, 3), slice(0, 50_000)), noise(slice(1, 2), slice(40, 42))
        >>> whole.shape, bool((whole[1:2, 40:42] == part).all())
        (torch.Size([3, 50000]), True)
    """

    def __init__(self, seed: int, draws: Sequence[int], device: torch.device) -> None:
        self.seed, self.draws, self.device = seed, draws, device
        self._kept: dict[int, tuple[int, np.ndarray]] = {}

    def __call__(self, some: slice, rows: slice) -> Float[Tensor, "s m"]:
        """The numbers of some of the draws at some rows, in float64."""
        found = np.stack([self._numbers(draw, rows.start, rows.stop) for draw in self.draws[some]])
        return torch.from_numpy(found).to(self.device)

    def _numbers(self, draw: int, start: int, stop: int) -> np.ndarray:
        first, last = start // _CHUNK, max(stop - 1, start) // _CHUNK
        parts = [
            self._chunk(draw, i)[max(start - i * _CHUNK, 0) : stop - i * _CHUNK]
            for i in range(first, last + 1)
        ]
        return np.concatenate(parts)

    def _chunk(self, draw: int, index: int) -> np.ndarray:
        kept = self._kept.get(draw)
        if kept is None or kept[0] != index:
            numbers = np.random.default_rng([self.seed, draw, 1, index]).standard_normal(_CHUNK)
            self._kept[draw] = kept = index, numbers
        return kept[1]
