r"""Moments of weights with inclusion indicators, and their divergence.

With $\alpha = \sigma(\omega)$, $\tau = \text{softplus}(\rho)$ and slab divergence
$s = -\tfrac12 \log(2\pi e \tau^2) - \mathrm{E} \log p(\beta)$, the layer needs

$$ \mathrm{E}[w] = \alpha\kappa, \quad
   \mathrm{Var}[w] = \alpha(\tau^2 + (1 - \alpha)\kappa^2), \quad
   \sum \alpha (s + \omega) - \text{softplus}(\omega), \quad \sum \alpha . $$
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from subbayes.likelihoods.gaussian import softplus_inverse
from subbayes.sparse.priors import Slab

__all__ = ["slab_kl", "terms", "unconstrained_sd"]

_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)  # of a standard normal number


def slab_kl(sd: Tensor, square: Tensor, slab: Slab) -> Tensor:
    """An upper bound of the divergence s of each included weight from the slab.

    Args:
        sd: tau.
        square: the expected square of the weight.
        slab: of the layer.
    """
    return -(_ENTROPY + sd.log()) - slab.expected_log_prob(square)


def terms(
    mean: Tensor, raw_sd: Tensor, logits: Tensor, slab: Slab
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance of the weights; divergence without the inclusion prior; expected count.

    Args:
        mean: kappa.
        raw_sd: rho, of the same shape.
        logits: omega, of the same shape.
        slab: of the layer.
    """
    sd, alpha = functional.softplus(raw_sd), torch.sigmoid(logits)
    square, variance = mean.square(), sd.square()
    pushed = slab_kl(sd, square + variance, slab) + logits
    return (
        alpha * mean,
        alpha * (variance + (1 - alpha) * square),
        (alpha * pushed - functional.softplus(logits)).sum(),
        alpha.sum(),
    )


def unconstrained_sd(sd: float) -> float:
    """The number that softplus maps to a standard deviation.

    Example:
        >>> float(functional.softplus(torch.tensor(unconstrained_sd(0.5))))
        0.5
    """
    return float(softplus_inverse(torch.tensor(sd, dtype=torch.float64)))
