"""Predictions along a column."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from subbayes.plots.drawn import HasCurves
from subbayes.plots.style import COLORS, band, label_axes, label_levels, legend, new_axes

_LINES, _MARKERS = ("-", "--", ":", "-."), "os^Dv"


def conditional(effect: HasCurves, *, ax: Axes | None = None) -> Axes:
    """Draw predictions along a column, or averages of them, with their intervals.

    Lines of several groups have a legend above the axes, where it hides none of them.

    Args:
        effect: result of `conditional_effect` or `survival` of `Regression`, or of
            `marginal_means`, `contrast` or `marginal_slopes`.
        ax: axes to draw on.

    Example:
        >>> import pandas as pd
        >>> from subbayes.inference import Sampling
        >>> from subbayes import Regression
        >>> frame = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20.0) % 7})
        >>> model = Regression("y ~ x").fit(
        ...     frame, sampling=Sampling(draws=50, warmup=50, progress=False)
        ... )
        >>> conditional(model.conditional_effect("x")).get_xlabel()
        'x'
    """
    curves = effect.as_conditional()
    ax = new_axes(ax)
    tail = (1 - curves.level) / 2
    many = len(curves.groups)
    for i, (group, draws) in enumerate(zip(curves.groups, curves.draws, strict=True)):
        colour = COLORS[i % len(COLORS)]
        low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
        mean = draws.mean(0)
        name = None if group is None else f"{curves.by} = {_short(group)}"
        if curves.discrete:
            at = np.arange(len(mean)) + 0.12 * (i - (many - 1) / 2)
            fmt, yerr = _MARKERS[i % len(_MARKERS)], [mean - low, high - mean]
            ax.errorbar(at, mean, yerr=yerr, fmt=fmt, color=colour, label=name)
        else:
            band(ax, curves.x, low, high, colour, 0.2 if many == 1 else 0.12)
            ax.plot(curves.x, mean, _LINES[i % len(_LINES)], color=colour, label=name)
    if curves.discrete:
        label_levels(ax, [str(level) for level in curves.x])
    if many > 1:
        legend(ax, columns=3)
    return label_axes(ax, curves.variable, curves.quantity)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
