r"""Tail probabilities of gamma, beta, Student's t, binomial and inverse Gaussian variables.

Torch has no incomplete beta function and no derivative of the incomplete gamma function for its
shape. Both are integrals of log-concave functions of $s$, the logarithm of a gamma variable or the
logit of a beta variable, up to one end. The smaller tail is integrated by the rule of Gauss and
Legendre from this end to where nothing is left; the derivatives are those of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from subbayes.likelihoods.tails.tails import Tails, legendre, student_log_constant
from subbayes.utils.types import Predictors

_NEGLIGIBLE = 40.0  # decrease of a log density, after which integrals end
_AT_ONCE = 2**15  # probabilities by quadrature: their nodes take 16 MB
_STIRLING = 100.0
_SERIES, _LOG_LARGEST_X = 9, -3.5  # terms and fixed-point steps, for x of at most 0.03
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
    far, _ = _tails_of_odds(nu.log() - 2 * distance.log(), nu)
    return _both(far - math.log(2), z < 0)


def _tails_of_odds(logit: Tensor, nu: Tensor) -> Tails:
    """Log tails of the logit of this beta variable."""
    return beta_log_tails(logit, (nu / 2).log(), torch.full_like(nu, math.log(0.5)))


def student_from_log_tails(below: Tensor, above: Tensor, nu: Tensor) -> Tensor:
    """The inverse of `student_log_tails`: of a series far out, elsewhere SciPy's quantile.

    The latter has few digits of tiny probabilities, of which it is solved for.
    """
    from scipy.special import stdtrit

    below, above, nu = torch.broadcast_tensors(below, above, nu)
    far = torch.minimum(below, above)
    log_x = _student_log_x(far, nu)
    z = nu.sqrt() * (-log_x / 2).exp() * (-torch.expm1(log_x)).sqrt()
    near = ~(log_x < _LOG_LARGEST_X)
    z[near] = -torch.from_numpy(np.asarray(stdtrit(nu[near].numpy(), far[near].exp().numpy())))
    rare = near & (~z.isfinite() | (far < -100))
    if bool(rare.any()):
        log_far, degrees = far[rare] + math.log(2), nu[rare]
        ratio = -2 * far[rare] / degrees  # of the bound (1 + z^2 / nu)^(-nu / 2) of the tail
        log_beta = -student_log_constant(degrees) - 0.5 * degrees.log()
        logit = solve_log_tails(
            lambda v: _tails_of_odds(v, degrees),
            lambda v: degrees / 2 * logsigmoid(v) + 0.5 * logsigmoid(-v) - log_beta,
            log_far,
            torch.log1p(-log_far.exp()),
            -ratio - torch.log(-torch.expm1(-ratio)),
        )
        z[rare] = (0.5 * (degrees.log() - logit)).exp()
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


def solve_log_tails(
    tails: Callable[[Tensor], Tails],
    log_density: Callable[[Tensor], Tensor],
    below: Tensor,
    above: Tensor,
    start: Tensor,
) -> Tensor:
    """The values v with these log tails, by Newton's method and bisection.

    Args:
        tails: log P(V <= v) and log P(V > v) by v, such as the logarithm of a response.
        log_density: of V.
        below: log tails to find.
        above: the other ones.
        start: v to start from.

    Example:
        >>> def tails(v):
        ...     return gamma_log_tails(v, torch.zeros_like(v))
        >>> v = torch.tensor([-3.0, 0.5], dtype=torch.float64)
        >>> solve_log_tails(tails, lambda v: v - v.exp(), *tails(v), torch.zeros_like(v))
        tensor([-3.0000,  0.5000], dtype=torch.float64)
    """
    below, above, v = torch.broadcast_tensors(below, above, start)
    lower, upper = torch.full_like(v, -_LOG_LARGEST), torch.full_like(v, _LOG_LARGEST)
    use_below, last = below < above, torch.full_like(v, math.inf)
    done = torch.zeros_like(use_below)
    precision = 1e-14 * torch.where(use_below, below, above).abs().clamp_min(1.0)
    for _ in range(_MOST_STEPS):
        own = torch.where(use_below, *tails(v))
        gap = torch.where(use_below, own - below, above - own)
        lower, upper = torch.where(gap < 0, v, lower), torch.where(gap < 0, upper, v)
        new = v - gap * (own - log_density(v)).exp()
        # bisection where steps hardly come closer, leave the bracket or are NaN
        kept = (new >= lower) & (new <= upper) & (gap.abs() <= 0.25 * last)
        new = torch.where(kept, new, (lower + upper) / 2)
        last = gap.abs()
        done = done | (last <= precision) | (upper - lower <= 1e-15 * v.abs())
        if bool(done.all()):
            break
        v = torch.where(done, v, new)
    return v


def inverse_from_tails(
    inverse: Callable[..., Any],
    complement: Callable[..., Any],
    shapes: Sequence[Tensor],
    below: Tensor,
    above: Tensor,
) -> Tensor:
    """Values with these log tails, by SciPy; not accurate for tails that underflow.

    Args:
        inverse: of the distribution function, such as `scipy.special.gammaincinv`.
        complement: of one less it.
        shapes: the parameters of both.
        below: log P(V <= v).
        above: log P(V > v).

    Example:
        >>> from scipy import special
        >>> known = special.gammaincinv, special.gammainccinv
        >>> shape = torch.tensor([1.0], dtype=torch.float64)
        >>> log_half = torch.tensor([0.5], dtype=torch.float64).log()
        >>> inverse_from_tails(*known, [shape], log_half, log_half)
        tensor([0.6931], dtype=torch.float64)
    """
    parts = torch.broadcast_tensors(*shapes, below.exp(), above.exp())
    *given, p, q = (part.numpy() for part in parts)
    return torch.from_numpy(np.where(p < q, inverse(*given, p), complement(*given, q)))


def responses_from_log_tails(
    family: Any, below: Tensor, above: Tensor, eta: Predictors, start: Tensor | None = None
) -> Tensor:
    """The positive responses of a family with these log tails; its first predictor is the log mean.

    Args:
        family: the family.
        below: log P(Y <= y).
        above: log P(Y > y).
        eta: its predictors.
        start: log y to start from where it is finite; by default the log mean.

    Example:
        >>> from subbayes.likelihoods.families import GammaFamily
        >>> family, eta = GammaFamily(), tuple(torch.zeros(2, 1, dtype=torch.float64))
        >>> tails = family.log_tails(torch.tensor([0.25], dtype=torch.float64), eta)
        >>> responses_from_log_tails(family, *tails, eta)
        tensor([0.2500], dtype=torch.float64)
    """
    return solve_log_tails(
        lambda v: family.log_tails(v.exp(), eta),
        lambda v: family.log_density(v.exp(), eta) + v,
        below,
        above,
        eta[0] if start is None else torch.where(start.isfinite(), start, eta[0]),
    ).exp()


def log_ends(lower: Tensor, upper: Tensor) -> Tails:
    """The logarithms of two bounds of positive responses."""
    return lower.clamp_min(0.0).log(), upper.clamp_min(0.0).log()


def exp_change(v: Tensor, step: Tensor) -> Tensor:
    """How much exp(v) increases with a step."""
    return v.exp() * torch.expm1(step)


def sigmoid_change(v: Tensor, step: Tensor) -> Tensor:
    """How much 1 / (1 + exp(-v)) increases with a step.

    Example:
        >>> round(float(sigmoid_change(torch.tensor(0.0), torch.tensor(1.0))), 4)
        0.2311
    """
    up = -torch.expm1(-step) * (v + step).sigmoid() * (-v).sigmoid()
    down = torch.expm1(step) * v.sigmoid() * (-v - step).sigmoid()
    return torch.where(step >= 0, up, down)


def log_concave_moments(
    log_density: Callable[[Tensor], Tensor],
    mode: Tensor,
    ends: Tails,
    change: Callable[[Tensor, Tensor], Tensor] = exp_change,
) -> Tails:
    r"""Mean and variance of responses between two bounds, by quadrature over v, such as $\log y$.

    Args:
        log_density: a concave function of v, the log density of v up to a constant; from (m, n).
        mode: where it is largest, shape (n,).
        ends: the bounds, in v, each of shape (n,).
        change: how much y increases with a step of v, from that of minus infinity, y = 0.

    Example:
        >>> mode = torch.zeros(1, dtype=torch.float64)
        >>> ends = mode - math.inf, mode + math.inf
        >>> moments = log_concave_moments(lambda v: v - v.exp(), mode, ends)
        >>> [round(part.item(), 6) for part in moments]  # exponential
        [1.0, 1.0]
    """
    low, high = ends
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
        nodes.append(change(start, sign * w))
        weights.append(density * width * (log_weight.exp() * 2 * x).unsqueeze(-1))
    found, weight = torch.cat(nodes), torch.cat(weights)
    weight = weight / weight.sum(0)
    mean = (weight * found).sum(0)
    variance = (weight * (found - mean).square()).sum(0)
    return mean - change(start, torch.full_like(start, -math.inf)), variance


def _in_chunks(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """An elementwise function whose memory is a multiple of its arguments, in parts."""
    values = torch.broadcast_tensors(*values)
    if values[0].numel() <= _AT_ONCE:
        return function(*values)
    parts = zip(*(value.reshape(-1).split(_AT_ONCE) for value in values), strict=True)
    return torch.cat([function(*part) for part in parts]).reshape(values[0].shape)


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


def scaled_trigamma(a: Tensor) -> Tensor:
    r"""$a^2 \psi'(a)$, which is 1 for a shape of 0."""
    return 1 + a.square() * torch.polygamma(1, 1 + a)
