"""Calibration curves: expected against observed frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from subbayes.diagnostics.checks import class_labels, target_values
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_count, fail
from subbayes.utils.types import RowNumbers


@dataclass(frozen=True, eq=False)
class CalibrationCurve:
    """Observed against expected frequencies; calibrated predictions lie on the diagonal.

    Attributes:
        expected: interval levels, or mean confidence per bin, shape (m,).
        observed: fraction of targets inside, or accuracy per bin, shape (m,).
        count: number of targets behind each point, shape (m,).
    """

    expected: Float[np.ndarray, "m"]
    observed: Float[np.ndarray, "m"]
    count: Int[np.ndarray, "m"]


def calibration_curve(
    predictive: Predictive, y: object, levels: Float[np.ndarray, "m"] | None = None, bins: int = 15
) -> CalibrationCurve:
    r"""Observed against expected coverage, or accuracy against confidence for classes.

    Regression: for each level, the fraction of targets inside the central interval of that level,
    found from $F(y)$ without computing the intervals. Counts: the same of $F(y)$ spread over
    $[F(y - 1), F(y)]$, because intervals that end at whole numbers contain more than their level.
    Classification: the reliability diagram of the top class, empty bins left out.

    Args:
        predictive: the predictive distribution of N observations.
        y: targets, (N,) or (N, T); labels for a classifier.
        levels: interval levels between 0 and 1; by default 0.05, 0.1, ..., 0.95.
        bins: number of bins of equal width, for a classifier.

    Raises:
        InputError: if `y` does not fit the predictions, or `levels` are not within [0, 1].

    Source: Kuleshov, Fenner and Ermon (2018), ICML, section 3.5; Guo et al. (2017), section 2.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(1, 3, 1), Gaussian(noise=1.0))
        >>> calibration_curve(predictive, [0.0, 1.0, 3.0], np.array([0.5, 0.9])).observed
        array([0.333, 0.667])
    """
    if predictive.likelihood.kind == "classification":
        return reliability(*class_labels(predictive, y, "calibration_curve"), bins)
    levels = np.linspace(0.05, 0.95, 19) if levels is None else np.asarray(levels, np.float64)
    if not ((levels >= 0) & (levels <= 1)).all():
        fail("levels", "probabilities between 0 and 1", f"{levels.min():g} to {levels.max():g}")
    values = target_values(predictive, y)
    below, count = predictive.cdf(values).ravel(), np.full(len(levels), values.size)
    if predictive.likelihood.kind == "count":
        strictly = predictive.cdf(values - 1).ravel()
        low, high = (shares_below(strictly, below, (1 + sign * levels) / 2) for sign in (-1, 1))
        return CalibrationCurve(levels, high - low, count)
    needed = np.sort(1 - 2 * np.minimum(below, 1 - below))
    inside = np.searchsorted(needed, levels + 1e-12, side="right")
    return CalibrationCurve(levels, inside / values.size, count)


def shares_below(
    low: RowNumbers, high: RowNumbers, edges: Float[np.ndarray, "m"]
) -> Float[np.ndarray, "m"]:
    """Mean share of intervals of probabilities that lies below each edge.

    Args:
        low: lower ends, in [0, 1].
        high: upper ends, of which some may be equal to the lower ones.
        edges: probabilities.

    Source: Czado, Gneiting and Held (2009), Biometrics 65(4), eq. 2.

    Example:
        >>> shares_below(np.array([0.0, 0.5]), np.array([0.5, 1.0]), np.array([0.25, 0.5, 1.0]))
        array([0.25, 0.5 , 1.  ])
    """
    low = np.minimum(low, 1 - np.finfo(float).eps)
    width = np.maximum(high - low, np.finfo(float).eps)
    return np.array([np.clip((edge - low) / width, 0, 1).mean() for edge in edges])


def expected_coverage(predictive: Predictive, level: float = 0.95) -> tuple[float, float]:
    """Share of the targets that central intervals contain if calibrated, and its standard error.

    It is the level, or more for counts, whose intervals end at whole numbers.

    Args:
        predictive: predictions of N observations, not of classes.
        level: probability of the intervals.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Poisson
        >>> predictive = Predictive(torch.full((1, 100, 1), 0.3).log(), Poisson())
        >>> [round(part, 3) for part in expected_coverage(predictive)]
        [0.996, 0.006]
    """
    p = np.asarray(level)
    if predictive.likelihood.kind == "count":
        lower, upper = predictive.interval(level)
        p = predictive.cdf(upper) - predictive.cdf(lower - 1)
    return float(p.mean()), float(np.sqrt((p * (1 - p)).mean() / len(predictive)))


def reliability(
    p: Float[np.ndarray, "N K"], labels: Int[np.ndarray, "N"], bins: int
) -> CalibrationCurve:
    """Accuracy against confidence of the most probable class, in bins of equal width."""
    top, correct = p.max(axis=1), p.argmax(axis=1) == labels
    index = _bins_of(top, bins)
    count = np.bincount(index, minlength=bins)
    hits = np.bincount(index, correct, minlength=bins)
    confidence = np.bincount(index, top, minlength=bins)
    used = count > 0
    return CalibrationCurve(confidence[used] / count[used], hits[used] / count[used], count[used])


def calibration_error(
    top: RowNumbers, correct: Bool[np.ndarray, "N"], bins: int, weights: RowNumbers | None = None
) -> float:
    """Mean over rows of the gap between accuracy and confidence in the bin of each.

    Args:
        top: the largest probability of each row.
        correct: whether it is that of the label.
        bins: number of bins of equal width.
        weights: how often each row counts; once by default.

    Example:
        >>> calibration_error(np.array([0.5, 0.75]), np.array([True, True]), 2)
        0.375
    """
    if weights is None:
        weights = np.ones(len(top))
    gaps = np.bincount(_bins_of(top, bins), weights * (correct - top), minlength=bins)
    return float(np.abs(gaps).sum() / weights.sum())


def _bins_of(top: RowNumbers, bins: int) -> Int[np.ndarray, "N"]:
    check_count("bins", bins)
    index = np.searchsorted(np.linspace(0, 1, bins + 1), top, side="left") - 1
    return index.clip(0, bins - 1)


def wilson_interval(
    share: Float[np.ndarray, "*m"] | float, count: Any
) -> tuple[Float[np.ndarray, "*m"], Float[np.ndarray, "*m"]]:
    """95 % confidence interval (lower, upper) of a probability from an observed share.

    Args:
        share: observed shares, in [0, 1].
        count: number of observations of each share.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".

    Example:
        >>> [round(float(end), 3) for end in wilson_interval(0.9, 10)]
        [0.596, 0.982]
    """
    z, share = 1.96, np.asarray(share, dtype=np.float64)
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    low, high = np.minimum(middle - half, share), np.maximum(middle + half, share)
    return np.asarray(low), np.asarray(high)
