r"""A posterior relative to a Gaussian q close to it: the density $p_T(z \mid D) / q(z)$ under q.

The sampled density is the same, with q in the place of the prior. If the prior is much wider than
the posterior, q saves most of the evaluations (Nishihara, Murray and Adams 2014, with a Student t
as q).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.laplace import Laplace
from subbayes.inference.samplers.chains import Density
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.priors import Normal
from subbayes.utils import artifact
from subbayes.utils.checks import fail

__all__ = ["RelativeDensity", "laplace_reference"]


class RelativeDensity:
    """A density relative to a reference Gaussian, which takes the place of the prior.

    Args:
        posterior: the density.
        q: the Gaussian, with the rank of the posterior. Chains mix slowly in directions in which q
            is narrower than the posterior.

    Raises:
        InputError: a Gaussian of another rank.
    """

    temperature = 1.0

    def __init__(self, posterior: Density, q: Normal) -> None:
        self.posterior, self.prior, self.rank = posterior, q, posterior.rank
        ranks = {
            np.shape(v)[0]
            for v in (q.mean, q.scale, q.covariance)
            if v is not None and np.ndim(v) and np.shape(v)[0] > 1
        }
        if ranks - {self.rank}:
            fail("reference", f"a Normal of {self.rank} coordinates", f"one of {ranks.pop()}")

    def log_likelihood(self, z: Float[np.ndarray, "chains k"]) -> Float[np.ndarray, "chains"]:
        """The tempered log density minus that of q, up to a constant."""
        of = self.posterior
        tempered = of.log_likelihood(z) / of.temperature
        return tempered + of.prior.log_prob(z) - self.prior.log_prob(z)

    def fingerprint(self) -> str:
        """A digest of the posterior and q."""
        return artifact.fingerprint(
            {}, {"of": self.posterior.fingerprint(), "q": self.prior.to_config()}
        )

    def original(self, draws: Draws) -> Draws:
        """The draws with the log-likelihood and temperature of the posterior."""
        of, z = self.posterior, draws.z
        stats = dict(draws.stats)
        if "log_likelihood" in stats:
            stats["log_likelihood"] = of.temperature * (
                stats["log_likelihood"] + self.prior.log_prob(z) - of.prior.log_prob(z)
            )
        return replace(draws, stats=stats, temperature=of.temperature)


def laplace_reference(posterior: Density, inflation: float, sampling: Sampling) -> Normal:
    """The Laplace approximation of a posterior with inflated standard deviations.

    Args:
        posterior: the density.
        inflation: factor of the standard deviations.
        sampling: seed of the start points of the optimisation, and progress.

    Raises:
        InputError: a density without gradients, or a mode without curvature.
    """
    if not isinstance(posterior, GradientDensity):
        fail(
            "reference",
            "a density with value_and_grad for 'laplace'",
            type(posterior).__name__,
            "Pass a Normal",
        )
    found = Laplace().sample(
        posterior, draws=1, chains=1, seed=sampling.seed, progress=sampling.progress
    )
    assert found.moments is not None
    assert found.moments.covariance is not None
    return Normal(mean=found.moments.mean, covariance=inflation**2 * found.moments.covariance)
