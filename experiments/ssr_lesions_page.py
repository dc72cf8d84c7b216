"""Figure of `ssr_lesions`: posteriors of the age effect, pooled and by fold."""

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
    """Plot figure 6 (pooled draws of all folds), figure 13 (each fold) and the legend.

    Args:
        found: records of the folds, by method.
    """
    folds = max(len(records) for records in found.values())
    panels = list(range(folds + 1)) if folds > 1 else [1]
    columns = min(_COLUMNS, len(panels) + 1)
    rows = style.grid(-(-(len(panels) + 1) // columns), columns, width=2.7, height=2.3)
    cells = [ax for row in rows for ax in row]
    draws = {name: [np.array(r["theta"]) for r in records] for name, records in found.items()}
    every = np.concatenate([theta for each in draws.values() for theta in each])
    grid = np.linspace(*style.limits(every), 300)
    for i, (ax, panel) in enumerate(zip(cells, panels, strict=False)):
        for name, each in draws.items():
            chosen = each if panel == 0 else each[panel - 1 : panel]
            if chosen:
                _curve(ax, grid, np.concatenate(chosen), name)
        ax.set_title(f"fold {panel}" if panel else "all folds together", fontsize=10)
        ax.set_yticks([])
        ax.set_ylim(bottom=0)
        style.label_axes(ax, "log odds for 10 years", "density" if i % columns == 0 else "")
    for ax in cells[len(panels) :]:
        ax.set_axis_off()
    handles, names = cells[0].get_legend_handles_labels()
    cells[len(panels)].legend(handles, names, loc="center left", frameon=False)
    result = cells[0].figure
    assert isinstance(result, Figure)
    return result


def _curve(ax: Axes, grid: np.ndarray, theta: np.ndarray, name: str) -> None:
    """Plot a kernel density estimate."""
    from scipy.stats import gaussian_kde

    density = gaussian_kde(theta)(grid)
    ax.fill_between(grid, density, color=COLORS[name], alpha=0.15, linewidth=0)
    ax.plot(grid, density, color=COLORS[name], label=name)
