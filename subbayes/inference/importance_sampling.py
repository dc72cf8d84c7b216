"""Independent draws of an approximation, with importance ratios of the posterior."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from subbayes import diagnostics
from subbayes.draws import Draws
from subbayes.inference.samplers.chains import Density

__all__ = ["approximate_draws", "estimate_evidence"]

_AT_ONCE = 64
_LEAST = 25  # draws for a Pareto fit


def approximate_draws(
    posterior: Density,
    z: Float[np.ndarray, "chains draws k"],
    log_q: Float[np.ndarray, "chains draws"],
    **facts: Any,
) -> Draws:
    """Draws of an approximation with stats "log_density" and "log_q", and their Pareto k.

    Args:
        posterior: the density.
        z: independent draws of the approximation.
        log_q: the normalised log density of the approximation there.
        facts: further fields of `Draws`.
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
