"""Importance ratios of independent draws of an approximation, and systematic resampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from subbayes import diagnostics
from subbayes.draws import Draws

if TYPE_CHECKING:
    from subbayes.inference.samplers.chains import Density

__all__ = ["approximate_draws", "estimate_evidence", "systematic_resampling"]

_AT_ONCE = 64
_LEAST = 25  # draws needed for a Pareto fit


def approximate_draws(
    posterior: Density,
    z: Float[np.ndarray, "chains draws k"],
    log_q: Float[np.ndarray, "chains draws"],
    **facts: Any,
) -> Draws:
    """`Draws` of an approximation with the stats "log_density" and "log_q", and their Pareto k.

    `z` are independent draws of the approximation, `log_q` its normalised log density there, and
    `facts` other fields of `Draws`.
    """
    rows = z.reshape(-1, z.shape[-1])
    likelihood = np.concatenate(
        [posterior.log_likelihood(rows[i : i + _AT_ONCE]) for i in range(0, len(rows), _AT_ONCE)]
    )
    value = likelihood / posterior.temperature + posterior.prior.log_prob(rows)
    ratios = np.maximum(value - log_q.reshape(-1), -1e300)[:, None]
    tail = float(diagnostics.psis(ratios)[1][0]) if len(rows) >= _LEAST else float("nan")
    stats = {"log_density": value.reshape(log_q.shape), "log_q": log_q}
    return Draws(
        z,
        stats,
        validity="approximation",
        independent=True,
        temperature=posterior.temperature,
        pareto_k=tail,
        **facts,
    )


def estimate_evidence(log_ratios: Float[np.ndarray, "S"]) -> tuple[float, float]:
    r"""Log of the mean ratio and its standard error, by the delta method.

    $$ \log p_T(D) \approx \log \tfrac1S \sum_s \frac{p_T(D, z_s)}{q(z_s)}, \qquad z_s \sim q . $$

    Args:
        log_ratios: $\log p_T(D, z_s) - \log q(z_s)$.

    Example:
        >>> value, error = estimate_evidence(np.log(np.array([1.0, 3.0])))
        >>> f"{value:.4f} {error:.4f}"
        '0.6931 0.3536'
    """
    top = float(log_ratios.max())
    if not np.isfinite(top):
        return top, float("nan")
    ratios = np.exp(log_ratios - top)
    mean = float(ratios.mean())
    return top + float(np.log(mean)), float(ratios.std() / mean / np.sqrt(len(ratios)))


def systematic_resampling(
    weights: Float[np.ndarray, "n"], count: int, rng: np.random.Generator
) -> Int[np.ndarray, "count"]:
    """Ascending indices of `count` draws of equal weight.

    Args:
        weights: weights above or equal to 0.
        count: number of indices.
        rng: of the common offset, one uniform.

    Example:
        >>> systematic_resampling(np.array([0.5, 0.0, 0.5]), 4, np.random.default_rng(0))
        array([0, 0, 2, 2])
    """
    edges = np.cumsum(weights)
    places = (np.arange(count) + rng.random()) / count
    return np.searchsorted(edges / edges[-1], places).clip(max=len(weights) - 1)
