"""Spectra of the trajectory, the Hessian and the Fisher information, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from subbayes.curvature.lanczos import Eigenpairs, SpectralDensity
from subbayes.plots.style import GREY, band, by_name, label_axes, legend, legend_entry, new_axes
from subbayes.training.trajectory import TrajectoryRecorder

_ROUNDING = 1e-7  # relative to the largest: rounding error of a zero in single precision


def spectra(
    spectra: Mapping[str, Eigenpairs | TrajectoryRecorder | Sequence[float] | Any],
    *,
    share: bool = False,
    ax: Axes | None = None,
) -> Axes:
    r"""Magnitudes of eigenvalues in descending order, on a logarithmic axis.

    Hollow points are negative eigenvalues. Vertical lines are residual norms where they are known
    (most are shorter than the marker). Values below 1e-7 of the largest, which cannot be
    distinguished from 0 in single precision, are left out.

    Args:
        spectra: by name: `Eigenpairs`; the recorder of a trajectory, whose eigenvalues
            $s_i^2$ are the variances along its principal directions; or numbers.
        share: divide each by the sum of its magnitudes, to compare decays.
        ax: axes to draw on.

    Source: figures 6 and 7 of Izmailov et al. (2019).

    Example:
        >>> spectra({"Hessian": [9.0, 4.0, -1.0], "Fisher": [8.0, 3.0]}).get_xlabel()
        'eigenvalue'
    """
    ax = new_axes(ax)
    hollow, longest = False, 1
    for name, one, color, marker in by_name(spectra, "osD^v"):
        values, residuals = _values(name, one)
        size = np.abs(values)
        scale = size.sum() if share else 1.0
        place, below = np.arange(1, len(values) + 1), values < 0
        ax.plot(place, size / scale, "-", color=color, linewidth=1, alpha=0.6)
        for part, face in ((~below, color), (below, "white")):
            ax.plot(
                place[part],
                size[part] / scale,
                marker,
                markersize=4.5,
                linestyle="",
                color=color,
                markerfacecolor=face,
                label=name if part is not below else None,
            )
        if residuals is not None:
            low = np.maximum(size - residuals, 1e-3 * size)
            ax.vlines(place, low / scale, (size + residuals) / scale, color=color, linewidth=1)
        hollow, longest = hollow or bool(below.any()), max(longest, len(values))
    ax.set_yscale("log")
    ax.set_xlim(1 - 0.03 * longest, longest + 0.03 * longest)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = list(ax.get_legend_handles_labels()[0])
    if hollow:
        handles.append(legend_entry("negative", GREY, "o", markersize=4.5, markerfacecolor="white"))
    what = "share of the magnitudes shown" if share else "magnitude"
    return legend(label_axes(ax, "eigenvalue", what), columns=3, handles=handles)


def _values(name: str, one: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Eigenvalues, largest magnitude first, and their residuals."""
    residuals = None
    if isinstance(one, Eigenpairs):
        values, residuals = one.values, one.residuals
    elif isinstance(one, TrajectoryRecorder):
        values = one.singular_values.double().numpy() ** 2
    else:
        values = np.asarray(one, dtype=float)
    order = np.argsort(-np.abs(values), kind="stable")
    order = order[np.abs(values[order]) > _ROUNDING * np.abs(values).max(initial=0.0)]
    return values[order], None if residuals is None else residuals[order]


def spectral_density(
    densities: Mapping[str, SpectralDensity], *, width: float = 0.03, ax: Axes | None = None
) -> Axes:
    """Density of eigenvalues on an axis that is linear near 0 and logarithmic beyond.

    The nodes are smoothed on that axis.

    Args:
        densities: by name, what `curvature.spectral_density` returns.
        width: standard deviation of the smoothing, as a share of the axis.
        ax: axes to draw on.

    Source: Ghorbani, Krishnan and Xiao (2019), figure 1.

    Example:
        >>> one = SpectralDensity(np.array([-1.0, 5.0]), np.array([0.2, 0.8]), size=10)
        >>> spectral_density({"Hessian": one}).get_xlabel()
        'eigenvalue'
    """
    ax = new_axes(ax)
    near = 1e-4 * max(float(np.abs(one.nodes).max()) for one in densities.values())
    for name, one, color, _ in by_name(densities):
        grid, count = _smoothed_density(one, near, width)
        count = np.maximum(count, 1e-3)
        band(ax, grid, 1e-3, count, color, 0.18)
        ax.plot(grid, count, color=color, linewidth=1.6, label=name)
    ax.set_xscale("symlog", linthresh=near, linscale=0.5)
    ax.set_xticks(_ticks(ax.get_xlim(), near))
    ax.minorticks_off()
    ax.set_yscale("log")
    ax.set_ylim(0.05, None)
    return legend(label_axes(ax, "eigenvalue", "eigenvalues per unit of the axis"))


def _ticks(limits: tuple[float, float], near: float) -> list[float]:
    """0 and at most six powers of ten on each side, none close to 0."""
    first = int(np.ceil(np.log10(near))) + 1
    last = int(np.floor(np.log10(max(-limits[0], limits[1], 10.0**first))))
    powers = 10.0 ** np.arange(first, last + 1, max(1, (last - first) // 5 + 1))
    both = [*(-powers[::-1]), 0.0, *powers]
    return [float(t) for t in both if limits[0] <= t <= limits[1]]


def _smoothed_density(
    one: SpectralDensity, near: float, width: float
) -> tuple[Float[np.ndarray, "g"], Float[np.ndarray, "g"]]:
    """Gaussians at the nodes, on the axis arcsinh(x / near)."""
    at = np.arcsinh(one.nodes / near)
    spread = max(width * float(np.ptp(at)), 0.1)
    grid = np.linspace(at.min() - 4 * spread, at.max() + 4 * spread, 400)
    bells = np.exp(-0.5 * ((grid[:, None] - at) / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
    return near * np.sinh(grid), one.size * (bells @ one.weights)
