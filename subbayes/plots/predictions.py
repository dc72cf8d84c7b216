"""Predictions with their epistemic and total uncertainty."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from subbayes.data.arrays import to_targets, to_tensor
from subbayes.plots.style import (
    BLUE,
    INK,
    RED,
    SKY,
    band,
    label_axes,
    legend,
    legend_entry,
    limits,
    new_axes,
)
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_count, fail


def bands(
    predictive: Predictive,
    x: Any,
    *,
    data: tuple[Any, Any] | None = None,
    level: float = 0.95,
    curves: int = 0,
    target: int = 0,
    names: tuple[str, str] = ("x", "y"),
    ax: Axes | None = None,
) -> Axes:
    r"""The predictive curve over one input, with bands.

    The inner band contains the means $\mathrm{E}[y \mid x, z_s]$ of a share `level` of the draws
    (epistemic), the outer one this share of observations (epistemic and aleatoric).

    Args:
        predictive: predictions at `x`.
        x: the input, shape (N,) or (N, 1), in any order.
        data: observations (x, y) to draw too.
        level: probability of each band.
        curves: number of draws, evenly spaced, whose curves are drawn too.
        target: which target, if there are several.
        names: of the input and the target, with their units.
        ax: axes to draw on.

    Raises:
        InputError: predictions of classes, or inputs of other number or shape.

    Source: figures 1, 3 and 8 of Izmailov et al. (2019).

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 50)
        >>> curves = torch.stack([a * x for a in (0.8, 1.0, 1.2)])[..., None]
        >>> bands(Predictive(curves, Gaussian(noise=0.1)), x).get_xlabel()
        'x'
    """
    place = _one_input(x, len(predictive))
    order = np.argsort(place, kind="stable")
    place = place[order]
    mean, lower, upper = (part[order] for part in _moments(predictive, level, target))
    ax = new_axes(ax)
    percent = f"{100 * level:g} %"
    band(ax, place, lower, upper, SKY, 0.35, f"{percent} of observations")
    if predictive.n_draws > 1:
        low, high = (part[order] for part in _interval_of_means(predictive, level, target))
        band(ax, place, low, high, BLUE, 0.4, f"{percent} of curves (epistemic)")
    if curves:
        shown = np.stack([_column(one, target)[order] for one in _some_means(predictive, curves)])
        lines = ax.plot(place, shown.T, color=BLUE, linewidth=0.7, alpha=0.6)
        lines[0].set_label(f"{len(shown)} of the curves")
    ax.plot(place, mean, color=BLUE, linewidth=1.8, label="mean")
    if data is not None:
        seen = observed(data[1], target)
        style: dict[str, Any] = {"color": INK, "markersize": 3, "alpha": 0.6, "markeredgewidth": 0}
        ax.plot(_one_input(data[0], len(seen)), seen, "o", label="observed", **style)
    return legend(label_axes(ax, *names))


def intervals(
    predictive: Predictive,
    y: Any,
    *,
    level: float = 0.95,
    target: int = 0,
    name: str = "y",
    ax: Axes | None = None,
) -> Axes:
    """Observed targets and their predictive intervals, for rows with several inputs.

    Args:
        predictive: predictions of N rows.
        y: observed targets, (N,) or (N, T).
        level: probability of the intervals.
        target: which target, if there are several.
        name: of the target, with its unit.
        ax: axes to draw on.

    Raises:
        InputError: predictions of classes, or targets of another number.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(2, 3, 1), Gaussian(noise=1.0))
        >>> intervals(predictive, [0.0, 1.0, 3.0]).get_ylabel()
        'y, observed'
    """
    seen = observed(y, target)
    mean, lower, upper = _moments(predictive, level, target)
    low, high = _interval_of_means(predictive, level, target)
    inside = (lower <= seen) & (seen <= upper)
    ax = new_axes(ax)
    width = float(np.clip(300 / max(len(seen), 1), 0.6, 3.0))
    ax.vlines(mean, lower, upper, color=SKY, alpha=0.45, linewidth=width)
    if predictive.n_draws > 1:
        ax.vlines(mean, low, high, color=BLUE, alpha=0.8, linewidth=width)
    ends = [mean.min(), mean.max()]
    ax.plot(ends, ends, color=BLUE, linewidth=1.2)
    ax.plot(mean[inside], seen[inside], "o", color=INK, markersize=3.2, markeredgewidth=0)
    ax.plot(mean[~inside], seen[~inside], "D", color=RED, markersize=4, markeredgewidth=0)
    ax.set_ylim(*limits(np.concatenate([seen, lower, upper])))
    percent, share = f"{100 * level:g} %", 100 * float(inside.mean())
    handles = [
        legend_entry(f"{percent} interval", SKY, alpha=0.6, linewidth=4),
        legend_entry(f"observed inside ({share:.0f} %)", INK, "o", markersize=4),
        legend_entry(f"{percent} of means (epistemic)", BLUE, linewidth=4),
        legend_entry(f"outside ({100 - share:.0f} %)", RED, "D", markersize=4.5),
    ]
    if predictive.n_draws == 1:
        del handles[2]
    return legend(label_axes(ax, f"{name}, predicted mean", f"{name}, observed"), handles=handles)


def observed(y: Any, target: int = 0) -> np.ndarray:
    """One target of (N,) or (N, T) observations, float64."""
    targets = to_targets(y, "y")
    values = targets if isinstance(targets, Tensor) else targets[0]
    return _column(values.detach().cpu().double().numpy(), target)


def _column(values: np.ndarray, target: int) -> np.ndarray:
    if values.ndim == 1:
        return values
    return values[:, target]


def _one_input(x: Any, n: int) -> np.ndarray:
    values = to_tensor("x", x).cpu().double().numpy()
    if values.shape not in ((n,), (n, 1)):
        fail(
            "x",
            f"one number for each of {n} rows",
            f"shape {values.shape}",
            "Use intervals(...) for several inputs",
        )
    return values.reshape(n)


def _moments(
    predictive: Predictive, level: float, target: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and ends of the interval of one target."""
    lower, upper = predictive.interval(level)
    return (_column(predictive.mean, target), _column(lower, target), _column(upper, target))


def _some_means(predictive: Predictive, n: int) -> np.ndarray:
    """The means of n evenly spaced draws, shape (n, N, T)."""
    rows = np.linspace(0, predictive.n_draws - 1, min(check_count("curves", n), predictive.n_draws))
    index = torch.from_numpy(rows.round().astype(int))
    outputs = predictive.outputs[index]
    return predictive.likelihood.select_draws(index).mean(outputs).numpy()


def _interval_of_means(
    predictive: Predictive, level: float, target: int
) -> tuple[np.ndarray, np.ndarray]:
    """The central interval that contains the means of a share `level` of the draws."""
    means = predictive.likelihood.mean(predictive.outputs)
    ends = torch.quantile(
        means, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=means.dtype), dim=0
    ).numpy()
    return _column(ends[0], target), _column(ends[1], target)
