"""Logarithms of tail probabilities, differentiable and with batching rules of torch."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["log_difference", "normal_log_tails", "student_log_tails"]


def _log_upper(z: Tensor) -> Tensor:
    r"""$\log \Phi(-z)$, exact in both tails."""
    root = 2.0**-0.5
    right, left = z.clamp_min(0.0), z.clamp_max(0.0)
    far = (0.5 * torch.special.erfcx(root * right)).log() - 0.5 * right.square()
    near = torch.log1p(-0.5 * torch.special.erfc(-root * left))
    return torch.where(z > 0, far, near)


def normal_log_tails(z: Tensor) -> tuple[Tensor, Tensor]:
    r"""$\log \Phi(z)$ and $\log \Phi(-z)$.

    Example:
        >>> [round(float(part), 4) for part in normal_log_tails(torch.tensor(1.0))]
        [-0.1728, -1.841]
    """
    return _log_upper(-z), _log_upper(z)


def student_log_tails(z: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
    r"""The same for Student's t, by Gauss-Legendre quadrature.

    With $t = \sqrt\nu \tan\theta$ the tail is $\propto \int \cos^{\nu - 1}\theta\, d\theta$ from
    $\arctan(z / \sqrt\nu)$ to $\pi / 2$, or as far as the integrand is not negligible.
    """
    nodes, weights = np.polynomial.legendre.leggauss(64)
    v = (nodes + 1) / 2
    at = torch.from_numpy(1 - v**2).to(z)  # the integrand has an infinite slope at the end
    log_weight = torch.from_numpy(np.log(weights * v)).to(z)
    constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * math.log(math.pi)
    start = torch.atan2(z.abs(), nu.sqrt())
    width = (math.pi / 2 - start).minimum(12 / nu.sqrt())
    theta = start.unsqueeze(-1) + width.unsqueeze(-1) * at
    log_cosine = torch.log(theta.cos().clamp_min(torch.finfo(z.dtype).tiny))
    terms = (nu - 1).unsqueeze(-1) * log_cosine + log_weight
    log_far = constant + width.log() + terms.logsumexp(-1)
    log_near = torch.log1p(-log_far.exp())
    return torch.where(z < 0, log_far, log_near), torch.where(z < 0, log_near, log_far)


def log_difference(high: Tensor, low: Tensor) -> Tensor:
    """The logarithm of the difference of two numbers, the first of them larger, from their logs.

    Example:
        >>> log_difference(torch.tensor(0.0), torch.tensor(-0.6931)).exp().round(decimals=3)
        tensor(0.5000)
    """
    gap = (low - high).clamp_max(-torch.finfo(high.dtype).tiny)
    return high + torch.log(-torch.expm1(gap))
