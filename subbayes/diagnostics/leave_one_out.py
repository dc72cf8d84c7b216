"""Leave-one-out cross-validation by Pareto-smoothed importance sampling (Vehtari et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Num

from subbayes.diagnostics.convergence import blocks, ess_mean
from subbayes.utils.checks import check_positive, fail
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warn_user

_MIN_TAIL = 5  # smallest number of exceedances for a generalised Pareto fit
_LOG_TINY = math.log(np.finfo(np.float64).tiny)


@dataclass(frozen=True, eq=False)
class LooResult:
    r"""Expected log predictive density under leave-one-out cross-validation.

    Attributes:
        elpd: $\sum_i a_i \log p(y_i \mid y_{-i})$ with the weights $a_i$ of the rows, in nats.
        se: standard error of `elpd` over observations, in nats.
        p_loo: effective number of parameters, the in-sample log density minus `elpd`.
        pointwise: the term of one copy of each observation, shape (N,); NaN for rows of weight 0.
        pareto_k: tail shape of each observation's importance ratios, shape (N,); minus infinity
            for rows of weight 0.
        n_draws: number of posterior draws S.
        row_weights: how many times each observation counts, shape (N,); None if each counts once.
    """

    elpd: float
    se: float
    p_loo: float
    pointwise: RowNumbers
    pareto_k: RowNumbers
    n_draws: int
    row_weights: RowNumbers | None = None

    @property
    def n_observations(self) -> float:
        """Number of observations that `elpd` is a sum over: N, or the sum of the row weights."""
        return len(self.pointwise) if self.row_weights is None else float(self.row_weights.sum())

    @property
    def n_rows(self) -> int:
        """Number of rows of weight above 0."""
        if self.row_weights is None:
            return len(self.pointwise)
        return int((self.row_weights > 0).sum())

    @property
    def good_k(self) -> float:
        r"""Largest reliable Pareto k, $\min(1 - 1 / \log_{10} S, 0.7)$."""
        return min(1 - 1 / math.log10(self.n_draws), 0.7) if self.n_draws > 1 else -math.inf

    @property
    def n_bad(self) -> int:
        """Number of rows whose Pareto k is above `good_k`."""
        return int((self.pareto_k > self.good_k).sum())

    def worst(self, most: int = 3) -> dict[int, float]:
        """Positions of the observations with the largest Pareto k above `good_k`, and their k.

        Args:
            most: number of observations at most.

        Example:
            >>> k = np.array([0.1, 1.4, 0.2, 0.9])
            >>> LooResult(-4.0, 1.0, 1.0, np.full(4, -1.0), k, 1000).worst()
            {1: 1.4, 3: 0.9}
        """
        order = np.argsort(-self.pareto_k, kind="stable")[: min(most, self.n_bad)]
        return {int(i): float(self.pareto_k[i]) for i in order}

    def reliability(self) -> str:
        """Which terms are unreliable, and what to do, in a line."""
        n = self.n_rows
        if not self.n_bad:
            return f"Pareto k is at most {self.good_k:.2f} at all {n} points."
        listed = ", ".join(f"{i} (k {k:.2f})" for i, k in self.worst().items())
        pulls = bool(self.pareto_k.max() > 1) and self.n_draws >= 5 * _MIN_TAIL
        return (
            f"Pareto k is above {self.good_k:.2f} at {self.n_bad} of {n} points, whose terms are "
            f"unreliable: {'the largest are ' if self.n_bad > 3 else ''}{listed}, counted from 0. "
            + "A point with k above 1 pulls the fit: look at it, or use a family with heavier "
            "tails (student-t). " * pulls + "Draw more, or score on held-out data instead."
        )

    def difference(self, best: LooResult) -> tuple[float, float]:
        """`elpd` minus that of another result on the same observations, and its standard error."""
        terms = self.pointwise - best.pointwise
        return self.elpd - best.elpd, sum_se(terms, self.row_weights)

    def __repr__(self) -> str:
        worst = ", ".join(f"{k:.2f} at {i}" for i, k in self.worst().items())
        return (
            f"LooResult(elpd={self.elpd:.1f}, se={self.se:.1f}, p_loo={self.p_loo:.1f}; "
            f"{self.n_bad} of {self.n_rows} Pareto k above {self.good_k:.2f}"
            f"{': ' + worst + ', ...' * (self.n_bad > 3) if worst else ''})"
        )


def psis(
    log_ratios: Num[np.ndarray, "..."], reff: float | RowNumbers = 1.0
) -> tuple[Float[np.ndarray, "S N"], RowNumbers]:
    r"""Pareto-smoothed importance weights, for each of N targets at once.

    The $M = \lceil \min(S / 5, 3 \sqrt{S / r_\mathrm{eff}}) \rceil$ largest ratios are replaced
    by the expected order statistics of a generalised Pareto distribution fitted to them, and
    truncated at the largest ratio. The weights are reliable if its shape $\hat k$ is below
    $\min(1 - 1 / \log_{10} S, 0.7)$.

    Args:
        log_ratios: log importance ratios up to a constant per column, shape (S, N).
        reff: relative efficiency ESS / S of the draws, one number or one per column.

    Returns:
        Normalised log weights (S, N), whose exponentials sum to 1 over the draws, and Pareto k
        (N,): infinite if fewer than five ratios are above the threshold of the tail or there are
        fewer than five draws, minus infinity if all ratios of at least five draws are equal.

    Raises:
        InputError: if `log_ratios` is not (S, N), a column has nan, +inf or only -inf, or `reff` is
            not positive.

    Source: Vehtari, Simpson, Gelman, Yao and Gabry (2024), JMLR 25(72), algorithm 1; the fit is
        that of Zhang and Stephens (2009), with the weak prior of Vehtari et al. (2024).

    Example:
        >>> log_ratios = np.random.default_rng(0).exponential(size=(1000, 2)) * [0.2, 1.2]
        >>> log_weights, pareto_k = psis(log_ratios)
        >>> np.exp(log_weights).sum(0).round(6), pareto_k > 0.67
        (array([1., 1.]), array([False,  True]))
    """
    if log_ratios.ndim != 2 or len(log_ratios) == 0:
        fail(
            "log_ratios",
            "shape (draws, points)",
            f"shape {log_ratios.shape}",
            "Stack the chains with reshape(-1, points)",
        )
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
    reff: float | RowNumbers | None = None,
    *,
    temperature: float = 1.0,
    row_weights: Float[np.ndarray, "*_"] | None = None,
    log_weights: Float[np.ndarray, "*_"] | None = None,
    quiet: bool = False,
) -> LooResult:
    r"""Leave-one-out predictive density from draws of a posterior, without refitting.

    $$\widehat{\mathrm{elpd}} = \sum_i a_i \log \sum_s w_{is} \, p(y_i \mid z_s), \qquad
      w_{is} \propto \mathrm{PSIS}\left(\omega_s \, p(y_i \mid z_s)^{-\min(a_i, 1)/T}\right).$$

    The draws must come from the posterior with this likelihood, or be weighted to it by
    $\omega_s$. A row of weight $a_i$ counts as $a_i$ equal rows of which one copy is left out, or
    the whole row if its weight is below 1; a row of weight 0 counts as no row, and may have a
    density of 0. A warning names observations whose importance weights are too heavy-tailed.

    Args:
        log_lik: log density of one copy of every observation under every draw, in nats, shape
            (S, N), or (chains, draws, N), from which each observation's relative efficiency is
            estimated; see `Posterior.pointwise`.
        reff: relative efficiency ESS / S, one number or one per observation; by default 1 for
            (S, N), which treats the draws as independent.
        temperature: temperature T of the posterior; the score is that of the untempered
            likelihood for any T.
        row_weights: $a_i$, how many times the likelihood of the posterior counts each observation,
            shape (N,); by default once. See `Posterior.row_weights`.
        log_weights: $\log \omega_s$ up to a constant, shape (S,): log ratio of the posterior of
            interest to the sampled one; by default constant.
        quiet: suppress the warning.

    Raises:
        InputError: if `log_lik` has another shape or is not finite in rows of weight above 0,
            `reff` or `temperature` is not positive, row weights are negative or all 0, or log
            weights are NaN or all minus infinity.

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
    counts = _check_row_weights(row_weights, n)
    _check_points("log_lik", np.isfinite(chains).all(axis=(0, 1)) | (counts == 0))
    if reff is None and log_lik.ndim == 2:
        reff = 1.0
    given = None if reff is None else _efficiency(reff, n)
    check_positive("temperature", temperature)
    base = _normalised(log_weights, n_draws)
    left_out, some = np.minimum(counts, 1.0) / temperature, np.flatnonzero(counts)
    pointwise, in_sample, pareto_k = np.full(n, np.nan), np.zeros(n), np.full(n, -np.inf)
    for block in blocks(len(some), n_draws):
        rows = some[block]
        part = np.array(chains[:, :, rows], dtype=np.float64)
        efficiency = _relative_efficiency(part) if given is None else given[rows]
        columns = np.ascontiguousarray(part.reshape(n_draws, -1).T)
        weights, pareto_k[rows] = _smooth(
            base - left_out[rows, None] * columns, _tail_lengths(n_draws, efficiency)
        )
        pointwise[rows] = _logsumexp(weights + columns)
        in_sample[rows] = _logsumexp(base + columns)
    elpd = float(counts[some] @ pointwise[some])
    result = LooResult(
        elpd,
        sum_se(pointwise, row_weights),
        float(counts @ in_sample) - elpd,
        pointwise,
        pareto_k,
        n_draws,
        row_weights,
    )
    if result.n_bad and not quiet:
        warn_user(f"loo: {result.reliability()}")
    return result


