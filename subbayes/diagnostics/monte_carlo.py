r"""Monte Carlo error of predictions, and the number of draws that suffices.

A predictive averages S draws, so that it has an error of its own beside the uncertainty that it
describes. For draws $f_s$ with the effective sample size $S_\text{eff}$ the standard errors are

$$ \mathrm{se}\Big(\tfrac1S \sum_s \mu_s\Big) = \frac{\mathrm{sd}(\mu_s)}{\sqrt{S_\text{eff}}},
   \qquad \mathrm{se}\Big(\log \tfrac1S \sum_s p_s\Big) \approx
   \frac{\mathrm{sd}(p_s / \bar p)}{\sqrt{S_\text{eff}}} $$

with $\mu_s = E[y \mid f_s]$ and $p_s = p(y \mid f_s)$; the second is by the delta method.

Sources: Vehtari et al. (2021), section 3.2, for the effective sample size; Geyer (1992), section
3.6, for thinning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from subbayes.data.arrays import to_targets
from subbayes.diagnostics.convergence import ess_mean
from subbayes.diagnostics.function_space import LEAST_IN_CHAIN, check_draws
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_count, check_positive, fail
from subbayes.utils.trees import n_rows, take
from subbayes.utils.types import RowNumbers, Targets
from subbayes.utils.warning import warn_user

Array = np.ndarray


@dataclass(frozen=True)
class MonteCarloError:
    """Standard errors of a predictive that are due to its finite number of draws.

    Attributes:
        mean: of the predictive mean (of class probabilities), shape (N,) or (N, T), in units of y;
            NaN where this mean is not finite.
        relative: the same in predictive standard deviations, or, where these are infinite, in
            halves of the central 68.27 % intervals.
        log_density: of the log density of each observation, shape (N,), NaN where no draw has a
            density above 0; None without targets.
        mean_log_density: of the mean of those that are known; None without targets.
        draws: number of draws S.
        recommended_draws: number of draws, evenly spaced in chains as long as these or, if it is
            above S, of longer chains, whose errors are below the tolerances. A model with S draws
            has no more: fit it again with more draws.
    """

    mean: Array
    relative: Array
    log_density: RowNumbers | None
    mean_log_density: float | None
    draws: int
    recommended_draws: int

    def __repr__(self) -> str:
        density = ""
        if self.mean_log_density is not None:
            density = f", {self.mean_log_density:.2g} nats of the mean log density"
        more = "" if self.recommended_draws <= self.draws else ", more than there are: run longer"
        most = np.fmax.reduce(self.relative, None)
        return (
            f"MonteCarloError(at most {most:.2g} predictive standard deviations"
            f"{density}, draws={self.draws}, recommended_draws={self.recommended_draws}{more})"
        )


def monte_carlo_error(
    predictive: Predictive | Iterable[Predictive],
    y: Any = None,
    *,
    chains: int = 1,
    independent: bool = False,
    tolerance: float = 0.05,
    log_density_tolerance: float = 0.01,
) -> MonteCarloError:
    """The Monte Carlo error of a predictive, and how many draws are enough.

    Predictives in closed form have none, and need one draw. Warnings name rows whose mean is not
    finite, and rows whose target has zero density under all draws: their errors are unknown, and
    neither the error of the mean log density nor the recommended number of draws contains them.

    Args:
        predictive: a predictive whose draws are in the order of their chains, one chain after the
            other, or those of batches of rows, as of `predict_batches`.
        y: targets of all rows, for the error of the log density.
        chains: number of chains.
        independent: whether draws are independent, like those of an approximation.
        tolerance: error of the predictive mean of any row, in predictive standard deviations. The
            default needs 400 effective draws at most.
        log_density_tolerance: error of the mean log density, in nats.

    Raises:
        InputError: a number of draws that is not a multiple of `chains`, fewer than 4 per chain
            (2 independent ones), no rows, or another number of targets.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> f = torch.randn(2000, 3, 1, generator=torch.Generator().manual_seed(0))
        >>> error = monte_carlo_error(Predictive(f, Gaussian(noise=1.0)), independent=True)
        >>> error.mean.round(3), error.recommended_draws  # (0.05 * sqrt(2)) ** -2 = 200
        (array([0.022, 0.022, 0.022]), 202)
    """
    check_positive("tolerance", tolerance)
    check_positive("log_density_tolerance", log_density_tolerance)
    batches = [predictive] if isinstance(predictive, Predictive) else predictive
    chains = 1 if independent else check_count("chains", chains)
    targets = None if y is None else to_targets(y, "y")
    means, relative, densities = [], [], []
    needed, influence, done, draws = 1.0, np.zeros(()), 0, 1
    for batch in batches:
        rows = slice(done, done + len(batch))
        done += len(batch)
        if targets is not None:
            _check_target_count(targets, done, last=False)
        if batch.kind != "mixture":
            means.append(np.zeros_like(batch.mean))
            relative.append(means[-1])
            densities.append(np.zeros(len(batch)))
            continue
        draws = batch.n_draws
        check_draws(draws, chains, 2 if independent else LEAST_IN_CHAIN)
        error, size = errors_of_means(
            batch.likelihood.mean(batch.outputs).numpy(), chains, independent
        )
        error = np.where(np.isfinite(error), error, np.nan)
        scale = _scale(batch).reshape(error.shape)
        ratio = np.divide(error, scale, out=np.where(np.isnan(error), error, 0), where=scale > 0)
        finite = ~np.isnan(ratio)
        needed = max(needed, _most(ratio[finite], tolerance, size[finite], draws))
        means.append(error.reshape(batch.mean.shape))
        relative.append(ratio.reshape(batch.mean.shape))
        if targets is not None:
            weights, known = _weights(batch.component_log_prob(take(targets, rows)).numpy())
            error, _ = errors_of_means(weights, chains, independent)
            densities.append(np.where(known, error, np.nan))
            influence = influence + weights[:, known].sum(1)
    if targets is not None:
        _check_target_count(targets, done)
    if (infinite := np.isnan(np.concatenate(means))).any():
        _warn_of_infinite_means(infinite.reshape(done, -1).any(1))
    total = None if targets is None else 0.0
    unknown = np.isnan(np.concatenate(densities)) if densities else np.zeros(0, dtype=bool)
    if unknown.any():
        _warn_of_zero_density(unknown)
        total = math.nan
    if influence.ndim and not unknown.all():
        error, size = errors_of_means(influence[:, None] / (~unknown).sum(), chains, independent)
        total = float(error[0])
        needed = max(needed, _most(error, log_density_tolerance, size, draws))
    return MonteCarloError(
        np.concatenate(means),
        np.concatenate(relative),
        None if targets is None else np.concatenate(densities),
        total,
        draws,
        chains * math.ceil(needed / chains - 1e-9),
    )


def _check_target_count(targets: Targets, rows: int, *, last: bool = True) -> None:
    """Raise `InputError` for too few targets, or after the last row too many."""
    count = n_rows(targets)
    if count < rows or (last and count != rows):
        which = "one for each row that is predicted" if last else "one for each row"
        expected = f"{'' if last else 'at least '}{rows} targets, {which}"
        remedy = "Pass the targets of the rows that are predicted, in their order"
        fail("y", expected, count, remedy)


def sufficient_draws(
    needed: Float[np.ndarray, "..."], effective: Float[np.ndarray, "..."], draws: int
) -> Float[np.ndarray, "..."]:
    r"""Evenly spaced draws of chains whose effective sample size is `needed`.

    Chains are taken for autoregressive processes with the same effective size, $\rho$ their
    autocorrelation: m of S draws have the effective size
    $m (1 - \rho^{S/m}) / (1 + \rho^{S/m})$, so that strongly correlated draws can be thinned at
    little loss. If all S draws are not enough, longer chains of such draws are.

    Args:
        needed: effective sample sizes.
        effective: those of all draws.
        draws: number of draws S.

    Example:
        >>> sufficient_draws(np.array([100.0, 400.0]), np.array([1000.0, 200.0]), 1000)
        array([ 100., 2000.])
    """
    rho = np.clip((draws - effective) / (draws + effective), 0, 1)
    low, high = np.zeros(np.shape(needed)), np.full(np.shape(needed), float(draws))
    for _ in range(60):
        m = (low + high) / 2
        power = rho ** (draws / m)
        above = m * (1 - power) / (1 + power) >= needed
        low, high = np.where(above, low, m), np.where(above, m, high)
    return np.where(needed < np.minimum(effective, draws), high, needed * draws / effective)


def _weights(
    log_density: Float[np.ndarray, "S n"],
) -> tuple[Float[np.ndarray, "S n"], Bool[np.ndarray, "n"]]:
    """Weights of the draws in the mean density of rows, and which rows have a density above 0."""
    top = log_density.max(0)
    known = np.isfinite(top)
    weights = np.exp(np.where(known, log_density - np.where(known, top, 0), 0))
    return weights / weights.mean(0), known


def _scale(batch: Predictive) -> Array:
    """Predictive standard deviations; half the central 68.27 % intervals where they are infinite.

    Both are the same for a normal distribution.
    """
    scale = np.asarray(batch.std)
    if np.isfinite(scale).all():
        return scale
    low, high = batch.interval(0.6827)
    return np.where(np.isfinite(scale), scale, (high - low) / 2)


def _warn_of_infinite_means(infinite: Bool[np.ndarray, "n"]) -> None:
    warn_user(
        f"predictive: {int(infinite.sum())} of {len(infinite)} predictive means are not finite "
        f"(the first in row {int(infinite.argmax())}), so that their error is unknown: use "
        "quantiles, or a likelihood with lighter tails"
    )


def _warn_of_zero_density(unknown: Bool[np.ndarray, "n"]) -> None:
    warn_user(
        f"y: {int(unknown.sum())} of {len(unknown)} targets have zero density under all draws (the "
        f"first in row {int(unknown.argmax())}), so that the error of their log density is "
        "unknown: check these targets, or use a likelihood with heavier tails"
    )


def errors_of_means(
    x: Float[np.ndarray, "S *rows"], chains: int, independent: bool
) -> tuple[Array, Array]:
    """Standard errors and effective sizes of means over draws, each of shape `rows`.

    Args:
        x: values at draws, one chain after the other, at least 4 of each (2 independent ones).
        chains: number of chains.
        independent: whether draws are independent.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4000, 2))
        >>> errors_of_means(x, 1, independent=True)[0].round(3)
        array([0.016, 0.016])
    """
    S = len(x)
    with np.errstate(invalid="ignore"):  # infinite means
        sd = x.std(0, ddof=1)
    size = np.full(sd.shape, float(S))
    if not independent:
        found = ess_mean(x.reshape(chains, S // chains, *x.shape[1:]))
        size = np.where(np.isnan(found), size, found)  # of values that do not vary
    return np.asarray(sd / np.sqrt(size)), size


def _most(error: Array, tolerance: float, size: Array, draws: int) -> float:
    """The number of draws with which the largest of the errors is below the tolerance."""
    needed = np.maximum((error / tolerance) ** 2 * size, 1.0)
    return float(sufficient_draws(needed, size, draws).max(initial=1.0))
