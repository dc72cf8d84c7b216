r"""Scores of a `Predictive` against the observed targets.

Every score is a function `(predictive, y) -> float`, an average over the N observations (and over
the targets, if there are several). `y` has shape (N,) or (N, T), or (N,) with labels 0 to K - 1 for
classes. Observations count as often as `weights` of shape (N,) say, once by default: integer
weights have the effect of repeated rows. `InputError` is raised if `y` does not fit the
predictions, or if a score for classes is used for regression or counts, or vice versa. `score`
returns all scores that apply to the likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np
import torch
from jaxtyping import Bool, Float

from subbayes.data.data import check_weights
from subbayes.diagnostics.calibration import calibration_error
from subbayes.diagnostics.checks import (
    class_labels,
    has_response_columns,
    require_ordered,
    target_values,
)
from subbayes.diagnostics.coverage import CoverageTest, coverage_scores
from subbayes.diagnostics.crps import crps_counts, crps_gaussian_mixture, crps_samples
from subbayes.diagnostics.token_scores import TokenScores, weighted_mean
from subbayes.likelihoods import CategoricalTokens
from subbayes.likelihoods.base import UndefinedError
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warn_user

__all__ = [
    "accuracy",
    "auroc",
    "brier",
    "coverage",
    "crps",
    "crps_gaussian_mixture",
    "ece",
    "interval_width",
    "label_scores",
    "log_likelihood",
    "rmse",
    "roc_area",
    "score",
]


Weights = RowNumbers | None


def score(
    predictive: Predictive,
    y: object,
    level: float = 0.95,
    weights: Weights = None,
    ordered: bool = False,
) -> dict[str, float]:
    r"""All scores that apply to the likelihood, by name.

    Regression: log_likelihood, log_likelihood_moment_matched (unless a variance is infinite), rmse,
    crps, coverage, interval_width. Counts: the same without the moment-matched one. Classification:
    log_likelihood, accuracy, brier, ece, auroc. Tokens: log_likelihood of rows,
    log_likelihood_per_token, perplexity, and accuracy, brier and ece over all tokens that count,
    each with the mixture of its own position. Labels of `SeveralTargets`: log_likelihood of rows
    and `label_scores`. Censored responses: log_likelihood. Scores that need a method that a
    likelihood of the user does not define, such as draws for crps, are left out. Of several targets
    of a row, those that are NaN do not count.

    `level` is the probability of the interval for coverage and width. `ordered` says that rows are
    in the order of time, and adds "coverage_alarm", the row from which on it is sure that the
    coverage is not within (1 - level) / 2 of the level (of counts: that it is lower), NaN if there
    is none, and "coverage_evidence" in nats; see `subbayes.diagnostics.coverage`.

    Raises:
        InputError: targets that do not fit the predictions, weights that are not numbers of at
            least 0, one for each row, or ordered rows with weights, or without an interval of one
            target.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(4, 3, 1), Gaussian(noise=1.0))
        >>> scores = score(predictive, [0.0, 1.0, -3.0])
        >>> {name: round(value, 3) for name, value in scores.items()}
        {'log_likelihood': -2.586, 'log_likelihood_moment_matched': -2.586, 'rmse': 1.826,
         'crps': 1.091, 'coverage': 0.667, 'interval_width': 3.92}
    """
    if weights is not None:
        check_weights(torch.as_tensor(weights))
    kind = predictive.likelihood.kind
    if ordered and (
        weights is not None
        or kind == "classification"
        or predictive.likelihood.per_position
        or has_response_columns(predictive.likelihood)
        or len(predictive.shape) > 1
    ):
        expected = "False with weights, or without intervals of one number or count for each row"
        fail("ordered", expected, "True", "Use conformal(...).evaluate for classes")
    if isinstance(predictive.likelihood, CategoricalTokens):
        return TokenScores.of(predictive, y, weights).scores()
    scores = {"log_likelihood": log_likelihood(predictive, y, weights=weights)}
    if has_response_columns(predictive.likelihood):  # values alone may be censored
        return scores
    if getattr(predictive.likelihood.unweighted, "of_labels", False):
        return scores | label_scores(predictive, y, weights)
    if predictive.likelihood.kind == "classification":
        each = (accuracy, brier, ece, auroc)
        return scores | {f.__name__: f(predictive, y, weights=weights) for f in each}
    ends = cache(lambda: predictive.interval(level))
    computed: dict[str, Callable[[], float]] = {
        "rmse": lambda: rmse(predictive, y, weights),
        "crps": lambda: crps(predictive, y, weights),
        "coverage": lambda: _covered(ends(), target_values(predictive, y, missing=True), weights),
        "interval_width": lambda: _width(ends(), weights),
    }
    if predictive.likelihood.kind == "regression" and _has_moments(predictive):
        moment_matched = log_likelihood(predictive, y, True, weights)
        scores["log_likelihood_moment_matched"] = moment_matched
    for name, compute in computed.items():
        # variances, draws or a distribution function, which a likelihood of the user may lack
        with suppress(UndefinedError, NotImplementedError):
            scores[name] = compute()
    if ordered:
        lower, upper = ends()
        values, half = target_values(predictive, y, missing=True), (1 - level) / 2
        test = CoverageTest(level - half, 1.0 if kind == "count" else level + half)
        scores |= coverage_scores(test, (lower <= values) & (values <= upper))
    return scores


def label_scores(predictive: Predictive, y: object, weights: Weights = None) -> dict[str, float]:
    r"""Scores of labels that a row has or not, of scikit-learn, without missing entries.

    log_loss[t] of each label; their mean log_loss; hamming_loss, the share of wrong entries at the
    threshold 1/2; f1_micro of all entries; f1_macro, the mean of the labels' F1; and
    average_precision, the mean over the labels that some row has.

    Args:
        predictive: predictions of `SeveralTargets(Bernoulli(), T)`.
        y: 0 and 1, (N, T), with NaN for missing entries.
        weights: of the rows.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli, SeveralTargets
        >>> outputs = torch.tensor([[[2.0, -2.0], [1.0, 3.0], [-1.0, -1.0]]])
        >>> predictive = Predictive(outputs, SeveralTargets(Bernoulli(), 2))
        >>> found = label_scores(predictive, [[1, 0], [1, 1], [0, np.nan]])
        >>> found["hamming_loss"], found["f1_macro"], round(found["log_loss[1]"], 3)
        (0.0, 1.0, 0.088)
    """
    from sklearn.metrics import average_precision_score, f1_score, hamming_loss, log_loss

    p = predictive.mean
    values = target_values(predictive, y, missing=True)
    observed = ~np.isnan(values)
    counts = np.broadcast_to(1.0 if weights is None else weights[:, None], values.shape)
    losses, f1, precision = [], [], []
    for t, rows in enumerate(observed.T):
        true, probable, count = values[rows, t], p[rows, t], counts[rows, t]
        losses.append(log_loss(true, probable, labels=[0, 1], sample_weight=count))
        f1.append(f1_score(true, probable > 0.5, sample_weight=count, zero_division=0))
        if true.any():
            precision.append(average_precision_score(true, probable, sample_weight=count))
    true, likely, count = values[observed], p[observed] > 0.5, counts[observed]
    return {
        "log_loss": float(np.mean(losses)),
        "hamming_loss": float(hamming_loss(true, likely, sample_weight=count)),
        "f1_micro": float(f1_score(true, likely, sample_weight=count, zero_division=0)),
        "f1_macro": float(np.mean(f1)),
        "average_precision": float(np.mean(precision)) if precision else math.nan,
        **{f"log_loss[{t}]": float(loss) for t, loss in enumerate(losses)},
    }


def _has_moments(predictive: Predictive) -> bool:
    """Whether all variances of observations are known and finite."""
    with suppress(UndefinedError, NotImplementedError):
        return bool(predictive.likelihood.variance(predictive.outputs).isfinite().all())
    return False


def mean(values: Float[np.ndarray, "N *T"], weights: Weights) -> float:
    """Mean over targets that are not missing, and rows, which count as often as weights say."""
    if values.ndim == 2:
        observed = ~np.isnan(values)
        if weights is not None:
            weights = np.broadcast_to(weights[:, None], values.shape)[observed]
        values = values[observed]
    return float(np.mean(values)) if weights is None else weighted_mean(values, weights)


def log_likelihood(
    predictive: Predictive, y: object, moment_matched: bool = False, weights: Weights = None
) -> float:
    r"""Mean log predictive density, in nats per observation; higher is better.

    $$\frac{1}{N} \sum_i \log \frac{1}{S} \sum_s p(y_i \mid f_s(x_i))$$

    `moment_matched` uses the Gaussian with the mixture's mean and variance instead of the mixture
    itself, as Izmailov et al. (2019) report; regression only.

    Source: Izmailov et al. (2019), eq. 3 and appendix E.1.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(1, 2, 1), Gaussian(noise=1.0))
        >>> round(log_likelihood(predictive, [0.0, 0.0]), 4)
        -0.9189
    """
    likelihood = predictive.likelihood
    whole = isinstance(y, tuple) or likelihood.per_position or has_response_columns(likelihood)
    targets = y if whole else target_values(predictive, y, missing=True)
    return mean(predictive.log_prob(targets, moment_matched=moment_matched), weights)


def rmse(predictive: Predictive, y: object, weights: Weights = None) -> float:
    r"""Root mean squared error of the predictive mean, in the units of y.

    $\sqrt{\mathrm{mean}_i (\mathrm{E}[y_i] - y_i)^2}$.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> rmse(Predictive(torch.zeros(1, 2, 1), Gaussian(noise=1.0)), [3.0, -3.0])
        3.0
    """
    require_ordered(predictive, "rmse")
    return math.sqrt(
        mean((predictive.mean - target_values(predictive, y, missing=True)) ** 2, weights)
    )


def crps(predictive: Predictive, y: object, weights: Weights = None) -> float:
    r"""Continuous ranked probability score of the mixture, in the units of y; lower is better.

    $$\mathrm{CRPS}(F, y) = \int (F(t) - 1\{t \ge y\})^2 \, dt
      = \mathrm{E}|Y - y| - \tfrac12 \mathrm{E}|Y - Y'|$$

    Exact for Gaussian noise (`crps_gaussian_mixture`) and for counts, by a sum over the integers;
    estimated without bias from 1000 samples for other likelihoods and for counts with a range of
    thousands. With several targets it is the mean over targets.

    Source: Gneiting and Raftery (2007), JASA 102(477), eqs. 20 and 21.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = Predictive(torch.zeros(1, 1, 1), Gaussian(noise=1.0))
        >>> round(crps(predictive, [0.0]), 4), round((2**0.5 - 1) / math.pi**0.5, 4)
        (0.2337, 0.2337)
    """
    require_ordered(predictive, "crps")
    targets = target_values(predictive, y, missing=True)
    values = np.where(np.isnan(targets), 0.0, targets)
    parts = predictive.components()
    if parts is not None:
        means, stds = (part.reshape(len(part), -1) for part in parts)
        each = crps_gaussian_mixture(means, stds, values.ravel()).reshape(values.shape)
    elif predictive.likelihood.kind == "count" and predictive.likelihood.has_cdf:
        each = crps_counts(predictive, values)
    else:
        each = crps_samples(predictive, values)
    return mean(np.where(np.isnan(targets), np.nan, each), weights)


def coverage(
    predictive: Predictive, y: object, level: float = 0.95, weights: Weights = None
) -> float:
    r"""Fraction of targets inside the central predictive interval of probability `level`.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> coverage(Predictive(torch.zeros(1, 2, 1), Gaussian(noise=1.0)), [1.9, 2.0])
        0.5
    """
    require_ordered(predictive, "coverage")
    values = target_values(predictive, y, missing=True)
    return _covered(predictive.interval(level), values, weights)


def interval_width(
    predictive: Predictive, y: object = None, level: float = 0.95, weights: Weights = None
) -> float:
    r"""Mean width of the central predictive interval, in the units of y.

    Narrower is better at equal coverage. `y` is ignored; it makes the signature uniform.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> round(interval_width(Predictive(torch.zeros(1, 2, 1), Gaussian(noise=1.0))), 2)
        3.92
    """
    require_ordered(predictive, "interval_width")
    return _width(predictive.interval(level), weights)


def _covered(
    interval: tuple[np.ndarray, np.ndarray], values: np.ndarray, weights: Weights
) -> float:
    inside = (interval[0] <= values) & (values <= interval[1])
    return mean(np.where(np.isnan(values), np.nan, inside), weights)


def _width(interval: tuple[np.ndarray, np.ndarray], weights: Weights) -> float:
    return mean(interval[1] - interval[0], weights)


def accuracy(predictive: Predictive, y: object, weights: Weights = None) -> float:
    r"""Fraction of observations whose most probable class is correct.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> accuracy(Predictive(torch.tensor([[[-1.0], [2.0]]]), Bernoulli()), [0, 0])
        0.5
    """
    p, labels = class_labels(predictive, y, "accuracy")
    return mean((p.argmax(1) == labels).astype(np.float64), weights)


def brier(predictive: Predictive, y: object, weights: Weights = None) -> float:
    r"""Brier score, between 0 and 2; lower is better.

    $$\frac{1}{N} \sum_i \sum_k (p_{ik} - 1\{y_i = k\})^2$$

    It sums over all classes, so for two classes it is twice the one-class form.

    Source: Brier (1950), Monthly Weather Review 78(1), eq. 2.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> brier(Predictive(torch.zeros(1, 2, 1), Bernoulli()), [0, 1])
        0.5
    """
    p, labels = class_labels(predictive, y, "brier")
    right = p[np.arange(len(p)), labels]
    return mean((p**2).sum(1) - 2 * right + 1, weights)


def ece(predictive: Predictive, y: object, bins: int = 15, weights: Weights = None) -> float:
    r"""Expected calibration error: mean gap between confidence and accuracy.

    $$\sum_b \frac{n_b}{N} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|$$

    over `bins` bins of equal width, closed on the right, of the top class's probability.

    Source: Guo, Pleiss, Sun and Weinberger (2017), ICML, eq. 3.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> ece(Predictive(torch.zeros(1, 2, 1), Bernoulli()), [0, 0])
        0.5
    """
    p, labels = class_labels(predictive, y, "ece")
    return calibration_error(p.max(1), p.argmax(1) == labels, bins, weights)


def auroc(predictive: Predictive, y: object, weights: Weights = None) -> float:
    r"""Area under the receiver operating characteristic: one half is chance, one is perfect.

    The probability that an observation of the class has a higher predicted probability than one
    of another class, with ties counted one half. For more than two classes, the mean of each class
    against the rest. NaN, with a warning, if `y` lacks a class.

    Source: Hanley and McNeil (1982), Radiology 143(1); macro average over classes.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> outputs = torch.tensor([[[-1.0], [0.5], [0.0], [2.0]]])
        >>> auroc(Predictive(outputs, Bernoulli()), [0, 0, 1, 1])
        0.75
    """
    p, labels = class_labels(predictive, y, "auroc")
    if weights is None:
        weights = np.ones(len(labels))
    missing = np.setdiff1d(np.arange(p.shape[1]), labels[weights > 0])
    if len(missing):
        warn_user(
            f"auroc: y lacks {len(missing)} of {p.shape[1]} classes (first: "
            f"{missing[0]}), so it is nan. Score data with every class."
        )
        return math.nan
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    return float(np.mean([roc_area(p[:, k], labels == k, weights) for k in classes]))


def roc_area(values: RowNumbers, positive: Bool[np.ndarray, "N"], weights: Weights = None) -> float:
    """Area under the ROC curve: the Mann–Whitney statistic over the number of pairs.

    Args:
        values: a score per row, higher for positive rows, shape (N,).
        positive: which rows are positive, shape (N,); some are and some are not.
        weights: how often each row counts, shape (N,); once by default.

    Example:
        >>> roc_area(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
        0.875
    """
    if weights is None:
        weights = np.ones(len(values))
    _, place = np.unique(values, return_inverse=True)
    positives, negatives = (np.bincount(place, weights * part) for part in (positive, ~positive))
    below = negatives.cumsum() - negatives / 2  # of equal values half
    return float(positives @ below / (positives.sum() * negatives.sum()))
