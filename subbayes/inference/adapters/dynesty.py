r"""dynesty's nested sampling (Speagle 2020), on any density: draws and the log evidence.

$$ \log p_T(D) = \log \int p(D \mid z)^{1/T} \, p(z)\, dz $$

with the Gaussian prior as a transform of the unit cube, $z = m + L\, \Phi^{-1}(u)$. Finds several
modes if the live points are dense enough to reach them. Suitable for k up to about 20.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws
from subbayes.inference.adapters.common import (
    ExternalSampler,
    Value,
    adapted_draws,
    import_package,
    show_progress,
)
from subbayes.inference.configuration import Sampling
from subbayes.inference.importance_sampling import systematic_resampling
from subbayes.inference.samplers.chains import Density
from subbayes.utils.checks import check_count, fail

__all__ = ["Dynesty"]

_TRIES = 100
_LOWEST = -1e300


@dataclass(frozen=True)
class Dynesty(ExternalSampler):
    r"""Nested sampling with dynesty.

    The prior has to be Gaussian. The weighted points of the run are resampled systematically to
    equal weights and distributed over the chains; with more draws than `meta["effective_draws"]`
    many are repeated. The draws have the stat "log_likelihood" (at temperature 1) and a log
    evidence of the tempered posterior. `warmup`, `thin`, `initial` and `checkpoint` do not apply.

    Source: Speagle (2020), "dynesty: a dynamic nested sampling package"; Skilling (2006).

    Attributes:
        live: number of live points; the error of the evidence falls with its root.
        tolerance: stop when the remaining log evidence is below this, in nats; by default
            dynesty's own.
        options: further arguments of `dynesty.NestedSampler`, such as "bound" and "sample".

    Raises:
        ImportError: dynesty is not installed (`pip install 'subbayes[samplers]'`).
        InputError: a density of minus infinity at all draws from the prior.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> engine = Dynesty(live=30, tolerance=1)
        >>> draws = engine.sample(posterior, draws=100, chains=4, progress=False)
        >>> draws.z.shape, draws.log_evidence_error < 2
        ((4, 100, 2), True)
    """

    name = "dynesty"
    live: int = 500
    tolerance: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("live", self.live)

    def check(self, rank: int | None = None) -> None:
        """Check that dynesty is installed, and that there are enough live points."""
        super().check(rank)
        if rank is not None:
            check_count("live", self.live, 2 * rank + 1)

    def run(self, posterior: Density, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        self.check(posterior.rank)
        library = import_package("dynesty")
        value = Value(posterior)
        rng = np.random.default_rng(sampling.seed)
        sampler = library.NestedSampler(
            lambda z: float(np.maximum(value.likelihood(z[None])[0], _LOWEST)),
            lambda u: _from_cube(posterior, u),
            posterior.rank,
            nlive=self.live,
            rstate=rng,
            live_points=_live_points(posterior, value, self.live, rng),
            **self.options,
        )
        sampler.run_nested(dlogz=self.tolerance, print_progress=show_progress(sampling.progress))
        found = sampler.results
        weights = found.importance_weights()
        shape = sampling.chains, sampling.draws
        rows = rng.permutation(systematic_resampling(weights, math.prod(shape), rng)).reshape(shape)
        return adapted_draws(
            self.name,
            found.samples[rows],
            {"log_likelihood": posterior.temperature * found.logl[rows]},
            value,
            {
                "seed": sampling.seed,
                "effective_draws": float(1 / np.square(weights).sum()),
                "live": self.live,
            },
            log_evidence=float(found.logz[-1]),
            log_evidence_error=float(found.logzerr[-1]),
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
