"""Convergence of chains: traces, ranks, autocorrelation, effective sample sizes."""

from __future__ import annotations

from itertools import cycle

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from scipy.stats import rankdata

from subbayes.draws import Draws
from subbayes.plots.style import (
    BLUE,
    COLORS,
    GREY,
    RED,
    SKY,
    drawable,
    label_axes,
    legend,
    new_axes,
    note,
)
from subbayes.utils.checks import check_count

_MOST_DRAWN = 32  # chains in one figure


def trace(draws: Draws, coordinate: int | str = 0, *, ax: Axes | None = None) -> Axes:
    """Trace of each chain for one coordinate or statistic; converged chains look alike.

    Of more than 32 chains 32 are drawn, evenly spaced, and a note says so.

    Args:
        draws: what inference returned.
        coordinate: number of the coordinate, or name of a statistic ("log_likelihood").
        ax: axes to draw on.

    Example:
        >>> z = np.random.default_rng(0).normal(size=(4, 100, 2))
        >>> trace(Draws(z), 1).get_ylabel()
        'z[1]'
    """
    x, name = _chains(draws, coordinate)
    ax = new_axes(ax, height=2.6)
    draw = np.arange(1, x.shape[1] + 1)
    for chain, color in zip(x[_drawn(x)], cycle(COLORS), strict=False):
        ax.plot(draw, drawable(chain), color=color, linewidth=0.6, alpha=0.6)
    ax.set_xlim(1, max(x.shape[1], 2))
    note(ax, _note_of(x))
    return label_axes(ax, "draw", name)


def ranks(
    draws: Draws, coordinate: int | str = 0, *, bins: int = 20, ax: Axes | None = None
) -> Axes:
    """Rank histogram of each chain, which is uniform if the chains have converged.

    Of more than 32 chains 32 are drawn, evenly spaced, and a note says so.

    Args:
        draws: what inference returned.
        coordinate: number of the coordinate, or name of a statistic.
        bins: number of bins.
        ax: axes to draw on.

    Raises:
        InputError: no such coordinate or statistic.

    Source: Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), section 4.4.

    Example:
        >>> z = np.random.default_rng(0).normal(size=(4, 100, 2))
        >>> ranks(Draws(z)).get_ylabel()
        'chain'
    """
    x, name = _chains(draws, coordinate)
    shown = _drawn(x)
    heights = rank_histogram(x, check_count("bins", bins, 2))[shown]
    ax = new_axes(ax, height=2.6)
    edges = np.linspace(0, x.size, bins + 1)
    for c, height in enumerate(heights):
        ax.bar(
            edges[:-1],
            0.45 * height,
            width=np.diff(edges),
            bottom=c + 1,
            align="edge",
            color=COLORS[c % len(COLORS)],
            alpha=0.75,
            edgecolor="white",
            linewidth=0.4,
        )
        ax.axhline(c + 1.45, color=GREY, linewidth=0.8, linestyle="--")
    ax.set_yticks(np.arange(1, len(shown) + 1), [str(chain + 1) for chain in shown])
    ax.set_xlim(0, x.size)
    ax.set_ylim(0.9, len(shown) + 1.15)
    ax.grid(False)
    if len(shown) < len(x):
        note(ax, _note_of(x))
    return label_axes(ax, f"rank of {name} among all draws", "chain")


def _drawn(x: Float[np.ndarray, "chains draws"]) -> Int[np.ndarray, "m"]:
    """Indices of the chains that are drawn: each has many artists."""
    return np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_DRAWN)).round().astype(int))


def _note_of(x: Float[np.ndarray, "chains draws"]) -> str:
    return f"{len(x)} chains" if len(x) <= _MOST_DRAWN else f"{_MOST_DRAWN} of {len(x)} chains"


