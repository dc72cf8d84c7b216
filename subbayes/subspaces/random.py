"""Random subspace (Izmailov et al. 2019, section 4.1): the control for every other subspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from subbayes.networks.sharded_network import ShardedNetwork
from subbayes.subspace import RandomSubspace, Subspace
from subbayes.subspaces.base import RankedMethod
from subbayes.subspaces.sharded_random import ShardedRandomSubspace

if TYPE_CHECKING:
    from subbayes.training.pipeline import Trained

__all__ = ["Random"]


@dataclass(frozen=True)
class Random(RankedMethod):
    r"""Random directions of norm 1 around the SWA mean.

    $$ v_i = \tilde v_i / \lVert \tilde v_i \rVert, \qquad \tilde v_i \sim N(0, I_D) $$

    The prior is z ~ N(0, I). Only the seed is saved; see `RandomSubspace`. Weights that are sharded
    among processes get a `ShardedRandomSubspace`.

    Attributes:
        rank: number of directions k; None takes 5, or all weights if there are fewer.

    Example:
        >>> import torch
        >>> from subbayes import Network
        >>> Random().expected_rank(Network(torch.nn.Linear(2, 1)))
        3
    """

    name: ClassVar[str] = "random"
    default_rank: ClassVar[int] = 5

    def build(self, trained: Trained, prior_scale: float = 1.0) -> Subspace:
        """Draw directions with the seed of the training."""
        network, rank = trained.network, self.expected_rank(trained.network)
        if isinstance(network, ShardedNetwork):
            return ShardedRandomSubspace(network, rank, trained.seed)
        return RandomSubspace(network.weights, rank, trained.seed)
