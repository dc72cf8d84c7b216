"""The loss along a curve between solutions, beside the straight line between them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from subbayes.plots.style import BLUE, GREY, INK, ORANGE, label_axes, legend, limits, new_axes
from subbayes.subspaces.curve import CurveLosses


def loss_along_curve(
    losses: CurveLosses,
    straight: CurveLosses | None = None,
    *,
    test: CurveLosses | None = None,
    quantity: Literal["loss", "error"] = "loss",
    ax: Axes | None = None,
) -> Axes:
    """Loss or error along a curve in weight space, on training and test rows.

    Dashed lines are the straight line between the ends of the curve, which usually crosses a
    barrier; the heights of the barriers are shown (`CurveLosses.barrier`).

    Args:
        losses: along the curve on the training rows, from `curve_losses`.
        straight: along the straight line on the same rows.
        test: along the curve on test rows.
        quantity: "loss" (mean negative log-likelihood) or "error" (share of wrong labels, RMSE).
        ax: axes to draw on.

    Source: figure 2 of Garipov et al. (2018), "Loss surfaces, mode connectivity, and fast
    ensembling of DNNs".

    Example:
        >>> t = np.linspace(0, 1, 5)
        >>> bent = CurveLosses(t, 0.1 + 0 * t, 0.02 + 0 * t, "error rate")
        >>> line = CurveLosses(t, 0.1 + t * (1 - t), 0.02 + t * (1 - t), "error rate")
        >>> loss_along_curve(bent, line).get_xlabel()
        'place on the curve t'
    """
    shown = [
        (losses, BLUE, "-", "curve, training rows"),
        (test, ORANGE, "-", "curve, test rows"),
        (straight, BLUE, "--", "straight line, training rows"),
    ]
    ax, seen = new_axes(ax), []
    for one, color, style, label in shown:
        if one is None:
            continue
        values = getattr(one, quantity)
        seen.append(values)
        bent = style == "-"
        ax.plot(one.t, values, style, color=color, linewidth=1.8 if bent else 1.2, label=label)
        if bent:
            ax.plot(one.t[[0, -1]], values[[0, -1]], "o", color=INK, markersize=4.5, zorder=3)
    ax.set_xlim(-0.02, 1.02)
    low, high = limits(np.concatenate(seen))
    ax.set_ylim(low, high)
    if quantity == "loss":
        ax.set_ylim(low, high + 0.08 * (high - low))  # room for the text
        text = f"barrier on training rows: {losses.barrier:.2g} nats"
        if straight is not None:
            text += f", straight line {straight.barrier:.2g}"
        ax.text(
            0.99, 0.985, text, transform=ax.transAxes, ha="right", va="top", fontsize=9, color=GREY
        )
    what = {
        "loss": "negative log-likelihood\n(nats per observation)",
        "error": {"RMSE": "RMSE (units of y)"}.get(losses.error_name, losses.error_name),
    }
    return legend(label_axes(ax, "place on the curve t", what[quantity]))
