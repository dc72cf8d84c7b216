"""Weights of an average of predictive distributions with the best log score (stacking)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from subbayes.utils.types import RowNumbers

_STEPS = 1000
_TOLERANCE = 1e-12  # of the score of a row
_LEAST = float(np.finfo(np.float64).tiny)  # density of an average of models of which none fits


def maximise_log_score(
    log_densities: Float[np.ndarray, "N K"], row_weights: RowNumbers | None = None
) -> Float[np.ndarray, "K"]:
    r"""Weights w of the largest $\sum_n a_n \log \sum_k w_k p_k(y_n)$, which sum to 1.

    The score is concave in them. Source: Yao, Vehtari, Simpson and Gelman (2018), *Using stacking
    to average Bayesian predictive distributions*, Bayesian Analysis 13, equation (8).

    Args:
        log_densities: of each row, that was not used for fitting, under each model.
        row_weights: a, 1 by default.

    Example:
        >>> better = np.array([[0.0, -5.0], [0.0, -5.0], [-5.0, 0.0]])
        >>> maximise_log_score(better).round(2)
        array([0.67, 0.33])
    """
    from scipy.optimize import minimize

    n, count = log_densities.shape
    share = np.full(n, 1 / n) if row_weights is None else row_weights / row_weights.sum()
    p = np.exp(log_densities - log_densities.max(1, keepdims=True))

    def average(w: Float[np.ndarray, "K"]) -> RowNumbers:
        return np.maximum(p @ w, _LEAST)

    found = minimize(
        lambda w: -(share @ np.log(average(w))),
        np.full(count, 1 / count),
        jac=lambda w: -((share / average(w)) @ p),
        method="SLSQP",
        bounds=[(0.0, 1.0)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"maxiter": _STEPS, "ftol": _TOLERANCE},
    )
    w = np.clip(found.x, 0.0, None)
    return np.asarray(w / w.sum())
