"""Replicated responses beside the data."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Num
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from subbayes.plots.drawn import DrawnReplicates
from subbayes.plots.style import BLUE, GREY, INK, label_axes, legend, new_axes

_MOST_LINES, _MOST_BARS, _MOST_LABELS, _POINTS = 50, 40, 10, 200


def predictive_check(replicates: DrawnReplicates, *, ax: Axes | None = None) -> Axes:
    """Draw the distribution of the responses, and of replicates from the model.

    Numbers: kernel densities, which are reflected at 0 where nothing is below. Counts and classes:
    the share of each value, with the central 90 % of the replicates. Censored responses of the
    data are those that `Replicates.completed` has drawn, and the legend says how many: of numbers
    there is a line for each of them.

    Args:
        replicates: of `prior_predictive` or `posterior_predictive`.
        ax: axes to draw on.

    Example:
        >>> from subbayes.regression.questions.predictive_checks import Replicates
        >>> y = np.arange(10.0)
        >>> replicates = Replicates(y, y + np.ones((3, 1)), "regression", "posterior")
        >>> predictive_check(replicates).get_ylabel()
        'density'
    """
    ax = new_axes(ax)
    if replicates.kind == "regression":
        _densities(ax, replicates)
    else:
        _shares(ax, replicates)
    return legend(ax, columns=1 if replicates.n_censored else 2)


def _densities(ax: Axes, replicates: DrawnReplicates) -> None:
    y, draws = replicates.data()[:_MOST_LINES], replicates.finite()[:_MOST_LINES]
    low, high = np.quantile(np.concatenate([draws.ravel(), y.ravel()]), [0.01, 0.99])
    low = min(low, float(np.median(y.min(1))))
    high = max(high, float(np.median(y.max(1))))
    margin = 0.1 * (high - low)
    positive = bool(min(draws.min(initial=np.inf), y.min()) >= 0)
    at = np.linspace(max(low - margin, 0) if positive else low - margin, high + margin, _POINTS)
    with np.errstate(over="ignore"):
        spread = np.std(draws, axis=1)
    for i, row in enumerate(draws):
        if 0 < spread[i] < np.inf:  # a variance that overflows has no kernel density
            name = f"drawn from the {replicates.source}" if i == 0 else None
            ax.plot(at, _density(row, at, positive), color=BLUE, lw=0.6, alpha=0.4, label=name)
    width, alpha = (1.8, 1.0) if len(y) == 1 else (0.6, 0.4)
    for i, row in enumerate(y):
        if np.std(row) > 0:
            name = _of_data(replicates) if i == 0 else None
            ax.plot(at, _density(row, at, positive), color=INK, lw=width, alpha=alpha, label=name)
    label_axes(ax, "response", "density")


def _density(
    values: Num[np.ndarray, "n"], at: Float[np.ndarray, "m"], positive: bool
) -> Float[np.ndarray, "m"]:
    """A kernel density, whose mass below 0 is reflected for values that are not negative."""
    from scipy import stats

    kernel = stats.gaussian_kde(values)
    density: np.ndarray = kernel(at)
    return density + kernel(-at) if positive else density


def _of_data(replicates: DrawnReplicates) -> str:
    """The label of the data."""
    censored = replicates.n_censored
    return f"data, {censored} censored responses drawn" if censored else "data"


def _shares(ax: Axes, replicates: DrawnReplicates) -> None:
    y, draws = replicates.data(), replicates.finite()
    if not len(draws):
        draws = np.full((1, y.shape[1]), np.nan)  # no share of any value
    last = int(min(max(np.median(y.max(1)), np.quantile(draws, 0.99)), _MOST_BARS))
    values = np.arange(last + 1)
    shares = np.stack([(draws == value).mean(1) for value in values], 1)
    low, high = np.quantile(shares, [0.05, 0.95], axis=0)
    middle = shares.mean(0)
    own = [(y == value).mean() for value in values]
    ax.bar(values, own, color=GREY, label=_of_data(replicates))
    ax.errorbar(
        values,
        middle,
        yerr=[np.maximum(middle - low, 0), np.maximum(high - middle, 0)],
        fmt="o",
        color=BLUE,
        label=f"drawn from the {replicates.source}",
    )
    if 0 < len(replicates.labels) <= _MOST_LABELS:
        ax.set_xticks(range(len(replicates.labels)), [str(one) for one in replicates.labels])
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(ax, "response", "share of rows")
