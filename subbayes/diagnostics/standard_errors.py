r"""Standard errors of scores over test rows, and of areas under ROC curves.

They include the sampling of test rows, and not the variation over seeds and training rows.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float

from subbayes.diagnostics.leave_one_out import sum_se
from subbayes.predictions.predictive import Predictive
from subbayes.utils.types import RowNumbers

__all__ = [
    "auroc_difference",
    "auroc_with_error",
    "error_of_mean",
    "mean_and_error",
    "standard_errors",
]

In = RowNumbers
Out = Float[np.ndarray, "m"]


def standard_errors(predictive: Predictive, y: object, level: float = 0.95) -> dict[str, float]:
    r"""Standard errors of "log_likelihood", and of "rmse" and "coverage" or "accuracy" and "brier".

    A mean of terms $t_n$ has the standard error $\mathrm{sd}(t) / \sqrt N$; that of the root mean
    squared error follows by the delta method, $\mathrm{sd}(e^2) / (2\, \mathrm{RMSE} \sqrt N)$.

    Args:
        predictive: predictions of N rows with one target each.
        y: targets, shape (N,).
        level: probability of the intervals whose coverage is measured.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> errors = standard_errors(Predictive(torch.zeros(1, 4, 1), Gaussian(1.0)), [1, 1, 1, -3])
        >>> {name: round(value, 3) for name, value in errors.items()}
        {'log_likelihood': 1.0, 'rmse': 0.577, 'coverage': 0.25}
    """
    values = np.asarray(y).reshape(-1)
    found = {"log_likelihood": error_of_mean(predictive.log_prob(y))}
    if predictive.likelihood.kind == "classification":
        p = predictive.probabilities
        truth = values[:, None] == np.arange(p.shape[1])
        found["accuracy"] = error_of_mean(predictive.labels == values)
        found["brier"] = error_of_mean(np.square(p - truth).sum(1))
        return found
    squares = np.square(np.reshape(predictive.mean, -1) - values)
    low, high = (np.reshape(bound, -1) for bound in predictive.interval(level))
    rmse = float(np.sqrt(squares.mean()))
    found["rmse"] = error_of_mean(squares) / (2 * rmse) if rmse else 0.0
    found["coverage"] = error_of_mean((low <= values) & (values <= high))
    return found


def auroc_with_error(inside: In, outside: Out) -> tuple[float, float]:
    """The area under the ROC curve of a score, and its standard error.

    Args:
        inside: scores of one group of rows.
        outside: scores of the other, which should be higher.

    Source: DeLong, DeLong and Clarke-Pearson (1988), Biometrics 44.

    Example:
        >>> area, error = auroc_with_error(np.array([0.0, 1.0, 2.0]), np.array([1.5, 3.0]))
        >>> round(area, 3), round(error, 3)
        (0.833, 0.236)
    """
    placements = _placements(inside, outside)
    return float(placements[1].mean()), _of_placements(*placements)


def auroc_difference(first: tuple[In, Out], second: tuple[In, Out]) -> tuple[float, float]:
    """The difference of two areas under ROC curves on the same rows, and its standard error.

    Args:
        first: scores (inside, outside) of one method.
        second: scores of another method for the same rows; its area is subtracted.

    Source: DeLong, DeLong and Clarke-Pearson (1988), Biometrics 44.

    Example:
        >>> inside, outside = np.array([0.0, 1.0, 2.0]), np.array([1.5, 3.0])
        >>> auroc_difference((inside, outside), (inside, outside))
        (0.0, 0.0)
    """
    pairs = zip(_placements(*first), _placements(*second), strict=True)
    of_inside, of_outside = (one - other for one, other in pairs)
    return float(of_outside.mean()), _of_placements(of_inside, of_outside)


def _placements(inside: In, outside: Out) -> tuple[In, Out]:
    """For each row, the share of the other group on the right side of it, ties one half."""

    def share_below(values: np.ndarray, others: np.ndarray) -> np.ndarray:
        others = np.sort(others)
        sides = (np.searchsorted(others, values, side) for side in ("left", "right"))
        return np.mean(list(sides), axis=0) / len(others)

    return 1 - share_below(inside, outside), share_below(outside, inside)


def _of_placements(inside: In, outside: Out) -> float:
    return float(np.hypot(error_of_mean(inside), error_of_mean(outside)))


def error_of_mean(terms: RowNumbers | Bool[np.ndarray, "N"]) -> float:
    """The standard error of a mean, NaN of one number.

    Example:
        >>> error_of_mean(np.array([1.0, 3.0]))
        1.0
    """
    return sum_se(terms.astype(np.float64)) / len(terms)


def mean_and_error(values: RowNumbers, counts: RowNumbers) -> tuple[float, float]:
    """The weighted mean of numbers, and its standard error.

    Example:
        >>> mean_and_error(np.array([1.0, 3.0]), np.ones(2))
        (2.0, 1.0)
    """
    share = counts / counts.sum()
    mean = float(share @ values)
    n = 1 / float(share @ share)
    return mean, math.sqrt(float(share @ (values - mean) ** 2) / max(n - 1, 1))