def rank_histogram(
    x: Float[np.ndarray, "chains draws"], bins: int
) -> Float[np.ndarray, "chains bins"]:
    """Frequency of each chain's ranks relative to a flat histogram, shape (chains, bins)."""
    rank = rankdata(x).reshape(x.shape) - 0.5
    edges = np.linspace(0, x.size, bins + 1)
    counts = np.stack([np.histogram(chain, edges)[0] for chain in rank])
    return counts * bins / x.shape[1]


def autocorrelation(draws: Draws, *, ax: Axes | None = None) -> Axes:
    """Autocorrelation at lags up to 100, or a third of the draws, averaged over chains.

    Args:
        draws: what inference returned.
        ax: axes to draw on.

    Example:
        >>> z = np.random.default_rng(0).normal(size=(4, 300, 2))
        >>> len(autocorrelation(Draws(z)).get_lines())
        3
    """
    lag = max(1, min(100, draws.n_draws // 3))
    ax = new_axes(ax)
    ax.axhline(0, color=GREY, linewidth=1)
    rho = [correlations(_chains(draws, i)[0], lag) for i in range(draws.rank)]
    if len(rho) <= len(COLORS):
        for i, line in enumerate(rho):
            color = COLORS[i % len(COLORS)]
            ax.plot(line, color=color, linewidth=1.3, alpha=0.9, label=f"z[{i}]")
    else:
        ax.plot(np.transpose(rho), color=BLUE, linewidth=1.3, alpha=0.4)
        note(ax, f"{len(rho)} coordinates")
    ax.set_xlim(0, lag)
    ax.set_ylim(float(np.nanmin([-0.08, *(line.min() for line in rho)])) - 0.02, 1.02)
    return legend(label_axes(ax, "lag in draws", "autocorrelation"), columns=min(len(rho), 5))


def correlations(x: Float[np.ndarray, "chains draws"], max_lag: int) -> Float[np.ndarray, "lags"]:
    """Autocorrelation at lags 0 to `max_lag`, pooled over chains, around each chain's mean."""
    n = x.shape[1]
    transform = np.fft.rfft(x - x.mean(1, keepdims=True), 2 * n, axis=1)
    covariance = np.fft.irfft(np.abs(transform) ** 2, 2 * n, axis=1)[:, : max_lag + 1].mean(0)
    return covariance / covariance[0] if covariance[0] > 0 else np.full(max_lag + 1, np.nan)


def ess(draws: Draws, *, ax: Axes | None = None) -> Axes:
    """Bulk and tail effective sample size of each coordinate.

    The dashed line is 100 per chain, which reliable means, quantiles and R-hat require.

    Args:
        draws: what inference returned.
        ax: axes to draw on.

    Example:
        >>> z = np.random.default_rng(0).normal(size=(4, 100, 3))
        >>> ess(Draws(z)).get_xlabel()
        'effective sample size'
    """
    bulk, tail = draws.ess_bulk(), draws.ess_tail()
    place = np.arange(draws.rank)
    ax = new_axes(ax, height=max(2.4, 1.2 + 0.24 * draws.rank))
    ax.barh(place - 0.2, bulk, height=0.36, color=BLUE, label="bulk")
    ax.barh(place + 0.2, tail, height=0.36, color=SKY, label="tail")
    enough = 100 * draws.n_chains
    ax.axvline(enough, color=RED, linewidth=1.2, linestyle="--", label=f"enough ({enough})")
    shown = place[:: max(1, draws.rank // 25)]
    ax.set_yticks(shown, [f"z[{i}]" for i in shown])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    return legend(label_axes(ax, "effective sample size", "coordinate"), columns=3)


def _chains(draws: Draws, coordinate: int | str) -> tuple[np.ndarray, str]:
    """Values (chains, draws) of a coordinate or statistic, and their name."""
    if isinstance(coordinate, str):
        return np.asarray(draws.stats[coordinate], dtype=float), coordinate.replace("_", " ")
    return draws.z[:, :, coordinate], f"z[{coordinate}]"
