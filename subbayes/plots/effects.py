"""Partial effects with bands, and forest plots of effects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from subbayes.diagnostics.convergence import hdi
from subbayes.plots.drawn import DrawnEffect
from subbayes.plots.style import (
    BLUE,
    GREY,
    INK,
    MANY_LEVELS,
    band,
    grid,
    label_axes,
    label_levels,
    new_axes,
    styled,
)
from subbayes.plots.term_surfaces import term_surface
from subbayes.utils.checks import check_count
from subbayes.utils.text_table import shortened

__all__ = ["effect", "effects", "forest"]


@styled
def effect(partial: DrawnEffect, *, ax: Axes | None = None) -> Axes:
    """The effect of a term on the predictor, with its interval.

    The effect of a number is relative to the average row, with ticks at the observed values; that
    of a factor is relative to its reference level, that of a network to its mean over the rows.
    A smooth of two variables is a map, see `subbayes.plots.term_surfaces.term_surface`.

    Args:
        partial: result of `Regression.effect`.
        ax: axes to draw on; a map has two new ones by default, of the mean and of the standard
            deviation, and the first is returned.

    Raises:
        InputError: a smooth of three variables.

    Example:
        >>> import pandas as pd
        >>> from subbayes.inference import Sampling
        >>> from subbayes import Regression
        >>> frame = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20.0) % 7})
        >>> model = Regression("y ~ x").fit(
        ...     frame, sampling=Sampling(draws=50, warmup=50, progress=False)
        ... )
        >>> effect(model.effect("x")).get_xlabel()
        'x'
    """
    if partial.x.ndim == 2:
        return term_surface(partial, ax=ax)
    ax = new_axes(ax)
    table = partial.table()
    low, high = (table.iloc[:, i].to_numpy() for i in (3, 4))
    mean = table["mean"].to_numpy()
    ax.axhline(0, color=GREY, linewidth=0.8)
    if partial.discrete:
        capsize, markersize, linewidth = (0, 3, 0.9) if len(mean) > MANY_LEVELS else (3, 5, 1.5)
        ax.errorbar(
            np.arange(len(mean)),
            mean,
            yerr=[mean - low, high - mean],
            fmt="o",
            color=BLUE,
            capsize=capsize,
            markersize=markersize,
            linewidth=linewidth,
        )
        label_levels(ax, [str(level) for level in partial.x])
    else:
        band(ax, partial.x, low, high, BLUE, 0.2)
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


@styled
def effects(partials: Sequence[DrawnEffect], *, columns: int = 3) -> Figure:
    """Several effects in one figure, each as `effect` draws it.

    A map takes two panels, of its mean and of its standard deviation.

    Args:
        partials: results of `Regression.partials`.
        columns: number of panels per row.

    Example:
        >>> import pandas as pd
        >>> from subbayes.inference import Sampling
        >>> from subbayes import Regression
        >>> frame = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20.0) % 7})
        >>> model = Regression("y ~ x").fit(
        ...     frame, sampling=Sampling(draws=50, warmup=50, progress=False)
        ... )
        >>> len(effects(model.partials()).axes)
        1
    """
    drawings: list[Callable[..., Axes]] = []
    for partial in partials:
        drawings.append(functools.partial(effect, partial))
        if partial.x.ndim == 2:
            drawings.append(functools.partial(term_surface, partial, sd=True))
    columns = min(check_count("columns", columns), len(drawings))
    panels = sum(grid(-(-len(drawings) // columns), columns, 4.2, 3.1), [])
    for ax, draw in zip(panels, drawings, strict=False):
        draw(ax=ax)
    for ax in panels[len(drawings) :]:
        ax.remove()
    figure = panels[0].figure
    assert isinstance(figure, Figure)
    return figure


@styled
def forest(
    effects: Mapping[str, Float[np.ndarray, "..."]], level: float = 0.95, *, ax: Axes | None = None
) -> Axes:
    """Means and intervals of several effects, one per line.

    Args:
        effects: draws by name.
        level: level of the thin interval; the thick one contains half of the draws. Both are those
            of highest density, as in the summary.
        ax: axes to draw on.

    Example:
        >>> draws = {"age": np.random.default_rng(0).normal(size=200)}
        >>> [text.get_text() for text in forest(draws).get_yticklabels()]
        ['age']
    """
    ax = new_axes(ax, height=0.9 + 0.35 * len(effects))
    for place, draws in enumerate(effects.values()):
        flat = np.asarray(draws).reshape(-1)
        ax.plot(hdi(flat, level), [place, place], color=BLUE, linewidth=1.4)
        ax.plot(hdi(flat, 0.5), [place, place], color=BLUE, linewidth=4, solid_capstyle="butt")
        ax.plot([flat.mean()], [place], "o", color="white", markeredgecolor=BLUE, markersize=5)
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.set_yticks(range(len(effects)), list(map(shortened, effects)))
    ax.set_ylim(len(effects) - 0.4, -0.6)
    return label_axes(ax, f"effect, with 50 % and {100 * level:g} % intervals", "")
