"""Random directions of weights that FSDP2 divides among processes: each holds its part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.distributed.exact_sum import decode, encode
from subbayes.distributed.sharded_weights import joined_processes
from subbayes.subspace import Subspace
from subbayes.subspaces.base import check_rank
from subbayes.utils.checks import check_seed, fail
from subbayes.utils.memory import check_memory

if TYPE_CHECKING:
    from subbayes.networks.sharded.network import ShardedNetwork


_CHUNK = 2**18  # numbers of a direction that are generated at once


class ShardedRandomSubspace(Subspace):
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

    traceable = False

    def __init__(self, network: ShardedNetwork, rank: int, seed: int = 0) -> None:
        check_rank(rank, network)
        self.seed, self.rank, self.layout = check_seed(seed), rank, network.layout
        self.shift = shift = network.weights.detach()
        check_memory(
            "rank",
            f"the part of {rank} directions that this process holds",
            rank * shift.nbytes,
            "Lower the rank, or start more processes",
        )
        self._basis = shift.new_empty(rank, len(shift))
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

    @property
    def size(self) -> int:
        """Number of weights D of all processes."""
        return self.layout.size

    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D_r"]:
        """The shard of z @ basis."""
        return z.to(self.shift.dtype) @ self._basis

    def pull(self, cotangent: Float[Tensor, "*S D_r"]) -> Float[Tensor, "*S k"]:
        """The term of this process; the sum over processes is cotangent @ basis.T."""
        return cotangent @ self._basis.T

    def project(self, weights: Float[Tensor, "*S D_r"]) -> Float[Tensor, "*S k"]:
        """Least-squares coordinates; all processes have to call it."""
        gram = sum_over_processes(self.pull(self._basis))
        right = sum_over_processes(self.pull(weights - self.shift))
        return (right @ torch.linalg.pinv(gram, hermitian=True)).to(weights.dtype)

    def to(
        self, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> ShardedRandomSubspace:
        """The same subspace, which stays where the module is."""
        if torch.device(device).type != self.shift.device.type:
            fail("device", f"{self.shift.device}, where the sharded module is", device)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """None: no process has all weights."""
        return {}

    def config(self) -> dict[str, Any]:
        """Name, rank, seed and a digest of the centre; all processes have to call it."""
        digest = self.layout.digest(self.shift, joined_processes())
        return super().config() | {"shift": digest, "seed": self.seed}


def sum_over_processes(part: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """The exact sum over processes, in float64; all processes have to call it."""
    limbs = joined_processes().sum_over_data(encode(part.double().cpu().numpy()))
    return torch.from_numpy(decode(limbs)).to(part.device)
