r"""Moments of weights that are in or out, and their divergence, in two passes over the weights.

With $\alpha = \sigma(\omega)$, $\tau = \text{softplus}(\rho)$ and slab divergence
$s = -\tfrac12 \log(2\pi e \tau^2) - \mathrm{E} \log p(\beta)$, the layer needs

$$ \mathrm{E}[w] = \alpha\kappa, \quad
   \mathrm{Var}[w] = \alpha(\tau^2 + (1 - \alpha)\kappa^2), \quad
   \sum \alpha (s + \omega) - \text{softplus}(\omega), \quad \sum \alpha, \quad
   \sum \alpha (1 - \alpha) . $$

Their gradients are written down instead of left to autograd: logarithms and exponentials are taken
once, forward, and the way back is arithmetic. Where hyper-parameters of the slab are learned,
autograd takes over.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subbayes.sparse.priors import Slab

__all__ = ["ENTROPY", "terms"]

_LINEAR = 20.0  # beyond it softplus is the identity
ENTROPY = 0.5 * math.log(2 * math.pi * math.e)  # of a standard normal number

Terms = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def terms(mean: Tensor, raw_sd: Tensor, logits: Tensor, slab: Slab) -> Terms:
    """Mean and variance of the weights; divergence but for the inclusion prior; count; variance.

    Args:
        mean: kappa.
        raw_sd: rho, of the same shape.
        logits: omega, of the same shape.
        slab: of the layer.
    """
    if not torch.is_grad_enabled() or any(p.requires_grad for p in slab.parameters()):
        return _plain(mean, raw_sd, logits, slab)
    found: Terms = _Terms.apply(mean, raw_sd, logits, slab)
    return found


def _plain(mean: Tensor, raw_sd: Tensor, logits: Tensor, slab: Slab) -> Terms:
    sd, alpha = functional.softplus(raw_sd), torch.sigmoid(logits)
    square, variance = mean.square(), sd.square()
    out = 1 - alpha
    slab_kl = -(ENTROPY + sd.log()) - slab.expected_log_prob(square + variance)
    divergence = (alpha * (slab_kl + logits) - functional.softplus(logits)).sum()
    return (alpha * mean, alpha * (variance + out * square), divergence, alpha.sum(),
            (alpha * out).sum())


class _Terms(torch.autograd.Function):
    """The same with gradients by hand."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, raw_sd: Tensor, logits: Tensor, slab: Slab
    ) -> Terms:
        """One pass, which keeps what the way back would have to take logarithms for."""
        found, kept = _ahead(mean, raw_sd, logits, slab)
        ctx.save_for_backward(mean, *kept)
        ctx.slab = slab
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sums of products."""
        return (*_back(ctx.slab, *gradients, *ctx.saved_tensors), None)


def _ahead(
    mean: Tensor, raw_sd: Tensor, logits: Tensor, slab: Slab
) -> tuple[Terms, tuple[Tensor, ...]]:
    """Two exponentials and four logarithms a weight; the rest is arithmetic."""
    grown = torch.exp(raw_sd.clamp(max=_LINEAR))
    sd = torch.where(raw_sd > _LINEAR, raw_sd, torch.log1p(grown))
    less = torch.exp(-logits.abs())  # at most 1: nothing overflows
    likelier = 1 / (1 + less)
    rarer, above = less * likelier, logits >= 0
    alpha, out = torch.where(above, likelier, rarer), torch.where(above, rarer, likelier)
    square, variance = mean * mean, sd * sd
    slab_kl = -(ENTROPY + sd.log()) - slab.expected_log_prob(square + variance)
    pushed = slab_kl + logits
    softplus = functional.relu(logits) + torch.log1p(less)
    found = (alpha * mean, alpha * (variance + out * square),
             (alpha * pushed - softplus).sum(), alpha.sum(), (alpha * out).sum())
    return found, (alpha, out, sd, grown / (1 + grown), pushed)


def _back(
    slab: Slab, by_mean: Tensor, by_variance: Tensor, by_kl: Tensor, by_count: Tensor,
    by_spread: Tensor, mean: Tensor, alpha: Tensor, out: Tensor, sd: Tensor, slope: Tensor,
    pushed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """By mean, raw deviation and logit; `slope` is that of the softplus."""
    square, variance = mean * mean, sd * sd
    pull = -2 * slab.expected_slope(square + variance)
    return (alpha * (by_mean + (2 * by_variance * out + by_kl * pull) * mean),
            alpha * slope * (2 * by_variance * sd + by_kl * (pull * sd - 1 / sd)),
            alpha * out * (by_mean * mean + by_count + by_kl * pushed
                           + by_variance * (variance + (out - alpha) * square)
                           + by_spread * (out - alpha)))
