r"""Detection of out-of-distribution rows by the uncertainty of predictions.

A score per row, higher for inputs that are less like the training data, and how well it separates
rows like the training data from others.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from subbayes.diagnostics.metrics import roc_area
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_finite, fail
from subbayes.utils.types import RowNumbers


def uncertainties(predictive: Predictive) -> dict[str, RowNumbers]:
    r"""Scores of how unlike the training data each row is, by name, each of shape (N,).

    Classes, with probabilities $\pi_s$ of draw s and $\pi_* = \frac1S \sum_s \pi_s$, in nats:

    - "entropy": $H(\pi_*)$, the total uncertainty;
    - "mutual_information": $H(\pi_*) - \frac1S \sum_s H(\pi_s)$, the part that is epistemic;
    - "max_probability": $1 - \max_c \pi_{*c}$, so that all scores are higher for doubtful rows.

    Regression and counts, in squared units of y, summed over targets:

    - "epistemic": $\mathrm{Var}_s\, \mathrm{E}[y \mid s]$, the disagreement of the draws;
    - "variance": the total variance, which ranks rows as "epistemic" does if the noise is constant.

    A point estimate has no epistemic part: its mutual information and epistemic variance are 0.

    Source: Hendrycks and Gimpel (2017), ICLR (largest probability); Smith and Gal (2018), UAI.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Bernoulli
        >>> agree, differ = torch.zeros(2, 1, 1), torch.tensor([[[9.0]], [[-9.0]]])
        >>> both = uncertainties(Predictive(torch.cat([agree, differ], 1), Bernoulli()))
        >>> {name: score.round(2).tolist() for name, score in both.items()}
        {'entropy': [0.69, 0.69], 'mutual_information': [0.0, 0.69], 'max_probability': [0.5, 0.5]}
    """
    if predictive.likelihood.kind == "classification":
        return {
            "entropy": predictive.entropy,
            "mutual_information": predictive.mutual_information,
            "max_probability": 1 - predictive.probabilities.max(-1),
        }
    parts = {"epistemic": predictive.epistemic, "variance": predictive.variance}
    return {name: part.reshape(len(predictive), -1).sum(1) for name, part in parts.items()}


def detection_scores(
    inside: RowNumbers, outside: Float[np.ndarray, "m"], recall: float = 0.95
) -> dict[str, float]:
    r"""How well a score detects out-of-distribution rows, which should have higher values.

    - "auroc": probability that a row from outside has a higher score than one from inside, ties
      counted one half; one half is chance;
    - "average_precision": mean over the rows from outside of the share of rows from outside among
      those with at least their score; chance is the share of rows from outside;
    - "false_positive_rate": share of the rows from inside that are flagged at the highest threshold
      that flags `recall` of those from outside (FPR@95); lower is better.

    Args:
        inside: scores of N rows like the training data, shape (N,).
        outside: scores of M other rows, shape (M,).
        recall: share of the rows from outside to detect, above 0 and at most 1.

    Raises:
        InputError: no rows, NaN, or a recall out of range.

    Source: Hendrycks, Mazeika and Dietterich (2019), ICLR, section 4.1.

    Example:
        >>> found = detection_scores(np.array([0.1, 0.2, 0.6]), np.array([0.5, 0.9]))
        >>> {name: round(value, 3) for name, value in found.items()}
        {'auroc': 0.833, 'average_precision': 0.833, 'false_positive_rate': 0.333}
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1 or len(scores) == 0:
            fail(name, "scores of at least one row, shape (n,)", scores.shape)
        check_finite(name, scores)
    if not 0 < recall <= 1:
        fail("recall", "a share above 0 and at most 1", recall)
    values = np.concatenate([inside, outside])
    is_outside = np.arange(len(values)) >= len(inside)
    threshold = np.sort(outside)[len(outside) - math.ceil(recall * len(outside))]
    return {
        "auroc": roc_area(values, is_outside),
        "average_precision": _average_precision(inside, outside),
        "false_positive_rate": float(np.mean(inside >= threshold)),
    }


def out_of_distribution(
    inside: Predictive, outside: Predictive, recall: float = 0.95
) -> dict[str, dict[str, float]]:
    """How well the uncertainty of predictions detects rows that are unlike the training data.

    Args:
        inside: predictions of rows like the training data, which were not trained on.
        outside: predictions of other rows, by the same model.
        recall: as for `detection_scores`.

    Returns:
        For each score of `uncertainties`, the numbers of `detection_scores`.

    Raises:
        InputError: predictions of classes and of numbers.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> spread = torch.randn(50, 20, 1, generator=torch.Generator().manual_seed(0))
        >>> near, far = (Predictive(width * spread, Gaussian(1.0)) for width in (0.1, 2.0))
        >>> out_of_distribution(near, far)["epistemic"]["auroc"]
        1.0
    """
    parts = uncertainties(inside), uncertainties(outside)
    if parts[0].keys() != parts[1].keys():
        fail(
            "outside",
            f"predictions of the same model, {inside.likelihood!r}",
            repr(outside.likelihood),
        )
    return {name: detection_scores(own, parts[1][name], recall) for name, own in parts[0].items()}


def _average_precision(inside: RowNumbers, outside: Float[np.ndarray, "m"]) -> float:
    """Mean precision at the scores from outside, ties flagged together."""
    above = [len(part) - np.searchsorted(np.sort(part), outside) for part in (inside, outside)]
    return float(np.mean(above[1] / (above[0] + above[1])))