def _by_chain(log_lik: np.ndarray) -> Num[np.ndarray, "chains draws N"]:
    if log_lik.ndim not in (2, 3) or 0 in log_lik.shape:
        fail(
            "log_lik",
            "shape (draws, points) or (chains, draws, points)",
            f"shape {log_lik.shape}",
            "Compute it with posterior.pointwise",
        )
    return log_lik if log_lik.ndim == 3 else log_lik[None]


def _normalised(log_weights: np.ndarray | None, n_draws: int) -> Float[np.ndarray, "S"]:
    """Log weights of the draws, whose exponentials sum to 1."""
    if log_weights is None:
        return np.full(n_draws, -math.log(n_draws))
    if log_weights.shape != (n_draws,):
        fail("log_weights", f"one for each of {n_draws} draws", f"shape {log_weights.shape}")
    if not math.isfinite(log_weights.max()):  # the maximum of NaN is NaN
        got = "minus infinity at all draws"
        if not np.isneginf(log_weights).all():
            got = f"NaN or infinity at {int((~(log_weights < np.inf)).sum())} draws"
        fail("log_weights", "numbers, or minus infinity at some draws", got, "Drop these draws")
    return log_weights - _logsumexp(log_weights[None])


def _check_row_weights(row_weights: np.ndarray | None, n: int) -> RowNumbers:
    """How many times each observation counts."""
    if row_weights is None:
        return np.ones(n)
    if row_weights.shape != (n,):
        fail("row_weights", f"one for each of {n} points", f"shape {row_weights.shape}")
    bad = ~(np.isfinite(row_weights) & (row_weights >= 0))
    if bad.any() or not row_weights.any():
        got = (
            f"{row_weights[bad.argmax()]:g} at point {bad.argmax()}" if bad.any() else "zeros only"
        )
        fail("row_weights", "numbers of at least 0, of which one is above 0", got)
    return row_weights


