"""Responses within the support of a family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subbayes.likelihoods.families.base import Family


def response_within(family: Family) -> float:
    """A response in the support of a family, at which its density can be evaluated.

    Example:
        >>> from subbayes.likelihoods.families import BetaFamily, PoissonFamily
        >>> response_within(BetaFamily()), response_within(PoissonFamily())
        (0.5, 0.0)
    """
    low, high = family.bounds
    if family.kind == "count":
        return float(max(math.ceil(low), 0)) if low > -math.inf else 0.0
    if low == -math.inf:
        return 0.0 if high == math.inf else high - 1
    return low + 1 if high == math.inf else (low + high) / 2


def strictly_inside(family: Family, y: Tensor) -> Tensor:
    """Responses that rounding has put on an end of the support, 0 or 1, moved next to it.

    The density may have a pole or be 0 there, as that of shares near 0 has.

    Example:
        >>> from subbayes.likelihoods.families import BetaFamily
        >>> y = strictly_inside(BetaFamily(), torch.tensor([0.0, 0.5, 1.0]))
        >>> BetaFamily().allows(y)
        tensor([True, True, True])
    """
    limits = torch.finfo(y.dtype)
    low = limits.tiny if family.bounds[0] == 0 else -math.inf
    return y.clamp(low, 1 - limits.eps / 2 if family.bounds[1] == 1 else math.inf)
