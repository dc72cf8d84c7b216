"""Logarithms of tail probabilities, differentiable and with batching rules of torch.

Probabilities below the smallest number keep their logarithms. The inverse functions take the
logarithms of both tails, of which they use the smaller one: the other one has no digits left where
it is near 0. They run on the CPU, without gradients.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

Tails = tuple[Tensor, Tensor]

_LOG_2PI = math.log(2 * math.pi)
_NEGLIGIBLE = 40.0  # decrease of a log density, after which integrals end
_TERMS = 8  # of continued fractions
_MANY = 200.0  # degrees of freedom


def normal_log_density(z: Tensor, log_sd: Tensor) -> Tensor:
    """The log density of normal variables, z standard deviations from their means.

    Example:
        >>> normal_log_density(torch.tensor(1.0), torch.tensor(0.0))
        tensor(-1.4189)
    """
    return -0.5 * (_LOG_2PI + z.square()) - log_sd


def normal_log_above(z: Tensor) -> Tensor:
    r"""$\log \Phi(-z)$, exact in both tails; torch's own has no batching rule.

    Example:
        >>> round(float(normal_log_above(torch.tensor(1.0))), 4)
        -1.841
    """
    root = 2.0**-0.5
    right, left = z.clamp_min(0.0), z.clamp_max(0.0)
    far = (0.5 * torch.special.erfcx(root * right)).log() - 0.5 * right.square()
    near = torch.log1p(-0.5 * torch.special.erfc(-root * left))
    return torch.where(z > 0, far, near)


def normal_log_tails(z: Tensor) -> Tails:
    r"""$\log \Phi(z)$ and $\log \Phi(-z)$.

    Example:
        >>> [round(float(part), 4) for part in normal_log_tails(torch.tensor(1.0))]
        [-0.1728, -1.841]
    """
    return normal_log_above(-z), normal_log_above(z)


def normal_from_log_tails(below: Tensor, above: Tensor) -> Tensor:
    """The inverse of `normal_log_tails`.

    Example:
        >>> tails = normal_log_tails(torch.tensor([-50.0, 0.5], dtype=torch.float64))
        >>> normal_from_log_tails(*tails)
        tensor([-50.0000,   0.5000], dtype=torch.float64)
    """
    from scipy.special import ndtri_exp

    z = torch.from_numpy(np.asarray(ndtri_exp(torch.minimum(below, above).numpy())))
    return torch.where(below < above, z, -z)


def truncated_normal_moments(mean: Tensor, sd: Tensor, bounds: Tails) -> Tails:
    r"""Mean and variance of normal variables between two bounds.

    The density relative to its largest value at m is $e^{-m t - t^2 / 2}$ at $z = m + t$. Its
    moments by quadrature over the t where it is not negligible have no differences that cancel,
    as those of the usual formulas do far outside the bounds and for bounds close to each other.

    Args:
        mean: means before truncation, shape (n,).
        sd: their standard deviations.
        bounds: the bounds, which may be infinite, each of shape (n,).

    Example:
        >>> mean, sd = torch.tensor([[-10.0], [1.0]], dtype=torch.float64)
        >>> moments = truncated_normal_moments(mean, sd, (0 * mean, 0 * mean + 9))
        >>> [round(part.item(), 6) for part in moments]
        [0.098093, 0.009445]
    """
    x, log_weight = legendre(mean)
    peak = mean.clamp(*bounds)
    m = (peak - mean) / sd
    reach = 2 * _NEGLIGIBLE / (m.abs() + (m.square() + 2 * _NEGLIGIBLE).sqrt())
    left = reach.minimum((peak - bounds[0]) / sd)
    width = left + reach.minimum((bounds[1] - peak) / sd)
    t = torch.addcmul(-left, width, x[:, None])
    density = torch.add(m, t, alpha=0.5).mul_(t).neg_().exp_()
    rule = log_weight.exp() * torch.stack([torch.ones_like(x), x, x.square()])
    total, first, second = rule @ density  # of x, whose variance is no small part of its square
    first, second = first / total, second / total
    mean_t, sd_t = width * first - left, width * sd
    return peak + sd * mean_t, sd_t.square() * (second - first.square())


def legendre(like: Tensor) -> Tails:
    """Nodes in (0, 1) and log weights of Gauss and Legendre."""
    nodes, log_weights = _legendre_rule()
    return torch.from_numpy(nodes).to(like), torch.from_numpy(log_weights).to(like)


@cache
def _legendre_rule() -> tuple[np.ndarray, np.ndarray]:
    """The same, computed once: its eigenvalues take longer than the quadrature of a block."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    return (nodes + 1) / 2, np.log(weights / 2)


def student_log_constant(nu: Tensor) -> Tensor:
    r"""The log density of Student's t at 0, of which many degrees of freedom keep their digits.

    Example:
        >>> nu = torch.tensor([1.0, 1e20], dtype=torch.float64)
        >>> student_log_constant(nu).exp()  # 1 / pi and 1 / sqrt(2 pi)
        tensor([0.3183, 0.3989], dtype=torch.float64)
    """
    few, inverse = nu.clamp_max(_MANY), 1 / nu.clamp_min(_MANY)
    near = torch.lgamma((few + 1) / 2) - torch.lgamma(few / 2) - 0.5 * (few * math.pi).log()
    # Stirling's series of both
    far = inverse * (inverse.square() / 24 - 0.25) - 0.5 * math.log(2 * math.pi)
    return torch.where(nu < _MANY, near, far)