def _check_points(argument: str, good: np.ndarray) -> None:
    if not good.all():
        fail(
            argument,
            "finite numbers",
            f"NaN or infinite values at {(~good).sum()} of "
            f"{len(good)} points (first at point {good.argmin()})",
            "Drop the draws that produced them",
        )


def _efficiency(reff: float | np.ndarray, n: int) -> RowNumbers:
    values = np.asarray(reff, dtype=np.float64)
    if values.shape not in ((), (1,), (n,)) or not (np.isfinite(values) & (values > 0)).all():
        fail(
            "reff",
            f"a positive number, or {n} of them",
            f"{reff!r}",
            "Divide the effective sample size by the number of draws",
        )
    return np.broadcast_to(values, (n,))


def _relative_efficiency(log_lik: Float[np.ndarray, "chains draws n"]) -> RowNumbers:
    """ESS / S of each observation's likelihood; 1 where it is undefined."""
    likelihood = np.exp(log_lik - log_lik.max(axis=(0, 1)))
    relative = ess_mean(likelihood) / (log_lik.shape[0] * log_lik.shape[1])
    return np.where(np.isfinite(relative), relative, 1.0)


def _tail_lengths(n_draws: int, reff: RowNumbers) -> Num[np.ndarray, "n"]:
    """The number M of largest ratios to smooth (Vehtari et al. 2024)."""
    lengths = np.ceil(np.minimum(n_draws / 5, 3 * np.sqrt(n_draws / reff)))
    return np.minimum(lengths, n_draws - 1).astype(np.int64)


