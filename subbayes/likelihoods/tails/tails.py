"""Logarithms of tail probabilities, differentiable and with batching rules of torch.

Probabilities below the smallest number keep their logarithms. The inverse functions take the
logarithms of both tails, of which they use the smaller one: the other one has no digits left where
it is near 0. They run on the CPU, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

Tails = tuple[Tensor, Tensor]

_NEGLIGIBLE = 40.0  # decrease of a log density, after which integrals end
_AT_ONCE = 2**15  # probabilities by quadrature: their nodes take 16 MB
_NEWTON_STEPS = 100
_SERIES, _LOG_LARGEST_X = 9, -3.5  # terms and fixed-point steps, for x of at most 0.03
_TERMS = 8  # of continued fractions
_MANY = 200.0  # degrees of freedom


def _log_upper(z: Tensor) -> Tensor:
    r"""$\log \Phi(-z)$, exact in both tails."""
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
    return _log_upper(-z), _log_upper(z)


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


def exponential_moments(rate: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Of $e^{-r t}$ between 0 and w: the log of its integral times r, mean and variance of t.

    Example:
        >>> rate = torch.tensor(2.0, dtype=torch.float64)
        >>> [round(part.item(), 4) for part in exponential_moments(rate, rate * 0 + math.inf)]
        [-0.0, 0.5, 0.25]
    """
    v = rate * width
    near, far = v.clamp(1e-300, 0.05), v.clamp(0.05, 600.0)
    square = near.square()
    mean = torch.where(v < 0.05, 0.5 - near / 12, 1 / far - 1 / torch.expm1(far))
    spread = torch.where(
        v < 0.05,
        1 / 12 - square / 240 + square.square() / 6048,
        1 / far.square() - (2 * (far / 2).sinh()).pow(-2),
    )
    mean = torch.where(v < 0.05, mean + near * square / 720, mean)
    scale = torch.where(v > 600.0, 600.0 / rate, width)
    return exponential_log_below(v.log()), scale * mean, scale.square() * spread


def joined_moments(log_weight: Tensor, mean: Tensor, variance: Tensor) -> Tails:
    """Mean and variance of mixtures, over the last axis."""
    weight = log_weight.softmax(-1)
    joint = (weight * mean).sum(-1)
    apart = (mean - joint.unsqueeze(-1)).square()
    return joint, (weight * (variance + apart)).sum(-1)


