"""The picture of the experiment `ssr_simulation`: moments against the reference, and coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.store import Record
from subbayes.diagnostics.calibration import wilson_interval
from subbayes.plots import style


def figure(results: Mapping[str, Mapping[str, Sequence[Record]]]) -> Figure:
    """Figures 4 and 10 (differences of moments) and 5, 11, 12 (coverage), a row a family."""
    from experiments.ssr_simulation import LEVELS, MOMENTS, REFERENCE, covered, differences

    axes = style.grid(len(results), 5, width=2.8, height=3.2)
    units = {
        "mean": "mean / sd",
        "sd": "sd, relative",
        "skewness": "skewness",
        "kurtosis": "excess kurtosis",
    }
    for row, (family, by_method) in zip(axes, results.items(), strict=True):
        subspaces = [m for m in by_method if m != REFERENCE]
        for ax, moment in zip(row, MOMENTS, strict=False):
            away = [
                differences(by_method[m], by_method[REFERENCE], moment).reshape(-1)
                for m in subspaces
            ]
            ax.axhline(0, color=style.GREY, linewidth=1)
            ax.boxplot(
                away,
                tick_labels=[m.removeprefix("k = ") for m in subspaces],
                widths=0.55,
                flierprops={"markersize": 2},
                medianprops={"color": style.BLUE, "linewidth": 1.6},
            )
            style.labelled(ax, "k", units[moment])
            if moment == "mean":
                ax.set_title(f"{family}, differences from all weights", fontsize=10, loc="left")
        ax = row[-1]
        ax.plot([0, 1], [0, 1], color=style.GREY, linewidth=1, linestyle="--")
        for method, shade in ((subspaces[0], 0.4), (subspaces[-1], 1.0), (REFERENCE, 1.0)):
            found = [covered(by_method[method], level) for level in LEVELS]
            share = np.array([s for s, _ in found])
            colour = style.RED if method == REFERENCE else style.BLUE
            ax.plot(LEVELS, share, color=colour, alpha=shade, linewidth=1.2, label=method)
            if method in (subspaces[0], REFERENCE):
                low, high = wilson_interval(share, found[0][1])
                ax.fill_between(LEVELS, low, high, color=colour, alpha=0.12, linewidth=0)
        style.labelled(ax, "level of the interval", "coverage")
        style.legend(ax, columns=2)
    found_figure = axes[0][0].figure
    assert isinstance(found_figure, Figure)
    return found_figure
