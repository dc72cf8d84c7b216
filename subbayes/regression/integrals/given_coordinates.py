"""The density of some coordinates of effects, of which the others keep their values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from subbayes.artifacts.tensors import fingerprint
from subbayes.priors import Normal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.shapes import EffectPoint, Point
from subbayes.utils.types import Coordinates, LogDensity


def with_fixed(
    at: Point, free: list[int], h: Float[np.ndarray, "*S f"]
) -> Float[np.ndarray, "*S d"]:
    """Points with the coordinates `free`, and others as at a point."""
    found = np.broadcast_to(at, (*h.shape[:-1], len(at))).copy()
    found[..., free] = h
    return found


@dataclass
class GivenCoordinates:
    """A density with gradients, as samplers take it, with a standard normal prior.

    Attributes:
        likelihood: of all coordinates.
        at: their values.
        free: positions of the coordinates of the density.
    """

    likelihood: EffectsLikelihood
    at: EffectPoint
    free: tuple[int, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self.rank, self.prior = len(self.free), Normal(1.0)

    def _whole(self, h: Coordinates) -> torch.Tensor:
        return torch.from_numpy(with_fixed(self.at, list(self.free), h))

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """The log-likelihood at each point."""
        return np.asarray(self.likelihood.value(self._whole(z)).numpy())

    def value_and_grad(self, z: Coordinates) -> tuple[LogDensity, Coordinates]:
        """The log density and its gradient."""
        value, gradient = self.likelihood.value_and_grad(self._whole(z))
        prior = self.prior.log_prob(z)
        return value.numpy() + prior, gradient.numpy()[:, self.free] - z

    def fingerprint(self) -> str:
        """A digest of the values that are kept."""
        return fingerprint({"at": self.at, "free": np.array(self.free)}, {})
