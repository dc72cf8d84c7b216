"""Digests of sharded weights, against their definition."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subbayes.distributed import sharded_weights
from subbayes.distributed.processes import Processes
from subbayes.distributed.sharded_weights import ShardLayout

PIECE = 10


def mixed(x):
    """The finaliser of splitmix64, on Python's numbers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def digest_of_each(parameters):
    """The digest of whole parameters, one weight after the other."""
    numbers = np.concatenate([p.double().flatten().numpy() for p in parameters.values()])
    bits = [*enumerate(numbers.view(np.uint64).tolist())]
    sums = [sum(mixed(b ^ mixed(2 * i + seed)) for i, b in bits) % 2**64 for seed in (1, 2)]
    return "".join(f"{number:016x}" for number in sums)


class OneAfterTheOther(Processes):
    """Processes whose sums are those of the ones that came before."""

    total = 0

    def sum_over_data(self, numbers):
        self.total = self.total + numbers.view(np.uint64)
        return self.total.view(np.int64)


class Storages(TorchDispatchMode):
    """Records the bytes of the largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
        for made in tree_leaves(found):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.most = max(self.most, made.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_digests_are_those_of_whole_weights_and_take_memory_for_a_piece(count, monkeypatch):
    monkeypatch.setattr(sharded_weights, "_CHUNK", PIECE)
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape, dtype in (
            ("a", (50, 3, 2), torch.bfloat16),
            ("b", (7,), torch.float32),
            ("c", (20, 4), torch.float16),
        )
    }
    rows = tuple((len(p), p[0].numel()) for p in parameters.values())
    processes, again = OneAfterTheOther(), OneAfterTheOther()
    for rank in range(count):
        layout = ShardLayout(tuple(parameters), rows, rank, count)
        shards = {}
        for name, p in parameters.items():
            each = -(-len(p) // count)
            shards[name] = p[rank * each : (rank + 1) * each]
        flat = layout.flatten(shards)
        with Storages() as storages:
            found = {layout.digest_of(shards, processes), layout.digest(flat, again)}
        assert storages.most <= 8 * PIECE
    assert found == {digest_of_each(parameters)}
