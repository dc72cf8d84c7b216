r"""How good is a prediction: scores and calibration of a `Predictive` against the targets.

Every score is one function `(predictive, y) -> float`, an average over observations (and over
targets, if there are several). `score` gives those that fit the likelihood.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from subbayes.data.data import to_targets
from subbayes.diagnostics.convergence import average_ranks
from subbayes.diagnostics.crps import crps_counts, crps_gaussian_mixture, crps_samples
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_count, check_finite, fail

__all__ = [
    "CalibrationCurve",
    "accuracy",
    "auroc",
    "brier",
    "calibration_curve",
    "coverage",
    "crps",
    "crps_gaussian_mixture",
    "ece",
    "interval_width",
    "log_likelihood",
    "rmse",
    "score",
    "wilson_interval",
]


def score(predictive: Predictive, y: object, level: float = 0.95) -> dict[str, float]:
    r"""All scores that fit the likelihood, by name.

    Regression: log_likelihood, log_likelihood_moment_matched, rmse, crps, coverage,
    interval_width. Counts: the same without the moment-matched one. Classification:
    log_likelihood, accuracy, brier, ece, auroc.

    Args:
        predictive: the predictive distribution of N observations.
        y: targets, (N,) or (N, T).
        level: probability of the interval whose coverage and width are given.

    Returns:
        Scores by the names of this module's functions.

    Raises:
        InputError: if `y` does not fit the predictions or holds NaN.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(4, 3, 1), Gaussian(noise=1.0))
        >>> scores = score(predictive, [0.0, 1.0, -3.0])
        >>> {name: round(value, 3) for name, value in scores.items()}
        {'log_likelihood': -2.586, 'log_likelihood_moment_matched': -2.586, 'rmse': 1.826,
         'crps': 1.091, 'coverage': 0.667, 'interval_width': 3.92}
    """
    scores = {"log_likelihood": log_likelihood(predictive, y)}
    if predictive.likelihood.kind == "classification":
        return scores | {f.__name__: f(predictive, y) for f in (accuracy, brier, ece, auroc)}
    if predictive.likelihood.kind == "regression":
        scores["log_likelihood_moment_matched"] = log_likelihood(predictive, y, True)
    interval = predictive.interval(level)
    return scores | {
        "rmse": rmse(predictive, y),
        "crps": crps(predictive, y),
        "coverage": _covered(interval, _values(predictive, y)),
        "interval_width": _width(interval),
    }


# --- any likelihood -------------------------------------------------------------------------


def log_likelihood(predictive: Predictive, y: object, moment_matched: bool = False) -> float:
    r"""Mean log predictive density, in nats per observation; higher is better.

    $$\frac{1}{N} \sum_i \log \frac{1}{S} \sum_s p(y_i \mid f_s(x_i))$$

    Args:
        predictive: the predictive distribution of N observations.
        y: targets, (N,) or (N, T).
        moment_matched: use the Gaussian with the mixture's mean and variance instead of the
            mixture itself, as Izmailov et al. (2019) report; regression only.

    Returns:
        The mean over observations.

    Raises:
        InputError: if `y` does not fit the predictions, or a moment-matched density is asked of
            a likelihood other than a regression.

    Source: Izmailov et al. (2019), eq. 3 and appendix E.1.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(1, 2, 1), Gaussian(noise=1.0))
        >>> round(log_likelihood(predictive, [0.0, 0.0]), 4)
        -0.9189
    """
    targets = y if isinstance(y, tuple) else _values(predictive, y)
    return float(np.mean(predictive.log_prob(targets, moment_matched=moment_matched)))


# --- regression and counts ------------------------------------------------------------------


def rmse(predictive: Predictive, y: object) -> float:
    r"""Root mean squared error of the predictive mean, in the units of y.

    Args:
        predictive: the predictive distribution of N observations.
        y: targets, (N,) or (N, T).

    Returns:
        $\sqrt{\mathrm{mean}_i (\mathrm{E}[y_i] - y_i)^2}$.

    Raises:
        InputError: if `y` does not fit the predictions, or they are of classes.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> rmse(Predictive(torch.zeros(1, 2, 1), Gaussian(noise=1.0)), [3.0, -3.0])
        3.0
    """
    _require_ordered(predictive, "rmse")
    return float(np.sqrt(np.mean((predictive.mean - _values(predictive, y)) ** 2)))


def crps(predictive: Predictive, y: object) -> float:
    r"""Continuous ranked probability score of the mixture, in the units of y; lower is better.

    $$\mathrm{CRPS}(F, y) = \int (F(t) - 1\{t \ge y\})^2 \, dt
      = \mathrm{E}|Y - y| - \tfrac12 \mathrm{E}|Y - Y'|$$

    Exact for Gaussian noise (`crps_gaussian_mixture`) and, as the sum over the whole numbers,
    for counts; estimated without bias from 1000 samples for other likelihoods and for counts
    spread over thousands. With several targets it is the mean over targets.

    Args:
        predictive: the predictive distribution of N observations.
        y: targets, (N,) or (N, T).

    Returns:
        The mean over observations.

    Raises:
        InputError: if `y` does not fit the predictions, or they are of classes.

    Source: Gneiting and Raftery (2007), JASA 102(477), eqs. 20 and 21.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(1, 1, 1), Gaussian(noise=1.0))
        >>> round(crps(predictive, [0.0]), 4), round((2**0.5 - 1) / math.pi**0.5, 4)
        (0.2337, 0.2337)
    """
    _require_ordered(predictive, "crps")
    values = _values(predictive, y)
    parts = predictive.components()
    if parts is not None:
        means, stds = (part.reshape(len(part), -1) for part in parts)
        return float(crps_gaussian_mixture(means, stds, values.ravel()).mean())
    if predictive.likelihood.kind == "count":
        return crps_counts(predictive, values)
    return crps_samples(predictive, values)


def coverage(predictive: Predictive, y: object, level: float = 0.95) -> float:
    r"""Fraction of targets inside the central predictive interval; `level` if calibrated.

    Args:
        predictive: the predictive distribution of N observations.
        y: targets, (N,) or (N, T).
        level: probability the interval claims to hold.

    Returns:
        A fraction between 0 and 1.

    Raises:
        InputError: if `y` does not fit the predictions, or they are of classes.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> coverage(Predictive(torch.zeros(1, 2, 1), Gaussian(noise=1.0)), [1.9, 2.0])
        0.5
    """
    _require_ordered(predictive, "coverage")
    values = _values(predictive, y)
    return _covered(predictive.interval(level), values)


def wilson_interval(
    share: Float[np.ndarray, "*m"] | float, count: Any
) -> tuple[Float[np.ndarray, "*m"], Float[np.ndarray, "*m"]]:
    """95 % interval of a probability of which a share was observed.

    Args:
        share: observed shares, in [0, 1].
        count: number of observations of each.

    Returns:
        Lower and upper ends.

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


