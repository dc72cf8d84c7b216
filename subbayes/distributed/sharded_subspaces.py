"""Subspaces of weights that FSDP2 divides among processes: each holds its part of them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.distributed.exact_sum import decode, encode
from subbayes.distributed.sharded_weights import ShardLayout, joined_processes
from subbayes.subspace import Subspace
from subbayes.utils.checks import fail


class ShardedSubspace(Subspace):
    r"""Process r holds the shard $\hat w_r$ of the centre, $D_r$ numbers, and its part of P.

    Args:
        layout: which weights this process holds.
        shift: the shard of the centre, shape (D_r,).
        rank: number of directions k.

    Attributes:
        layout: as given.
        shift: as given.
    """

    traceable = False

    def __init__(self, layout: ShardLayout, shift: Float[Tensor, "D_r"], rank: int) -> None:
        self.layout, self.shift, self.rank = layout, shift, rank

    @property
    def size(self) -> int:
        """Number of weights D of all processes."""
        return self.layout.size

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ShardedSubspace:
        """The same subspace, which stays where the module is."""
        if torch.device(device).type != self.shift.device.type:
            fail("device", f"{self.shift.device}, where the sharded module is", device)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """None: no process has all weights."""
        return {}

    def config(self) -> dict[str, Any]:
        """Name, rank and a digest of the centre; all processes have to call it."""
        return super().config() | {"shift": self.digest(self.shift)}

    def digest(self, weights: Float[Tensor, "D_r"]) -> str:
        """A digest of a vector of which each process holds its shard; all have to call it."""
        return self.layout.digest(weights, joined_processes())


class ShardedDenseSubspace(ShardedSubspace):
    r"""Directions of which process r holds k rows of $D_r$ numbers.

    Args:
        layout: which weights this process holds.
        shift: the shard of the centre, shape (D_r,).
        basis: the parts of the directions that this process holds, shape (k, D_r).
    """

    def __init__(
        self, layout: ShardLayout, shift: Float[Tensor, "D_r"], basis: Float[Tensor, "k D_r"]
    ) -> None:
        super().__init__(layout, shift, len(basis))
        self._basis = basis

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

    def config(self) -> dict[str, Any]:
        """Name, rank and digests of centre and basis; all processes have to call it."""
        return super().config() | {"basis": [self.digest(row) for row in self._basis]}


def sum_over_processes(part: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """The exact sum over processes, in float64; all processes have to call it."""
    limbs = joined_processes().sum_over_data(encode(part.double().cpu().numpy()))
    return torch.from_numpy(decode(limbs)).to(part.device)
