"""Style of figures: a palette for colour-blind readers, and axes without global state.

Figures are made without pyplot, so that they involve no window, backend or `rcParams` and need not
be closed. `ax.figure` shows one in a notebook, `save` writes one.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from jaxtyping import Float, Int
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, LogFormatter, ScalarFormatter

from subbayes.artifacts.files import atomic_write_bytes
from subbayes.plots.fonts import use_fallback_font
from subbayes.utils.text_table import printable, shortened
from subbayes.utils.warning import filtered_warnings, warn_user

# Okabe and Ito (2008), "Color universal design": told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, INK, GREY = "#56B4E9", "#CC79A7", "#222222", "#767676"
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, INK, GREY)
REFERENCE: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": "--"}
"""Style of lines to compare with."""

T = TypeVar("T")
P = ParamSpec("P")

WIDTH, HEIGHT, DPI = 5.2, 3.7, 150
_LABEL, _TICK, _LEGEND = 10.5, 9.5, 9.0
MANY_LEVELS, _MAX_LABELS = 20, 36  # above MANY_LEVELS, marks and labels are smaller
_LABEL_WIDTH, _ROW_WIDTH = 16, 46  # characters of one label, and of all labels in a row
_MISSING_SHOWN = 20
_LARGEST = 1e100  # of numbers on an axis, whose range has to be finite


def new_axes(ax: Axes | None = None, width: float = WIDTH, height: float = HEIGHT) -> Axes:
    """The given axes, or new ones in their own figure.

    Args:
        ax: axes to draw on.
        width: of a new figure, in inches.
        height: of a new figure, in inches.

    Example:
        >>> new_axes().figure.get_size_inches()
        array([5.2, 3.7])
    """
    if ax is not None:
        return ax
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return _apply_style(figure.add_subplot())


def grid(rows: int, columns: int, width: float = WIDTH, height: float = HEIGHT) -> list[list[Axes]]:
    """Several axes in one figure, as a list of rows.

    Args:
        rows: number of rows.
        columns: number of columns.
        width: of one, in inches.
        height: of one, in inches.

    Example:
        >>> [len(row) for row in grid(2, 3)]
        [3, 3]
    """
    figure = Figure(
        figsize=(columns * width, rows * height), layout="constrained", facecolor="white"
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    return [[_apply_style(ax) for ax in row] for row in axes]


def _apply_style(ax: Axes) -> Axes:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#999999")
    ax.tick_params(labelsize=_TICK, color="#999999", labelcolor=INK)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_fontsize(_LABEL)
        axis.label.set_color(INK)
    ax.grid(color="#E8E8E8", linewidth=0.7)
    ax.set_axisbelow(True)
    return ax


def label_axes(ax: Axes, x: str, y: str) -> Axes:
    """Label both axes, and return them."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    return ax


def by_name(named: Mapping[str, T], markers: str = "o") -> Iterator[tuple[str, T, str, str]]:
    """Names and values, each with a colour and a marker."""
    for (name, value), color, marker in zip(
        named.items(), cycle(COLORS), cycle(markers), strict=False
    ):
        yield name, value, color, marker


def band(
    ax: Axes, x: Any, low: Any, high: Any, color: str, alpha: float, label: str | None = None
) -> None:
    """Fill the area between two curves."""
    ax.fill_between(x, low, high, color=color, alpha=alpha, linewidth=0, label=label)


def legend_entry(label: str, color: str, marker: str = "", **style: Any) -> Line2D:
    """An entry for a legend: a marker, or else a line."""
    line = "" if marker else "-"
    return Line2D(
        [], [], **{"color": color, "marker": marker, "linestyle": line} | style, label=label
    )


def legend(ax: Axes, columns: int = 2, handles: Sequence[Artist] | None = None) -> Axes:
    """Add a legend above the axes, where it hides no data, and return the axes.

    Args:
        ax: the axes; without labelled artists there is no legend.
        columns: entries side by side.
        handles: what to show; by default all labelled artists.
    """
    if handles is None:
        handles = ax.get_legend_handles_labels()[0]
    if handles:
        ax.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1.01),
            ncols=columns,
            frameon=False,
            fontsize=_LEGEND,
            borderaxespad=0.2,
            handlelength=1.6,
            columnspacing=1.4,
        )
    return ax


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """The function, in whose own figures "$" in names is no mathematics, and all letters show."""

    @functools.wraps(function)
    def drawn(*args: P.args, **options: P.kwargs) -> T:
        found = function(*args, **options)
        if isinstance(found, (Axes, Figure)) and options.get("ax") is None:
            _escape_dollars(_figure_of(found))
            use_fallback_font(_figure_of(found))
        return found

    return drawn


