r"""A posterior as a Gaussian q near it times what remains, $p_T(z \mid D) / q(z)$.

The density is the same; samplers that take their moves from the prior take them from q instead.
Where the data say much the prior is far wider than the posterior, and q saves the better part of
the evaluations (Nishihara, Murray and Adams 2014, who take a Student t for q).
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
        q: the Gaussian, of as many coordinates. One that is narrower than the posterior in some
            direction makes chains slow there: rather widen it.

    Raises:
        InputError: a Gaussian of another number of coordinates.
    """

    temperature = 1.0

    def __init__(self, posterior: Density, q: Normal) -> None:
        self.posterior, self.prior, self.rank = posterior, q, posterior.rank
        known = {
            np.shape(v)[0]
            for v in (q.mean, q.scale, q.covariance)
            if v is not None and np.ndim(v) and np.shape(v)[0] > 1
        }
        if known - {self.rank}:
            fail("reference", f"a Normal of {self.rank} coordinates", f"one of {known.pop()}")

    def log_likelihood(self, z: Float[np.ndarray, "chains k"]) -> Float[np.ndarray, "chains"]:
        """What remains: the tempered log density less that of q, up to its constant."""
        of = self.posterior
        tempered = of.log_likelihood(z) / of.temperature
        return tempered + of.prior.log_prob(z) - self.prior.log_prob(z)

    def fingerprint(self) -> str:
        """A digest of both."""
        return artifact.fingerprint(
            {}, {"of": self.posterior.fingerprint(), "q": self.prior.to_config()}
        )

    def original(self, draws: Draws) -> Draws:
        """Draws of this density with the log-likelihood and temperature of the posterior."""
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
        sampling: seed of the points from which the mode is searched for, and progress.

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
