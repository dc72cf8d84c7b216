"""The density of some coordinates of effects, of which the others keep their values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from subbayes.artifacts.tensors import fingerprint
from subbayes.priors import Normal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.shapes import Point
from subbayes.utils.types import Coordinates, LogDensity


@dataclass(frozen=True)
class FreeCoordinates:
    """Points of which some coordinates keep their values.

    Attributes:
        point: the values.
        free: positions of the coordinates that do not.
    """

    point: Point
    free: list[int]

    @classmethod
    def of(cls, point: Point, positions: Sequence[int], fixed: Collection[int]) -> FreeCoordinates:
        """Some coordinates of a point, of which those of `fixed` keep their values."""
        free = [i for i, j in enumerate(positions) if j not in fixed]
        return cls(point[positions], free)

    @property
    def start(self) -> Float[np.ndarray, "f"]:
        """The free coordinates at the point."""
        return self.point[self.free]

    def whole(self, h: Float[np.ndarray, "*S f"]) -> Float[np.ndarray, "*S d"]:
        """All coordinates of points with these free ones."""
        found = np.broadcast_to(self.point, (*h.shape[:-1], len(self.point))).copy()
        found[..., self.free] = h
        return found


@dataclass
class GivenCoordinates:
    """A density with gradients, as samplers take it, with a standard normal prior.

    Attributes:
        likelihood: of all coordinates.
        coordinates: those of the density, and the values of the others.
    """

    likelihood: EffectsLikelihood
    coordinates: FreeCoordinates
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self.rank, self.prior = len(self.coordinates.free), Normal(1.0)

    def _whole(self, h: Coordinates) -> torch.Tensor:
        return torch.from_numpy(self.coordinates.whole(h))

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """The log-likelihood at each point."""
        return np.asarray(self.likelihood.value(self._whole(z)).numpy())

    def value_and_grad(self, z: Coordinates) -> tuple[LogDensity, Coordinates]:
        """The log density and its gradient."""
        value, gradient = self.likelihood.value_and_grad(self._whole(z))
        prior = self.prior.log_prob(z)
        return value.numpy() + prior, gradient.numpy()[:, self.coordinates.free] - z

    def fingerprint(self) -> str:
        """A digest of the values that are kept."""
        given = self.coordinates
        return fingerprint({"at": given.point, "free": np.array(given.free)}, {})
