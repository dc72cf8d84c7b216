r"""The continuous ranked probability score by kind of predictive; see `metrics.crps`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.diagnostics.convergence import blocks
from subbayes.predictions.predictive import Predictive
from subbayes.utils.types import RowNumbers

_TAIL = 1e-6  # tail probability excluded from the CRPS of counts: an error below 1e-12
_MAX_COUNTS = 4096  # a wider count distribution is scored by sampling
_MAX_TERMS = 3e8  # rows x draws x counts, seconds of work; more are scored by sampling
_N_SAMPLES = 1000
_SUM_ERROR = 1e-6


def crps_counts(
    predictive: Predictive, values: Float[np.ndarray, "*NT"]
) -> Float[np.ndarray, "*NT"]:
    """CRPS of each count: a sum over the integers between the extreme quantiles and the count."""
    if values.ndim == 1 and predictive.count_probabilities is not None:
        first, p = predictive.count_probabilities
        distance = first + torch.arange(len(p))[:, None] - torch.from_numpy(values)
        F = p.cumsum(0)
        return (p * distance.abs() - F * (1 - F)).sum(0).numpy()  # E|X - y| - E|X - X'| / 2
    low = np.minimum(predictive.quantile(_TAIL), values)
    high = np.maximum(predictive.quantile(1 - _TAIL), values)
    widest = float((high - low).max())
    if not math.isfinite(widest):
        return np.full(values.shape, math.nan)
    steps = int(widest)
    if steps > _MAX_COUNTS or steps * predictive.outputs[..., 0].numel() > _MAX_TERMS:
        return crps_samples(predictive, values)
    if values.ndim == 1:
        found = _crps_of_sums(predictive, values, low, high, steps)
        if found is not None:
            return found
    total = np.zeros(values.shape)
    for step in range(steps):
        k = low + step
        total += (k < high) * (predictive.cdf(k) - (k >= values)) ** 2
    return total


def _crps_of_sums(
    predictive: Predictive, values: RowNumbers, low: RowNumbers, high: RowNumbers, steps: int
) -> RowNumbers | None:
    """The same with distribution functions as running sums of probabilities.

    Their logarithms cost a tenth of an incomplete beta function. None if the sums do not end at
    the distribution function, as where a probability below the support is not 0.
    """
    total, cdf = np.zeros(len(values)), predictive.cdf(low - 1)
    for step in range(steps):
        k = torch.from_numpy(np.minimum(low + step, high))
        terms = predictive.likelihood.log_prob(predictive.outputs, k.to(predictive.outputs))
        inside = low + step < high
        cdf = cdf + inside * terms.double().exp().mean(0).numpy()
        total += inside * (cdf - (k.numpy() >= values)) ** 2
    ends = np.abs(cdf - predictive.cdf(np.maximum(high, low + 1) - 1))
    exact = low < high
    return total if bool((ends[exact] < _SUM_ERROR).all()) else None


def crps_samples(
    predictive: Predictive, values: Float[np.ndarray, "*NT"]
) -> Float[np.ndarray, "*NT"]:
    """Unbiased estimate of the CRPS of each target from samples, for any likelihood."""
    from scoringrules import crps_ensemble

    samples = predictive.sample(_N_SAMPLES, seed=0)
    return np.asarray(crps_ensemble(values, samples, m_axis=0, estimator="pwm"))


def crps_gaussian_mixture(
    means: Float[np.ndarray, "S n"], stds: Float[np.ndarray, "S n"], y: RowNumbers
) -> RowNumbers:
    r"""CRPS of n equally weighted mixtures of S Gaussians, in closed form.

    With $A(\mu, \sigma) = \mathrm{E}|X|$ for $X \sim N(\mu, \sigma^2)$,

    $$\frac{1}{S} \sum_i A(y - \mu_i, \sigma_i)
      - \frac{1}{2 S^2} \sum_{i,j} A\left(\mu_i - \mu_j, \sqrt{\sigma_i^2 + \sigma_j^2}\right).$$

    The double sum equals $\int F (1 - F) \, dt$ for the distribution function $F$ of the
    mixture. The trapezoidal rule with steps of half the smallest $\sigma$ is exact to rounding for
    this smooth integrand ($e^{-\pi^2 \sigma^2 / h^2} \approx 10^{-17}$). It replaces the S² pairs
    where it needs fewer evaluations, for most posteriors about 50 S. Memory does not grow with S².

    Args:
        means: component means, shape (S, n).
        stds: component standard deviations, shape (S, n).
        y: targets, shape (n,).

    Returns:
        One score per mixture, shape (n,), in the units of `y`.

    Source: Grimit, Gneiting, Berrocal and Johnson (2006), Q. J. R. Meteorol. Soc. 132, eq. 5.

    Example:
        >>> means, stds = np.array([[0.1], [-0.3]]), np.array([[0.4], [2.1]])
        >>> crps_gaussian_mixture(means, stds, np.array([0.0])).round(4)
        array([0.2244])
    """
    m, s, t = (torch.from_numpy(np.ascontiguousarray(part.T)) for part in (means, stds, y))
    s = s.clamp_min(torch.finfo(torch.float64).tiny)
    error = torch.cat(
        [_absolute_moment(t[b, None] - m[b], s[b]).mean(1) for b in blocks(len(t), m.shape[1])]
    )
    return (error - _mean_distance(m, s) / 2).numpy()


def _absolute_moment(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, std²)."""
    ratio = mean / (std * math.sqrt(2))
    return mean * torch.erf(ratio) + std * math.sqrt(2 / math.pi) * torch.exp(-ratio.square())


