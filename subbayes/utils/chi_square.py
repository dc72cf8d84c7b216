"""Bounds on what sums of squares of normal numbers can be, for numbers that files claim."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

__all__ = ["LEAST_LOG_PROBABILITY", "are_standard_normal", "log_tail"]

LEAST_LOG_PROBABILITY = float(np.log(1e-30))
"""Less probable draws are not those of the distribution."""
_MOST_PAIRED = 2000  # coordinates whose products are compared


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


def are_standard_normal(eps: Float[np.ndarray, "n k"]) -> bool:
    r"""Whether rows can be draws from a standard normal of k dimensions: means and second moments.

    Means are bounded by the normal tail, mean squares by `log_tail`, and mean products of two
    coordinates by Chernoff's bound, with probabilities of 1e-30 for each; products only for up to
    2000 coordinates.

    Args:
        eps: the rows.

    Example:
        >>> eps = np.random.default_rng(0).standard_normal((400, 2))
        >>> are_standard_normal(eps), are_standard_normal(eps + 1)
        (True, False)
        >>> are_standard_normal(eps @ np.array([[1.0, 0.0], [0.9, 0.5]]))
        False
    """
    n = len(eps)
    if not np.isfinite(eps).all():
        return False
    bound = -LEAST_LOG_PROBABILITY
    if not (0.5 * n * np.square(eps.mean(0)) <= bound).all():
        return False
    if not (log_tail(np.square(eps).mean(0), n) > LEAST_LOG_PROBABILITY).all():
        return False
    if eps.shape[1] > _MOST_PAIRED:
        return True
    t = np.abs(eps.T @ eps / n)
    np.fill_diagonal(t, 0.0)
    # E exp(a x y) = (1 - a^2)^(-1/2) for independent x and y, and the best a in Chernoff's bound
    a = 2 * t / (1 + np.sqrt(1 + 4 * np.square(t)))
    return bool((n * (a * t + 0.5 * np.log1p(-np.square(a))) <= bound).all())
