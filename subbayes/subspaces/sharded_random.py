"""Random directions of weights that FSDP2 divides among processes: each holds its part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.distributed.sharded_subspaces import (
    ShardedDenseSubspace,
    ShardedSubspace,
    sum_over_processes,
)
from subbayes.subspace import SparseRandomSubspace
from subbayes.subspaces.base import check_rank
from subbayes.utils.checks import check_seed
from subbayes.utils.memory import check_memory

if TYPE_CHECKING:
    from subbayes.networks.sharded.network import ShardedNetwork


_CHUNK = 2**18  # numbers of a direction that are generated at once


class ShardedRandomSubspace(ShardedDenseSubspace):
    r"""The directions of `RandomSubspace` with the same seed, of which each process holds a part.

    Each process generates the numbers of every direction in chunks and keeps its own, so that their
    values are those of `RandomSubspace` for every number of processes (beyond $2^{18}$ weights up
    to the rounding of their norm), at the cost of generating all of them in every process once.

    Args:
        network: the network whose weights are the centre.
        rank: number of directions k.
        seed: seed of the directions.

    Attributes:
        shift: the shard of the centre.

    Raises:
        InputError: a rank above the number of weights, or a part that does not fit into memory.
    """

    def __init__(self, network: ShardedNetwork, rank: int, seed: int = 0) -> None:
        check_rank(rank, network)
        self.seed, shift = check_seed(seed), network.weights.detach()
        check_memory(
            "rank",
            f"the part of {rank} directions that this process holds",
            rank * shift.nbytes,
            "Lower the rank, or start more processes",
        )
        super().__init__(network.layout, shift, shift.new_empty(rank, len(shift)))
        for i, row in enumerate(self._basis):
            self._fill(row, i)

    def _fill(self, row: Float[Tensor, "D_r"], i: int) -> None:
        """Write the part of direction i that this process holds."""
        generator = np.random.Generator(np.random.PCG64([self.seed, i]))
        square = 0.0
        starts = np.cumsum([0, *(part.stop - part.start for part in self.layout.slices)])
        for start in range(0, self.size, _CHUNK):
            stop = min(start + _CHUNK, self.size)
            chunk = generator.standard_normal(stop - start, dtype=np.float32).astype(np.float64)
            square += float(chunk @ chunk)
            for at, part in zip(starts, self.layout.slices, strict=False):
                low, high = max(part.start, start), min(part.stop, stop)
                if low < high:
                    kept = torch.from_numpy(chunk[low - start : high - start])
                    row[at + low - part.start : at + high - part.start] = kept
        for part in row.split(_CHUNK):  # whole rows in float64 would be the peak of memory
            part.copy_(part.double() / square**0.5)

    def config(self) -> dict[str, Any]:
        """Name, rank, seed and a digest of the centre; all processes have to call it."""
        return ShardedSubspace.config(self) | {"seed": self.seed}


class ShardedSparseRandomSubspace(ShardedSubspace):
    r"""The groups and signs of `SparseRandomSubspace` with the same seed, for the shards held.

    Each process generates those of all weights once, about 40 bytes for each, and keeps those of
    its own, 12 bytes for each in float32: for adapters, which are few beside the base weights.

    Args:
        network: the network whose weights are the centre.
        rank: number of directions k.
        seed: seed of the groups and signs.

    Raises:
        InputError: a rank above the number of weights, or groups that do not fit into memory.
    """

    def __init__(self, network: ShardedNetwork, rank: int, seed: int = 0) -> None:
        check_rank(rank, network)
        size, remedy = network.size, "Use ShardedRandomSubspace with a lower rank"
        check_memory("rank", f"the groups of {size:,} weights", 40 * size, remedy)
        super().__init__(network.layout, network.weights.detach(), rank)
        whole = SparseRandomSubspace(self.shift.new_zeros(()).expand(size), rank, seed)
        self.seed = whole.seed
        held = [torch.arange(part.start, part.stop) for part in self.layout.slices]
        index = torch.cat(held).to(self.shift.device)
        self._group, self._entries = whole.groups[index], whole.entries[index]

    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D_r"]:
        """The coordinate of each weight, times its sign and scale."""
        return z.to(self.shift.dtype).index_select(-1, self._group) * self._entries

    def pull(self, cotangent: Float[Tensor, "*S D_r"]) -> Float[Tensor, "*S k"]:
        """The term of this process; the sum over processes is that over the groups."""
        terms = (cotangent * self._entries).double()  # of large groups, whose rounding adds up
        sums = terms.new_zeros(*cotangent.shape[:-1], self.rank)
        return sums.index_add(-1, self._group, terms).to(cotangent.dtype)

    def project(self, weights: Float[Tensor, "*S D_r"]) -> Float[Tensor, "*S k"]:
        """The sum of `pull`, since the directions are orthonormal; all processes have to call."""
        return sum_over_processes(self.pull(weights - self.shift)).to(weights.dtype)

    def config(self) -> dict[str, Any]:
        """Name, rank, seed and a digest of the centre; all processes have to call it."""
        return super().config() | {"seed": self.seed}
