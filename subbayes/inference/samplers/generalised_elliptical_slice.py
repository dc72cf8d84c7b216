r"""A posterior as a Gaussian q near it times what remains, $p_T(z \mid D) / q(z)$.

The density is the same; samplers that take their moves from the prior take them from q instead.
Where the data say much the prior is far wider than the posterior, and q saves the better part of
the evaluations (Nishihara, Murray and Adams 2014, who take a Student t for q).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws
from subbayes.inference.laplace.laplace import laplace
from subbayes.inference.samplers.chains import Density
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.priors import Normal
from subbayes.utils import artifact
from subbayes.utils.checks import check_positive, fail, fail_type

__all__ = ["Recentred", "near"]


class Recentred:
    """A density with a Gaussian of one's own in the place of the prior.

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
            fail("around", f"a Normal of {self.rank} coordinates", f"one of {known.pop()}")

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

    def as_drawn(self, draws: Draws) -> Draws:
        """Draws with the log-likelihood and the temperature of the posterior."""
        of, z = self.posterior, draws.z
        stats = dict(draws.stats)
        if "log_likelihood" in stats:
            stats["log_likelihood"] = of.temperature * (
                stats["log_likelihood"] + self.prior.log_prob(z) - of.prior.log_prob(z)
            )
        return Draws(z, stats, draws.meta | {"temperature": of.temperature})


def near(
    posterior: Density, around: str | Normal, *, widened: float, seed: int, progress: bool | None
) -> Recentred | None:
    """The density about a Gaussian; None for the prior itself.

    Args:
        posterior: the density.
        around: "prior", "laplace" or a Gaussian.
        widened: factor of the standard deviations of the Laplace approximation.
        seed: of the points from which its mode is looked for.
        progress: show a bar.

    Raises:
        InputError: other words, a density without gradients, or a mode without curvature.
    """
    check_positive("widened", widened)
    if isinstance(around, Normal):
        return Recentred(posterior, around)
    if not isinstance(around, str):
        fail_type("around", "'prior', 'laplace' or a Normal", around)
    if around == "prior":
        return None
    if around != "laplace":
        fail("around", "'prior', 'laplace' or a Normal", repr(around))
    if not isinstance(posterior, GradientDensity):
        fail(
            "around",
            "a density with value_and_grad for 'laplace'",
            type(posterior).__name__,
            "Pass a Normal",
        )
    found = laplace(posterior, draws=1, chains=1, seed=seed, progress=progress)
    return Recentred(
        posterior,
        Normal(
            mean=np.array(found.meta["mode"]),
            covariance=widened**2 * np.array(found.meta["covariance"]),
        ),
    )
