"""Figure of `ssr_simulation`: differences of moments from the reference, and coverage."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from subbayes.diagnostics.calibration import wilson_interval
from subbayes.plots import style


def figure(
    differences: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]],
    coverage: Mapping[str, Mapping[str, tuple[np.ndarray, int]]],
    levels: np.ndarray,
    reference: str,
) -> Figure:
    """Plot figures 4 and 10 (differences of moments) and 5, 11, 12 (coverage), one row per family.

    Args:
        differences: differences from the reference, by family, moment and subspace.
        coverage: observed shares at the levels with their number of intervals, by family and
            method.
        levels: levels of the intervals.
        reference: name of the method of reference.
    """
    axes = style.grid(len(differences), 5, width=2.8, height=3.2)
    units = {
        "mean": "mean / sd",
        "sd": "sd, relative",
        "skewness": "skewness",
        "kurtosis": "excess kurtosis",
    }
    for row, (family, by_moment) in zip(axes, differences.items(), strict=True):
        subspaces = list(next(iter(by_moment.values())))
        for ax, (moment, by_subspace) in zip(row, by_moment.items(), strict=False):
            ax.axhline(0, color=style.GREY, linewidth=1)
            ax.boxplot(
                list(by_subspace.values()),
                tick_labels=[m.removeprefix("k = ") for m in subspaces],
                widths=0.55,
                flierprops={"markersize": 2},
                medianprops={"color": style.BLUE, "linewidth": 1.6},
            )
            style.label_axes(ax, "k", units[moment])
            if moment == "mean":
                ax.set_title(f"{family}, differences from all weights", fontsize=10, loc="left")
        ax = row[-1]
        ax.plot([0, 1], [0, 1], color=style.GREY, linewidth=1, linestyle="--")
        for method, shade in ((subspaces[0], 0.4), (subspaces[-1], 1.0), (reference, 1.0)):
            share, count = coverage[family][method]
            colour = style.RED if method == reference else style.BLUE
            ax.plot(levels, share, color=colour, alpha=shade, linewidth=1.2, label=method)
            if method in (subspaces[0], reference):
                low, high = wilson_interval(share, count)
                ax.fill_between(levels, low, high, color=colour, alpha=0.12, linewidth=0)
        style.label_axes(ax, "level of the interval", "coverage")
        style.legend(ax, columns=2)
    found_figure = axes[0][0].figure
    assert isinstance(found_figure, Figure)
    return found_figure