def _smooth(
    x: Float[np.ndarray, "n S"], tails: Num[np.ndarray, "n"]
) -> tuple[Float[np.ndarray, "n S"], RowNumbers]:
    """PSIS of each row of log ratios, in place; rows of equal tail length are fitted together."""
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
        pareto_k[rows] = np.where(fitted, shape, np.inf)
        rows = rows[fitted]
        smoothed = np.log(quantiles[fitted] + base[fitted])
        x[rows[:, None], places[rows, -length:]] = np.minimum(smoothed, 0)
    return x - _logsumexp(x)[:, None], pareto_k


def _largest(
    x: Float[np.ndarray, "n S"], count: int
) -> tuple[Num[np.ndarray, "n count"], Float[np.ndarray, "n count"]]:
    """Places and values of the `count` largest entries of each row, ascending."""
    places = np.argpartition(x, x.shape[1] - count, axis=1)[:, x.shape[1] - count :]
    places = np.sort(places, axis=1)  # equal values in the order of the draws, for any `count`
    values = np.take_along_axis(x, places, axis=1)
    order = np.argsort(values, axis=1, kind="stable")
    return np.take_along_axis(places, order, axis=1), np.take_along_axis(values, order, axis=1)


def _smooth_tails(tails: Float[np.ndarray, "n M"]) -> tuple[RowNumbers, Float[np.ndarray, "n M"]]:
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


def _fit_pareto(tails: Float[np.ndarray, "n M"]) -> tuple[RowNumbers, RowNumbers]:
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


def _logsumexp(x: Float[np.ndarray, "n m"]) -> RowNumbers:
    """`scipy.special.logsumexp` along each row, without its import time."""
    top = x.max(axis=1, keepdims=True)
    return np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]


def sum_se(terms: RowNumbers, row_weights: RowNumbers | None = None) -> float:
    r"""Standard error of a sum of N terms, $\sqrt{N s^2}$ with the unbiased variance $s^2$ (N - 1).

    This is ArviZ's from version 1 on; earlier versions divide by N. It is NaN where the counts
    add up to one or less.

    Args:
        terms: the terms.
        row_weights: how many times each one counts; by default once. Terms of weight 0 may be NaN.
            A term that counts twice is two equal terms, whose standard error is 0.

    Example:
        >>> round(sum_se(np.array([1.0, 3.0, 1.0, 3.0])), 3)
        2.309
        >>> round(sum_se(np.array([1.0, 3.0, 9.0]), np.array([2.0, 2.0, 0.0])), 3)
        2.309
    """
    counts = np.ones(len(terms)) if row_weights is None else row_weights
    terms, counts = terms[counts > 0], counts[counts > 0]
    total = float(counts.sum())
    if total <= 1:
        return math.nan
    mean = counts @ terms / total
    return float(np.sqrt(total / (total - 1) * (counts @ np.square(terms - mean))))