def note(ax: Axes, text: str) -> None:
    """Add small right-aligned text above the axes."""
    ax.annotate(
        text,
        (1, 1.02),
        xycoords="axes fraction",
        ha="right",
        va="bottom",
        fontsize=_LEGEND,
        color=GREY,
    )


def mark_missing(ax: Axes, x: Int[np.ndarray, "n"], values: Float[np.ndarray, "n"]) -> None:
    """Mark values that are NaN or infinite by crosses at the top of axes.

    Args:
        ax: the axes, whose limits are set.
        x: where the values are, such as epochs.
        values: the values.
    """
    bad = ~np.isfinite(values)
    if bad.any():
        top = np.full(int(bad.sum()), 0.97)
        ax.plot(x[bad], top, "x", color=RED, markersize=5, label="NaN or infinite",
                transform=ax.get_xaxis_transform())  # fmt: skip


def drawable(values: Any) -> Float[np.ndarray, "n"]:
    """Values as float64, infinite where they are beyond what axes show.

    Example:
        >>> drawable([1.0, -1e200])
        array([  1., -inf])
    """
    array = np.asarray(values, dtype=float)
    return np.where(np.abs(array) > _LARGEST, np.copysign(np.inf, array), array)


def limits(values: Sequence[float] | np.ndarray, margin: float = 0.05) -> tuple[float, float]:
    """The range of the finite values with a margin."""
    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array)]
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 1.0)
    pad = margin * (high - low) or margin * abs(high) or 0.5
    return low - pad, high + pad


def png(drawn: Axes | Figure, dpi: int = DPI) -> bytes:
    """A figure as the bytes of a PNG file.

    Characters that the default font does not have are written in an installed font that has them;
    a warning names those that no font has.

    Args:
        drawn: the figure, or axes in it.
        dpi: pixels per inch.

    Example:
        >>> png(new_axes())[1:4]
        b'PNG'
    """
    figure = _figure_of(drawn)
    _escape_dollars(figure)
    missing, buffer = use_fallback_font(figure), io.BytesIO()
    # Matplotlib warns of each missing character, whenever it draws a text
    with filtered_warnings("ignore", UserWarning, "Glyph .* missing from font"):
        figure.savefig(buffer, format="png", dpi=dpi)
    if missing:
        shown = missing[:_MISSING_SHOWN] + ("..." if len(missing) > _MISSING_SHOWN else "")
        warn_user(
            f"figures show boxes for the characters {shown}, which no installed font has; install "
            "one, such as Noto Sans CJK"
        )
    return buffer.getvalue()


def label_levels(ax: Axes, levels: Sequence[str]) -> None:
    """Label levels on the x axis: vertically if they are long, only some if they are many.

    Args:
        ax: the axes, on which level i is at i.
        levels: the labels.
    """
    step = -(-len(levels) // _MAX_LABELS)
    labels = [shortened(level, _LABEL_WIDTH) for level in levels[::step]]
    ax.set_xticks(
        range(0, len(levels), step),
        labels,
        rotation=90 if sum(len(label) + 2 for label in labels) > _ROW_WIDTH else 0,
        fontsize=7 if len(labels) > MANY_LEVELS else None,
    )
    ax.set_xlim(-0.6, len(levels) - 0.4)


def _figure_of(drawn: Axes | Figure) -> Figure:
    figure = drawn if isinstance(drawn, Figure) else drawn.figure
    while isinstance(figure, SubFigure):
        figure = figure.figure
    return figure


def _escape_dollars(figure: Figure) -> None:
    """Show "$" in names as it is, which Matplotlib takes for mathematics, but for its numbers.

    Control characters, which no font has, are shown as escape sequences.
    """
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks_of = [[axis.offsetText, *axis.get_ticklabels(which="both")] for axis in axes]
    of_ticks = {id(text) for texts in ticks_of for text in texts}  # which are formatted again
    for text in figure.findobj(Text):
        if isinstance(text, Text) and id(text) not in of_ticks:
            text.set(text=printable(text.get_text()), parse_math=False)
    for axis in axes:
        numbers = isinstance(axis.get_major_formatter(), (ScalarFormatter, LogFormatter))
        if isinstance(axis.get_major_locator(), FixedLocator) and not numbers:
            labels = [printable(label.get_text()) for label in axis.get_ticklabels()]
            axis.set_ticklabels(labels, parse_math=False)


def save(drawn: Axes | Figure, path: str | Path, dpi: int = DPI) -> Path:
    """Write a figure as a PNG file atomically.

    Args:
        drawn: the figure, or axes in it.
        path: the file; its folder is created if missing.
        dpi: pixels per inch.

    Raises:
        ArtifactError: the file cannot be written.

    Example:
        >>> save(new_axes(), "empty.png").name
        'empty.png'
    """
    atomic_write_bytes(path, png(drawn, dpi))
    return Path(path)
