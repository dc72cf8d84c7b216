"""Terms of a log-likelihood that count with weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.utils.types import Outputs, PerPoint


def weighted_terms(
    log_prob: Callable[[Tensor], Tensor], outputs: Outputs, weights: Float[Tensor, "N"]
) -> PerPoint:
    """Log densities times weights, which are 0 with a gradient of 0 where the weight is.

    Rows of weight 0 are evaluated at outputs of 0: their own densities may be 0, of which neither
    the logarithm nor its gradient is finite.

    Args:
        log_prob: log density of each row from outputs, shape (..., N).
        outputs: network outputs, shape (..., N, C).
        weights: at least 0.

    Example:
        >>> weighted_terms(lambda f: f[:, 0].log(), torch.zeros(2, 1) + 1, torch.tensor([0.0, 2.0]))
        tensor([0., 0.])
    """
    none, weights = weights == 0, weights.to(outputs.dtype)
    terms = log_prob(torch.where(none.unsqueeze(-1), 0.0, outputs))
    return torch.where(none, 0.0, weights * terms)
