r"""Tail probabilities of gamma, beta, Student's t, binomial and inverse Gaussian variables.

Torch has no incomplete beta function and no derivative of the incomplete gamma function for its
shape. Both are integrals of log-concave functions of $s$, the logarithm of a gamma variable or the
logit of a beta variable, up to one end. The smaller tail is integrated by the rule of Gauss and
Legendre from this end to where nothing is left; the derivatives are those of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from subbayes.likelihoods.tails.tails import Tails, legendre

_NEGLIGIBLE = 40.0  # decrease of a log density, after which integrals end
_AT_ONCE = 2**15  # probabilities by quadrature: their nodes take 16 MB
_STIRLING = 100.0
_LOG_LARGEST = 700.0  # of responses and their inverse


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
    far = _in_chunks(_gamma_log_far, log_ratio, log_shape)
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


def beta_log_tails(logit: Tensor, log_a: Tensor, log_b: Tensor) -> Tails:
    r"""Log P(Y <= y) and log P(Y > y) of beta variables with shapes a and b.

    They are integrals of $t^a (1 - t)^b$ over s, the logit of t, up to that of y and from there.

    Args:
        logit: $\log(y / (1 - y))$.
        log_a: log a, of the same shape.
        log_b: log b.

    Example:
        >>> logit, zero = torch.tensor(0.25).logit(), torch.tensor(0.0)
        >>> below, above = beta_log_tails(logit, zero, zero)  # uniform
        >>> round(below.exp().item(), 4), round(above.exp().item(), 4)
        (0.25, 0.75)
    """
    inside = logit.clamp(-_LOG_LARGEST, _LOG_LARGEST)
    below, above = _both(_in_chunks(_beta_log_far, inside, log_a, log_b), inside < log_a - log_b)
    below = below.masked_fill(logit == -math.inf, -math.inf).masked_fill(logit == math.inf, 0.0)
    above = above.masked_fill(logit == math.inf, -math.inf).masked_fill(logit == -math.inf, 0.0)
    return below, above


def binomial_log_tails(y: Tensor, logit: Tensor, trials: Tensor) -> Tails:
    r"""Log P(Y <= y) and log P(Y > y) of binomial counts of successes.

    $P(Y > y)$ is that of a beta variable with shapes $\lfloor y \rfloor + 1$ and
    $n - \lfloor y \rfloor$ below the probability p of a success (Abramowitz and Stegun 26.5.24).

    Args:
        y: counts, or numbers between them.
        logit: $\log(p / (1 - p))$, of the same shape.
        trials: n.

    Example:
        >>> y, zero = torch.tensor(0.0), torch.tensor(0.0)
        >>> below, above = binomial_log_tails(y, zero, zero + 2)  # 1/4 and the rest
        >>> round(below.exp().item(), 4), round(above.exp().item(), 4)
        (0.25, 0.75)
    """
    k = (y.floor() + 1 + 0 * logit).detach()
    rest = (trials + 1 - k).detach()
    none, all_ = k < 1, rest < 1
    above, below = beta_log_tails(logit, k.clamp_min(1.0).log(), rest.clamp_min(1.0).log())
    below = below.masked_fill(none, -math.inf).masked_fill(all_, 0.0)
    above = above.masked_fill(all_, -math.inf).masked_fill(none, 0.0)
    return below, above


def negative_binomial_log_tails(y: Tensor, log_mean: Tensor, log_shape: Tensor) -> Tails:
    r"""Log P(Y <= y) and log P(Y > y) of negative binomial counts with mean $\mu$ and shape r.

    They are those of a beta variable with shapes r and $\lfloor y \rfloor + 1$ (Abramowitz and
    Stegun 26.5.26) at the logit $\log(r / \mu)$.

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
    return beta_log_tails(log_shape - log_mean, log_shape, k.log() + 0 * log_mean)


