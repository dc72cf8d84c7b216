"""Products with the root of the data's precision in the whitened coordinates of a subspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.row_noise import RowNoise
from subbayes.curvature.sample_then_optimise import Products
from subbayes.subspace import Subspace


@dataclass(frozen=True)
class WhitenedProducts:
    r"""Products with $V P L / \sqrt T$, for weights $\hat w + P z$ and coordinates z = L u.

    With a prior $z \sim N(0, L L^\top)$ that of u is N(0, I).

    Attributes:
        V: products with V.
        subspace: with the basis P.
        factor: L, as its diagonal (k,) or as a matrix (k, k), in float64.
        temperature: T.
    """

    V: Products
    subspace: Subspace
    factor: Tensor
    temperature: float = 1.0

    @property
    def size(self) -> int:
        """Number of coordinates k."""
        return self.subspace.rank

    @property
    def length(self) -> int:
        """Number of rows of V."""
        return self.V.length

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of coordinates."""
        return torch.float64

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.V.device

    def coordinates(self, u: Float[Tensor, "s k"]) -> Float[Tensor, "s k"]:
        """Coordinates z = L u."""
        return u * self.factor if self.factor.ndim == 1 else u @ self.factor.T

    def whitened(self, z: Float[Tensor, "s k"]) -> Float[Tensor, "s k"]:
        """L' z, the adjoint of `coordinates`."""
        return z * self.factor if self.factor.ndim == 1 else z @ self.factor

    def _weights(self, u: Float[Tensor, "s k"]) -> Float[Tensor, "s D"]:
        return self.subspace.push(self.coordinates(u.double()).to(self.V.dtype))

    def _pulled(self, vectors: Float[Tensor, "s D"]) -> Float[Tensor, "s k"]:
        return self.whitened(self.subspace.pull(vectors).double())

    def push(self, vectors: Float[Tensor, "s k"]) -> Float[Tensor, "s m"]:
        """Products of all rows with s vectors."""
        return self.V.push(self._weights(vectors)) / self.temperature**0.5

    def pull(self, cotangents: Float[Tensor, "s m"]) -> Float[Tensor, "s k"]:
        """Combinations of all rows with s vectors of coefficients."""
        return self._pulled(self.V.pull(cotangents)) / self.temperature**0.5

    def pull_from(self, source: RowNoise, count: int) -> Float[Tensor, "s k"]:
        """Combinations with coefficients that are made when they are needed."""
        return self._pulled(self.V.pull_from(source, count)) / self.temperature**0.5

    def squared(self, vectors: Float[Tensor, "s k"]) -> Float[Tensor, "s k"]:
        """The product of the two, in one pass."""
        return self._pulled(self.V.squared(self._weights(vectors))) / self.temperature

    def minibatches(self) -> Iterator[tuple[slice, WhitenedProducts]]:
        """Products with blocks of rows."""
        for place, V in self.V.minibatches():
            yield place, replace(self, V=V)
