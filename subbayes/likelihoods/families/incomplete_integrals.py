r"""Tail probabilities of the gamma, negative binomial and inverse Gaussian distributions.

Torch has no incomplete beta function and no derivative of the incomplete gamma function for its
shape. Both are integrals of log-concave functions of $s$, the logarithm of a gamma variable or the
logit of a beta variable, up to one end. The smaller tail is integrated by the rule of Gauss and
Legendre from this end to where nothing is left; the derivatives are those of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subbayes.likelihoods.families.tails import Tails, in_chunks, legendre

__all__ = [
    "gamma_log_tails",
    "inverse_gaussian_log_tails",
    "log_concave_moments",
    "negative_binomial_log_tails",
    "responses_from_log_tails",
    "solve_log_tails",
]

_NEGLIGIBLE = 40.0  # decrease of a log density, after which integrals end
_STIRLING = 100.0
_LOG_LARGEST = 700.0  # of responses and their inverse
_MOST_STEPS = 200
_DOUBLINGS, _HALVINGS = 20, 6


def gamma_log_tails(log_ratio: Tensor, log_shape: Tensor) -> Tails:
    r"""Log P(Y <= y) and log P(Y > y) of gamma variables with shape a and mean $\mu$.

    With $x = a y / \mu$ they are integrals of $e^{a s - e^s}$ up to log x and from there.

    Args:
        log_ratio: $\log(y / \mu)$.
        log_shape: log a, of the same shape.

    Example:
        >>> below, above = gamma_log_tails(torch.tensor(0.0), torch.tensor(0.0))
        >>> round(below.exp().item(), 4), round(above.exp().item(), 4)  # 1 - 1/e and 1/e
        (0.6321, 0.3679)
    """
    far = in_chunks(_gamma_log_far, log_ratio, log_shape)
    return _both(far, log_ratio < 0)


def _gamma_log_far(log_ratio: Tensor, log_shape: Tensor) -> Tensor:
    """The log of the tail that does not have the mode of s."""
    a, x = log_shape.exp(), (log_shape + log_ratio).exp()
    below = log_ratio < 0
    slope = (a - x).abs()
    narrow = torch.where(x >= 3 * _NEGLIGIBLE, 3 * _NEGLIGIBLE / x, math.inf).sqrt()
    left = narrow.minimum((_NEGLIGIBLE + x) / a)
    tiny = torch.finfo(x.dtype).tiny
    few = torch.where(x <= 0.75 * _NEGLIGIBLE, 2 * _NEGLIGIBLE / x.clamp_min(tiny), math.inf)
    right = (2 * _NEGLIGIBLE / x.clamp_min(tiny)).sqrt().minimum(torch.log1p(few))
    width = torch.where(below, left, right).minimum(_NEGLIGIBLE / slope.clamp_min(tiny))
    sign = torch.where(below, -1.0, 1.0).to(x).unsqueeze(-1)

    def decrease(w: Tensor) -> Tensor:
        return sign * a.unsqueeze(-1) * w - x.unsqueeze(-1) * torch.expm1(sign * w)

    # a log x - x - log Gamma(a), of which large shapes keep their digits
    top = a * (log_ratio - torch.expm1(log_ratio)) + _gap_of_stirling(a, log_shape)
    return top + _log_integral(decrease, width)


def negative_binomial_log_tails(y: Tensor, log_mean: Tensor, log_shape: Tensor) -> Tails:
    r"""Log P(Y <= y) and log P(Y > y) of negative binomial counts with mean $\mu$ and shape r.

    They are incomplete beta functions (Abramowitz and Stegun 26.5.26): integrals of
    $t^r (1 - t)^{y + 1}$ over s, the logit of t, up to $\log(r / \mu)$ and from there.

    Args:
        y: counts, or numbers between them.
        log_mean: $\log \mu$, of the same shape.
        log_shape: log r.

    Example:
        >>> y, zero = torch.tensor(1.0), torch.tensor(0.0)
        >>> below, above = negative_binomial_log_tails(y, zero, zero)  # 1/2 + 1/4 and the rest
        >>> round(below.exp().item(), 4), round(above.exp().item(), 4)
        (0.75, 0.25)
    """
    k = (y.floor() + 1 + 0 * log_mean).detach()
    return _both(in_chunks(_binomial_log_far, k, log_mean, log_shape), k.log() < log_mean)


def _binomial_log_far(k: Tensor, log_mean: Tensor, log_shape: Tensor) -> Tensor:
    mean, r = log_mean.exp(), log_shape.exp()
    below = k.log() < log_mean
    logit = log_shape - log_mean
    # the integral of t^a (1 - t)^b from the end where t is small, for t or 1 - t
    a, b, end = (torch.where(below, *pair) for pair in ((r, k), (k, r), (logit, -logit)))
    p, rest = end.sigmoid(), (-end).sigmoid()
    tiny = torch.finfo(p.dtype).tiny
    slope = (a * rest - b * p).clamp_min(tiny)
    narrow = (2 * math.e * _NEGLIGIBLE / ((a + b) * p * rest).clamp_min(tiny)).sqrt()
    width = (_NEGLIGIBLE - (a + b) * torch.nn.functional.logsigmoid(-end)) / a
    width = width.minimum(_NEGLIGIBLE / slope)
    width = torch.where(narrow <= 1.0, width.minimum(narrow), width)

    def decrease(w: Tensor) -> Tensor:
        shrunk = torch.log1p(p.unsqueeze(-1) * torch.expm1(-w))
        return -a.unsqueeze(-1) * w - (a + b).unsqueeze(-1) * shrunk

    # r log p + k log(1 - p) - log B(r, k), of which large shapes keep their digits
    total = torch.log1p((k - mean) / (r + mean))
    top = r * total + k * (log_mean - k.log() + total)
    top = top + _gap_of_stirling(r, log_shape) + _gap_of_stirling(k, k.log())
    top = top - _gap_of_stirling(r + k, torch.logaddexp(log_shape, k.log()))
    return top + _log_integral(decrease, width)


def inverse_gaussian_log_tails(log_ratio: Tensor, log_precision: Tensor) -> Tails:
    r"""Log P(Y <= y) and log P(Y > y) of inverse Gaussian variables.

    With $a = \sqrt{\lambda / y}\,(y / \mu - 1)$ and $b = \sqrt{\lambda / y}\,(y / \mu + 1)$ the
    tail below is $\Phi(a) + e^{2 \lambda / \mu} \Phi(-b)$ (Shuster 1968), in which
    $e^{2 \lambda / \mu} \Phi(-b) = \tfrac12 e^{-a^2 / 2} \operatorname{erfcx}(b / \sqrt 2)$.

    Args:
        log_ratio: $\log(y / \mu)$.
        log_precision: $\log(\lambda / \mu)$, of the same shape.

    Example:
        >>> below, above = inverse_gaussian_log_tails(torch.tensor(0.0), torch.tensor(0.0))
        >>> round(below.exp().item(), 4), round(above.exp().item(), 4)
        (0.6681, 0.3319)
    """
    root = (0.5 * (log_precision - log_ratio)).exp() * 2.0**-0.5
    a, b = root * torch.expm1(log_ratio), root * (log_ratio.exp() + 1)
    below = a < 0
    other = torch.special.erfcx(b)
    own = torch.special.erfcx(a.abs())
    sum_ = torch.where(below, own + other, (own - other).clamp_min(torch.finfo(a.dtype).tiny))
    return _both(math.log(0.5) - a.square() + sum_.log(), below)


def solve_log_tails(
    tails: Callable[[Tensor], Tails],
    log_density: Callable[[Tensor], Tensor],
    below: Tensor,
    above: Tensor,
    start: Tensor,
) -> Tensor:
    """The log of positive responses with these log tails, by Newton's method and bisection.

    Args:
        tails: log P(Y <= y) and log P(Y > y) by log y.
        log_density: of Y, by log y.
        below: log tails to find.
        above: the other ones.
        start: log y to start from.

    Example:
        >>> def tails(v):
        ...     return gamma_log_tails(v, torch.zeros_like(v))
        >>> v = torch.tensor([-3.0, 0.5], dtype=torch.float64)
        >>> solve_log_tails(tails, lambda v: -v.exp(), *tails(v), torch.zeros_like(v))
        tensor([-3.0000,  0.5000], dtype=torch.float64)
    """
    below, above, v = torch.broadcast_tensors(below, above, start)
    lower, upper = torch.full_like(v, -_LOG_LARGEST), torch.full_like(v, _LOG_LARGEST)
    use_below, last = below < above, torch.full_like(v, math.inf)
    done = torch.zeros_like(use_below)
    precision = 1e-15 * torch.where(use_below, below, above).abs().clamp_min(1.0)
    for _ in range(_MOST_STEPS):
        own = torch.where(use_below, *tails(v))
        gap = torch.where(use_below, own - below, above - own)
        lower, upper = torch.where(gap < 0, v, lower), torch.where(gap < 0, upper, v)
        new = v - gap * (own - log_density(v) - v).exp()
        # bisection where steps hardly come closer, leave the bracket or are NaN
        kept = (new >= lower) & (new <= upper) & (gap.abs() <= 0.25 * last)
        new = torch.where(kept, new, (lower + upper) / 2)
        last = gap.abs()
        done = done | (last <= precision) | (upper - lower <= 1e-15 * v.abs())
        if bool(done.all()):
            break
        v = torch.where(done, v, new)
    return v


def responses_from_log_tails(
    family: Any, below: Tensor, above: Tensor, eta: tuple[Tensor, ...]
) -> Tensor:
    """The positive responses of a family with these log tails; its first predictor is the log mean.

    Example:
        >>> from subbayes.likelihoods.families import GammaFamily
        >>> family, eta = GammaFamily(), tuple(torch.zeros(2, 1, dtype=torch.float64))
        >>> tails = family.log_tails(torch.tensor([0.25], dtype=torch.float64), eta)
        >>> responses_from_log_tails(family, *tails, eta)
        tensor([0.2500], dtype=torch.float64)
    """
    return solve_log_tails(
        lambda v: family.log_tails(v.exp(), eta),
        lambda v: family.log_density(v.exp(), eta),
        below,
        above,
        eta[0],
    ).exp()


def log_concave_moments(
    log_density: Callable[[Tensor], Tensor], mode: Tensor, bounds: tuple[float, float]
) -> Tails:
    r"""Mean and variance of positive responses between two bounds, by quadrature over $v = \log y$.

    Args:
        log_density: a concave function of v, the log density of v up to a constant; from (m, n).
        mode: where it is largest, shape (n,).
        bounds: of the responses.

    Example:
        >>> mode = torch.zeros(1, dtype=torch.float64)
        >>> moments = log_concave_moments(lambda v: v - v.exp(), mode, (0.0, math.inf))
        >>> [round(part.item(), 6) for part in moments]  # exponential
        [1.0, 1.0]
    """
    low, high = (math.log(end) if end > 0 else -math.inf for end in bounds)
    start = mode.clamp(low, high)
    top = log_density(start.unsqueeze(0))[0]
    x, log_weight = legendre(start)
    nodes, weights = [], []
    for sign, most in ((-1.0, start - low), (1.0, high - start)):
        width = torch.full_like(start, 2.0**-10)
        for _ in range(_DOUBLINGS):
            width = torch.where(
                _decreases(log_density, start + sign * width, top), width, 2 * width
            )
        step = width / 4
        for _ in range(_HALVINGS):  # to a width that is hardly too large
            less = _decreases(log_density, start + sign * (width - step), top)
            width, step = torch.where(less, width - step, width), step / 2
        width = width.minimum(most)
        w = width * x.square().unsqueeze(-1)
        density = (log_density(start + sign * w) - top).exp()
        nodes.append(torch.expm1(sign * w))
        weights.append(density * width * (log_weight.exp() * 2 * x).unsqueeze(-1))
    change, weight = torch.cat(nodes), torch.cat(weights)
    weight = weight / weight.sum(0)
    mean = (weight * change).sum(0)
    variance = (weight * (change - mean).square()).sum(0)
    return start.exp() * (1 + mean), start.exp().square() * variance


def _decreases(log_density: Callable[[Tensor], Tensor], v: Tensor, top: Tensor) -> Tensor:
    """Whether nothing is left at v."""
    return ~(top - log_density(v.unsqueeze(0))[0] < _NEGLIGIBLE)


def _both(far: Tensor, below: Tensor) -> Tails:
    """Both log tails from the smaller one, which is that below where `below` says so."""
    near = torch.log1p(-far.exp())
    return torch.where(below, far, near), torch.where(below, near, far)


def _log_integral(decrease: Callable[[Tensor], Tensor], width: Tensor) -> Tensor:
    """The log of the integral of e^decrease(w) from 0 to the width, which has no gradient."""
    width = width.detach()
    v, log_weight = legendre(width)
    terms = decrease(width.unsqueeze(-1) * v.square()) + log_weight + (2 * v).log()
    return width.log() + terms.logsumexp(-1)


def _gap_of_stirling(a: Tensor, log_a: Tensor) -> Tensor:
    r"""$a \log a - a - \log \Gamma(a)$."""
    large = a.clamp_min(_STIRLING)
    series = 1 / (12 * large) - 1 / (360 * large.pow(3))
    far = 0.5 * (log_a.clamp_min(math.log(_STIRLING)) - math.log(2 * math.pi)) - series
    small = a.clamp_max(_STIRLING)
    return torch.where(a > _STIRLING, far, small * (small.log() - 1) - torch.lgamma(small))
