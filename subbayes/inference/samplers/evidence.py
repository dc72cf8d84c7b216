"""Log evidence of several independent runs, and its standard error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.special import logsumexp

from subbayes.draws import Draws


def evidence_of_groups(logs: Float[np.ndarray, "groups"]) -> tuple[float, float]:
    """The log of the mean of the groups' estimates, and its standard error (delta method).

    Example:
        >>> round(evidence_of_groups(np.log([1.0, 3.0]))[0], 4)
        0.6931
    """
    log_mean = float(logsumexp(logs) - np.log(len(logs)))
    if len(logs) == 1:
        return log_mean, math.nan
    return log_mean, float(np.exp(logs - log_mean).std(ddof=1) / np.sqrt(len(logs)))


def bridge_bias(
    log_overlap: Float[np.ndarray, "chains gaps"], draws: Int[np.ndarray, "chains"]
) -> Float[np.ndarray, "chains"]:
    r"""Error of bridge sampling between rungs that overlap too little, of each ladder.

    For the geometric bridge the product of the two means that it divides, $\mathrm{BC}^2$ with the
    Bhattacharyya coefficient BC of the rungs, gives the relative variance
    $2 (\mathrm{BC}^{-2} - 1) / n$ of the estimated ratio (Meng & Wong 1996), and
    $\tfrac12 \log(1 + \text{relative variance})$ is the bias of its logarithm. It vanishes as
    1 / n, and grows with the distance between rungs that do not overlap, of which no draw tells the
    ratio.

    Args:
        log_overlap: $\log \mathrm{BC}^2$ of neighbours.
        draws: n, of each rung.

    Example:
        >>> bridge_bias(np.array([[-0.1, -0.1], [-0.1, -20.0]]), np.array([100, 100])).round(2)
        array([0.  , 8.04])
    """
    with np.errstate(invalid="ignore"):
        log_variance = np.log(2 / np.maximum(draws, 1))[:, None] + np.log(
            np.expm1(np.clip(-log_overlap, 1e-12, 700))
        )
    return np.asarray(np.sqrt(((0.5 * np.logaddexp(0, log_variance)) ** 2).sum(1)))


def evidence_of_ladders(
    running: Float[np.ndarray, "chains draws"], bias: Float[np.ndarray, "chains"]
) -> tuple[float, float]:
    r"""Log evidence of ladders and its standard error; NaN for a single ladder.

    The estimate is the log of the mean: a ladder that has missed modes is too low. With the
    variance $s^2$ of the L ladders' logarithms, $d_l$ the change of ladder l in the second half of
    its run and $w^2$ the mean of $d_l^2$,

    $$ \text{error}^2 = \frac{s^2}{L} + \frac{L - 1}{L} (s^2 - 2 w^2)_+
       + (\bar d^2 - 4 s_d^2 / L)_+ + \overline{b^2} . $$

    If ladders mix, $w^2 \approx s^2$ and only the first term remains. The second counts in full
    what ladders differ by more than they change: they are stuck in different modes, and more of
    them would not help. The third is a common drift, the last the bias between distant rungs.

    Args:
        running: log evidence of each ladder up to each draw.
        bias: b of each ladder, see `bridge_bias`.

    Example:
        >>> moving = np.array([[0.1, 0.0], [-0.2, 0.0], [0.3, 0.0]])
        >>> stuck = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
        >>> [round(evidence_of_ladders(x, np.zeros(3))[1], 2) for x in (moving, stuck)]
        [0.0, 1.0]
    """
    logs, ladders = running[:, -1], len(running)
    log_mean = evidence_of_groups(logs)[0]
    if ladders == 1 or not np.isfinite(logs).all():
        return log_mean, math.nan
    variance = float(logs.var(ddof=1))
    error = variance / ladders + float(np.square(bias).mean())
    half = running[:, max(running.shape[1] // 2 - 1, 0)]
    if running.shape[1] > 1 and np.isfinite(half).all():
        change = logs - half
        within = float(np.square(change).mean())
        error += (1 - 1 / ladders) * max(variance - 2 * within, 0.0)
        noise = float(change.var(ddof=1)) / ladders
        error += max(float(change.mean()) ** 2 - 4 * noise, 0.0)
    return log_mean, math.sqrt(error)


def summary_of_ladders(draws: Draws) -> tuple[dict[str, Any], float, float]:
    """Final values of the statistics of draws, the log evidence and its standard error."""
    last = {name: values[:, -1] for name, values in draws.stats.items()}
    summary = {
        "swap_rate": float(last["swap_rate"].mean()),
        "least_swap_rate": float(last["least_swap_rate"].min()),
        "barrier": float(last["barrier"].mean()),
        "idle": float(last["idle"].mean()),
        "round_trips": int(last["round_trips"].sum()),
    }
    return summary, *evidence_of_ladders(draws.stats["log_evidence"], last["bridge_bias"])