def _mean_distance(m: Float[Tensor, "n S"], s: Float[Tensor, "n S"]) -> Float[Tensor, "n"]:
    """E|X - X'| of two independent draws of each mixture."""
    low, high = (m - 8 * s).amin(1), (m + 8 * s).amax(1)
    nodes = 1 + 2 * (high - low) / s.amin(1)
    # Round up by less than a fifth, so that mixtures with similar numbers of nodes form a batch.
    nodes = torch.exp2(torch.ceil(4 * torch.log2(nodes)) / 4).ceil()
    nodes[~(nodes <= 2 * m.shape[1])] = 0  # NaN, too, if a mixture is not finite
    distance = torch.empty(len(m), dtype=m.dtype)
    for count in nodes.unique().long().tolist():
        rows = nodes == count
        distance[rows] = (
            _distance_on_grid(m[rows], s[rows], low[rows], high[rows], count)
            if count
            else _distance_of_pairs(m[rows], s[rows])
        )
    return distance


def _distance_on_grid(
    m: Float[Tensor, "n S"], s: Float[Tensor, "n S"], low: Tensor, high: Tensor, count: int
) -> Float[Tensor, "n"]:
    """2 ∫ F (1 - F) dt by the trapezoidal rule on `count` nodes."""
    step = (high - low) / (count - 1)
    node = torch.arange(count, dtype=m.dtype)

    def spread(rows: slice, part: slice) -> Tensor:
        t = low[rows, None, None] + step[rows, None, None] * node[part, None]
        erf = torch.erf((t - m[rows, None]) / (s[rows, None] * math.sqrt(2))).mean(2)
        return step[rows] * (1 - erf.square()).sum(1) / 2

    return _sum_in_blocks(spread, len(m), count, m.shape[1])


def _distance_of_pairs(m: Float[Tensor, "n S"], s: Float[Tensor, "n S"]) -> Float[Tensor, "n"]:
    """Mean over all pairs of components."""

    def spread(rows: slice, part: slice) -> Tensor:
        std = torch.hypot(s[rows, part, None], s[rows, None])
        return _absolute_moment(m[rows, part, None] - m[rows, None], std).mean(2).sum(1)

    return _sum_in_blocks(spread, len(m), m.shape[1], m.shape[1]) / m.shape[1]


def _sum_in_blocks(
    term: Callable[[slice, slice], Tensor], n: int, count: int, width: int
) -> Float[Tensor, "n"]:
    """Sum `term` over `count` points for n rows, in blocks of bounded memory."""
    total = torch.zeros(n, dtype=torch.float64)
    for rows in blocks(n, count * width):
        for part in blocks(count, (rows.stop - rows.start) * width):
            total[rows] += term(rows, part)
    return total
