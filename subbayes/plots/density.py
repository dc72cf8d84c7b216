"""The log density of a posterior over two of its coordinates, with draws."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from subbayes.draws import Draws
from subbayes.plots.style import (
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    label_axes,
    legend,
    legend_entry,
    new_axes,
)
from subbayes.posterior import Posterior

_MARKS = ((ORANGE, "o"), (PURPLE, "^"), (GREEN, "s"), (RED, "D"))
_BATCH = 64  # points in one evaluation


def surface(
    posterior: Posterior,
    first: Float[np.ndarray, "a"],
    second: Float[np.ndarray, "b"],
    axes: tuple[int, int] = (0, 1),
    center: Float[np.ndarray, "k"] | None = None,
) -> Float[np.ndarray, "b a"]:
    """The log density on a grid over two coordinates, the others held at `center`.

    Args:
        posterior: the posterior.
        first: values of the first coordinate, shape (a,).
        second: values of the second, shape (b,).
        axes: which two coordinates.
        center: values of all coordinates, shape (k,); by default 0, the shift.

    Returns:
        Values up to the posterior's constant, shape (b, a).

    Example:
        >>> import torch, subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> posterior = Posterior(net, Gaussian(1.0), data,
        ...                       subbayes.subspace.FullSubspace(net.weights))
        >>> surface(posterior, np.linspace(-1, 1, 5), np.linspace(-1, 1, 3)).shape
        (3, 5)
    """
    center = np.zeros(posterior.rank) if center is None else center
    points = np.tile(np.asarray(center, dtype=float), (len(second), len(first), 1))
    points[..., axes[0]], points[..., axes[1]] = first, second[:, None]
    z = points.reshape(-1, len(center))
    padding = np.repeat(z[-1:], -len(z) % _BATCH, 0)  # a traced graph is reused for equal sizes
    padded = np.concatenate([z, padding])
    parts = [posterior.value(padded[s : s + _BATCH]) for s in range(0, len(padded), _BATCH)]
    return np.concatenate(parts)[: len(z)].reshape(len(second), -1)


def density(
    posterior: Posterior,
    draws: Draws | Mapping[str, Draws],
    *,
    axes: tuple[int, int] = (0, 1),
    spans: tuple[tuple[float, float], tuple[float, float]] | None = None,
    size: int = 41,
    n_draws: int = 800,
    ax: Axes | None = None,
) -> Axes:
    """Contours of the log density over two coordinates, in nats below their maximum.

    The other coordinates are held at the mean of the draws, so this is a slice through the
    posterior; the draws are projected onto it, and spread wider than the slice where
    coordinates are correlated. Two nats below the maximum is two standard deviations of
    a Gaussian.

    Args:
        posterior: the posterior.
        draws: draws from it, or those of several engines by name.
        axes: which two coordinates.
        spans: what to show of each, as (low, high); by default the draws.
        size: grid points along each axis; costs size² evaluations of the density.
        n_draws: how many of the draws to show, of each engine.
        ax: axes to draw on.

    Source: figures 2, 5 and 9 of Izmailov et al. (2019), "Subspace inference for Bayesian deep
    learning".

    Example:
        >>> import torch, subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> posterior = Posterior(net, Gaussian(1.0), data,
        ...                       subbayes.subspace.FullSubspace(net.weights))
        >>> density(posterior, Draws(np.random.randn(1, 20, 2)), size=9).get_xlabel()
        'z[0]'
    """
    i, j = axes
    named = draws if isinstance(draws, Mapping) else {"draws": draws}
    every = [group.flat() for group in named.values()]
    center = np.concatenate(every).mean(0)
    spans = spans or (_span(every, i), _span(every, j))
    first, second = (np.linspace(*span, size) for span in spans)
    values = surface(posterior, first, second, (i, j), center)
    ax = new_axes(ax, width=5.6, height=4.4)
    _contours(ax, first, second, values.max() - values)
    entries = _draws(ax, named, (i, j), n_draws)
    if len(named) == 1:
        label = "mean of the draws"
        entries += ax.plot(
            *center[[i, j]], "X", color=INK, markersize=8, markeredgecolor="white", label=label
        )
    if first[0] < 0 < first[-1] and second[0] < 0 < second[-1]:
        entries += ax.plot(
            0, 0, "P", color="white", markersize=7, markeredgecolor=INK, label="shift (z = 0)"
        )
    ax.set_xlim(first[0], first[-1])
    ax.set_ylim(second[0], second[-1])
    ax.grid(False)
    return legend(label_axes(ax, f"z[{i}]", f"z[{j}]"), columns=3, handles=entries)


def _draws(
    ax: Axes, named: Mapping[str, Draws], axes: tuple[int, int], n_draws: int
) -> list[Line2D]:
    """Points of each engine, with its own colour and marker."""
    entries = []
    for (name, group), (color, marker) in zip(named.items(), cycle(_MARKS), strict=False):
        x, y = group.flat(n_draws)[:, axes].T
        ax.plot(x, y, marker, color=color, markersize=2.8, alpha=0.8, markeredgewidth=0)
        entries.append(legend_entry(name, color, marker, markersize=5))
    return entries


def _span(every: list[Float[np.ndarray, "S k"]], i: int) -> tuple[float, float]:
    """The range of a coordinate of the draws with a margin."""
    ends = [np.quantile(z[:, i], [0.002, 0.998]) for z in every]
    low, high = float(np.min(ends)), float(np.max(ends))
    pad = 0.25 * (high - low) or 1.0
    return low - pad, high + pad


def _contours(
    ax: Axes,
    first: Float[np.ndarray, "a"],
    second: Float[np.ndarray, "b"],
    below: Float[np.ndarray, "b a"],
) -> None:
    """Filled contours in nats below the maximum, on a scale of powers of two."""
    finite = below[np.isfinite(below)]
    deepest = float(finite.max()) if finite.size else 1.0
    last = int(np.clip(np.ceil(np.log2(max(deepest, 2.0))), 2, 10))
    levels = np.array([0, 0.5, *(2.0 ** np.arange(last + 1))])
    dark, light = np.array([8, 64, 129]) / 255, np.array([240, 246, 251]) / 255
    mix = np.linspace(0, 1, len(levels) - 1)[:, None] ** 0.8
    colors = [(*row, 1.0) for row in (1 - mix) * dark + mix * light]
    shown = np.minimum(np.where(np.isfinite(below), below, np.inf), levels[-1])
    filled = ax.contourf(first, second, shown, levels, colors=colors)
    ax.contour(first, second, shown, levels[1:-1], colors="white", linewidths=0.6, alpha=0.7)
    bar = ax.figure.colorbar(
        filled,
        ax=ax,
        spacing="uniform",
        ticks=levels,
        pad=0.02,
        format=FuncFormatter(lambda value, _: f"{value:g}"),
    )
    bar.set_label("nats below the maximum", size=10)
    bar.ax.tick_params(labelsize=9)
    bar.ax.invert_yaxis()
    bar.outline.set_visible(False)
