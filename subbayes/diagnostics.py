r"""Did the chains mix, how much are they worth, and what would leaving a point out have done.

R-hat and effective sample sizes follow Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021),
"Rank-normalization, folding, and localization", Bayesian Analysis 16(2); Pareto-smoothed
importance sampling follows Vehtari, Simpson, Gelman, Yao and Gabry (2024), JMLR 25(72).

Chain diagnostics take draws of shape (chains, draws, k) and return one number per coordinate,
shape (k,); draws of shape (chains, draws) give a zero-dimensional array. A number that cannot
be known is nan: fewer than four draws a chain, a coordinate that never moves, a value that is
not finite. Chains are split in half, so a single chain is compared with itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Num

from subbayes.checks import fail

__all__ = [
    "Comparison",
    "LooResult",
    "average_ranks",
    "compare",
    "ebfmi",
    "ess_bulk",
    "ess_mean",
    "ess_tail",
    "loo",
    "mcse_mean",
    "psis",
    "rhat",
    "separate_groups",
    "sum_se",
]

Chains: TypeAlias = Float[np.ndarray, "k chains draws"]
PerCoordinate: TypeAlias = Float[np.ndarray, "k"]

_BLOCK = 2**18  # numbers worked on at once: 2 MB in float64, about a cache
_MIN_TAIL = 5  # fewer exceedances cannot hold a generalised Pareto fit
_LOG_TINY = math.log(np.finfo(np.float64).tiny)


# --- chains ---------------------------------------------------------------------------------


def rhat(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Rank-normalised split R-hat: do the chains agree? Below 1.01 they do.

    With $n$ draws in each half chain, between-chain variance $B$ and within-chain variance $W$
    of the rank-normalised draws,

    $$\hat R = \sqrt{\frac{(n - 1) W / n + B / n}{W}},$$

    and the larger of the values for the draws (location) and for the draws folded about their
    median (scale) is reported.

    Args:
        x: draws, shape (chains, draws) or (chains, draws, k).

    Returns:
        R-hat per coordinate, shape (k,); infinite for chains stuck at different values.

    Raises:
        InputError: if `x` has fewer than two dimensions.

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
    r"""Effective sample size of the bulk: how many independent draws the chains are worth.

    $S / \hat\tau$ of the rank-normalised split chains, $\hat\tau = -1 + 2 \sum_t \hat\rho_t$
    truncated by Geyer's initial monotone sequence. Aim at 100 per chain.

    Args:
        x: draws, shape (chains, draws) or (chains, draws, k).

    Returns:
        Effective sample size per coordinate, shape (k,).

    Raises:
        InputError: if `x` has fewer than two dimensions.

    Source: Vehtari et al. (2021), sections 3.2 (estimator) and 4.1 (ranks).

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500))
        >>> 1500 < float(ess_bulk(x)) < 2500
        True
    """
    return _per_coordinate(lambda x: _ess(_normal_scores(_split(x))), x)


def ess_tail(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Effective sample size of the tails: the smaller one of the 5 % and the 95 % quantile.

    The effective sample size of a quantile is that of the indicators $1\{x \le \hat q\}$. A
    quantile that every draw lies below (a discrete coordinate) tells nothing and is passed over.

    Args:
        x: draws, shape (chains, draws) or (chains, draws, k).

    Returns:
        Effective sample size per coordinate, shape (k,).

    Raises:
        InputError: if `x` has fewer than two dimensions.

    Source: Vehtari et al. (2021), section 4.3.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500))
        >>> 1000 < float(ess_tail(x)) < 2500
        True
    """
    return _per_coordinate(_ess_tail, x)


