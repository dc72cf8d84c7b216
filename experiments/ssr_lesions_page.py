"""The picture of the experiment `ssr_lesions`: posteriors of the age effect, pooled and by fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.store import Record
from subbayes.plots import style

_COLUMNS = 4
COLORS = {
    "subspace, k = 2": style.BLUE,
    "subspace, k = 5": style.GREEN,
    "Laplace, last layer": style.ORANGE,
    "age only": style.GREY,
}


def figure(found: Mapping[str, Sequence[Record]]) -> Figure:
    """Figure 6 (draws of all folds together), then figure 13 (each fold), then the legend.

    Of a single fold there is one picture.

    Args:
        found: records of the folds, by method.
    """
    folds = max(len(records) for records in found.values())
    places = list(range(folds + 1)) if folds > 1 else [1]
    columns = min(_COLUMNS, len(places) + 1)
    rows = style.grid(-(-(len(places) + 1) // columns), columns, width=2.7, height=2.3)
    cells = [ax for row in rows for ax in row]
    draws = {name: [np.array(r["theta"]) for r in records] for name, records in found.items()}
    every = np.concatenate([theta for each in draws.values() for theta in each])
    grid = np.linspace(*style.limits(every), 300)
    for i, (ax, place) in enumerate(zip(cells, places, strict=False)):
        for name, each in draws.items():
            chosen = each if place == 0 else each[place - 1 : place]
            if chosen:
                _curve(ax, grid, np.concatenate(chosen), name)
        ax.set_title(f"fold {place}" if place else "all folds together", fontsize=10)
        ax.set_yticks([])
        ax.set_ylim(bottom=0)
        style.label_axes(ax, "log odds for 10 years", "density" if i % columns == 0 else "")
    for ax in cells[len(places) :]:
        ax.set_axis_off()
    handles, names = cells[0].get_legend_handles_labels()
    cells[len(places)].legend(handles, names, loc="center left", frameon=False)
    whole = cells[0].figure
    assert isinstance(whole, Figure)
    return whole


def _curve(ax: Axes, grid: np.ndarray, theta: np.ndarray, name: str) -> None:
    """A kernel density estimate of draws."""
    from scipy.stats import gaussian_kde

    density = gaussian_kde(theta)(grid)
    ax.fill_between(grid, density, color=COLORS[name], alpha=0.15, linewidth=0)
    ax.plot(grid, density, color=COLORS[name], label=name)
