"""Maps of smooths of two variables."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from scipy.spatial import KDTree

from subbayes.data.arrays import evenly_spaced
from subbayes.plots.drawn import DrawnEffect
from subbayes.plots.style import INK, grid, label_axes, legend, styled
from subbayes.utils.checks import fail
from subbayes.utils.text_table import shortened

_TOO_FAR = 0.1  # of the range of the points; the default of `vis.gam` in mgcv
_LEVELS, _MOST_ROWS = 12, 1000
_PANEL = 4.6, 3.7  # inches
_HATCH = "#999999"


def is_far(
    points: Float[np.ndarray, "m 2"], rows: Float[np.ndarray, "n 2"], distance: float = _TOO_FAR
) -> Bool[np.ndarray, "m"]:
    """Whether points are far from all rows, as `exclude.too.far` of mgcv has it.

    Args:
        points: shape (m, 2). Both variables are scaled so that they range over [0, 1] here.
        rows: shape (n, 2).
        distance: largest distance to the nearest row, on this scale.

    Example:
        >>> corners = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 5.0], [10.0, 5.0]])
        >>> is_far(corners, np.array([[0.5, 0.0], [5.0, 5.0]]))
        array([False,  True,  True,  True])
    """
    low, high = points.min(0), points.max(0)
    width = np.where(high > low, high - low, 1)
    return KDTree((rows - low) / width).query((points - low) / width)[0] > distance


@styled
def term_surface(partial: DrawnEffect, *, ax: Axes | None = None, sd: bool = False) -> Axes:
    """The effect of a smooth of two variables as a map.

    Filled contours of the posterior mean, blank where all rows are farther than a tenth of the
    ranges. Dots are the rows; hatches mark where the interval of the effect contains 0. Values that
    are no grid are coloured points.

    Args:
        partial: result of `Regression.effect`.
        ax: axes to draw on; by default two new ones, of the mean and of the standard deviation.
        sd: draw the standard deviation on the given axes in place of the mean.

    Returns:
        The axes of the mean, or those that were given.

    Raises:
        InputError: an effect of another number of variables than two.

    Example:
        >>> from subbayes.regression.design.design import Term
        >>> from subbayes.regression.questions.partial_effects import Partial
        >>> x = np.stack(np.meshgrid(np.arange(4.0), np.arange(5.0), indexing="ij"), -1)
        >>> term = Term("te(a, b)", "mu", "smooth", (1,), ("a", "b"))
        >>> at = x.reshape(-1, 2)
        >>> draws = at.sum(1) + np.array([[0.0], [1.0]])
        >>> ax = term_surface(Partial(term, "a, b", at, draws, at, 0.9))
        >>> ax.get_xlabel(), ax.get_ylabel(), len(ax.figure.axes)  # two of them colour bars
        ('a', 'b', 4)
    """
    names = partial.term.along
    if len(names) != 2:
        remedy = f"conditional_effect({names[0]!r}, by={names[1]!r}) shows it along two of them"
        fail("partial", "an effect of two variables", f"one of {', '.join(names)}", remedy)
    if ax is None:
        ax, other = grid(1, 2, *_PANEL)[0]
        term_surface(partial, ax=other, sd=True)
    mean, deviation, low, high = partial.table().iloc[:, -4:].to_numpy().T
    values = deviation if sd else mean
    rows = np.asarray(partial.observed, dtype=float)
    shown = evenly_spaced(rows, _MOST_ROWS)
    axes = [np.unique(column) for column in partial.x.T]
    shape = len(axes[0]), len(axes[1])
    is_grid = min(shape) > 1 and shape[0] * shape[1] == len(values)
    far = is_far(partial.x, rows) if is_grid else np.zeros(len(values), dtype=bool)
    far &= not far.all()  # a grid elsewhere is shown as it is
    seen = values[~far]
    largest = np.abs(seen).max() or 1.0
    colours: dict[str, Any] = {"cmap": "RdBu_r", "norm": CenteredNorm(0, largest)}
    if sd:  # the lightest colour is left to what is blank
        low_end = seen.min() - 0.15 * (seen.max() - seen.min())
        colours = {"cmap": "Purples", "norm": Normalize(low_end, seen.max())}
    ax.grid(visible=False)
    drawn: Any
    if not is_grid:
        drawn = ax.scatter(
            partial.x[:, 0], partial.x[:, 1], c=values, edgecolors=INK, linewidths=0.6, **colours
        )
    else:
        order = np.lexsort(partial.x.T[::-1])  # by the first variable, then by the second

        def on_grid(column: np.ndarray) -> np.ndarray:
            return np.ma.masked_array(column, far)[order].reshape(shape).T

        levels = MaxNLocator(_LEVELS, steps=[1, 2, 2.5, 5, 10]).tick_values(seen.min(), seen.max())
        drawn = ax.contourf(*axes, on_grid(values), levels=levels, **colours)
        ax.scatter(shown[:, 0], shown[:, 1], s=4, color=INK, alpha=0.35, linewidths=0)
        if not sd:
            around_zero = on_grid(np.minimum(-low, high))  # at least 0 where the interval has 0
            if around_zero.max() >= 0:
                marks = ax.contourf(*axes, around_zero, [0, np.inf], colors="none", hatches=["//"])
                marks.set_edgecolor(_HATCH)  # the colour of hatches
                marks.set_linewidth(0)
                name = f"{100 * partial.level:g} % interval contains 0"
                key = Patch(facecolor="none", edgecolor=_HATCH, linewidth=0, hatch="////")
                key.set_label(name)
                legend(ax, handles=[key])
    bar = ax.figure.colorbar(drawn, ax=ax)
    bar.outline.set_visible(False)
    what = "standard deviation" if sd else f"effect on {partial.scale}"
    bar.set_label(f"{shortened(partial.term.name, 30)}: {what}")
    return label_axes(ax, *names)
