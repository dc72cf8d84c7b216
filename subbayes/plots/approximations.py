"""Outlines of approximations to a posterior over two of its coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patheffects import AbstractPathEffect, withStroke

from subbayes.draws import Draws
from subbayes.plots.style import GREEN, INK, PURPLE, RED, legend_entry

_STYLES: tuple[tuple[str, Literal["-", "--", "-.", ":"]], ...] = (
    (INK, "--"),
    (RED, "-"),
    (GREEN, "-."),
    (PURPLE, ":"),
)
_NATS = 2.0  # below the maximum: two standard deviations of a Gaussian
_WHITE: list[AbstractPathEffect] = [withStroke(linewidth=3.2, foreground="white")]

Moments = tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k k"]]


def gaussian(approximation: Any) -> Moments | None:
    """Mean and covariance of an approximation that is given by them, else None.

    Args:
        approximation: a pair (mean, covariance), `Draws` (their mean and covariance, or the
            moments that they hold, as those of Laplace do), or something else.

    Example:
        >>> mean, covariance = gaussian(([0.0, 1.0], np.eye(2)))
        >>> mean
        array([0., 1.])
    """
    if isinstance(approximation, Draws):
        moments = approximation.moments
        approximation = (
            (approximation.mean(), approximation.covariance())
            if moments is None or moments.covariance is None
            else (moments.mean, moments.covariance)
        )
    if not isinstance(approximation, tuple):
        return None
    mean, covariance = (np.asarray(part, dtype=float) for part in approximation)
    return mean, covariance


def ellipse(moments: Moments, axes: tuple[int, int]) -> Float[np.ndarray, "201 2"]:
    """Points at two standard deviations of the marginal of a Gaussian over two coordinates.

    Args:
        moments: mean (k,) and covariance (k, k).
        axes: which two coordinates.

    Example:
        >>> ellipse((np.zeros(2), np.diag([1.0, 4.0])), (0, 1)).max(0)
        array([2., 4.])
    """
    mean, covariance = moments
    factor = np.linalg.cholesky(covariance[np.ix_(axes, axes)])
    angle = np.linspace(0, 2 * np.pi, 201)
    return mean[list(axes)] + 2 * np.stack([np.cos(angle), np.sin(angle)], 1) @ factor.T


def log_prob_on(approximation: Any, points: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
    """The log density of an approximation at points.

    Args:
        approximation: an object whose `log_prob` takes rows as NumPy arrays (a result of
            variational inference) or as tensors (a `torch.distributions` object, a flow), or a
            function of rows.
        points: rows z.

    Example:
        >>> q = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
        >>> log_prob_on(q, np.zeros((1, 2))).round(3)
        array([-1.838])
    """
    function = getattr(approximation, "log_prob", approximation)
    with torch.no_grad():
        if isinstance(approximation, (torch.distributions.Distribution, torch.nn.Module)):
            values = function(torch.from_numpy(points).to(torch.get_default_dtype()))
        else:
            values = function(points)
    return np.asarray(values, dtype=float)


def outlines(
    ax: Axes,
    approximations: Mapping[str, Any],
    first: Float[np.ndarray, "a"],
    second: Float[np.ndarray, "b"],
    axes: tuple[int, int],
    center: Float[np.ndarray, "k"],
) -> list[Line2D]:
    """Draw each approximation as a line, and return what the legend shows.

    Gaussians are ellipses at two standard deviations of their marginal. Others are contours two
    nats below the maximum of a slice, which is the same line for a Gaussian over two coordinates.

    Args:
        ax: axes to draw on.
        approximations: by name, as `gaussian` and `log_prob_on` take them.
        first: values of the first coordinate, shape (a,).
        second: values of the second, shape (b,).
        axes: which two coordinates.
        center: a point of the slice, shape (k,).
    """
    points = slice_points(first, second, axes, center)
    entries = []
    for i, (name, approximation) in enumerate(approximations.items()):
        color, style = _STYLES[i % len(_STYLES)]
        moments = gaussian(approximation)
        if moments is not None:
            ax.plot(
                *ellipse(moments, axes).T, style, color=color, linewidth=1.6, path_effects=_WHITE
            )
        else:
            values = log_prob_on(approximation, points)
            ax.contour(
                first,
                second,
                (values - values.max()).reshape(len(second), -1),
                levels=[-_NATS],
                colors=[color],
                linestyles=[style],
                linewidths=1.6,
            ).set_path_effects(_WHITE)
        entries.append(legend_entry(name, color, linestyle=style, linewidth=1.6))
    return entries


def slice_points(
    first: Float[np.ndarray, "a"],
    second: Float[np.ndarray, "b"],
    axes: tuple[int, int],
    center: Float[np.ndarray, "k"],
) -> Float[np.ndarray, "S k"]:
    """Points of a grid over two coordinates, row by row, the others held at `center`."""
    points = np.tile(np.asarray(center, dtype=float), (len(second), len(first), 1))
    points[..., axes[0]], points[..., axes[1]] = first, second[:, None]
    return points.reshape(-1, len(center))