def poisson_log_tails(y: Tensor, log_rate: Tensor) -> Tails:
    r"""Log P(Y <= y) and log P(Y > y) of Poisson counts.

    They are incomplete gamma functions of a = y + 1 and the rate x. Near the smallest number they
    are replaced by continued fractions, of which few terms are needed where x is far from a:

    $$ \gamma(a, x) = \frac{x^a e^{-x}}{a - x +}
    \frac{x}{a + 1 - x +}
    \frac{2x}{a + 2 - x +} \dots $$

    and Legendre's for $\Gamma(a, x)$ (the even part of DLMF 8.9.2):

    $$ \frac{x^a e^{-x}}{x + 1 - a +}
    \frac{a - 1}{x + 3 - a +}
    \frac{2 (a - 2)}{x + 5 - a +} \dots $$
    """
    limit = 0.85 * math.log(torch.finfo(log_rate.dtype).max)
    rate = log_rate.clamp(-limit, limit).exp()  # further out the fractions alone are used
    a = (y.floor() + 1 + 0 * log_rate).detach()
    tiny = torch.finfo(rate.dtype).tiny
    below, above = torch.special.gammaincc(a, rate), torch.special.gammainc(a, rate)
    few = rate < a
    # Legendre's is divided by x, and both by 1 beside it if the two are close
    one = torch.where(few, 1.0, 1 / torch.where(few, 1.0, rate))
    gap = torch.where(few, (a - rate).clamp_min(1.0), (1 - a * one).maximum(one))
    fraction = torch.full_like(gap, math.inf)
    for i in range(_TERMS, 0, -1):  # from the last term
        numerator = i * torch.where(few, rate, (a - i) * one.square())
        fraction = gap + torch.where(few, i - 1.0, 2.0 * i - 1) * one + numerator / fraction
    log_far = a * log_rate - torch.lgamma(a) - fraction.log() - torch.where(few, 0.0, log_rate)
    log_far = log_far - log_rate.exp()
    logs = [
        torch.where(part < tiny**0.5, log_far, part.clamp_min(tiny).log())
        for part in (below, above)
    ]
    return logs[0], logs[1]


def exponential_log_below(log_total: Tensor) -> Tensor:
    r"""$\log(1 - e^{-t})$ by the logarithm of t, which may be far below the smallest number.

    Example:
        >>> exponential_log_below(torch.tensor([-900.0, 0.0]))
        tensor([-900.0000,   -0.4587])
    """
    small = log_total < -12.0
    total = torch.where(small, 1.0, log_total.clamp_max(80.0)).exp()  # e^-t is 0 long before
    near = log_total - log_total.clamp_max(-12.0).exp() / 2
    large = total > 0.7
    below = torch.log(-torch.expm1(-torch.where(large, 1.0, total)))
    above = torch.log1p(-torch.exp(-torch.where(large, total, 1.0)))
    return torch.where(small, near, torch.where(large, above, below))


def total_from_log_tails(below: Tensor, above: Tensor) -> Tensor:
    r"""The total hazard $t = -\log P(Y > y)$ by the logarithms of both tails.

    Example:
        >>> total_from_log_tails(torch.tensor(-90.0), torch.tensor(0.0)).log()
        tensor(-90.)
    """
    return torch.where(below < above, -torch.log1p(-below.clamp_max(-0.5).exp()), -above)


def log_difference(high: Tensor, low: Tensor) -> Tensor:
    """The logarithm of the difference of two numbers, the first of them larger, from their logs.

    Example:
        >>> log_difference(torch.tensor(0.0), torch.tensor(-0.6931)).exp().round(decimals=3)
        tensor(0.5000)
    """
    none = torch.isneginf(high)
    finite = torch.where(none, 0.0, high)
    gap = (low - finite).clamp_max(-torch.finfo(high.dtype).tiny)
    return torch.where(none, high, finite + torch.log(-torch.expm1(gap)))


def log_between(low: Tails, high: Tails) -> Tensor:
    """Log P(l < Y <= u) from the log tails at l and at u: the difference of the smaller ones.

    Example:
        >>> ends = [normal_log_tails(torch.tensor(z, dtype=torch.float64)) for z in (-51.0, -50.0)]
        >>> round(float(log_between(*ends)), 2)
        -1254.83
    """
    in_upper = low[1] < high[0]
    larger, smaller = torch.where(in_upper, low[1], high[0]), torch.where(in_upper, high[1], low[0])
    return log_difference(larger, smaller)


def tails_between(low: Tails, high: Tails, log_u: Tensor, log_rest: Tensor) -> Tails:
    """The log tails at level u of the distribution between two numbers, from those at both.

    Args:
        low: log tails at the lower number.
        high: log tails at the upper one.
        log_u: log u.
        log_rest: log(1 - u).

    Example:
        >>> median = torch.tensor(0.5).log()
        >>> low, high = normal_log_tails(torch.tensor(0.0)), normal_log_tails(torch.tensor(9.0))
        >>> [round(float(part.exp()), 4) for part in tails_between(low, high, median, median)]
        [0.75, 0.25]
    """
    below, above = (
        torch.logaddexp(start + log_rest, end + log_u) for start, end in zip(low, high, strict=True)
    )
    return below, above
