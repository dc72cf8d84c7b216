r"""Survival curves: the probability that a response is longer than each of some times.

$S(t) = P(Y > t)$ is averaged over rows for each draw, as marginal means are, also with a column set
to one value in all rows: curves that are adjusted for the other columns (Makuch 1982).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.family import Family
from subbayes.regression.questions.averages import RowAverage
from subbayes.regression.shapes import NetworkValues
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers

_POINTS = 50


def log_survival(family: Family, outputs: NetworkValues, time: float) -> Float[np.ndarray, "S n"]:
    """Log P(Y > t), without censoring and before truncation.

    Raises:
        InputError: a family without tail probabilities.

    Example:
        >>> from subbayes.likelihoods.families import WeibullFamily
        >>> log_survival(WeibullFamily(), torch.zeros(1, 1, 2), 1.0)  # shape 1: exponential
        array([[-1.]])
    """
    family = family.innermost
    if type(family).log_tails is Family.log_tails:
        expected = "a family with tail probabilities, such as 'weibull' or 'log-normal'"
        fail("family", expected, repr(family))
    low, high = family.bounds
    if time < low or (time == low and family.kind == "regression"):
        return np.zeros(outputs.shape[:2])
    if time >= high:
        return np.full(outputs.shape[:2], -np.inf)
    eta = outputs[..., : len(family.parameters)].detach().double().cpu().unbind(-1)
    above: Tensor = family.log_tails(torch.full_like(eta[0], time), eta)[1]
    return above.numpy()


def times_of(times: Sequence[float] | np.ndarray | None, y: RowNumbers) -> Float[np.ndarray, "m"]:
    """The given times, or 50 from the start to the longest time of the training rows.

    Raises:
        InputError: times that are not increasing numbers.

    Example:
        >>> times_of(None, np.array([3.0, 4.9]))[[0, 1, -1]]
        array([0. , 0.1, 4.9])
    """
    if times is None:
        return np.linspace(min(0.0, float(y.min())), float(y.max()), _POINTS)
    found = np.asarray(times)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iuf":
        fail("times", "a list of increasing numbers", repr(times))
    found = found.astype(np.float64)
    if not (np.isfinite(found).all() and (np.diff(found) > 0).all()):
        fail("times", "a list of increasing numbers", repr(times))
    return found


def survival_curve(
    family: Family, outputs: NetworkValues, times: Float[np.ndarray, "m"], average: RowAverage
) -> Float[np.ndarray, "S m"]:
    """The average of P(Y > t) over rows, for each draw and time.

    Args:
        family: distribution of the response.
        outputs: draws of the predictors of the family's parameters at the rows.
        times: the times.
        average: over the rows.
    """
    logs = (log_survival(family, outputs, float(time)) for time in times)
    return np.stack([average(np.exp(values)) for values in logs], 1)