def interval_width(predictive: Predictive, y: object = None, level: float = 0.95) -> float:
    r"""Mean width of the central predictive interval, in the units of y.

    Narrower is better among predictions of the same coverage.

    Args:
        predictive: the predictive distribution of N observations.
        y: not used; taken so that every score is called alike.
        level: probability the interval claims to hold.

    Returns:
        The mean over observations.

    Raises:
        InputError: if the predictions are of classes.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> round(interval_width(Predictive(torch.zeros(1, 2, 1), Gaussian(noise=1.0))), 2)
        3.92
    """
    _require_ordered(predictive, "interval_width")
    return _width(predictive.interval(level))


def _covered(interval: tuple[np.ndarray, np.ndarray], values: np.ndarray) -> float:
    return float(np.mean((interval[0] <= values) & (values <= interval[1])))


def _width(interval: tuple[np.ndarray, np.ndarray]) -> float:
    return float(np.mean(interval[1] - interval[0]))


# --- classification -------------------------------------------------------------------------


def accuracy(predictive: Predictive, y: object) -> float:
    r"""Fraction of observations whose most probable class is the right one.

    Args:
        predictive: the predictive distribution of N observations.
        y: labels 0 to K - 1, shape (N,).

    Returns:
        A fraction between 0 and 1.

    Raises:
        InputError: if `y` holds other labels, or the predictions are not of classes.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> accuracy(Predictive(torch.tensor([[[-1.0], [2.0]]]), Bernoulli()), [0, 0])
        0.5
    """
    p, labels = _classes(predictive, y, "accuracy")
    return float(np.mean(p.argmax(1) == labels))


