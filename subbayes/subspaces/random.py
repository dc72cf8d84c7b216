"""Random subspace (Izmailov et al. 2019, section 4.1): the control for every other subspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from subbayes.networks.network import Network
from subbayes.subspace import RandomSubspace
from subbayes.subspaces.base import SubspaceMethod, TrainedNetwork
from subbayes.utils.checks import check_count, fail_type

__all__ = ["Random", "random"]


@dataclass(frozen=True)
class Random(SubspaceMethod):
    """Random directions around the SWA mean; see `random`.

    Attributes:
        rank: number of directions k; None takes 5, or all where there are fewer weights.

    Example:
        >>> import torch
        >>> Random().expected_rank(Network(torch.nn.Linear(2, 1)))
        3
    """

    rank: int | None = None
    name: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_count("rank", self.rank)

    def expected_rank(self, network: Network) -> int:
        """The rank, or its default."""
        return min(5, network.size) if self.rank is None else self.rank

    def build(self, trained: TrainedNetwork, prior_scale: float = 1.0) -> RandomSubspace:
        """Directions drawn with the seed of the training."""
        return random(trained.network, self.expected_rank(trained.network), trained.seed)


def random(center: Any, rank: int, seed: int = 0) -> RandomSubspace:
    r"""Gaussian directions of norm 1 around a good solution.

    $$ v_i = \tilde v_i / \lVert \tilde v_i \rVert, \qquad \tilde v_i \sim N(0, I_D) $$

    Read with the prior z ~ N(0, I). Only the seed is kept; see `RandomSubspace`.

    Args:
        center: a network, whose weights become the shift, or the shift itself, shape (D,);
            usually the SWA solution.
        rank: number of directions k.
        seed: seed of the directions.

    Raises:
        InputError: a rank above the number of weights.
        InputTypeError: `center` is neither a network nor a tensor.

    Example:
        >>> import torch
        >>> random(Network(torch.nn.Linear(3, 2)), rank=4, seed=1)
        RandomSubspace(rank=4, size=8)
    """
    if isinstance(center, Network):
        return RandomSubspace(center.weights, rank, seed)
    if not isinstance(center, Tensor):
        fail_type("center", "a Network or a tensor of weights", center)
    return RandomSubspace(center, rank, seed)
