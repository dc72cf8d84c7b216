r"""The Fisher information $E_y[s s^\top]$ as a sum over responses, of the scores s."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.base import in_float64
from subbayes.likelihoods.families.base import Family
from subbayes.utils.types import Outputs

_DRAWS = 1024
_AT_ONCE = 2**20  # draws, in a temporary array


def information_from_rule(
    family: Family, outputs: Outputs, y: Float[Tensor, "m *S N"], weight: Float[Tensor, "m *rows"]
) -> Float[Tensor, "*S N C C"]:
    """The Fisher information as a weighted sum over m responses of each distribution.

    Args:
        family: the family.
        outputs: predictors, shape (..., N, C).
        y: responses.
        weight: their weights, which can be broadcast to the shape of `y`.

    Example:
        >>> from subbayes.likelihoods.families import BernoulliFamily
        >>> y = torch.tensor([[0.0], [1.0]])
        >>> information_from_rule(BernoulliFamily(), torch.zeros(1, 1), y, 0 * y + 0.5)
        tensor([[[0.2500]]])
    """
    wide = in_float64(outputs.detach()).expand(len(y), *outputs.shape)
    y, weight = (part.to(wide) for part in (y, weight))
    score = torch.func.grad(lambda f: family.log_density(y, f.unbind(-1)).sum())(wide)
    found = torch.einsum("m...,m...a,m...b->...ab", weight.expand(y.shape), score, score)
    return found.to(outputs)


def information_from_draws(family: Family, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
    """The Fisher information as a mean over 1024 draws of each distribution, with a fixed seed.

    Its relative standard error is about 1/32 times the standard deviation of squared scores over
    their mean; it decreases in averages over rows, whose draws are independent.

    Args:
        family: the family.
        outputs: predictors, shape (..., N, C).

    Example:
        >>> from subbayes.likelihoods.families import NormalFamily
        >>> found = information_from_draws(NormalFamily(), torch.zeros(200, 2)).mean(0)
        >>> found.round(decimals=1).abs()  # diag(1, 2)
        tensor([[1., 0.],
                [0., 2.]])
    """
    generator = torch.Generator().manual_seed(0)
    flat, found = outputs.detach().reshape(-1, outputs.shape[-1]), []
    for rows in flat.split(_AT_ONCE // _DRAWS):
        y = family.sample(rows.cpu().expand(_DRAWS, *rows.shape), generator)[..., 0].to(rows)
        found.append(information_from_rule(family, rows, y, torch.full_like(y, 1 / _DRAWS)))
    return torch.cat(found).reshape(*outputs.shape, outputs.shape[-1])