def student_log_tails(z: Tensor, nu: Tensor) -> Tails:
    r"""Log P(Y <= z) and log P(Y > z) of Student's t with $\nu$ degrees of freedom.

    $P(Y > |z|)$ is half of that of a beta variable with shapes $\nu / 2$ and 1/2 below
    $\nu / (\nu + z^2)$ (Abramowitz and Stegun 26.7.1).

    Args:
        z: where.
        nu: degrees of freedom, of the same shape.

    Example:
        >>> below, above = student_log_tails(torch.tensor(1.0), torch.tensor(1.0))
        >>> round(below.exp().item(), 4), round(above.exp().item(), 4)
        (0.75, 0.25)
    """
    distance = (z + torch.finfo(z.dtype).tiny ** 0.3).abs()  # not 0, where a logarithm has no slope
    logit = nu.log() - 2 * distance.log()
    far, _ = beta_log_tails(logit, (nu / 2).log(), torch.full_like(nu, math.log(0.5)))
    return _both(far - math.log(2), z < 0)


def _beta_log_far(logit: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """The log of the tail that does not have the mode of s, the logit of a beta variable."""
    beyond = logit - (log_a - log_b)  # the mode
    below = beyond < 0
    # the integral of t^a (1 - t)^b from the end where t is small, for t or 1 - t
    log_a, log_b, end = (
        torch.where(below, *pair) for pair in ((log_a, log_b), (log_b, log_a), (logit, -logit))
    )
    a, b, gap = log_a.exp(), log_b.exp(), -beyond.abs()
    p, rest = end.sigmoid(), (-end).sigmoid()
    tiny = torch.finfo(p.dtype).tiny
    slope = (a * rest - b * p).clamp_min(tiny)
    narrow = (2 * math.e * _NEGLIGIBLE / ((a + b) * p * rest).clamp_min(tiny)).sqrt()
    width = (_NEGLIGIBLE - (a + b) * logsigmoid(-end)) / a
    width = width.minimum(_NEGLIGIBLE / slope)
    width = torch.where(narrow <= 1.0, width.minimum(narrow), width)

    log_p, log_rest = (logsigmoid(sign * end).unsqueeze(-1) for sign in (1, -1))

    def decrease(w: Tensor) -> Tensor:
        # the log of 1 - p + p e^-w
        change = p.unsqueeze(-1) * torch.expm1(-w)
        near, far = torch.log1p(change.clamp_min(-0.5)), torch.logaddexp(log_rest, log_p - w)
        shrunk = torch.where(change > -0.5, near, far)
        return -a.unsqueeze(-1) * w - (a + b).unsqueeze(-1) * shrunk

    # a log p + b log(1 - p) - log B(a, b), of which large shapes keep their digits
    mode = log_a - log_b
    top = a * _log_ratio(mode, gap) + b * _log_ratio(-mode, -gap)
    top = top + _gap_of_stirling(a, log_a) + _gap_of_stirling(b, log_b)
    top = top - _gap_of_stirling(a + b, torch.logaddexp(log_a, log_b))
    return top + _log_integral(decrease, width)


def _log_ratio(v: Tensor, step: Tensor) -> Tensor:
    """The log of sigmoid(v + step) / sigmoid(v), of which small steps keep their digits."""
    near = step.clamp(-1.0, 1.0)
    far = logsigmoid(v + step) - logsigmoid(v)
    return torch.where(step == near, -torch.log1p((-v).sigmoid() * torch.expm1(-near)), far)


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


def _in_chunks(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """An elementwise function whose memory is a multiple of its arguments, in parts."""
    values = torch.broadcast_tensors(*values)
    if values[0].numel() <= _AT_ONCE:
        return function(*values)
    parts = zip(*(value.reshape(-1).split(_AT_ONCE) for value in values), strict=True)
    return torch.cat([function(*part) for part in parts]).reshape(values[0].shape)


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


def scaled_trigamma(a: Tensor) -> Tensor:
    r"""$a^2 \psi'(a)$, which is 1 for a shape of 0."""
    return 1 + a.square() * torch.polygamma(1, 1 + a)
