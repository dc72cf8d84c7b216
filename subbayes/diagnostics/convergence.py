r"""Convergence of chains: R-hat, effective sample sizes, Monte Carlo standard errors.

R-hat and effective sample sizes follow Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021),
"Rank-normalization, folding, and localization", Bayesian Analysis 16(2).

Chain diagnostics take draws `x` of shape (chains, draws, k) and return one number per coordinate,
shape (k,); draws of shape (chains, draws) give a zero-dimensional array. Numbers that cannot be
computed are NaN: fewer than four draws per chain, a constant coordinate, a value that is not
finite. Chains are split in half, so that a single chain is compared with itself. Draws with fewer
than two dimensions raise `InputError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Num

from subbayes.utils.checks import fail

Chains: TypeAlias = Float[np.ndarray, "k chains draws"]
PerCoordinate: TypeAlias = Float[np.ndarray, "k"]

_BLOCK = 2**18  # numbers processed at once: 2 MB in float64, about the size of a cache


def rhat(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Rank-normalised split R-hat; below 1.01 the chains agree.

    With $n$ draws in each half chain, between-chain variance $B$ and within-chain variance $W$
    of the rank-normalised draws,

    $$\hat R = \sqrt{\frac{(n - 1) W / n + B / n}{W}},$$

    and the larger of the values for the draws (location) and for the draws folded about their
    median (scale) is returned; infinite for chains stuck at different values.

    Source: Vehtari et al. (2021), sections 3.1 (split R-hat), 4.1 and 4.2 (ranks, folding).

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500, 2))
        >>> rhat(x).round(2)
        array([1., 1.])
        >>> x[0, :, 1] += 3
        >>> rhat(x).round(1)
        array([1. , 1.5])
    """
    return _per_coordinate(_rhat_rank, x)


def ess_bulk(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Bulk effective sample size: the equivalent number of independent draws.

    $S / \hat\tau$ of the rank-normalised split chains, $\hat\tau = -1 + 2 \sum_t \hat\rho_t$
    truncated by Geyer's initial monotone sequence. At least 100 per chain are recommended.

    Source: Vehtari et al. (2021), sections 3.2 (estimator) and 4.1 (ranks).

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500))
        >>> 1500 < float(ess_bulk(x)) < 2500
        True
    """
    return _per_coordinate(lambda x: _ess(_normal_scores(_split(x))), x)


def ess_tail(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Tail effective sample size: the smaller of those of the 5 % and 95 % quantiles.

    The effective sample size of a quantile is that of the indicators $1\{x \le \hat q\}$. A
    quantile that is the largest draw (of a discrete coordinate) is ignored.

    Source: Vehtari et al. (2021), section 4.3.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500))
        >>> 1000 < float(ess_tail(x)) < 2500
        True
    """
    return _per_coordinate(_ess_tail, x)


def ess_mean(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Effective sample size for the mean, of the draws without rank normalisation.

    Source: Vehtari et al. (2021), section 3.2.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500)).cumsum(1)
        >>> float(ess_mean(x)) < 50
        True
    """
    return _per_coordinate(lambda x: _ess(_split(x)), x)


def mcse_mean(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Monte Carlo standard error of the mean, $\mathrm{sd}(x) / \sqrt{\mathrm{ESS}}$.

    Source: Vehtari et al. (2021), section 3.2, with `ess_mean`.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 2500))
        >>> float(mcse_mean(x).round(3))
        0.01
    """
    return _per_coordinate(lambda x: x.std(axis=(1, 2), ddof=1) / np.sqrt(_ess(_split(x))), x)