def brier(predictive: Predictive, y: object) -> float:
    r"""Brier score, between 0 and 2; lower is better.

    $$\frac{1}{N} \sum_i \sum_k (p_{ik} - 1\{y_i = k\})^2$$

    It sums over all classes, so for two classes it is twice the one-class form.

    Args:
        predictive: the predictive distribution of N observations.
        y: labels 0 to K - 1, shape (N,).

    Returns:
        The mean over observations.

    Raises:
        InputError: if `y` holds other labels, or the predictions are not of classes.

    Source: Brier (1950), Monthly Weather Review 78(1), eq. 2.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> brier(Predictive(torch.zeros(1, 2, 1), Bernoulli()), [0, 1])
        0.5
    """
    p, labels = _classes(predictive, y, "brier")
    right = p[np.arange(len(p)), labels]
    return float(np.mean((p**2).sum(1) - 2 * right + 1))


def ece(predictive: Predictive, y: object, bins: int = 15) -> float:
    r"""Expected calibration error: mean gap between confidence and accuracy.

    $$\sum_b \frac{n_b}{N} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|$$

    over bins of equal width, closed on the right, of the top class's probability.

    Args:
        predictive: the predictive distribution of N observations.
        y: labels 0 to K - 1, shape (N,).
        bins: number of bins over [0, 1].

    Returns:
        A number between 0 and 1.

    Raises:
        InputError: if `y` holds other labels, or the predictions are not of classes.

    Source: Guo, Pleiss, Sun and Weinberger (2017), ICML, eq. 3.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> ece(Predictive(torch.zeros(1, 2, 1), Bernoulli()), [0, 0])
        0.5
    """
    p, labels = _classes(predictive, y, "ece")
    curve = _reliability(p, labels, bins)
    gaps = np.abs(curve.observed - curve.expected)
    return float(np.sum(curve.count * gaps) / len(p))


def auroc(predictive: Predictive, y: object) -> float:
    r"""Area under the receiver operating characteristic: one half is chance, one is perfect.

    The probability that an observation of the class gets a higher probability than one outside
    it, ties counting one half. For more than two classes the mean over classes, each against
    the rest.

    Args:
        predictive: the predictive distribution of N observations.
        y: labels 0 to K - 1, shape (N,).

    Returns:
        A number between 0 and 1; nan, with a warning, if `y` lacks a class.

    Raises:
        InputError: if `y` holds other labels, or the predictions are not of classes.

    Source: Hanley and McNeil (1982), Radiology 143(1); macro average over classes.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> outputs = torch.tensor([[[-1.0], [0.5], [0.0], [2.0]]])
        >>> auroc(Predictive(outputs, Bernoulli()), [0, 0, 1, 1])
        0.75
    """
    p, labels = _classes(predictive, y, "auroc")
    missing = np.setdiff1d(np.arange(p.shape[1]), labels)
    if len(missing):
        warnings.warn(
            f"auroc: y lacks {len(missing)} of {p.shape[1]} classes (first: "
            f"{missing[0]}), so it is nan. Score on data that hold every class.",
            stacklevel=2,
        )
        return math.nan
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    return float(np.mean([_area(p[:, k], labels == k) for k in classes]))


def _area(p: Float[np.ndarray, "N"], inside: Bool[np.ndarray, "N"]) -> float:
    """Mann–Whitney statistic over the number of pairs."""
    n = int(inside.sum())
    ranks = average_ranks(p[None])[0]
    return float((ranks[inside].sum() - n * (n + 1) / 2) / (n * (len(p) - n)))


