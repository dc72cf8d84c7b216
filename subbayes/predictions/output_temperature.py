r"""The temperature of network outputs that predicts held-out rows best (Guo et al. 2017).

The temperature of classes has the prior $\log \tau \sim N(0, 0.5^2)$, which matters only where rows
that are predicted almost perfectly determine no temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers

_PRIOR_SCALE = 0.5  # of the logarithm of the temperature of classes


def log_prior(tau: float) -> float:
    """Log prior density of the temperature of classes, but for a constant."""
    return -0.5 * (math.log(tau) / _PRIOR_SCALE) ** 2


def best_temperature(
    log_densities: Callable[[float], RowNumbers], counts: RowNumbers, has_prior: bool = True
) -> float:
    """The temperature of the largest posterior density, or likelihood.

    Args:
        log_densities: of held-out rows at a temperature.
        counts: how many times each row counts.
        has_prior: whether the temperature has the prior of classes.

    Raises:
        InputError: rows for which no temperature is best.

    Example:
        >>> import numpy as np
        >>> x = np.array([2.0, -1.0, 0.5])  # the standard deviation of N(0, tau^2)
        >>> found = best_temperature(
        ...     lambda tau: -0.5 * (x / tau) ** 2 - np.log(tau), np.ones(3), has_prior=False)
        >>> round(found, 4), round(float(np.mean(x**2)) ** 0.5, 4)
        (1.3229, 1.3229)
    """
    from scipy.optimize import minimize_scalar

    share, n = counts / counts.sum(), counts.sum()

    def negative(log_tau: float) -> float:
        """Log posterior density of a temperature, for each row and negative."""
        tau = math.exp(log_tau)
        prior = log_prior(tau) if has_prior else 0.0
        return -float(log_densities(tau) @ share + prior / n)

    reach = math.log(1e4)
    optimum = minimize_scalar(
        negative, bounds=(-reach, reach), method="bounded", options={"xatol": 1e-8}
    )
    if not optimum.fun < min(negative(-reach), negative(reach)):
        fail(
            "validation",
            "held-out data that determine a temperature",
            f"data for which none from {math.exp(-reach):g} to {math.exp(reach):g} is best",
            "Use more held-out data, which the model has not been trained on",
        )
    return math.exp(optimum.x)
