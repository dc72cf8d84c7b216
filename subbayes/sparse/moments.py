r"""Moments of weights that are in or out, and their divergence, in two passes over the weights.

With $\alpha = \sigma(\omega)$, $\tau = \text{softplus}(\rho)$ and slab divergence
$s = -\tfrac12 \log(2\pi e \tau^2) - \mathrm{E} \log p(\beta)$, the layer needs

$$ \mathrm{E}[w] = \alpha\kappa, \quad
   \mathrm{Var}[w] = \alpha(\tau^2 + (1 - \alpha)\kappa^2), \quad
   \sum \alpha (s + \omega) - \text{softplus}(\omega), \quad \sum \alpha, \quad
   \sum \alpha (1 - \alpha) . $$

Their gradients are written down instead of left to autograd: all logarithms and exponentials are
taken once, forward, and the way back is additions and products. Where hyper-parameters of the slab
are learned, autograd takes over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subbayes.sparse.priors import Slab

__all__ = ["ENTROPY", "terms"]

ENTROPY = 0.5 * math.log(2 * math.pi * math.e)  # of a standard normal number

Terms = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def terms(mean: Tensor, raw_sd: Tensor, logits: Tensor, slab: Slab, compiled: bool) -> Terms:
    """Mean and variance of the weights; divergence but for the inclusion prior; count; variance.

    Args:
        mean: kappa.
        raw_sd: rho, of the same shape.
        logits: omega, of the same shape.
        slab: of the layer.
        compiled: whether both passes are compiled.
    """
    if not torch.is_grad_enabled() or any(p.requires_grad for p in slab.parameters()):
        return _plain(mean, raw_sd, logits, slab)
    found: Terms = _Terms.apply(mean, raw_sd, logits, slab, compiled)
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
        ctx: Any, mean: Tensor, raw_sd: Tensor, logits: Tensor, slab: Slab, compiled: bool
    ) -> Terms:
        """One pass, which keeps what the way back needs."""
        found, kept = (_compiled(_ahead) if compiled else _ahead)(mean, raw_sd, logits, slab)
        ctx.save_for_backward(mean, *kept)
        ctx.compiled = compiled
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sums of products."""
        back = _compiled(_back) if ctx.compiled else _back
        return (*back(*gradients, *ctx.saved_tensors), None, None)


def _ahead(
    mean: Tensor, raw_sd: Tensor, logits: Tensor, slab: Slab
) -> tuple[Terms, tuple[Tensor, ...]]:
    sd, alpha = functional.softplus(raw_sd), torch.sigmoid(logits)
    square, variance = mean * mean, sd * sd
    out = 1 - alpha
    spread = alpha * out
    both = square + variance
    slab_kl = -(ENTROPY + sd.log()) - slab.expected_log_prob(both)
    pull = -2 * slab.expected_slope(both)
    by_raw = alpha * -torch.expm1(-sd)  # alpha times the slope of the softplus
    pushed = slab_kl + logits
    found = (alpha * mean, alpha * (variance + out * square),
             (alpha * pushed - functional.softplus(logits)).sum(), alpha.sum(), spread.sum())
    kept = (alpha, spread, alpha * pull * mean, by_raw * (pull * sd - 1 / sd), spread * pushed,
            2 * by_raw * sd, spread * (variance + (out - alpha) * square))
    return found, kept


def _back(
    by_mean: Tensor, by_variance: Tensor, by_kl: Tensor, by_count: Tensor, by_spread: Tensor,
    mean: Tensor, alpha: Tensor, spread: Tensor, kl_mean: Tensor, kl_raw: Tensor,
    kl_logits: Tensor, variance_raw: Tensor, variance_logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return (by_mean * alpha + 2 * by_variance * spread * mean + by_kl * kl_mean,
            by_variance * variance_raw + by_kl * kl_raw,
            (by_mean * mean + by_count + by_spread * (1 - 2 * alpha)) * spread
            + by_variance * variance_logits + by_kl * kl_logits)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
