r"""Calibration of predictions: expected against observed frequencies.

Bands contain 95 % of the points of a calibrated prediction with as many observations, and more of
those of counts, $p \pm 1.96 \sqrt{p (1 - p) / N}$.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from subbayes.data.arrays import to_targets
from subbayes.diagnostics.calibration import calibration_curve, shares_below, wilson_interval
from subbayes.plots.predictions import observed
from subbayes.plots.style import (
    BLUE,
    GREY,
    REFERENCE,
    SKY,
    band,
    label_axes,
    legend,
    new_axes,
    note,
)
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_count, fail


def calibration(
    predictive: Predictive, y: Any, *, label: str = "model", ax: Axes | None = None
) -> Axes:
    r"""Observed coverage of central intervals against their level; for classes, `reliability`.

    Above the diagonal the intervals are too wide, below it too narrow. A count is spread over
    $[F(y - 1), F(y)]$, as in `pit`. Use the same axes for several methods to compare them.

    Args:
        predictive: predictions of N observations.
        y: targets, (N,) or (N, T).
        label: name of the curve.
        ax: axes to draw on.

    Raises:
        InputError: targets that do not fit the predictions.

    Source: Kuleshov, Fenner and Ermon (2018), ICML, section 3.5.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(1, 4, 1), Gaussian(noise=1.0))
        >>> calibration(predictive, [0.0, 1.0, -1.0, 3.0]).get_ylabel()
        'observed coverage'
    """
    if predictive.likelihood.kind == "classification":
        return reliability(predictive, y, label=label, ax=ax)
    curve = calibration_curve(predictive, y, np.linspace(0, 1, 41))
    ax, first = _unit_square(ax)
    if first:
        n, p = int(curve.count[0]), np.linspace(0, 1, 101)
        half = 1.96 * np.sqrt(p * (1 - p) / n)
        low, high = np.clip(p - half, 0, 1), np.clip(p + half, 0, 1)
        band(ax, p, low, high, GREY, 0.15, f"95 % if calibrated (N = {n})")
        ax.plot(p, p, **REFERENCE)
    color = BLUE if first else f"C{len(ax.lines) - 1}"
    ax.plot(curve.expected, curve.observed, linewidth=1.8, label=label, color=color)
    return legend(label_axes(ax, "level of the interval", "observed coverage"))


def reliability(
    predictive: Predictive, y: Any, *, bins: int = 10, label: str = "model", ax: Axes | None = None
) -> Axes:
    """Accuracy against confidence for classes; the size of a point shows its number of rows.

    Below the diagonal the classifier is overconfident. Bars are 95 % intervals of the
    accuracy in each bin.

    Args:
        predictive: class predictions of N observations.
        y: labels 0 to K - 1, shape (N,).
        bins: number of bins of equal width over [0, 1].
        label: name of the points.
        ax: axes to draw on.

    Raises:
        InputError: predictions that are not of classes, or labels that do not fit.

    Source: Guo, Pleiss, Sun and Weinberger (2017), ICML, section 2.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> predictive = Predictive(torch.tensor([[[-1.0], [0.5], [2.0]]]), Bernoulli())
        >>> reliability(predictive, [0, 1, 1]).get_xlabel()
        'confidence (probability of the top class)'
    """
    if (kind := predictive.likelihood.kind) != "classification":
        expected = "classification for a reliability diagram"
        fail("predictive", expected, kind, "Use calibration(...)")
    curve = calibration_curve(predictive, y, bins=bins)
    ax, first = _unit_square(ax)
    if first:
        ax.plot([0, 1], [0, 1], label="calibrated", **REFERENCE)
    low, high = wilson_interval(curve.observed, curve.count)
    color = BLUE if first else f"C{len(ax.lines) - 1}"
    ax.errorbar(
        curve.expected,
        curve.observed,
        [curve.observed - low, high - curve.observed],
        linewidth=0.8,
        elinewidth=1.2,
        label=label,
        color=color,
    )
    size = 12 + 90 * np.sqrt(curve.count / curve.count.sum())
    ax.scatter(curve.expected, curve.observed, s=size, color=color, zorder=3)
    start = min(0.5, float(curve.expected.min()))
    ax.set_xlim(start - 0.03, 1.02)
    return legend(label_axes(ax, "confidence (probability of the top class)", "accuracy"))


def pit(
    predictive: Predictive, y: Any, *, bins: int = 10, target: int = 0, ax: Axes | None = None
) -> Axes:
    r"""Histogram of the probability integral transform $F(y)$: flat if calibrated.

    A valley in the middle indicates overconfidence, a hill underconfidence, a slope bias. A count
    is spread over $[F(y - 1), F(y)]$.

    Args:
        predictive: predictions of N observations.
        y: targets, (N,) or (N, T).
        bins: number of bins.
        target: which target, if there are several.
        ax: axes to draw on.

    Raises:
        InputError: predictions of classes, or targets that do not fit.

    Source: Gneiting, Balabdaoui and Raftery (2007), JRSS B 69(2); for counts Czado, Gneiting
        and Held (2009), Biometrics 65(4).

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(1, 3, 1), Gaussian(noise=1.0))
        >>> pit(predictive, [-1.0, 0.0, 1.0]).get_ylabel()
        'relative frequency'
    """
    if predictive.likelihood.kind == "classification":
        expected = "regression or counts for a PIT histogram"
        fail("predictive", expected, "classification", "Use reliability(...)")
    edges = np.linspace(0, 1, check_count("bins", bins) + 1)
    height = bins * _pit_mass(predictive, y, target, edges)
    ax = new_axes(ax)
    half = 1.96 * np.sqrt((bins - 1) / len(predictive))
    label = "95 % if calibrated"
    ax.axhspan(max(1 - half, 0), 1 + half, color=GREY, alpha=0.15, linewidth=0, label=label)
    ax.bar(edges[:-1], height, width=1 / bins, align="edge", color=SKY, edgecolor="white")
    ax.axhline(1, **REFERENCE)
    ax.set_xlim(0, 1)
    note(ax, f"{len(predictive)} observations")
    return legend(label_axes(ax, "probability integral transform F(y)", "relative frequency"))


def _pit_mass(
    predictive: Predictive, y: Any, target: int, edges: Float[np.ndarray, "b"]
) -> Float[np.ndarray, "bins"]:
    """Share of the observations in each bin; the share of a count is spread over its jump."""
    whole = to_targets(y, "y")
    high = predictive.cdf(whole)
    high = high if high.ndim == 1 else high[:, target]
    if predictive.likelihood.kind != "count":
        return np.histogram(high, edges)[0] / len(high)
    low = predictive.cdf(observed(y, target) - 1)
    return np.diff(shares_below(low, high, edges))


def selective_accuracy(
    predictive: Predictive, y: Any, *, label: str = "model", ax: Axes | None = None
) -> Axes:
    """Accuracy among the most confident rows, against the share of rows that are answered.

    If the confidence is informative, the curve falls from left to right.

    Args:
        predictive: class predictions of N observations.
        y: labels 0 to K - 1, shape (N,).
        label: name of the curve.
        ax: axes to draw on.

    Raises:
        InputError: predictions that are not of classes.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> predictive = Predictive(torch.tensor([[[-1.0], [0.5], [2.0]]]), Bernoulli())
        >>> selective_accuracy(predictive, [0, 0, 1]).get_xlabel()
        'share of rows answered, most confident first'
    """
    if predictive.likelihood.kind != "classification":
        fail("predictive", "classification", predictive.likelihood.kind, "Use intervals(...)")
    right = predictive.labels == observed(y)
    order = np.argsort(-predictive.probabilities.max(1), kind="stable")
    count = np.arange(1, len(order) + 1)
    ax = new_axes(ax)
    accuracy = np.cumsum(right[order]) / count
    color = f"C{len(ax.lines)}" if ax.lines else BLUE
    ax.step(count / len(order), accuracy, where="post", linewidth=1.8, label=label, color=color)
    ax.set_xlim(0, 1)
    what = "accuracy among them"
    return legend(label_axes(ax, "share of rows answered, most confident first", what))


def _unit_square(ax: Axes | None) -> tuple[Axes, bool]:
    """Axes from 0 to 1, and whether they are empty."""
    ax = new_axes(ax)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    return ax, not ax.lines
