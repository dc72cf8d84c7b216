"""Cases of `worker.py` with batches that are padded to lengths of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import subbayes
from distributed.divided_cases import own_rows
from distributed.engine_cases import digest
from distributed.sharded_cases import off, sharded
from subbayes.data.data import Data
from subbayes.likelihoods import Gaussian
from subbayes.networks.sharded.network import ShardedNetwork
from subbayes.subspace import RandomSubspace
from subbayes.subspaces.sharded_random import ShardedRandomSubspace

LENGTHS = [2, 3, 5, 5, 1, 4, 4, 3, 2, 6, 1]
POINTS = np.random.default_rng(0).standard_normal((3, 4))


class Sequences(nn.Module):
    """The mean of a function of the tokens that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 7), nn.Linear(7, 1)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(tokens)) * mask[..., None]
        return self.last(hidden.sum(1) / mask.sum(1, keepdim=True))


def network_module() -> Sequences:
    """The module with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Sequences().double()


def items(lengths: list[int] = LENGTHS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences of several lengths, with their targets."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(length, 3, generator=generator).double(), torch.tensor(float(length)).double())
        for length in lengths
    ]


def pad(some: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], Any]:
    """A batch as long as its longest sequence."""
    tokens = nn.utils.rnn.pad_sequence([sequence for sequence, _ in some], batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence, _ in some])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).double()
    return {"tokens": tokens, "mask": mask}, torch.stack([y for _, y in some])


def padded_posterior(data: Any, batch_size: int | None, is_sharded: bool = False) -> Any:
    """A posterior of all weights."""
    module: nn.Module = network_module()
    if is_sharded:
        network: Any = ShardedNetwork(sharded(module, ("first", "last", "")))
        space: Any = ShardedRandomSubspace(network, 4, seed=1)
    else:
        network = subbayes.Network(module)
        space = RandomSubspace(network.weights, 4, seed=1)
    return subbayes.Posterior(network, Gaussian(noise=0.3), data, space, batch_size=batch_size)


def padded_values(loaded: int, batch_size: int | None) -> dict[str, Any]:
    """Digests of a density of batches of some rows, and differences from that of one batch."""
    loader = DataLoader(items(), batch_size=loaded, collate_fn=pad)  # type: ignore[arg-type]
    density, whole = (padded_posterior(data, batch_size) for data in (loader, pad(items())))
    found = [density.log_likelihood(POINTS), density.pointwise(POINTS)]
    expected = [whole.log_likelihood(POINTS), whole.pointwise(POINTS)]
    found += density.value_and_grad(POINTS)
    expected += whole.value_and_grad(POINTS)
    return {"digest": digest(*found), "off": max(map(off, found, expected))}


def padded_sharded(loaded: int, batch_size: int | None) -> dict[str, float]:
    """The same with sharded weights: processes evaluate different numbers of shapes."""
    loader = DataLoader(items(), batch_size=loaded, collate_fn=pad)  # type: ignore[arg-type]
    return {"off": _off_of_whole(loader, items(), batch_size)}


def padded_divided(lengths: list[list[int]], batch_size: int | None) -> dict[str, float]:
    """The same with sequences of each process, which may have one length or be none."""
    every = items([length for own in lengths for length in own])
    rows = own_rows(list(map(len, lengths)), list(range(len(lengths))), len(every))
    loader = DataLoader(every[rows], batch_size=2, collate_fn=pad)  # type: ignore[arg-type]
    return {"off": _off_of_whole(Data.of(loader, divided=True), every, batch_size)}


def _off_of_whole(data: Any, every: list[Any], batch_size: int | None) -> float:
    """Differences of a density of sharded weights from that of whole ones and of one batch."""
    density = padded_posterior(data, batch_size, is_sharded=True)
    whole = padded_posterior(pad(every), batch_size)
    found = [density.log_likelihood(POINTS), *density.value_and_grad(POINTS)]
    expected = [whole.log_likelihood(POINTS), *whole.value_and_grad(POINTS)]
    return max(map(off, found, expected))
