r"""Agreement of chains in what they predict, and what each of them adds to the score.

The weights of a network do not identify themselves: chains that permute hidden units disagree in
every weight and may agree in every prediction. R-hat and effective sample sizes of predictions
compare chains where it matters. With $\mu_{cs}$ the predicted mean of draw s of chain c at a row,
the variance over all draws is the sum of the variance between chains (of the chains' means) and
the variance within them; chains of one well mixed posterior have a share between chains near the
inverse of their effective size, members of an ensemble that stay apart one near 1.

Sources: Vehtari et al. (2021) for R-hat; Izmailov, Vikram, Hoffman and Wilson (2021), "What are
Bayesian neural network posteriors really like?", section 5, for R-hat in function space; Sommer et
al. (2024), "Connecting the dots: is mode-connectedness the key to feasible sample-based inference
in Bayesian neural networks?", for the share between chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from subbayes.data.arrays import to_targets
from subbayes.diagnostics.convergence import ess_bulk, rhat
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_count, fail
from subbayes.utils.trees import n_rows, take
from subbayes.utils.types import Targets

LEAST_IN_CHAIN = 4
"""Draws of a chain, of which an effective sample size can be estimated."""

_APART = 1.2  # median R-hat of predictions from which chains are in different places
_MOST_BETWEEN = 0.25  # share of the variance
_ROWS = (0, 0, 0, 1, 1)  # the axis of the rows in R-hat and the others
_LEAST_GAIN = 1e-3  # nats a row that are worth a warning


@dataclass(frozen=True)
class ChainPredictions:
    """Predictions of the chains beside each other.

    Scores are mean log densities of the rows, in nats; None without targets.

    Attributes:
        rhat: R-hat of the predicted mean (of class probabilities) of each row, shape (N,) or
            (N, T); NaN where predictions do not vary.
        ess: bulk effective sample size of the same.
        between: share of the variance over draws that is between chains, between 0 and 1.
        rhat_within: R-hat of each chain alone, by its halves, shape (chains, N) or (chains, N, T):
            near 1 for a chain that has settled, wherever that is.
        ess_within: bulk effective sample size of each chain alone, of the same shape.
        scores: of each chain alone, shape (chains,).
        contributions: score of all chains minus that without the chain, shape (chains,).
        contribution_errors: their standard errors over the rows.
        gain_of_chains: score of all chains minus that of half of them, and its standard error; half
            of an odd number is interpolated.
        gain_of_draws: score of all draws minus that of the first half of each chain, and its
            standard error.
    """

    rhat: np.ndarray
    ess: np.ndarray
    between: np.ndarray
    rhat_within: Float[np.ndarray, "chains ..."]
    ess_within: Float[np.ndarray, "chains ..."]
    scores: Float[np.ndarray, "chains"] | None = None
    contributions: Float[np.ndarray, "chains"] | None = None
    contribution_errors: Float[np.ndarray, "chains"] | None = None
    gain_of_chains: tuple[float, float] | None = None
    gain_of_draws: tuple[float, float] | None = None
    more_chains_help: bool = False

    def __repr__(self) -> str:
        parts = [
            f"R-hat of predictions {np.nanmedian(self.rhat):.2f} (median), "
            f"{np.nanmax(self.rhat):.2f} (largest)",
            f"effective sample size {np.nanmedian(self.ess):.0f} (median), "
            f"{np.nanmin(self.ess):.0f} (smallest)",
            f"{np.nanmedian(self.between):.0%} of their variance between chains",
            f"within chains R-hat {_median(self.rhat_within):.2f} and effective sample size "
            f"{_median(self.ess_within):.0f} (medians)",
        ]
        if self.gain_of_chains is not None and self.gain_of_draws is not None:
            chains, draws = self.gain_of_chains, self.gain_of_draws
            parts.append(f"doubled chains added {chains[0]:.3g} ± {chains[1]:.2g} nats")
            parts.append(f"doubled draws added {draws[0]:.3g} ± {draws[1]:.2g}")
        return f"ChainPredictions({'; '.join(parts)})"

    def warnings(self) -> list[str]:
        """Chains that differ, and what to do next, a line each; empty if there is nothing."""
        found, known = [], self.rhat[~np.isnan(self.rhat)]
        if known.size and np.median(known) > _APART:
            figures = f"R-hat of predictions is {np.median(known):.2f} in the median"
            share = float(np.nanmedian(self.between))
            found.append(
                f"chains differ in what they predict: {figures}, and {share:.0%} of their variance "
                "is between chains. The average depends on where the chains started: "
                f"{self._remedy()}"
                if share > _MOST_BETWEEN
                else f"predictions still change along the chains: {figures}; run longer "
                "(draws=...), or warm up longer (warmup=...)"
            )
        if not self.more_chains_help:
            return found
        assert self.gain_of_chains is not None
        assert self.gain_of_draws is not None
        return [
            *found,
            f"more chains would help more than more draws: the last doubling of the chains added "
            f"{self.gain_of_chains[0]:.3g} nats a row, that of the draws "
            f"{self.gain_of_draws[0]:.3g}: raise chains=... and lower draws=...",
        ]

    def _remedy(self) -> str:
        """What helps chains that differ: longer ones if they still move, more if they do not."""
        within = _median(self.rhat_within)
        if np.isnan(within):
            return "none of them moves; lower step_size=..., or start elsewhere (initial=...)"
        if within > _APART:
            return (
                f"each still moves (R-hat within chains {within:.2f}); warm up longer (warmup=...)"
            )
        return (
            f"each has settled in a place of its own (R-hat within chains {within:.2f}); raise "
            "chains=..."
        )


def chain_predictions(
    predictive: Predictive | Iterable[Predictive], y: Any = None, *, chains: int
) -> ChainPredictions:
    r"""Compare chains by their predictions.

    Scores are those of mixtures: of all draws of some chains,
    $\log \frac1S \sum_s p(y \mid f_s)$. The score of half of the chains is the mean over the
    C windows of $C / 2$ consecutive chains, of which the first follows the last. Half of an odd
    number, of chains or of draws, is interpolated between the whole numbers around it, linearly in
    the inverse of the number.

    Args:
        predictive: a predictive with all draws, one chain after the other, or those of batches of
            rows, as of `predict_batches`.
        y: targets of all rows, for the scores, in which every row counts alike: weights of rows
            have no effect.
        chains: number of chains, at least 2.

    Raises:
        InputError: one chain, a number of draws that is not a multiple of `chains`, fewer than 4
            draws per chain, predictions in closed form, no rows, or another number of targets.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> g = torch.Generator().manual_seed(0)
        >>> f = torch.randn(4, 100, 3, 1, generator=g) / 10 + torch.arange(4.0)[:, None, None, None]
        >>> found = chain_predictions(Predictive(f.flatten(0, 1), Gaussian(1.0)), chains=4)
        >>> found.between.round(2)
        array([0.99, 0.99, 0.99])
    """
    if check_count("chains", chains) < 2:
        fail("chains", "at least 2 to compare", chains, "Fit with chains=4, for instance")
    batches = [predictive] if isinstance(predictive, Predictive) else predictive
    targets = None if y is None else to_targets(y, "y")
    parts: list[tuple[np.ndarray, ...]] = []
    densities, done = [], 0
    for batch in batches:
        rows = slice(done, done + len(batch))
        done += len(batch)
        _check(batch, chains)
        means = batch.likelihood.mean(batch.outputs).double().cpu().numpy()
        x = means.reshape(chains, batch.n_draws // chains, -1)
        total = x.var((0, 1))
        share = np.divide(x.mean(1).var(0), total, out=np.full_like(total, np.nan), where=total > 0)
        whole = (p.reshape(batch.mean.shape) for p in (rhat(x), ess_bulk(x), share))
        alone = (
            np.stack([of(one[None]) for one in x]).reshape(chains, *batch.mean.shape)
            for of in (rhat, ess_bulk)
        )
        parts.append((*whole, *alone))
        if targets is not None:
            check_target_count(targets, done, last=False)
            terms = batch.component_log_prob(take(targets, rows)).double().cpu().numpy()
            densities.append(terms.reshape(chains, -1, len(batch)))
    if targets is not None:
        check_target_count(targets, done)
    agreed, sizes, shares, own, own_sizes = (
        np.concatenate(part, axis)
        for part, axis in zip(zip(*parts, strict=True), _ROWS, strict=True)
    )
    scores = {} if targets is None else _scores(np.concatenate(densities, -1))
    return ChainPredictions(agreed, sizes, shares, own, own_sizes, **scores)


def check_target_count(targets: Targets, rows: int, *, last: bool = True) -> None:
    """Check the number of targets against the number of rows that are predicted.

    Args:
        targets: of all rows.
        rows: number of rows that are predicted so far.
        last: whether these are all of them, so that there may not be more targets.

    Raises:
        InputError: too few targets, or after the last row too many.

    Example:
        >>> import torch
        >>> check_target_count(torch.zeros(3), 2, last=False)
    """
    count = n_rows(targets)
    if count < rows or (last and count != rows):
        which = "one for each row that is predicted" if last else "one for each row"
        expected = f"{'' if last else 'at least '}{rows} targets, {which}"
        remedy = "Pass the targets of the rows that are predicted, in their order"
        fail("y", expected, count, remedy)


def _check(batch: Predictive, chains: int) -> None:
    if batch.kind != "mixture":
        expected = "predictions that average draws of chains"
        fail("predictive", expected, f"a predictive in closed form ({batch.kind})")
    check_draws(batch.n_draws, chains)


def check_draws(draws: int, chains: int, least: int = LEAST_IN_CHAIN) -> None:
    """Check that draws divide into chains of enough draws.

    Args:
        draws: number of draws.
        chains: number of chains.
        least: draws that a chain needs.
    """
    if draws % chains:
        fail("chains", f"a divisor of {draws} draws", chains, "Give the number that made them")
    if draws // chains < least:
        fail("predictive", f"at least {least} draws per chain", draws // chains, "Draw more")


def _scores(terms: Float[np.ndarray, "chains draws n"]) -> dict[str, Any]:
    """The scores of chains, alone and together, from log densities given each draw."""
    count, draws, n = terms.shape
    alone = _log_mean(terms, 1)  # (chains, n)
    whole = _log_mean(alone, 0)
    without = np.stack([_log_mean(np.delete(alone, c, 0), 0) for c in range(count)])
    half_chains = _of_half(lambda m: _of_windows(alone, m), count)
    half_draws = _of_half(lambda m: _log_mean(_log_mean(terms[:, :m], 1), 0), draws)
    by_chains, by_draws = whole - half_chains, whole - half_draws
    difference, error = _mean_and_error(by_chains - by_draws)
    contributions, errors = zip(*(_mean_and_error(whole - w) for w in without), strict=True)
    gain = _mean_and_error(by_chains)
    return {
        "scores": alone.mean(1),
        "contributions": np.array(contributions),
        "contribution_errors": np.array(errors),
        "gain_of_chains": gain,
        "gain_of_draws": _mean_and_error(by_draws),
        "more_chains_help": bool(gain[0] > _LEAST_GAIN and difference > 2 * error),
    }


def _of_windows(alone: Float[np.ndarray, "chains n"], size: int) -> Float[np.ndarray, "n"]:
    """The mean log density of so many consecutive chains, of which the first follows the last."""
    count = len(alone)
    windows = [np.arange(c, c + size) % count for c in range(count)]
    return np.asarray(np.mean([_log_mean(alone[w], 0) for w in windows], 0))


def _of_half(score: Callable[[int], Float[np.ndarray, "n"]], count: int) -> Float[np.ndarray, "n"]:
    r"""The score of half of `count` chains or draws, also if the number is odd.

    A score of m of them is about $a + b / m$. Between the numbers below and above half of an odd
    number C it is interpolated in $1 / m$: with the weights $(C - 1) / 2C$ and $(C + 1) / 2C$,
    $1 / m$ is $2 / C$.
    """
    below, above = count // 2, -(-count // 2)
    if below == above:
        return score(below)
    return (below * score(below) + above * score(above)) / count


def _median(values: np.ndarray) -> float:
    """The median of the numbers that are known; NaN if none is."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")


def _log_mean(log_x: np.ndarray, axis: int) -> np.ndarray:
    """Logarithm of the mean of exp(log_x) along an axis."""
    return np.asarray(np.logaddexp.reduce(log_x, axis) - np.log(log_x.shape[axis]))


def _mean_and_error(x: Float[np.ndarray, "n"]) -> tuple[float, float]:
    error = float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")
    return float(x.mean()), error
