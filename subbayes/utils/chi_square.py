"""Bounds on what sums of squares of normal numbers can be, for numbers that files claim."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LEAST_LOG_PROBABILITY", "log_tail"]

LEAST_LOG_PROBABILITY = float(np.log(1e-30))
"""Less probable draws are not those of the distribution."""


def log_tail(mean_square: Any, n: int) -> Any:
    """Chernoff's bound on the log probability of such a mean of n squares of N(0, 1), or beyond.

    It is at most a, if a < 1, or at least a, if a > 1, with a probability of at most
    (a exp(1 - a))^(n / 2).

    Args:
        mean_square: the means a, of any shape.
        n: how many squares each is the mean of.

    Example:
        >>> float(log_tail(1.0, 10)), bool(log_tail(2.0, 1000) < LEAST_LOG_PROBABILITY)
        (0.0, True)
    """
    a = np.asarray(mean_square, dtype=np.float64)
    with np.errstate(divide="ignore"):
        return 0.5 * n * (np.log(a) + 1 - a)
