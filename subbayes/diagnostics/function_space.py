r"""Agreement of chains in what they predict.

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

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from subbayes.diagnostics.convergence import ess_bulk, rhat
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_count, fail

LEAST_IN_CHAIN = 4
"""Draws of a chain, of which an effective sample size can be estimated."""

_APART = 1.2  # median R-hat of predictions from which chains are in different places
_MOST_BETWEEN = 0.25  # share of the variance
_ROWS = (0, 0, 0, 1, 1)  # the axis of the rows in R-hat and the others


@dataclass(frozen=True)
class ChainPredictions:
    """Predictions of the chains beside each other.

    Attributes:
        rhat: R-hat of the predicted mean (of class probabilities) of each row, shape (N,) or
            (N, T); NaN where predictions do not vary.
        ess: bulk effective sample size of the same.
        between: share of the variance over draws that is between chains, between 0 and 1.
        rhat_within: R-hat of each chain alone, by its halves, shape (chains, N) or (chains, N, T):
            near 1 for a chain that has settled, wherever that is.
        ess_within: bulk effective sample size of each chain alone, of the same shape.
    """

    rhat: np.ndarray
    ess: np.ndarray
    between: np.ndarray
    rhat_within: Float[np.ndarray, "chains ..."]
    ess_within: Float[np.ndarray, "chains ..."]

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
        return f"ChainPredictions({'; '.join(parts)})"

    def warnings(self) -> list[str]:
        """Chains that differ, and what to do next; empty if there is nothing."""
        known = self.rhat[~np.isnan(self.rhat)]
        if not known.size or np.median(known) <= _APART:
            return []
        figures = f"R-hat of predictions is {np.median(known):.2f} in the median"
        share = float(np.nanmedian(self.between))
        if share <= _MOST_BETWEEN:
            return [
                f"predictions still change along the chains: {figures}; run longer (draws=...), or "
                "warm up longer (warmup=...)"
            ]
        return [
            f"chains differ in what they predict: {figures}, and {share:.0%} of their variance is "
            f"between chains. The average depends on where the chains started: {self._remedy()}"
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
    predictive: Predictive | Iterable[Predictive], *, chains: int
) -> ChainPredictions:
    """Compare chains by their predictions.

    Args:
        predictive: a predictive with all draws, one chain after the other, or those of batches of
            rows, as of `predict_batches`.
        chains: number of chains, at least 2.

    Raises:
        InputError: one chain, a number of draws that is not a multiple of `chains`, fewer than 4
            draws per chain, or predictions in closed form.

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
    parts: list[tuple[np.ndarray, ...]] = []
    for batch in batches:
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
    return ChainPredictions(
        *(
            np.concatenate(part, axis)
            for part, axis in zip(zip(*parts, strict=True), _ROWS, strict=True)
        )
    )


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


def _median(values: np.ndarray) -> float:
    """The median of the numbers that are known; NaN if none is."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")
