"""Partial effects with bands: lines for numbers, points for factors; and forests of effects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from subbayes.plots.style import BLUE, GREY, INK, labelled, new_axes

if TYPE_CHECKING:
    from subbayes.semistructured.partial import Partial

__all__ = ["effect", "forest"]


def effect(partial: Partial, *, ax: Axes | None = None) -> Axes:
    """The effect of a term on the predictor, with its interval.

    A number's effect is relative to the average row, with the observed values as ticks below; a
    factor's is relative to its reference level.

    Args:
        partial: what `SemiStructuredRegression.effect` returned.
        ax: axes to draw on.

    Example:
        >>> import pandas as pd
        >>> from subbayes.semistructured import SemiStructuredRegression
        >>> frame = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20.0) % 7})
        >>> model = SemiStructuredRegression("y ~ x").fit(frame, draws=50, progress=False)
        >>> effect(model.effect("x")).get_xlabel()
        'x'
    """
    ax = new_axes(ax)
    table = partial.table()
    low, high = (table.iloc[:, i].to_numpy() for i in (3, 4))
    mean = table["mean"].to_numpy()
    ax.axhline(0, color=GREY, linewidth=0.8)
    if partial.discrete:
        at = np.arange(len(mean))
        ax.errorbar(at, mean, yerr=[mean - low, high - mean], fmt="o", color=BLUE, capsize=3,
                    markersize=5)
        ax.set_xticks(at, [str(level) for level in partial.x])
        ax.set_xlim(-0.6, len(mean) - 0.4)
    else:
        ax.fill_between(partial.x, low, high, color=BLUE, alpha=0.2, linewidth=0)
        ax.plot(partial.x, mean, color=BLUE)
        ax.plot(partial.observed, np.zeros(len(partial.observed)), "|", color=INK, alpha=0.35,
                markersize=7, transform=ax.get_xaxis_transform(), clip_on=False)
    return labelled(ax, partial.variable, f"effect of {partial.term.name}")


def forest(
    effects: Mapping[str, Float[np.ndarray, "..."]], level: float = 0.95, *,
    ax: Axes | None = None,
) -> Axes:
    """Means and intervals of several effects, one a line.

    Args:
        effects: draws by name.
        level: of the thin interval; the thick one holds half of the draws.
        ax: axes to draw on.

    Example:
        >>> draws = {"age": np.random.default_rng(0).normal(size=200)}
        >>> [text.get_text() for text in forest(draws).get_yticklabels()]
        ['age']
    """
    ax = new_axes(ax, height=0.9 + 0.35 * len(effects))
    for place, draws in enumerate(effects.values()):
        flat = np.asarray(draws).reshape(-1)
        tail = (1 - level) / 2
        low, left, right, high = np.quantile(flat, [tail, 0.25, 0.75, 1 - tail])
        ax.plot([low, high], [place, place], color=BLUE, linewidth=1.4)
        ax.plot([left, right], [place, place], color=BLUE, linewidth=4, solid_capstyle="butt")
        ax.plot([flat.mean()], [place], "o", color="white", markeredgecolor=BLUE, markersize=5)
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.set_yticks(range(len(effects)), list(effects))
    ax.set_ylim(len(effects) - 0.4, -0.6)
    return labelled(ax, f"effect, with {100 * level:g} % and 50 % intervals", "")