# --- curves ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CalibrationCurve:
    """What was promised against what came; calibrated predictions lie on the diagonal.

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

    Regression and counts: for each level, the fraction of targets inside the central interval
    of that level, found from $F(y)$ without computing the intervals. Classification: the
    reliability diagram of the top class, empty bins left out.

    Args:
        predictive: the predictive distribution of N observations.
        y: targets, (N,) or (N, T); labels for a classifier.
        levels: interval levels between 0 and 1; by default 0.05, 0.1, ..., 0.95.
        bins: number of bins of equal width, for a classifier.

    Returns:
        The points of the curve.

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
        return _reliability(*_classes(predictive, y, "calibration_curve"), bins)
    levels = np.linspace(0.05, 0.95, 19) if levels is None else np.asarray(levels, np.float64)
    if not ((levels >= 0) & (levels <= 1)).all():
        fail("levels", "probabilities between 0 and 1", f"{levels.min():g} to {levels.max():g}")
    needed = np.sort(_needed_level(predictive, _values(predictive, y)).ravel())
    inside = np.searchsorted(needed, levels + 1e-12, side="right")
    return CalibrationCurve(levels, inside / len(needed), np.full(len(levels), len(needed)))


def _needed_level(
    predictive: Predictive, values: Float[np.ndarray, "..."]
) -> Float[np.ndarray, "..."]:
    """Level of the smallest central interval that holds each target."""
    below = predictive.cdf(values)
    strictly = predictive.cdf(values - 1) if predictive.likelihood.kind == "count" else below
    return 1 - 2 * np.minimum(below, 1 - strictly)


def _reliability(
    p: Float[np.ndarray, "N K"], labels: Int[np.ndarray, "N"], bins: int
) -> CalibrationCurve:
    check_count("bins", bins)
    top = p.max(axis=1)
    index = np.searchsorted(np.linspace(0, 1, bins + 1), top, side="left") - 1
    index = index.clip(0, bins - 1)
    count = np.bincount(index, minlength=bins)
    hits = np.bincount(index, p.argmax(axis=1) == labels, minlength=bins)
    confidence = np.bincount(index, top, minlength=bins)
    used = count > 0
    return CalibrationCurve(confidence[used] / count[used], hits[used] / count[used], count[used])


# --- targets --------------------------------------------------------------------------------


def _require_ordered(predictive: Predictive, name: str) -> None:
    if predictive.likelihood.kind == "classification":
        fail(
            "predictive",
            f"regression or counts for {name}",
            "classification",
            "Use accuracy, brier or ece",
        )


def _classes(
    predictive: Predictive, y: object, name: str
) -> tuple[Float[np.ndarray, "N K"], Int[np.ndarray, "N"]]:
    """Class probabilities and labels."""
    if predictive.likelihood.kind != "classification":
        fail(
            "predictive",
            f"classification for {name}",
            predictive.likelihood.kind,
            "Use rmse, crps or coverage",
        )
    p = predictive.probabilities
    values = _values(predictive, y)
    bad = (values < 0) | (values >= p.shape[1]) | (values != np.floor(values))
    if bad.any():
        fail(
            "y",
            f"labels 0 to {p.shape[1] - 1}",
            f"{values[bad][0]:g}",
            "Encode classes as they were in training",
        )
    return p, values.astype(np.int64)


def _values(predictive: Predictive, y: object) -> Float[np.ndarray, "..."]:
    """Targets as float64 in the shape of the predictions; a column counts as a vector."""
    targets = to_targets(y, "y")
    first = targets if isinstance(targets, Tensor) else targets[0]
    values = first.detach().cpu().double().numpy()
    classes = predictive.likelihood.kind == "classification"
    shape = (len(predictive),) if classes else predictive.mean.shape
    if values.shape not in (shape, (*shape, 1)):
        fail(
            "y",
            f"shape {shape}, one target per prediction",
            f"shape {values.shape}",
            "Score the rows that were predicted",
        )
    if values.size == 0:
        fail("y", "at least one target", "none", "Score a table that has rows")
    check_finite("y", values)
    return values.reshape(shape)
