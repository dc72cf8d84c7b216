"""Partial effects with bands: lines for numbers, points for factors; and forests of effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from subbayes.plots.style import BLUE, GREY, INK, grid, label_axes, new_axes
from subbayes.utils.checks import check_count, fail

if TYPE_CHECKING:
    from subbayes.semistructured.partial_effects import Partial

__all__ = ["effect", "effects", "forest"]

_MANY, _MOST = 20, 36  # more levels have small marks; largest number of labels
_LONG, _ROOM = 16, 46  # characters of one label, and of all labels in a row


def effect(partial: Partial, *, ax: Axes | None = None) -> Axes:
    """The effect of a term on the predictor, with its interval.

    The effect of a number is relative to the average row, with ticks at the observed values; that
    of a factor is relative to its reference level, that of a network to its mean over the rows.

    Args:
        partial: result of `SemiStructuredRegression.effect`.
        ax: axes to draw on.

    Example:
        >>> import pandas as pd
        >>> from subbayes.inference import Sampling
        >>> from subbayes.semistructured import SemiStructuredRegression
        >>> frame = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20.0) % 7})
        >>> model = SemiStructuredRegression("y ~ x").fit(
        ...     frame, sampling=Sampling(draws=50, progress=False)
        ... )
        >>> effect(model.effect("x")).get_xlabel()
        'x'
    """
    ax = new_axes(ax)
    table = partial.table()
    low, high = (table.iloc[:, i].to_numpy() for i in (3, 4))
    mean = table["mean"].to_numpy()
    ax.axhline(0, color=GREY, linewidth=0.8)
    if partial.discrete:
        at, many = np.arange(len(mean)), len(mean) > _MANY
        ax.errorbar(
            at,
            mean,
            yerr=[mean - low, high - mean],
            fmt="o",
            color=BLUE,
            capsize=0 if many else 3,
            markersize=3 if many else 5,
            linewidth=0.9 if many else 1.5,
        )
        _name_levels(ax, [str(level) for level in partial.x])
        ax.set_xlim(-0.6, len(mean) - 0.4)
    else:
        ax.fill_between(partial.x, low, high, color=BLUE, alpha=0.2, linewidth=0)
        ax.plot(partial.x, mean, color=BLUE)
        ax.plot(
            partial.observed,
            np.zeros(len(partial.observed)),
            "|",
            color=INK,
            alpha=0.35,
            markersize=7,
            transform=ax.get_xaxis_transform(),
            clip_on=False,
        )
    what = "network" if partial.term.kind == "network" else "effect of"
    return label_axes(ax, partial.variable, f"{what} {partial.term.name}")


def _name_levels(ax: Axes, levels: Sequence[str]) -> None:
    """Label the levels: vertically if they are long, every few if they are many."""
    short = [level if len(level) <= _LONG else level[: _LONG - 1] + "…" for level in levels]
    every = -(-len(short) // _MOST)
    upright = sum(len(level) + 2 for level in short[::every]) > _ROOM
    ax.set_xticks(
        range(0, len(short), every),
        short[::every],
        rotation=90 if upright else 0,
        fontsize=7 if len(short[::every]) > _MANY else None,
    )


def effects(partials: Sequence[Partial], *, columns: int = 3) -> Figure:
    """Several effects in one figure, each as `effect` draws it.

    Args:
        partials: results of `SemiStructuredRegression.partials`.
        columns: number of panels per row.

    Raises:
        InputError: no effects.

    Example:
        >>> import pandas as pd
        >>> from subbayes.inference import Sampling
        >>> from subbayes.semistructured import SemiStructuredRegression
        >>> frame = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20.0) % 7})
        >>> model = SemiStructuredRegression("y ~ x").fit(
        ...     frame, sampling=Sampling(draws=50, progress=False)
        ... )
        >>> len(effects(model.partials()).axes)
        1
    """
    if not partials:
        fail(
            "partials",
            "at least one effect to draw",
            "none",
            "contributions(frame) gives what networks of tensors add to each row",
        )
    wide = min(check_count("columns", columns), len(partials))
    panels = [ax for row in grid(-(-len(partials) // wide), wide, 4.2, 3.1) for ax in row]
    for ax, partial in zip(panels, partials, strict=False):
        effect(partial, ax=ax)
    for ax in panels[len(partials) :]:
        ax.remove()
    figure = panels[0].figure
    assert isinstance(figure, Figure)
    return figure


def forest(
    effects: Mapping[str, Float[np.ndarray, "..."]], level: float = 0.95, *, ax: Axes | None = None
) -> Axes:
    """Means and intervals of several effects, one per line.

    Args:
        effects: draws by name.
        level: level of the thin interval; the thick one contains half of the draws.
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
    return label_axes(ax, f"effect, with {100 * level:g} % and 50 % intervals", "")
