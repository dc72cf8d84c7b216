r"""dynesty's nested sampling (Speagle 2020), on any density: draws and the log evidence.

$$ \log p_T(D) = \log \int p(D \mid z)^{1/T} \, p(z)\, dz $$

with the Gaussian prior as a transform of the unit cube, $z = m + L\, \Phi^{-1}(u)$. Finds several
modes where they are no narrower than the live points are dense. Good up to k of about twenty.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from subbayes.draws import Draws
from subbayes.inference.adapters.common import Value, check_counts, finished, needed, on_terminal
from subbayes.inference.samplers.chains import Density
from subbayes.utils.checks import fail

__all__ = ["dynesty"]

_TRIES = 100
_LOWEST = -1e300


def dynesty(
    posterior: Density,
    *,
    draws: int = 1000,
    chains: int = 4,
    live: int = 500,
    tolerance: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Draws:
    r"""Sample a posterior by nested sampling with dynesty.

    Args:
        posterior: the density; its prior is Gaussian.
        draws: draws per chain.
        chains: groups that the draws are dealt to. The run's weighted points are resampled to equal
            weights, systematically; with more draws than `meta["effective_draws"]` many repeat.
        live: number of live points; the error of the evidence falls with its root.
        tolerance: stop when less than this is left of the log evidence, in nats; by default
            dynesty's own.
        seed: seed of everything.
        progress: show dynesty's progress; None shows it on a terminal.
        options: further arguments of `dynesty.NestedSampler`, such as `bound` and `sample`.

    Returns:
        Draws with stats "log_likelihood" (at temperature 1); meta has "log_evidence" of the
        tempered posterior, "log_evidence_error" and "effective_draws".

    Raises:
        ImportError: dynesty is not installed (`pip install 'subbayes[samplers]'`).
        InputError: a density of minus infinity at all draws from the prior.

    Source: Speagle (2020), "dynesty: a dynamic nested sampling package"; Skilling (2006).

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> draws = dynesty(posterior, draws=100, live=30, tolerance=1, progress=False)
        >>> draws.z.shape, draws.meta["log_evidence_error"] < 2
        ((4, 100, 2), True)
    """
    library = needed("dynesty")
    check_counts(
        draws=(draws, 1), chains=(chains, 1), live=(live, 2 * posterior.rank + 1), seed=(seed, 0)
    )
    started, value = time.perf_counter(), Value(posterior)
    rng = np.random.default_rng(seed)
    sampler = library.NestedSampler(
        lambda z: float(np.maximum(value.likelihood(z[None])[0], _LOWEST)),
        lambda u: _from_cube(posterior, u),
        posterior.rank,
        nlive=live,
        rstate=rng,
        live_points=_live_points(posterior, value, live, rng),
        **options,
    )
    sampler.run_nested(dlogz=tolerance, print_progress=on_terminal(progress))
    found = sampler.results
    weights = found.importance_weights()
    rows = _resampled(weights, chains * draws, rng).reshape(chains, draws)
    return finished(
        "dynesty",
        found.samples[rows],
        {"log_likelihood": posterior.temperature * found.logl[rows]},
        value,
        started,
        seed=seed,
        log_evidence=float(found.logz[-1]),
        log_evidence_error=float(found.logzerr[-1]),
        effective_draws=float(1 / np.square(weights).sum()),
        live=live,
    )


def _from_cube(posterior: Density, u: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S k"]:
    from scipy.special import ndtri

    return posterior.prior.mean + posterior.prior.from_standard(np.asarray(ndtri(u)))


def _live_points(
    posterior: Density, value: Value, live: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Live points from the prior and their log-likelihoods, evaluated together."""
    for _ in range(_TRIES):
        u = rng.random((live, posterior.rank))
        z = _from_cube(posterior, u)
        heights = np.concatenate(
            [value.likelihood(part) for part in np.array_split(z, max(1, live // 64))]
        )
        if np.isfinite(heights).any():
            return [u, z, np.maximum(heights, _LOWEST)]
    fail(
        "posterior",
        "a finite log-likelihood at some draw from the prior",
        f"minus infinity at all {_TRIES * live}",
        "Narrow the prior, or check the data",
    )


def _resampled(
    weights: Float[np.ndarray, "n"], count: int, rng: np.random.Generator
) -> Int[np.ndarray, "m"]:
    """Positions of draws of equal weight, in random order (systematic resampling)."""
    places = (np.arange(count) + rng.random()) / count
    edges = np.cumsum(weights)
    return rng.permutation(np.searchsorted(edges / edges[-1], places))
