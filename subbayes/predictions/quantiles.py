r"""Quantiles of mixtures by Newton's method and inverse interpolation within a bracket.

The quantile x of level q solves $F(x) = q$ for the distribution function
$F = \tfrac1S \sum_s F_s$ of the mixture. Newton's method is applied to
$\Phi^{-1}(F(x)) = \Phi^{-1}(q)$, which is linear in x for one Gaussian and nearly linear for
similar components, in the tails too:

$$ x \leftarrow x + (\Phi^{-1}(q) - u) \, \phi(u) / f(x), \qquad u = \Phi^{-1}(F(x)) $$

with the density f of the mixture. From the second step on, the new x is the value at
$\Phi^{-1}(q)$ of the cubic in u that has the values and the slopes of the last two points (inverse
Hermite interpolation, of order 2.7 where Newton's method has 2). A step that leaves the bracket, or
that is longer than half of the one before, is replaced by a bisection (Press et al., Numerical
Recipes, section 9.4), so that well separated components take more steps and not another result.

The search ends at a point with the level q, or with a step whose error is bounded by how the slope
dx/du changed between the last two points. Steps are compared with the standard deviation, and with
the probability that is missing: heavy tails have a standard deviation far above most quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.likelihoods import Likelihood
from subbayes.utils.types import Outputs

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Link = Callable[[Tensor], Tensor]

_NUMBERS_AT_ONCE = 2**18  # components evaluated at once, which fit into the cache
_TOLERANCE = 1e-5  # of the last step, whose error is about its square
_FINE = 1e-9  # of a point, or of the cubic term of the last step
_CUBIC_MASS = 1e-2  # of the smaller tail, at most, between the last two points of a cubic
_MOST_BEND = 0.5  # of the slope between two points that say how it goes on
_SMALL_STEP = 1e-3  # of the narrowest component, whose density hardly changes by it
_DRAWS_OF_START = 16  # whose quantile starts the search among many
_SMALLEST = 1e-12  # quantile of positive targets, in standard deviations of a component
_HEAVY = 30  # standard deviations in a mean, beyond which they say little about quantiles
_TINY, _HUGE = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max
_MOST_STEPS = 200
_ROUGH_STEPS = 4  # in single precision
_ROOT_2, _ROOT_2PI = math.sqrt(2), math.sqrt(2 * math.pi)


def _identity(x: Tensor) -> Tensor:
    return x


_INVERSE: dict[Link, Link] = {
    _identity: _identity,
    torch.exp: torch.log,
    torch.sigmoid: torch.logit,
}


def _beyond_newton(
    level: Tensor, old: tuple[Tensor, Tensor, Tensor], new: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What inverse interpolation adds to a Newton step from `new`.

    A point is (u, x, dx/du). The terms are those of Newton's form with both points taken twice.

    Returns:
        The two terms that are added, a bound of the error, and the relative change of the slope
        between the points. The bound is the second term, which may vanish by chance, and what it
        would be if terms shrank by the change of the slope.
    """
    (u0, x0, slope0), (u1, x1, slope1) = old, new
    h, left = u1 - u0, level - u1
    secant = (x1 - x0) / h
    bend = (slope1 - secant).abs().maximum((slope0 - secant).abs()) / secant.abs()
    square = left * left / h
    first = square * (slope1 - secant)
    second = square * (level - u0) * (slope0 + slope1 - 2 * secant) / h
    return first + second, second.abs().maximum(bend * first.abs()), bend


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
    resolution: Float[Tensor, "N T"],
    link: Link = _identity,
    exact_density: bool = True,
    smooth: Float[Tensor, "N T"] | None = None,
    most_steps: int = _MOST_STEPS,
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
        resolution: width of a bracket of values that ends the search.
        link: the value of a coordinate, increasing; by default the value itself.
        exact_density: False where the density is a difference quotient, whose interpolation has a
            larger error.
        smooth: length of a step, within which the density hardly changes, if it is known.
        most_steps: after which the search ends anyway.

    Returns:
        The quantiles, as coordinates.

    Example:
        >>> rates = torch.tensor([[1.0], [10.0]], dtype=torch.float64)  # exponential distributions
        >>> def evaluate(x, rows):
        ...     return 1 - torch.exp(-rates[rows] * x), rates[rows] * torch.exp(-rates[rows] * x)
        >>> ends = torch.zeros_like(rates), 20 / rates
        >>> solve_quantile(evaluate, 0.5, *ends, 1 / rates, 1 / rates, 1e-12 / rates).T * rates.T
        tensor([[0.6931, 0.6931]], dtype=torch.float64)
    """
    level = torch.special.ndtri(torch.tensor(q, dtype=torch.float64)).to(start)
    tail, rounding = min(q, 1 - q), torch.finfo(start.dtype).eps
    smooth = torch.zeros_like(start) if smooth is None else smooth
    roots, rows = start.clone(), torch.arange(len(start))
    x, last = start, torch.full_like(start, math.inf)
    old = (torch.full_like(start, math.nan),) * 3
    settled = torch.zeros_like(start, dtype=torch.bool)  # of some targets of a row
    for _ in range(most_steps):
        probability, density = evaluate(x, rows)
        above = probability >= q
        low, high = torch.where(above, low, x), torch.where(above, x, high)
        u = torch.special.ndtri(probability)
        point = u, x, torch.exp(u * u / -2) / (_ROOT_2PI * density)
        step = (level - u) * point[2]
        beyond, error, bend = _beyond_newton(level, old, point)
        usable = beyond.abs() <= step.abs() / 2  # False for NaN, as at the first point
        step = torch.where(usable, step + beyond, step)
        new, length = x + step, step.abs()
        trusted = (new >= low) & (new <= high) & (length <= last / 2)  # False for NaN
        missing = (probability - q).abs()
        # A step may vanish where the probability does, far from the quantile.
        trusted &= (new != x) | (missing <= _TOLERANCE * tail)
        new = torch.where(trusted, new, low / 2 + high / 2)
        last = torch.where(trusted, length, high / 2 - low / 2)
        # The step in probability is small where the density is, far from the quantile too.
        mass = missing.maximum(length * density) / tail
        reach, inexact = (link(x + part) - link(x) for part in (length, error))
        near = (mass <= _TOLERANCE) & (reach <= _TOLERANCE * scale)
        linear = usable & (bend <= _MOST_BEND)
        if exact_density:
            near, narrow = near & (length <= smooth), linear & (mass <= _CUBIC_MASS)
            small = near | narrow & (inexact <= _FINE * scale) & (error * density <= _FINE * tail)
        else:
            small = near & linear
        there = (missing <= rounding) | (mass <= _FINE) & (reach <= _FINE * scale)
        close = (link(high) - link(low) <= resolution) | (new == low) | (new == high)
        roots[rows] = x = torch.where(settled | there & ~(small & trusted), x, new)
        settled = settled | trusted & small | there | close
        done = settled.all(1)
        if bool(done.all()):
            break
        old = point
        if bool(done.any()):
            left = ~done
            old = old[0][left], old[1][left], old[2][left]
            rows, x, low, high = rows[left], x[left], low[left], high[left]
            scale, resolution, smooth = scale[left], resolution[left], smooth[left]
            last, settled = last[left], settled[left]
    return roots


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
    size = min(max(1, _NUMBERS_AT_ONCE // S), flat.shape[1])
    memory = (
        torch.empty(4, size, S, dtype=means.dtype),
        torch.empty(4, size, S, dtype=torch.float32),
    )
    pairs = zip(flat.split(size, 1), sds.split(size, 1), strict=True)
    return torch.cat(
        [_of_rows(q, m.T.contiguous(), s.T.contiguous(), *memory) for m, s in pairs]
    ).reshape(shape)


def _of_rows(
    q: float,
    means: Float[Tensor, "n S"],
    stds: Float[Tensor, "n S"],
    double: Tensor,
    single: Tensor,
) -> Tensor:
    """Quantiles of one mixture per row, shape (n, 1)."""
    centre = means.mean(1, keepdim=True)
    scale = (stds.square().mean(1, keepdim=True) + means.var(1, correction=0, keepdim=True)).sqrt()
    exact = _GaussianMixtures((means - centre) / scale, scale / stds, double)
    # Single precision takes half the time, and its error is removed by one step in double.
    rough = _GaussianMixtures(exact.means.float(), exact.rates.float(), single)
    level = torch.special.ndtri(torch.tensor(q, dtype=means.dtype))
    ends = exact.means + level / exact.rates  # those of the components enclose that of the mixture
    low, high = ends.amin(1, keepdim=True), ends.amax(1, keepdim=True)
    one = torch.ones_like(low)
    start = (level * one).clamp(low, high)
    narrowest = 1 / exact.rates.amax(1, keepdim=True)
    bounds = low.float(), high.float(), start.float(), one.float(), 0 * one.float()
    near = solve_quantile(rough, q, *bounds, most_steps=_ROUGH_STEPS).double()
    start = near.nan_to_num().clamp(low, high)
    bounds = low, high, start, one, _SMALLEST * narrowest
    return centre + scale * solve_quantile(exact, q, *bounds, smooth=_SMALL_STEP * narrowest)


@dataclass
class _GaussianMixtures:
    """Distribution function and density of some of the mixtures, without new memory at each call.

    Attributes:
        means: means of the components, one mixture per row, shape (n, S).
        rates: reciprocals of their standard deviations.
        memory: numbers that are overwritten, shape (4, n or more, S).
    """

    means: Tensor
    rates: Tensor
    memory: Tensor

    def __call__(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        means, rates, (z, work, *own) = self.means, self.rates, self.memory[:, : len(rows)]
        if len(rows) < len(means):
            means = torch.index_select(means, 0, rows, out=own[0])
            rates = torch.index_select(rates, 0, rows, out=own[1])
        torch.sub(x, means, out=z).mul_(rates)
        probability = torch.mul(z, -1 / _ROOT_2, out=work).erfc_().mean(1, keepdim=True) / 2
        density = z.square_().mul_(-0.5).exp_().mul_(rates).mean(1, keepdim=True) / _ROOT_2PI
        return probability, density


def mixture_quantile(
    q: float,
    likelihood: Likelihood,
    outputs: Outputs,
    moments: tuple[Float[Tensor, "S N T"], Float[Tensor, "S N T"]] | None = None,
) -> Float[Tensor, "N T"]:
    """Quantiles of mixtures of a continuous likelihood, from its `cdf` and `log_prob`.

    The density of one of several targets is not known, and is replaced by a difference quotient of
    the distribution function. Quantiles nearer than 1e-12 standard deviations to an end
    of the support are not resolved.

    Args:
        q: the level.
        likelihood: p(y | f), with `cdf`.
        outputs: network outputs.
        moments: mean and variance of each component, if they are known.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> outputs = torch.zeros(1, 1, 1, dtype=torch.float64)
        >>> mixture_quantile(0.975, Gaussian(2.0), outputs).item()  # doctest: +ELLIPSIS
        3.9199...
    """
    link: Link
    slope: Link
    likelihood = likelihood.unweighted  # of values without weights
    if likelihood.bounds[0] != 0:
        link, slope = _identity, torch.ones_like
    elif likelihood.bounds[1] != 1:
        link, slope = torch.exp, _identity
    else:
        link, slope = torch.sigmoid, _variance_of_share
    moments = likelihood.moments(outputs) if moments is None else moments
    found = link(_coordinate_of_quantile(q, likelihood, outputs, moments, link, slope)[0])
    for atom in likelihood.atoms:  # the search ends beside them
        at = torch.full_like(found, atom)
        before = torch.nextafter(at, at - 1)
        below, up_to = (likelihood.cdf(outputs, end).mean(0) for end in (before, at))
        found = torch.where((below < q) & (up_to >= q), at, found)
    return found


def _coordinate_of_quantile(
    q: float,
    likelihood: Likelihood,
    outputs: Outputs,
    moments: tuple[Float[Tensor, "S N T"], Float[Tensor, "S N T"]],
    link: Link,
    slope: Link,
) -> tuple[Tensor, Tensor]:
    """The coordinate of the quantile, and a guess at it from the moments.

    Near an end of the support Newton's method takes fewer steps for log x and logit x.
    """
    means, stds = moments[0], moments[1].sqrt()
    known = None if bool(stds.isfinite().all()) else likelihood.quantiles(outputs, q)
    if known is not None and not bool(known.isnan().any()):
        # the quantiles of the components enclose that of the mixture
        least = _TINY if likelihood.bounds[0] == 0 else -_HUGE
        places = _INVERSE[link](known.clamp(least, _HUGE))
        low, high, guess = places.amin(0), places.amax(0), places.mean(0)
        # variances may be infinite, and the interquartile range is not
        quartiles: list[Any] = [likelihood.quantiles(outputs, level) for level in (0.25, 0.75)]
        width = quartiles[1] - quartiles[0]
        scale = width.nan_to_num(math.inf).median(0).values.clamp_min(_TINY)
        nearest, start = torch.full_like(guess, _TINY), guess
    else:
        # Cantelli's inequality bounds the distance of a quantile from the mean.
        reach = 1 + math.sqrt(max(q / (1 - q), (1 - q) / q))
        low, high = (means - reach * stds).amin(0), (means + reach * stds).amax(0)
        heavy = (stds > _HEAVY * means).any(0)
        nearest = torch.where(heavy, _TINY, _SMALLEST * stds.amin(0))
        mean, scale = means.mean(0), (stds.square().mean(0) + means.var(0, correction=0)).sqrt()
        level = torch.special.ndtri(torch.tensor(q, dtype=torch.float64))
        if link is _identity:
            guess = mean + level * scale
        elif link is torch.exp:
            spread = (1 + (scale / mean).square()).log().sqrt()
            guess = mean.log() - spread.square() / 2 + level * spread  # log-normal, same moments
            low, high = nearest.log(), high.log()
        else:
            guess = mean.logit() + level * scale / slope(mean)
            low, high = nearest.logit(), (1 - nearest.clamp_min(2**-53)).logit()
        start = guess
        if (stride := len(outputs) // _DRAWS_OF_START) >= 4:
            few, own = outputs[::stride], (moments[0][::stride], moments[1][::stride])
            of_few = likelihood.select_draws(torch.arange(0, len(outputs), stride))
            theirs, their_guess = _coordinate_of_quantile(q, of_few, few, own, link, slope)
            start = guess + theirs - their_guess
    evaluate = _evaluation(likelihood, outputs, link, slope, scale)
    bounds = low, high, start.clamp(low, high), scale, nearest
    found = solve_quantile(evaluate, q, *bounds, link, low.shape[1] == 1)
    return torch.where(link(found) >= _HUGE * (1 - 1e-9), math.inf, found), guess


def _evaluation(
    likelihood: Likelihood, outputs: Outputs, link: Link, slope: Link, scale: Float[Tensor, "N T"]
) -> Evaluate:
    """Distribution function and density of the mixture at coordinates."""

    def evaluate(t: Tensor, rows: Int[Tensor, "m"]) -> tuple[Tensor, Tensor]:
        own, some, x = likelihood.select_rows(rows), outputs[:, rows], link(t)
        probability = own.cdf(some, x).mean(0)
        if x.shape[1] == 1:
            density = own.log_prob(some, x[:, 0]).exp().mean(0).unsqueeze(1)
        else:
            width = 1e-6 * scale[rows]
            density = (own.cdf(some, x + width).mean(0) - probability) / width
        return probability, density * slope(x)

    return evaluate
