"""Scores of methods and temperatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from subbayes.data.to_pandas import to_pandas
from subbayes.inference.tempering import TemperatureChoice
from subbayes.plots.style import (
    BLUE,
    GREY,
    RED,
    REFERENCE,
    SKY,
    band,
    label_axes,
    legend,
    limits,
    new_axes,
    note,
)
from subbayes.utils.text_table import shortened

SCORE_LABELS = {
    "log_likelihood": ("log-likelihood (nats per row)", "higher is better"),
    "calibrated_log_likelihood": (
        "log-likelihood, with a temperature (nats per row)",
        "higher is better",
    ),
    "log_likelihood_moment_matched": (
        "log-likelihood, moment-matched (nats per row)",
        "higher is better",
    ),
    "rmse": ("RMSE (units of y)", "lower is better"),
    "crps": ("CRPS (units of y)", "lower is better"),
    "coverage": ("coverage of the {percent:g} % interval", "{level:g} is right"),
    "interval_width": ("width of the {percent:g} % interval (units of y)", "narrower is sharper"),
    "accuracy": ("accuracy", "higher is better"),
    "brier": ("Brier score", "lower is better"),
    "ece": ("expected calibration error", "lower is better"),
    "auroc": ("AUROC", "higher is better"),
    "seconds": ("seconds of training and inference", "lower is better"),
}
_SHARES = ("accuracy", "auroc", "coverage")


def scores(
    table: Any,
    score: str = "log_likelihood",
    *,
    errors: Mapping[str, float] | None = None,
    level: float = 0.95,
    ax: Axes | None = None,
) -> Axes:
    """One score of each method, plus and minus one standard error.

    Args:
        table: one row per method, with columns "method" and `score`: `Comparison.table`.
        score: which score.
        errors: its standard error by method, such as those of `Comparison.differences`.
        level: probability of the intervals whose coverage or width the scores are.
        ax: axes to draw on.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"method": ["MAP", "SWA"], "rmse": [2.0, 1.5]})
        >>> scores(table, "rmse").get_xlabel()
        'RMSE (units of y)'
    """
    table = to_pandas("table", table)
    names, values = list(table["method"]), np.asarray(table[score], dtype=float)
    half = np.array([(errors or {}).get(name, 0.0) for name in names])
    ax = new_axes(ax, height=1.3 + 0.34 * len(names))
    place = np.arange(len(names))
    loss = distance_to_best(score, values, level)
    ours = (loss == np.nanmin(loss)) & (score != "seconds")
    ax.hlines(place, values - half, values + half, color=GREY, linewidth=1.5)
    ax.scatter(values, place, s=46, zorder=3, color=[BLUE if best else GREY for best in ours])
    if score == "coverage":
        ax.axvline(level, color=RED, linewidth=1.2, linestyle="--")
    if score == "seconds":
        ax.hlines(place, 0, values, color=GREY, linewidth=1.5)
        ax.set_xlim(0, 1.05 * float(np.nanmax(values)))
    else:
        low, high = limits(
            np.concatenate([values - half, values + half, [level] if score == "coverage" else []]),
            0.1,
        )
        ax.set_xlim(low, min(high, 1.005) if score in _SHARES else high)
    ax.set_yticks(place, list(map(shortened, names)))
    ax.set_ylim(len(names) - 0.5, -0.5)
    title, better = _labels(score, level)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    note(ax, better)
    return label_axes(ax, title, "")


def _labels(score: str, level: float) -> tuple[str, str]:
    """A label of the axis, and what is better."""
    title, better = SCORE_LABELS.get(score, (score, ""))
    return title.format(percent=100 * level, level=level), better.format(level=level)


def distance_to_best(score: str, values: np.ndarray, level: float) -> np.ndarray:
    """Values that are smallest for the best method.

    Example:
        >>> distance_to_best("coverage", np.array([0.9, 1.0]), 0.95).round(2).tolist()
        [0.05, 0.05]
    """
    if score == "coverage":
        return np.abs(values - level)
    return -values if SCORE_LABELS.get(score, ("", ""))[1].startswith("higher") else values


def temperature(choice: TemperatureChoice | Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """The score of each temperature, with its standard error, and the chosen one.

    Args:
        choice: result of `choose_temperature`, or its entries as in
            `FittedModel.settings["temperatures"]`.
        ax: axes to draw on.

    Source: figure 11 of Izmailov et al. (2019).

    Example:
        >>> choice = TemperatureChoice((1.0, 10.0), (-1.2, -1.1), (0.1, 0.1), (0.3, 0.2), "loo")
        >>> temperature(choice).get_xlabel()
        'temperature T'
    """
    if not isinstance(choice, TemperatureChoice):
        choice = TemperatureChoice.of(choice)
    how = "leave-one-out" if choice.by == "loo" else "validation rows"
    ax = new_axes(ax)
    middle, half = np.asarray(choice.scores), np.asarray(choice.standard_errors)
    band(ax, choice.temperatures, middle - half, middle + half, SKY, 0.25, "± standard error")
    ax.plot(choice.temperatures, middle, "o-", color=BLUE, linewidth=1.6, markersize=5, label=how)
    chosen = f"T = {choice.best:g}" if choice.best else "no posterior"
    ax.axvline(choice.best, label=f"chosen: {chosen}", **REFERENCE)
    least = min(t for t in choice.temperatures if t)
    ax.set_xscale("symlog", linthresh=least, linscale=0.5)  # 0 is no posterior
    shown = choice.temperatures[:: -(-len(choice.temperatures) // 20)]
    ax.set_xticks(shown, [f"{t:g}" for t in shown])
    ax.minorticks_off()
    return legend(label_axes(ax, "temperature T", "log-likelihood\n(nats per observation)"))