def ebfmi(energy: Float[np.ndarray, "chains draws"]) -> Float[np.ndarray, "chains"]:
    r"""Energy Bayesian fraction of missing information of each chain; below 0.3 is low.

    $\sum_i (H_i - H_{i-1})^2 / \sum_i (H_i - \bar H)^2$: the share of the variance of the energy
    that resampling the momentum explores (Betancourt 2016, *Diagnosing suboptimal cotangent
    disintegrations*).

    Args:
        energy: H at each draw, shape (chains, draws).

    Example:
        >>> energy = np.random.default_rng(0).normal(size=(2, 4000))
        >>> ebfmi(energy).round(1)
        array([2., 2.])
    """
    spread = np.square(energy - energy.mean(1, keepdims=True)).sum(1)
    change = np.square(np.diff(energy, axis=1)).sum(1)
    return np.divide(change, spread, out=np.full(len(energy), np.nan), where=spread > 0)


def separate_groups(x: Float[np.ndarray, "chains draws k"]) -> list[Num[np.ndarray, "_"]]:
    r"""Groups of stationary chains that do not overlap, which indicates several modes.

    In a coordinate, chains whose central 95 % intervals overlap, directly or through other chains,
    form a group. Coordinates with chains that are not stationary (split R-hat of a single chain
    above 1.2) are ignored. The groups of the coordinate with the most groups are returned.

    Args:
        x: draws, shape (chains, draws, k).

    Returns:
        The chains of each group, the largest group first; a single group if there are no modes.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500, 2))
        >>> x[[1, 3], :, 1] += 8
        >>> [group.tolist() for group in separate_groups(x)]
        [[0, 2], [1, 3]]
    """
    chains, draws, k = x.shape
    alone = rhat(x.swapaxes(0, 1).reshape(1, draws, chains * k)).reshape(chains, k)
    low, high = np.quantile(x, [0.025, 0.975], axis=1)
    best = [np.arange(chains)]
    for j in range(k):
        if not (alone[:, j] < 1.2).all():
            continue
        order = np.argsort(low[:, j])
        reach = np.maximum.accumulate(high[order, j])
        gaps = np.flatnonzero(low[order[1:], j] > reach[:-1]) + 1
        if len(gaps) >= len(best):
            best = [np.sort(group) for group in np.split(order, gaps)]
    return sorted(best, key=lambda group: (-len(group), int(group[0])))


def _per_coordinate(
    statistic: Callable[[np.ndarray], np.ndarray], x: np.ndarray
) -> Float[np.ndarray, "..."]:
    """Apply `statistic` to blocks of (k, chains, draws); NaN where it is undefined."""
    x = np.asarray(x)
    if x.ndim < 2:
        fail(
            "x",
            "draws of shape (chains, draws) or (chains, draws, k)",
            f"shape {x.shape}",
            "Add an axis for the chains, as in x[None]",
        )
    flat = np.moveaxis(x.reshape(*x.shape[:2], math.prod(x.shape[2:])), 2, 0)
    result = np.full(len(flat), np.nan)
    if x.shape[0] > 0 and x.shape[1] >= 4:
        for block in blocks(len(flat), x.shape[0] * x.shape[1]):
            part = np.array(flat[block], dtype=np.float64, order="C")
            known = np.isfinite(part).all(axis=(1, 2))
            known &= part.min(axis=(1, 2)) < part.max(axis=(1, 2))
            with np.errstate(divide="ignore", invalid="ignore"):
                if known.any():
                    result[block][known] = statistic(part[known])
    return result.reshape(x.shape[2:])


