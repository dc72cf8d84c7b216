"""Importance ratios of independent draws of an approximation, and systematic resampling."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.special import logsumexp

from subbayes import diagnostics
from subbayes.draws import MAX_PARETO_K, Draws
from subbayes.inference.density import Density
from subbayes.priors import reject_undefined

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
    parts = [
        posterior.log_likelihood(rows[i : i + _AT_ONCE]) for i in range(0, len(rows), _AT_ONCE)
    ]
    likelihood = reject_undefined(np.concatenate(parts))
    value = likelihood / posterior.temperature + posterior.prior.log_prob(rows)
    stats = {"log_density": value.reshape(log_q.shape), "log_q": log_q}
    return Draws(
        z,
        stats,
        validity="approximation",
        independent=True,
        temperature=posterior.temperature,
        pareto_k=pareto_k(log_ratios(value, log_q)),
        **facts,
    )


def log_ratios(
    log_density: Float[np.ndarray, "*S"], log_q: Float[np.ndarray, "*T"]
) -> Float[np.ndarray, "S"]:
    """Log importance ratios of all draws, as a vector.

    Example:
        >>> log_ratios(np.array([[1.0, 2.0]]), np.array([[0.5, 0.5]]))
        array([0.5, 1.5])
    """
    return np.asarray(log_density.reshape(-1) - log_q.reshape(-1))


def pareto_k(ratios: Float[np.ndarray, "S"]) -> float:
    """Pareto k of log importance ratios; NaN for fewer than 25.

    Example:
        >>> pareto_k(np.zeros(10))
        nan
    """
    if len(ratios) < _LEAST:
        return float("nan")
    return float(diagnostics.psis(np.maximum(ratios, -1e300)[:, None])[1][0])


def reliable_error(error: float, pareto_k: float) -> float:
    """A standard error, or NaN where the variance of the ratios may be infinite.

    Example:
        >>> reliable_error(0.1, 0.5), reliable_error(0.1, 0.9)
        (0.1, nan)
    """
    return float("nan") if pareto_k > MAX_PARETO_K else error


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


def evidence_of_groups(logs: Float[np.ndarray, "groups"]) -> tuple[float, float]:
    """The log of the mean of the groups' estimates, and its standard error (delta method).

    Example:
        >>> round(evidence_of_groups(np.log([1.0, 3.0]))[0], 4)
        0.6931
    """
    log_mean = float(logsumexp(logs) - np.log(len(logs)))
    if len(logs) == 1:
        return log_mean, float("nan")
    return log_mean, float(np.exp(logs - log_mean).std(ddof=1) / np.sqrt(len(logs)))


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
