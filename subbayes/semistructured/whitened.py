r"""A posterior of many effects in coordinates of its Laplace approximation.

With the mode m and the precision P at the mode, $\zeta = m + L u$ and $L L^\top = P^{-1}$: u has
about the covariance I, so that a diagonal mass matrix fits, where a dense one of each chain would
have to be learned from many draws. The density of u is that of $\zeta$ up to a constant.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.semistructured.independence_metropolis import Proposals

__all__ = ["WhitenedDensity", "whitened_draws"]


class WhitenedDensity:
    """The density of u, for samplers that follow gradients.

    Args:
        posterior: the density of the coordinates.
        approximation: its Laplace approximation.
    """

    temperature = 1.0

    def __init__(self, posterior: Posterior, approximation: Proposals) -> None:
        self.posterior, self.approximation = posterior, approximation
        self.rank, self.prior = posterior.rank, Normal(1.0)

    def coordinates(self, u: Float[np.ndarray, "*S P"]) -> Float[np.ndarray, "*S P"]:
        """m + L u."""
        return self.approximation.mean + u @ self.approximation.factor.T

    def log_likelihood(self, u: Float[np.ndarray, "S P"]) -> Float[np.ndarray, "S"]:
        """The log density relative to a standard normal."""
        return self.posterior.value(self.coordinates(u)) - self.prior.log_prob(u)

    def value_and_grad(
        self, u: Float[np.ndarray, "S P"]
    ) -> tuple[Float[np.ndarray, "S"], Float[np.ndarray, "S P"]]:
        """The log density and its gradient."""
        value, gradient = self.posterior.value_and_grad(self.coordinates(u))
        return value, gradient @ self.approximation.factor

    def fingerprint(self) -> str:
        """A digest of the density."""
        return f"{self.posterior.fingerprint()}, whitened"


def whitened_draws(
    engine: Engine,
    posterior: Posterior,
    approximation: Proposals,
    start: Float[np.ndarray, "chains P"],
    sampling: Sampling,
) -> Draws:
    """Draws of the coordinates by an engine that samples u.

    Args:
        engine: such as `NUTS()`.
        posterior: the density of the coordinates.
        approximation: its Laplace approximation.
        start: start points of the chains.
        sampling: the settings.
    """
    density = WhitenedDensity(posterior, approximation)
    initial = np.linalg.solve(approximation.factor, (start - approximation.mean).T).T
    draws = engine.run(density, replace(sampling, initial=initial))
    z, stats = density.coordinates(draws.z), dict(draws.stats)
    if "log_density" in stats:
        stats["log_likelihood"] = stats["log_density"] - posterior.prior.log_prob(z)
    return replace(draws, z=z, stats=stats)
