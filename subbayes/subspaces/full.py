"""The full weight space: the posterior of all weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from subbayes.networks.network import Network
from subbayes.subspace import FullSubspace
from subbayes.subspaces.base import SubspaceMethod

if TYPE_CHECKING:
    from subbayes.training.pipeline import Trained

__all__ = ["Full"]


@dataclass(frozen=True)
class Full(SubspaceMethod):
    """All weights around the SWA mean.

    Example:
        >>> import torch
        >>> Full().expected_rank(Network(torch.nn.Linear(3, 1)))
        4
    """

    name: ClassVar[str] = "full"
    spans_weights: ClassVar[bool] = True

    def expected_rank(self, network: Network) -> int:
        """The number of weights."""
        return network.size

    def build(self, trained: Trained, prior_scale: float = 1.0) -> FullSubspace:
        """The full space around the network's weights."""
        return FullSubspace(trained.network.weights)