def in_chunks(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """An elementwise function whose memory is a multiple of its arguments, in parts."""
    values = torch.broadcast_tensors(*values)
    if values[0].numel() <= _AT_ONCE:
        return function(*values)
    parts = zip(*(value.reshape(-1).split(_AT_ONCE) for value in values), strict=True)
    return torch.cat([function(*part) for part in parts]).reshape(values[0].shape)


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


def student_log_tails(z: Tensor, nu: Tensor) -> Tails:
    r"""The same for Student's t, by Gauss-Legendre quadrature.

    With $t = \sqrt\nu \cot\theta$ the tail is $\propto \int \sin^{\nu - 1}\theta\, d\theta$ from 0
    to $\operatorname{arccot}(|z| / \sqrt\nu)$, or from where the integrand is not negligible.
    """
    log_far = in_chunks(_student_log_far, z.abs(), nu)
    log_near = torch.log1p(-log_far.exp())
    return torch.where(z < 0, log_far, log_near), torch.where(z < 0, log_near, log_far)


def _student_log_far(z: Tensor, nu: Tensor) -> Tensor:
    """Log P(T > z) for z of at least 0."""
    v, log_weight = legendre(z)
    constant = student_log_constant(nu) + 0.5 * nu.log()
    tiny = torch.finfo(z.dtype).tiny
    end = torch.atan2(nu.sqrt(), z)
    decay = (nu - 1) * z / nu.sqrt()  # of the integrand at the end, at least
    width = end.minimum(12 / nu.sqrt()).minimum(_NEGLIGIBLE / decay.clamp_min(tiny**0.5))
    # a power of v because the integrand has an infinite slope at 0
    theta = (end - width).unsqueeze(-1) + width.unsqueeze(-1) * v.pow(4)
    log_sine = torch.log(theta.sin().clamp_min(tiny))
    terms = (nu - 1).unsqueeze(-1) * log_sine + log_weight + (4 * v.pow(3)).log()
    return constant + width.log() + terms.logsumexp(-1)


def student_from_log_tails(below: Tensor, above: Tensor, nu: Tensor) -> Tensor:
    r"""The inverse of `student_log_tails`.

    Far out it is the inverse of a series, or Newton's method for $\log P(T > e^v)$, which is
    concave in v and converges from any point above; elsewhere SciPy's quantile.
    """
    from scipy.special import stdtrit

    below, above, nu = torch.broadcast_tensors(below, above, nu)
    far = torch.minimum(below, above)
    log_x = _student_log_x(far, nu)
    z = nu.sqrt() * (-log_x / 2).exp() * (-torch.expm1(log_x)).sqrt()
    near = ~(log_x < _LOG_LARGEST_X)
    z[near] = -torch.from_numpy(np.asarray(stdtrit(nu[near].numpy(), far[near].exp().numpy())))
    unknown = near & (~z.isfinite() | (far < -100))  # where it has few digits
    if bool(unknown.any()):
        z[unknown] = _student_newton(far[unknown], nu[unknown])
    return torch.where(below < above, -z, z)


def _student_log_x(log_far: Tensor, nu: Tensor) -> Tensor:
    r"""The log of $x = \nu / (\nu + z^2)$ from log P(T > z), where x is small.

    The tail is $\frac{x^{\nu / 2}}{\nu B(\nu / 2, 1/2)} \sum_n \frac{\nu}{\nu + 2n}
    \frac{(1/2)_n}{n!} x^n$ (DLMF 8.17.7).
    """
    log_beta = -student_log_constant(nu) - 0.5 * nu.log()
    first = found = 2 / nu * (log_far + nu.log() + log_beta)
    for _ in range(_SERIES):
        x, total = found.clamp_max(_LOG_LARGEST_X).exp(), torch.zeros_like(found)
        for n in range(_SERIES, 0, -1):  # as by Horner
            total = x * ((2 * n - 1) / (2 * n)) * (nu / (nu + 2 * n) + total)
        found = first - 2 / nu * torch.log1p(total)
    return found


def _student_newton(log_far: Tensor, nu: Tensor) -> Tensor:
    # (1 + z^2 / nu)^(-nu / 2) is above the tail
    ratio = -2 * log_far / nu
    v = 0.5 * (nu.log() + ratio + torch.log(-torch.expm1(-ratio)))
    constant = student_log_constant(nu)
    for _ in range(_NEWTON_STEPS):
        tail = in_chunks(_student_log_far, v.exp(), nu)
        spread = torch.nn.functional.softplus(2 * v - nu.log())  # log(1 + z^2 / nu)
        slope = (constant - 0.5 * (nu + 1) * spread + v - tail).exp()
        step = (tail - log_far) / slope
        v = v + torch.where(step.isfinite(), step, 0.0)
        if not bool((step.abs() > 1e-12).any()):
            break
    return v.exp()


def poisson_log_tails(y: Tensor, log_rate: Tensor, relative: bool = False) -> Tails:
    r"""Log P(Y <= y) and log P(Y > y) of Poisson counts.

    Relative ones leave out the factor $e^{-x}$, beside which the terms of a count have no digits
    where the rate is large: they are sums of $x^k / k!$ that stay exact for every rate if the tail
    is the one below.

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
    whole = rate if relative else torch.zeros_like(rate)
    if not relative:
        log_far = log_far - log_rate.exp()
    logs = [
        torch.where(part < tiny**0.5, log_far, part.clamp_min(tiny).log() + whole)
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
    return torch.where(
        low[1] < high[0], log_difference(low[1], high[1]), log_difference(high[0], low[0])
    )


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