def ess_mean(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Effective sample size for the mean: of the draws themselves, not of their ranks.

    Args:
        x: draws, shape (chains, draws) or (chains, draws, k).

    Returns:
        Effective sample size per coordinate, shape (k,).

    Raises:
        InputError: if `x` has fewer than two dimensions.

    Source: Vehtari et al. (2021), section 3.2.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500)).cumsum(1)
        >>> float(ess_mean(x)) < 50
        True
    """
    return _per_coordinate(lambda x: _ess(_split(x)), x)


def mcse_mean(x: Num[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    r"""Monte Carlo standard error of the mean, $\mathrm{sd}(x) / \sqrt{\mathrm{ESS}}$.

    Args:
        x: draws, shape (chains, draws) or (chains, draws, k).

    Returns:
        Standard error per coordinate, shape (k,), in the units of `x`.

    Raises:
        InputError: if `x` has fewer than two dimensions.

    Source: Vehtari et al. (2021), section 3.2, with `ess_mean`.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 2500))
        >>> float(mcse_mean(x).round(3))
        0.01
    """
    return _per_coordinate(lambda x: x.std(axis=(1, 2), ddof=1) / np.sqrt(_ess(_split(x))), x)


def separate_groups(x: Float[np.ndarray, "chains draws k"]) -> list[Num[np.ndarray, "_"]]:
    r"""Groups of chains that never meet, each chain settled where it is: several modes.

    In a coordinate, chains whose central 95 % intervals overlap belong together, and so do those
    that a chain between them connects. Chains that are still on their way (split R-hat of the chain
    alone above 1.2) are no evidence of modes. The coordinate with the most groups counts.

    Args:
        x: draws, shape (chains, draws, k).

    Returns:
        The chains of each group, the largest group first; one group where all is well.

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


def average_ranks(x: Num[np.ndarray, "rows n"]) -> Float[np.ndarray, "rows n"]:
    """Ranks 1 to n along each row; equal values share the mean of their ranks.

    Args:
        x: values, shape (rows, n).

    Returns:
        Ranks, shape (rows, n).

    Source: `scipy.stats.rankdata(x, axis=1)`, without its import time.

    Example:
        >>> average_ranks(np.array([[30.0, 10.0, 10.0]]))
        array([[3. , 1.5, 1.5]])
    """
    order = np.argsort(x, axis=1)
    ordered = np.take_along_axis(x, order, axis=1)
    place = np.arange(x.shape[1])
    new = np.ones(x.shape, dtype=bool)  # a run of equal values starts here ...
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    end = np.ones(x.shape, dtype=bool)  # ... and ends here
    end[:, :-1] = new[:, 1:]
    first = np.maximum.accumulate(np.where(new, place, 0), axis=1)
    last = np.minimum.accumulate(np.where(end, place, x.shape[1])[:, ::-1], axis=1)[:, ::-1]
    ranks = np.empty(x.shape)
    np.put_along_axis(ranks, order, (first + last) / 2 + 1, axis=1)
    return ranks


