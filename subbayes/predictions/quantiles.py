r"""Quantiles of mixtures by Newton's method within a bracket.

The quantile x of level q solves $F(x) = q$ for the distribution function
$F = \tfrac1S \sum_s F_s$ of the mixture. Newton's method is applied to
$\Phi^{-1}(F(x)) = \Phi^{-1}(q)$, which is linear in x for one Gaussian and nearly linear for
similar components, in the tails too:

$$ x \leftarrow x + (\Phi^{-1}(q) - u) \, \phi(u) / f(x), \qquad u = \Phi^{-1}(F(x)) $$

with the density f of the mixture. A step that leaves the bracket, or that is longer than half of
the one before, is replaced by a bisection (Press et al., Numerical Recipes, section 9.4), so that
well separated components take more steps and not another result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.likelihoods import Likelihood

__all__ = ["gaussian_mixture_quantile", "mixture_quantile", "solve_quantile"]

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_NUMBERS_AT_ONCE = 2**16  # components evaluated at once, which fit into the cache
_TOLERANCE = 1e-6  # of the last Newton step, whose error is about its square
_RESOLUTION = 1e-10  # of the bracket
_SMALLEST = 1e-12  # quantile of positive targets, in standard deviations
_MOST_STEPS = 200
_ROOT_2, _ROOT_2PI = math.sqrt(2), math.sqrt(2 * math.pi)


def _identity(x: Tensor) -> Tensor:
    return x


def _variance_of_share(x: Tensor) -> Tensor:
    """The derivative of the sigmoid, by its value."""
    return x * (1 - x)


def solve_quantile(
    evaluate: Evaluate,
    q: float,
    low: Float[Tensor, "N T"],
    high: Float[Tensor, "N T"],
    start: Float[Tensor, "N T"],
    scale: Float[Tensor, "N T"],
    link: Callable[[Tensor], Tensor] = _identity,
) -> Float[Tensor, "N T"]:
    """The quantile of level q of each distribution, by Newton's method within a bracket.

    Args:
        evaluate: a function of points (n, T) and of the indices of their rows (n,), to the
            distribution function and the density of the coordinate there, each (n, T). Rows that
            have converged are not evaluated again.
        q: the level.
        low: a bound at or below the quantile, in the coordinate.
        high: a bound at or above it.
        start: where to start, within the bounds.
        scale: standard deviation, which the precision refers to.
        link: the value of a coordinate, increasing; by default the value itself.

    Returns:
        The quantiles, as coordinates.

    Example:
        >>> rates = torch.tensor([[1.0], [10.0]], dtype=torch.float64)  # exponential distributions
        >>> def evaluate(x, rows):
        ...     return 1 - torch.exp(-rates[rows] * x), rates[rows] * torch.exp(-rates[rows] * x)
        >>> ends = torch.zeros_like(rates), 20 / rates
        >>> solve_quantile(evaluate, 0.5, *ends, 1 / rates, 1 / rates)[:, 0] * rates[:, 0]
        tensor([0.6931, 0.6931], dtype=torch.float64)
    """
    level = torch.special.ndtri(torch.tensor(q, dtype=torch.float64))
    found, rows = start.clone(), torch.arange(len(start))
    x, last = start, torch.full_like(start, math.inf)
    settled = torch.zeros_like(start, dtype=torch.bool)  # of some targets of a row
    for _ in range(_MOST_STEPS):
        probability, density = evaluate(x, rows)
        above = probability >= q
        low, high = torch.where(above, low, x), torch.where(above, x, high)
        u = torch.special.ndtri(probability)
        step = (level - u) * torch.exp(-u * u / 2) / (_ROOT_2PI * density)
        new = x + step
        length = step.abs()
        trusted = (new >= low) & (new <= high) & (length <= last / 2)  # False for NaN
        new = torch.where(trusted, new, (low + high) / 2)
        last = torch.where(trusted, length, (high - low) / 2)
        # A narrow component has a step far below the scale while its mass is still to be passed.
        passed = length * density <= _TOLERANCE * min(q, 1 - q)
        small = trusted & passed & (link(x + length) - link(x) <= _TOLERANCE * scale)
        close = (link(high) - link(low) <= _RESOLUTION * scale) | (new == low) | (new == high)
        found[rows] = x = torch.where(settled, x, new)
        settled = settled | small | close
        done = settled.all(1)
        if bool(done.all()):
            break
        if bool(done.any()):
            left = ~done
            rows, x, low, high = rows[left], x[left], low[left], high[left]
            scale, last, settled = scale[left], last[left], settled[left]
    return found


def gaussian_mixture_quantile(
    q: float, means: Float[Tensor, "S N T"], stds: Float[Tensor, "S N T"]
) -> Float[Tensor, "N T"]:
    """Quantiles of mixtures of S Gaussians with equal weights.

    Args:
        q: the level.
        means: means of the components.
        stds: their standard deviations.

    Example:
        >>> means = torch.tensor([-3.0, 1.0], dtype=torch.float64).reshape(2, 1, 1)
        >>> gaussian_mixture_quantile(0.5, means, torch.ones_like(means)).item()
        -1.0
    """
    S, shape = len(means), means.shape[1:]
    flat, sds = means.reshape(S, -1), stds.reshape(S, -1)
    size = max(1, _NUMBERS_AT_ONCE // S)
    pairs = zip(flat.split(size, 1), sds.split(size, 1), strict=True)
    return torch.cat([_of_rows(q, m.T.contiguous(), s.T.contiguous()) for m, s in pairs]).reshape(
        shape
    )


def _of_rows(q: float, means: Float[Tensor, "n S"], stds: Float[Tensor, "n S"]) -> Tensor:
    """Quantiles of one mixture per row, shape (n, 1)."""
    rates = stds.reciprocal()

    def evaluate(x: Tensor, rows: Int[Tensor, "m"]) -> tuple[Tensor, Tensor]:
        every = len(rows) == len(means)
        centre, rate = (means, rates) if every else (means[rows], rates[rows])
        z = (x - centre).mul_(rate)
        probability = torch.erfc(z / -_ROOT_2).mean(1, keepdim=True) / 2
        density = z.square_().mul_(-0.5).exp_().mul_(rate).mean(1, keepdim=True) / _ROOT_2PI
        return probability, density

    level = torch.special.ndtri(torch.tensor(q, dtype=torch.float64))
    ends = means + level * stds  # the quantiles of the components enclose that of the mixture
    low, high = ends.amin(1, keepdim=True), ends.amax(1, keepdim=True)
    scale = (stds.square().mean(1, keepdim=True) + means.var(1, correction=0, keepdim=True)).sqrt()
    start = means.mean(1, keepdim=True) + level * scale
    return solve_quantile(evaluate, q, low, high, start.clamp(low, high), scale)


def mixture_quantile(
    q: float, likelihood: Likelihood, outputs: Float[Tensor, "S N C"]
) -> Float[Tensor, "N T"]:
    """Quantiles of mixtures of a continuous likelihood, from its `cdf` and `log_prob`.

    The density of one of several targets is not known, and is replaced by a difference quotient of
    the distribution function. Quantiles nearer than 1e-12 standard deviations to an end
    of the support are not resolved.

    Args:
        q: the level.
        likelihood: p(y | f), with `cdf`.
        outputs: network outputs.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> outputs = torch.zeros(1, 1, 1, dtype=torch.float64)
        >>> mixture_quantile(0.975, Gaussian(2.0), outputs).item()  # doctest: +ELLIPSIS
        3.9199...
    """
    means, stds = likelihood.mean(outputs), likelihood.variance(outputs).sqrt()
    # Cantelli's inequality bounds the distance of a quantile from the mean.
    reach = 1 + math.sqrt(max(q / (1 - q), (1 - q) / q))
    low, high = (means - reach * stds).amin(0), (means + reach * stds).amax(0)
    mean, scale = means.mean(0), (stds.square().mean(0) + means.var(0, correction=0)).sqrt()
    level = torch.special.ndtri(torch.tensor(q, dtype=torch.float64))

    def evaluate(x: Tensor, rows: Int[Tensor, "m"]) -> tuple[Tensor, Tensor]:
        own, some = likelihood.select_rows(rows), outputs[:, rows]
        probability = own.cdf(some, x).mean(0)
        if x.shape[1] == 1:
            return probability, own.log_prob(some, x[:, 0]).exp().mean(0).unsqueeze(1)
        width = 1e-6 * scale[rows]
        return probability, (own.cdf(some, x + width).mean(0) - probability) / width

    if likelihood.bounds[0] != 0:
        start = (mean + level * scale).clamp(low, high)
        return solve_quantile(evaluate, q, low, high, start, scale)

    # Near an end of the support Newton's method takes fewer steps for log x and logit x.
    if likelihood.bounds[1] != 1:
        link, slope = torch.exp, _identity
        spread = (1 + (scale / mean).square()).log().sqrt()
        start = mean.log() - spread.square() / 2 + level * spread  # log-normal, same moments
        low, high = (_SMALLEST * scale).log(), high.log()
    else:
        link, slope = torch.sigmoid, _variance_of_share
        start = mean.logit() + level * scale / slope(mean)
        low, high = (_SMALLEST * scale).logit(), (1 - _SMALLEST * scale).logit()

    def evaluate_link(t: Tensor, rows: Int[Tensor, "m"]) -> tuple[Tensor, Tensor]:
        x = link(t)
        probability, density = evaluate(x, rows)
        return probability, density * slope(x)

    found = solve_quantile(evaluate_link, q, low, high, start.clamp(low, high), scale, link)
    return link(found)
