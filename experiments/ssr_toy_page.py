"""Figure of `ssr_toy`: predictions and posteriors of the effects."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.store import Record
from subbayes.plots import style


def figure(
    records: Mapping[str, Record],
    train: pd.DataFrame,
    grid: np.ndarray,
    truth: tuple[float, ...],
    reference: str,
) -> Figure:
    """Plot figure 1 (bands of the first category) and figure 9 (posteriors of theta), side by side.

    Args:
        records: records of one seed, by method.
        train: its training rows.
        grid: points of the curves.
        truth: true effects.
        reference: method whose posterior is drawn behind the others.
    """
    axes = style.grid(2, len(records), width=2.7, height=2.5)
    shift = dict(zip("abc", (0.0, *truth), strict=True))
    level = train["y"] - train["category"].map(shift)
    for column, (name, record) in enumerate(records.items()):
        top, below = axes[0][column], axes[1][column]
        mean, low, high = map(np.array, record["curve"])
        top.fill_between(grid, low, high, color=style.BLUE, alpha=0.2, linewidth=0)
        top.plot(grid, mean, color=style.BLUE)
        top.plot(train["u"], level, ".", color=style.INK, markersize=3)
        top.set_ylim(-3.5, 3.5)
        top.set_title(name, fontsize=10)
        style.label_axes(top, "u", "y of the first category" if column == 0 else "")
        if reference in records:
            below.plot(
                *np.array(records[reference]["theta"]),
                ".",
                color=style.GREY,
                markersize=1.5,
                alpha=0.5,
            )
        below.plot(*np.array(record["theta"]), ".", color=style.BLUE, markersize=1.5, alpha=0.5)
        below.plot(*truth, "x", color=style.RED, markersize=7)
        center = np.array(records[next(iter(records))]["mean"])
        below.set_xlim(center[0] - 0.35, center[0] + 0.35)
        below.set_ylim(center[1] - 0.35, center[1] + 0.35)
        style.label_axes(below, "theta 1", "theta 2" if column == 0 else "")
    found = axes[0][0].figure
    assert isinstance(found, Figure)
    return found
