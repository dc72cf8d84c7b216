"""Every k-th weight moves together with its neighbours: a kind of subspace, and its method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from subbayes.subspace import Subspace
from subbayes.subspaces.base import RankedMethod


class StripedSubspace(Subspace):
    """Weight i moves by coordinate i modulo k."""

    def __init__(self, shift, rank):
        self.shift, self.rank = shift, rank

    def push(self, z):
        """Tangents of weights."""
        return z[..., torch.arange(self.size, device=self.shift.device) % self.rank]

    def pull(self, cotangent):
        """The adjoint of `push`."""
        index = torch.arange(self.size, device=self.shift.device) % self.rank
        zeros = torch.zeros(*cotangent.shape[:-1], self.rank, dtype=cotangent.dtype)
        return zeros.to(cotangent.device).index_add(-1, index, cotangent)

    def project(self, weights):
        """Coordinates of the closest point: the mean over a stripe."""
        return self.pull(weights - self.shift) / self.pull(torch.ones_like(self.shift))

    def to(self, device, dtype=None):
        """The same subspace elsewhere."""
        return StripedSubspace(self.shift.to(device, dtype), self.rank)

    def tensors(self):
        """What is saved beside the rank."""
        return {"shift": self.shift}

    @classmethod
    def from_config(cls, config, tensors):
        """The subspace of what `config` and `tensors` saved."""
        return cls(tensors["shift"], config["rank"])


@dataclass(frozen=True)
class Stripes(RankedMethod):
    """A `StripedSubspace` around the trained network."""

    name: ClassVar[str] = "stripes"
    label: ClassVar[str] = "stripes"
    description: ClassVar[str] = "{k} stripes of weights, {centre}"
    default_rank: ClassVar[int] = 3

    def build(self, trained, prior_scale=1.0):
        """Around the weights of the network."""
        network = trained.network
        return StripedSubspace(network.weights, self.expected_rank(network))
