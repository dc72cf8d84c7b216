"""The densities that engines take, as protocols."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from subbayes.priors import Normal
from subbayes.utils.checks import fail


@runtime_checkable
class Density(Protocol):
    """The interface of a posterior that kernels use; implement it for a density of your own.

    Attributes:
        rank: number of coordinates k.
        prior: the Gaussian prior.
        temperature: T, the divisor of the log-likelihood.

    Engines also use what follows where a density has it, so that one around another passes it on:

    - `value_and_grad`, see `Differentiable`;
    - `reparameterisation`, a function from a power of the likelihood to other coordinates, see
      `subbayes.inference.samplers.reparameterisation`;
    - `network`, for the memory of its weights and its device;
    - `subspace`, `data` and `block_size`, which processes compare.
    """

    rank: int
    prior: Normal
    temperature: float

    def log_likelihood(self, z: Float[np.ndarray, "chains k"]) -> Float[np.ndarray, "chains"]:
        """Log-likelihood at temperature 1 of each chain's point.

        Samplers take NaN and plus infinity for minus infinity: chains never move there.
        """

    def fingerprint(self) -> str:
        """A digest of the density, which identifies a checkpoint."""


@runtime_checkable
class Differentiable(Protocol):
    """What leapfrog steps need of a density."""

    def value_and_grad(
        self, z: Float[np.ndarray, "chains k"]
    ) -> tuple[Float[np.ndarray, "chains"], Float[np.ndarray, "chains k"]]:
        """Tempered log density and its gradient at each chain's point."""


@runtime_checkable
class GradientDensity(Density, Differentiable, Protocol):
    """A density with gradients; `Posterior` is one."""


def check_gradient(posterior: Any) -> None:
    """Check that a density has gradients."""
    if not isinstance(posterior, GradientDensity):
        fail(
            "posterior",
            "a density with value_and_grad",
            type(posterior).__name__,
            "Use EllipticalSlice, which needs no gradient",
        )


def prior_scale(posterior: Density) -> Float[np.ndarray, "k"]:
    """Standard deviation of the prior in each coordinate."""
    return np.broadcast_to(posterior.prior.scale, (posterior.rank,)).astype(np.float64)
