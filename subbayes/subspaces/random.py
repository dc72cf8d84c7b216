"""Random subspace (Izmailov et al. 2019, section 4.1): the control for every other subspace."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subbayes.networks.network import Network
from subbayes.subspace import RandomSubspace
from subbayes.utils.checks import fail_type

__all__ = ["random"]


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