def _per_coordinate(
    statistic: Callable[[np.ndarray], np.ndarray], x: np.ndarray
) -> Float[np.ndarray, "..."]:
    """Apply `statistic` to blocks of (k, chains, draws); nan where it cannot be known."""
    x = np.asarray(x)
    if x.ndim < 2:
        fail("x", "draws of shape (chains, draws) or (chains, draws, k)", f"shape {x.shape}",
             "Add an axis for the chains, as in x[None]")
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
    """Slices of 0..n with about `_BLOCK` numbers in each, where an item holds `width`."""
    size = max(1, _BLOCK // max(1, width))
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _split(x: Chains) -> Float[np.ndarray, "k halves half"]:
    """Halve each chain; the middle draw of an odd number is left out."""
    half = x.shape[2] // 2
    return np.concatenate([x[:, :, :half], x[:, :, -half:]], axis=1)


def _normal_scores(x: Chains) -> Chains:
    """Rank-normalise over all chains: Φ⁻¹((r - 3/8) / (S + 1/4)) (section 4.1)."""
    from scipy.special import ndtri

    ranks = average_ranks(x.reshape(len(x), -1))
    return ndtri((ranks - 0.375) / (ranks.shape[1] + 0.25)).reshape(x.shape)


def _rhat_rank(x: Chains) -> PerCoordinate:
    halves = _split(x)
    folded = np.abs(halves - np.median(halves, axis=(1, 2), keepdims=True))
    return np.fmax(_rhat(_normal_scores(halves)), _rhat(_normal_scores(folded)))


def _rhat(x: Chains) -> PerCoordinate:
    n = x.shape[2]
    between = n * x.mean(axis=2).var(axis=1, ddof=1)
    # Relative to its first draw a stuck chain is exactly zero, and so is its variance.
    within = (x - x[:, :, :1]).var(axis=2, ddof=1).mean(axis=1)
    return np.sqrt((between / within + n - 1) / n)


def _ess_tail(x: Chains) -> PerCoordinate:
    low, high = np.quantile(x, [0.05, 0.95], axis=(1, 2), keepdims=True)
    return np.fmin(_ess_indicator(x, low), _ess_indicator(x, high))


def _ess_indicator(x: Chains, threshold: Float[np.ndarray, "k 1 1"]) -> PerCoordinate:
    return _ess(_split((x <= threshold).astype(np.float64)))


def _ess(x: Chains) -> PerCoordinate:
    """Effective sample size of (already split) chains (section 3.2); nan if none moves."""
    size = x.shape[1] * x.shape[2]
    tau = _autocorrelation_time(_autocorrelation(x))
    moves = x.min(axis=(1, 2)) < x.max(axis=(1, 2))
    return np.where(moves, size / np.maximum(tau, 1 / math.log10(size)), np.nan)


def _autocorrelation(x: Chains) -> Float[np.ndarray, "k draws"]:
    """Autocorrelation of the chains together: 1 - (W - mean autocovariance) / var⁺."""
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
    # The first half of the pair where it stops still counts, once: it lowers the variance
    # of the estimate for antithetic chains.
    even = rho[rows, 2 * stop]
    return 2 * head - 1 + np.where((even > 0) | (pairs[rows, stop] >= 0), even, 0)


# --- importance sampling and leave-one-out ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class LooResult:
    r"""Expected log predictive density under leave-one-out cross-validation.

    Attributes:
        elpd: $\sum_i \log p(y_i \mid y_{-i})$, in nats.
        se: standard error of `elpd` over observations, in nats.
        p_loo: effective number of parameters, the in-sample log density minus `elpd`.
        pointwise: each observation's term, shape (N,).
        pareto_k: tail shape of each observation's importance ratios, shape (N,).
        n_draws: number of posterior draws S behind it.
    """

    elpd: float
    se: float
    p_loo: float
    pointwise: Float[np.ndarray, "N"]
    pareto_k: Float[np.ndarray, "N"]
    n_draws: int

    @property
    def good_k(self) -> float:
        r"""Largest trustworthy Pareto k, $\min(1 - 1 / \log_{10} S, 0.7)$."""
        return _good_k(self.n_draws)

    @property
    def n_bad(self) -> int:
        """Number of observations whose Pareto k is above `good_k`."""
        return int((self.pareto_k > self.good_k).sum())


class Comparison(NamedTuple):
    """One row of `compare`.

    Attributes:
        name: what was compared.
        elpd: expected log predictive density, in nats; higher is better.
        se: standard error of `elpd`.
        difference: `elpd` minus the best one, zero or negative.
        difference_se: standard error of the difference, from the paired observations.
        p_loo: effective number of parameters.
        n_bad: number of observations with an unreliable term.
    """

    name: str
    elpd: float
    se: float
    difference: float
    difference_se: float
    p_loo: float
    n_bad: int


def ebfmi(energy: Float[np.ndarray, "chains draws"]) -> Float[np.ndarray, "chains"]:
    r"""Energy Bayesian fraction of missing information of each chain; below 0.3 is low.

    $\sum_i (H_i - H_{i-1})^2 / \sum_i (H_i - \bar H)^2$: how much of the spread of energies a fresh
    momentum covers (Betancourt 2016, *Diagnosing suboptimal cotangent disintegrations*).

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


def psis(
    log_ratios: Num[np.ndarray, "..."], reff: float | Float[np.ndarray, "N"] = 1.0
) -> tuple[Float[np.ndarray, "S N"], Float[np.ndarray, "N"]]:
    r"""Pareto-smoothed importance weights, for each of N targets at once.

    The $M = \lceil \min(S / 5, 3 \sqrt{S / r_\mathrm{eff}}) \rceil$ largest ratios are replaced
    by the expected order statistics of a generalised Pareto distribution fitted to them, and
    truncated at the largest raw ratio. Its shape $\hat k$ says whether the weights can be
    trusted: below $\min(1 - 1 / \log_{10} S, 0.7)$ they can.

    Args:
        log_ratios: log importance ratios up to a constant per column, shape (S, N).
        reff: relative efficiency ESS / S of the draws, one number or one per column.

    Returns:
        Normalised log weights (S, N), whose exponentials sum to 1 over the draws, and Pareto k
        (N,): infinite where fewer than five ratios stand out of the rest, so that nothing could
        be fitted, minus infinity where all ratios are equal.

    Raises:
        InputError: if `log_ratios` is not (S, N), a column holds nan or +inf or nothing but
            -inf, or `reff` is not positive.

    Source: Vehtari et al. (2024), Algorithm 1; the fit is Zhang and Stephens (2009), with the
        weak prior of Vehtari et al. (2024).

    Example:
        >>> log_ratios = np.random.default_rng(0).exponential(size=(1000, 2)) * [0.2, 1.2]
        >>> log_weights, pareto_k = psis(log_ratios)
        >>> np.exp(log_weights).sum(0).round(6), pareto_k > 0.67
        (array([1., 1.]), array([False,  True]))
    """
    if log_ratios.ndim != 2 or len(log_ratios) == 0:
        fail("log_ratios", "shape (draws, points)", f"shape {log_ratios.shape}",
             "Stack the chains with reshape(-1, points)")
    _check_points("log_ratios", np.isfinite(log_ratios.max(axis=0)))
    n_draws, n = log_ratios.shape
    tails = _tail_lengths(n_draws, _efficiency(reff, n))
    weights, pareto_k = np.empty((n_draws, n)), np.empty(n)
    for block in blocks(n, n_draws):
        ratios = np.array(log_ratios[:, block].T, dtype=np.float64, order="C")
        smoothed, pareto_k[block] = _smooth(ratios, tails[block])
        weights[:, block] = smoothed.T
    return weights, pareto_k


def loo(
    log_lik: Num[np.ndarray, "..."],
    reff: float | Float[np.ndarray, "N"] | None = None,
    *,
    temperature: float = 1.0,
    log_weights: Float[np.ndarray, "S"] | None = None,
    quiet: bool = False,
) -> LooResult:
    r"""Leave-one-out predictive density from the draws of one posterior, without refitting.

    $$\widehat{\mathrm{elpd}} = \sum_i \log \sum_s w_{is} \, p(y_i \mid z_s), \qquad
      w_{is} \propto \mathrm{PSIS}\left(\omega_s \, p(y_i \mid z_s)^{-1/T}\right).$$

    The draws must come from the posterior whose likelihood this is, or have weights $\omega_s$
    that make them so, and a warning is given for observations whose weights are too heavy-tailed
    to be trusted.

    Args:
        log_lik: log density of every observation under every draw, in nats, shape (S, N), or
            (chains, draws, N), from which each observation's relative efficiency is estimated.
        reff: relative efficiency ESS / S, one number or one per observation; by default 1 for
            (S, N), which treats the draws as independent.
        temperature: T of the posterior the draws are of; the score is of the observations as they
            are, at any T.
        log_weights: $\log \omega_s$ up to a constant, shape (S,): posterior of interest over the
            one that was sampled; by default all equal.
        quiet: give no warning.

    Returns:
        The estimate with its parts; see `LooResult`.

    Raises:
        InputError: if `log_lik` has another shape or is not finite, or `reff` is not positive.

    Source: Vehtari, Gelman and Gabry (2017), Statistics and Computing 27; weights as in `psis`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> y, mean = rng.normal(size=50), rng.normal(size=(1000, 1)) / np.sqrt(50)
        >>> result = loo(-0.5 * (y - mean) ** 2 - 0.5 * np.log(2 * np.pi))
        >>> f"{result.elpd:.1f} +- {result.se:.1f}", round(result.p_loo, 1), result.n_bad
        ('-68.1 +- 4.0', 0.8, 0)
    """
    chains = _by_chain(log_lik)
    n_draws, n = chains.shape[0] * chains.shape[1], chains.shape[2]
    _check_points("log_lik", np.isfinite(chains).all(axis=(0, 1)))
    if reff is None and log_lik.ndim == 2:
        reff = 1.0
    given = None if reff is None else _efficiency(reff, n)
    base = np.zeros(n_draws) if log_weights is None else log_weights
    if base.shape != (n_draws,):
        fail("log_weights", f"one for each of {n_draws} draws", f"shape {base.shape}")
    base = base - _logsumexp(base[None])
    pointwise, in_sample, pareto_k = np.empty(n), np.empty(n), np.empty(n)
    for block in blocks(n, n_draws):
        part = np.array(chains[:, :, block], dtype=np.float64)
        efficiency = _relative_efficiency(part) if given is None else given[block]
        columns = np.ascontiguousarray(part.reshape(n_draws, -1).T)
        weights, pareto_k[block] = _smooth(
            base - columns / temperature, _tail_lengths(n_draws, efficiency))
        pointwise[block] = _logsumexp(weights + columns)
        in_sample[block] = _logsumexp(base + columns)
    elpd = float(pointwise.sum())
    result = LooResult(elpd, sum_se(pointwise), float(in_sample.sum()) - elpd, pointwise,
                       pareto_k, n_draws)
    if not quiet:
        _warn_unreliable(result)
    return result


def compare(results: dict[str, LooResult]) -> list[Comparison]:
    r"""Rank models by leave-one-out predictive density, best first.

    The standard error of a difference pairs the observations,
    $\sqrt{N \, \mathrm{Var}_i(\mathrm{elpd}_{i} - \mathrm{elpd}_{i}^\mathrm{best})}$, and is
    usually far below the standard errors of the two.

    Args:
        results: a `LooResult` per name, all on the same observations in the same order.

    Returns:
        One row per name, best first.

    Raises:
        InputError: if `results` is empty or the results differ in their number of observations.

    Source: Vehtari, Gelman and Gabry (2017), section 5.2.

    Example:
        >>> log_lik = np.random.default_rng(0).normal(size=(200, 40)) / 10
        >>> rows = compare({"worse": loo(log_lik - 0.1), "better": loo(log_lik)})
        >>> [(row.name, round(row.difference, 3)) for row in rows]
        [('better', 0.0), ('worse', -4.0)]
    """
    lengths = {name: len(result.pointwise) for name, result in results.items()}
    if len(set(lengths.values())) != 1:
        fail("results", "at least one result, all on the same observations",
             ", ".join(f"{name} with {n}" for name, n in lengths.items()) or "none",
             "Compute each with loo on the same data")
    ranked = sorted(results.items(), key=lambda item: -item[1].elpd)
    best = ranked[0][1]
    return [
        Comparison(name, one.elpd, one.se, one.elpd - best.elpd,
                   sum_se(one.pointwise - best.pointwise), one.p_loo, one.n_bad)
        for name, one in ranked
    ]


def _by_chain(log_lik: np.ndarray) -> Num[np.ndarray, "chains draws N"]:
    if log_lik.ndim not in (2, 3) or 0 in log_lik.shape:
        fail("log_lik", "shape (draws, points) or (chains, draws, points)",
             f"shape {log_lik.shape}", "Compute it with posterior.pointwise")
    return log_lik if log_lik.ndim == 3 else log_lik[None]


def _check_points(argument: str, good: np.ndarray) -> None:
    if not good.all():
        fail(argument, "finite numbers", f"NaN or infinite values at {(~good).sum()} of "
             f"{len(good)} points (first at point {good.argmin()})",
             "Leave out the draws that produced them")


def _efficiency(reff: float | np.ndarray, n: int) -> Float[np.ndarray, "n"]:
    values = np.asarray(reff, dtype=np.float64)
    if values.shape not in ((), (1,), (n,)) or not (np.isfinite(values) & (values > 0)).all():
        fail("reff", f"a positive number, or {n} of them", f"{reff!r}",
             "Divide the effective sample size by the number of draws")
    return np.broadcast_to(values, (n,))


def _relative_efficiency(log_lik: Float[np.ndarray, "chains draws n"]) -> Float[np.ndarray, "n"]:
    """ESS / S of each observation's likelihood; 1 where it cannot be known."""
    likelihood = np.exp(log_lik - log_lik.max(axis=(0, 1)))
    relative = ess_mean(likelihood) / (log_lik.shape[0] * log_lik.shape[1])
    return np.where(np.isfinite(relative), relative, 1.0)


def _tail_lengths(n_draws: int, reff: Float[np.ndarray, "n"]) -> Num[np.ndarray, "n"]:
    """M of Vehtari et al. (2024): how many of the largest ratios are smoothed."""
    lengths = np.ceil(np.minimum(n_draws / 5, 3 * np.sqrt(n_draws / reff)))
    return np.minimum(lengths, n_draws - 1).astype(np.int64)


def _smooth(
    x: Float[np.ndarray, "n S"], tails: Num[np.ndarray, "n"]
) -> tuple[Float[np.ndarray, "n S"], Float[np.ndarray, "n"]]:
    """PSIS of each row of log ratios, in place. Rows of one tail length are fitted together."""
    x -= x.max(axis=1, keepdims=True)
    constant = (x.min(axis=1) == 0) & (x.shape[1] >= _MIN_TAIL)
    pareto_k = np.where(constant, -np.inf, np.inf)
    places, values = _largest(x, int(tails.max()) + 1)
    cutoff = np.take_along_axis(values, values.shape[1] - 1 - tails[:, None], axis=1)
    cutoff = np.maximum(cutoff, _LOG_TINY)
    lengths = (values > cutoff).sum(axis=1)
    for length in np.unique(lengths[lengths >= _MIN_TAIL]):
        rows = np.flatnonzero(lengths == length)
        base = np.exp(cutoff[rows])
        shape, quantiles = _smooth_tails(np.exp(values[rows, -length:]) - base)
        fitted = np.isfinite(shape)
        rows, pareto_k[rows] = rows[fitted], np.where(fitted, shape, np.inf)
        smoothed = np.log(quantiles[fitted] + base[fitted])
        x[rows[:, None], places[rows, -length:]] = np.minimum(smoothed, 0)
    return x - _logsumexp(x)[:, None], pareto_k


def _largest(
    x: Float[np.ndarray, "n S"], count: int
) -> tuple[Num[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """Places and values of the `count` largest entries of each row, ascending."""
    places = np.argpartition(x, x.shape[1] - count, axis=1)[:, x.shape[1] - count :]
    values = np.take_along_axis(x, places, axis=1)
    order = np.argsort(values, axis=1)
    return np.take_along_axis(places, order, axis=1), np.take_along_axis(values, order, axis=1)


def _smooth_tails(
    tails: Float[np.ndarray, "n M"],
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n M"]]:
    """Shape and expected order statistics of the Pareto fit to ascending exceedances."""
    shape, scale = np.empty(len(tails)), np.empty(len(tails))
    with np.errstate(divide="ignore", invalid="ignore"):
        for block in blocks(len(tails), tails.shape[1] * _n_candidates(tails.shape[1])):
            shape[block], scale[block] = _fit_pareto(tails[block])
        shape[~(np.isfinite(scale) & (scale > 0))] = np.nan
        probability = np.arange(0.5, tails.shape[1]) / tails.shape[1]
        return shape, _pareto_quantile(probability, shape[:, None], scale[:, None])


def _n_candidates(length: int) -> int:
    return 30 + int(length**0.5)


def _fit_pareto(
    tails: Float[np.ndarray, "n M"],
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Generalised Pareto shape k and scale σ of each row, by Zhang and Stephens (2009).

    Profile likelihood over a grid of θ = -k / σ, weighted into its posterior mean; then k is
    shrunk towards 1/2 with the weight of ten observations (Vehtari et al., 2024).
    """
    length, count = tails.shape[1], _n_candidates(tails.shape[1])
    quartile = tails[:, int(length / 4 + 0.5) - 1]
    spread = 1 - np.sqrt(count / (np.arange(1, count + 1) - 0.5))
    theta = spread / (3 * quartile[:, None]) + 1 / tails[:, -1:]
    k = np.log1p(-theta[:, :, None] * tails[:, None, :]).mean(axis=2)
    log_profile = length * (np.log(-theta / k) - k - 1)
    weights = np.exp(log_profile - _logsumexp(log_profile)[:, None])
    weights[weights < 10 * np.finfo(np.float64).eps] = 0
    theta_mean = (theta * weights).sum(axis=1) / weights.sum(axis=1)
    k_mean = np.log1p(-theta_mean[:, None] * tails).mean(axis=1)
    return (length * k_mean + 5) / (length + 10), -k_mean / theta_mean


def _pareto_quantile(
    p: Float[np.ndarray, "M"], k: Float[np.ndarray, "n 1"], scale: Float[np.ndarray, "n 1"]
) -> Float[np.ndarray, "n M"]:
    exponential = -np.log1p(-p)
    curved = np.expm1(k * exponential) / k
    return scale * np.where(np.abs(k) < np.finfo(np.float64).eps, exponential, curved)


def _logsumexp(x: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "n"]:
    """Log of the sum of exponentials along each row; scipy's, without its import time."""
    top = x.max(axis=1, keepdims=True)
    return np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]


def sum_se(terms: Float[np.ndarray, "N"]) -> float:
    """Standard error of a sum of N terms; one term has none.

    Example:
        >>> sum_se(np.array([1.0, 3.0, 1.0, 3.0]))
        2.0
    """
    if len(terms) < 2:
        return math.nan
    return float(np.sqrt(len(terms) * terms.var()))


def _good_k(n_draws: int) -> float:
    return min(1 - 1 / math.log10(n_draws), 0.7) if n_draws > 1 else -math.inf


def _warn_unreliable(result: LooResult) -> None:
    if result.n_bad:
        warnings.warn(
            f"loo: Pareto k is above {result.good_k:.2f} at {result.n_bad} of "
            f"{len(result.pareto_k)} points, whose terms are unreliable. Draw more, or score on "
            "held-out data instead.", stacklevel=3)