def blocks(n: int, width: int) -> Iterator[slice]:
    """Slices of 0..n with about `_BLOCK` numbers in each, for items of `width` numbers."""
    size = max(1, _BLOCK // max(1, width))
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _split(x: Chains) -> Float[np.ndarray, "k halves half"]:
    """Split each chain in half, without the middle one of an odd number of draws."""
    half = x.shape[2] // 2
    return np.concatenate([x[:, :, :half], x[:, :, -half:]], axis=1)


def _normal_scores(x: Chains) -> Chains:
    """Rank-normalise over all chains: Φ⁻¹((r - 3/8) / (S + 1/4)) (section 4.1)."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    ranks = rankdata(x.reshape(len(x), -1), axis=1)
    return ndtri((ranks - 0.375) / (ranks.shape[1] + 0.25)).reshape(x.shape)


def _rhat_rank(x: Chains) -> PerCoordinate:
    halves = _split(x)
    folded = np.abs(halves - np.median(halves, axis=(1, 2), keepdims=True))
    return np.fmax(_rhat(_normal_scores(halves)), _rhat(_normal_scores(folded)))


def _rhat(x: Chains) -> PerCoordinate:
    n = x.shape[2]
    between = n * x.mean(axis=2).var(axis=1, ddof=1)
    # Subtracting the first draw makes the variance of a constant chain exactly zero.
    within = (x - x[:, :, :1]).var(axis=2, ddof=1).mean(axis=1)
    return np.sqrt((between / within + n - 1) / n)


def _ess_tail(x: Chains) -> PerCoordinate:
    quantiles = np.quantile(x, [0.05, 0.95], axis=(1, 2), keepdims=True)
    low, high = (_ess(_split((x <= q).astype(np.float64))) for q in quantiles)
    return np.fmin(low, high)


def _ess(x: Chains) -> PerCoordinate:
    """Effective sample size of split chains (section 3.2); NaN for constant chains."""
    size = x.shape[1] * x.shape[2]
    tau = _autocorrelation_time(_autocorrelation(x))
    moves = x.min(axis=(1, 2)) < x.max(axis=(1, 2))
    return np.where(moves, size / np.maximum(tau, 1 / math.log10(size)), np.nan)


def _autocorrelation(x: Chains) -> Float[np.ndarray, "k draws"]:
    """Autocorrelation pooled over chains: 1 - (W - mean autocovariance) / var⁺."""
    n = x.shape[2]
    padded = 1 << (2 * n - 1).bit_length()
    transform = np.fft.rfft(x - x.mean(axis=2, keepdims=True), padded, axis=2)
    power = (transform.real**2 + transform.imag**2).mean(axis=1)
    autocovariance = np.fft.irfft(power, padded, axis=1)[:, :n] / n
    within = autocovariance[:, :1] * n / (n - 1)
    total = autocovariance[:, :1] + x.mean(axis=2).var(axis=1, ddof=1)[:, None]
    rho = 1 - (within - autocovariance) / total
    rho[:, 0] = 1
    return rho


def _autocorrelation_time(rho: Float[np.ndarray, "k draws"]) -> PerCoordinate:
    """Geyer's initial monotone sequence over the pairs (ρ₀ + ρ₁), (ρ₂ + ρ₃), ..."""
    rows, last = np.arange(len(rho)), max(0, (rho.shape[1] - 3) // 2)
    pairs = rho[:, : 2 * last + 2].reshape(len(rho), last + 1, 2).sum(axis=2)
    negative = pairs <= 0
    stop = np.where(negative.any(axis=1), negative.argmax(axis=1), last)
    kept = np.arange(last + 1) < stop[:, None]
    head = np.sum(np.minimum.accumulate(pairs, axis=1), axis=1, where=kept)
    # The first half of the last pair counts once, which lowers the variance of the estimate for
    # antithetic chains.
    even = rho[rows, 2 * stop]
    return 2 * head - 1 + np.where((even > 0) | (pairs[rows, stop] >= 0), even, 0)


def hdi(values: Float[np.ndarray, "S"], level: float = 0.95) -> tuple[float, float]:
    """The shortest interval that contains the fraction `level` of the draws.

    Example:
        >>> hdi(np.array([0.0, 1.0, 1.1, 1.2, 9.0]), 0.6)
        (1.0, 1.2)
    """
    ordered = np.sort(values)
    n = len(ordered)
    inside = min(max(int(np.ceil(level * n)), 1), n)
    widths = ordered[inside - 1 :] - ordered[: n - inside + 1]
    i = int(widths.argmin())
    return float(ordered[i]), float(ordered[i + inside - 1])
