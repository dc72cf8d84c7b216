"""Products with the root of the Gauss-Newton matrix of sharded rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.many_products import ManyProducts
from subbayes.curvature.row_noise import RowNoise
from subbayes.curvature.row_sums import sum_over_rows
from subbayes.curvature.sample_then_optimise import Products, SampleThenOptimise
from subbayes.utils.checks import fail


def products_of(
    V: Jacobian, settings: SampleThenOptimise
) -> tuple[ManyProducts | SummedProducts, SampleThenOptimise]:
    """Products with V for `SampleThenOptimise`, and the settings with a solver that they have.

    Raises:
        InputError: a solver that needs all rows in each process, if they are sharded.
    """
    if not V.is_divided:
        return ManyProducts(V), settings
    return SummedProducts(V), settings.without_rows()


@dataclass(frozen=True)
class SummedProducts:
    """Products that are sums over the rows of all processes, each of which has some.

    Every process has the same vectors of D numbers, and none has one of a number for each row, so
    that systems can be solved in the weights alone. All processes have to make the same calls.

    Attributes:
        rows: V.

    Example:
        >>> import subbayes
        >>> from subbayes.curvature.layers import Layers
        >>> network, x = subbayes.Network(torch.nn.Linear(2, 1)), torch.tensor([[3.0, 4.0]])
        >>> J = SummedProducts(Jacobian.of_inputs(Layers(network, x), x))
        >>> J.squared(torch.ones(1, 3))
        tensor([[24., 32.,  8.]])
    """

    rows: Jacobian

    @property
    def size(self) -> int:
        """Number of weights D."""
        return self.rows.size

    @property
    def length(self) -> int:
        """Number of rows of all processes."""
        return self.rows.rows

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network."""
        return self.rows.network.dtype

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.rows.network.device

    def squared(self, vectors: Float[Tensor, "s D"]) -> Float[Tensor, "s D"]:
        """V'V v."""
        (found,) = sum_over_rows(self.rows, lambda rows: (ManyProducts(rows).squared(vectors),))
        return found.to(self.dtype)

    def pull_from(self, source: RowNoise, count: int) -> Float[Tensor, "s D"]:
        """V' u for coefficients that are made when they are needed, by the position of the row."""

        def of(rows: Jacobian) -> tuple[Tensor]:
            first = rows.offset * rows.roots

            def own(some: slice, place: slice) -> Tensor:
                return source(some, slice(first + place.start, first + place.stop))

            return (ManyProducts(rows).pull_from(own, count),)

        return sum_over_rows(self.rows, of)[0].to(self.dtype)

    def push(self, vectors: Float[Tensor, "s D"]) -> NoReturn:
        """An error: no process has all rows."""
        self._fail()

    def pull(self, cotangents: Float[Tensor, "s m"]) -> NoReturn:
        """An error: no process has all rows."""
        self._fail()

    def minibatches(self) -> Iterator[tuple[slice, Products]]:
        """An error: no process has all rows."""
        self._fail()

    def _fail(self) -> NoReturn:
        fail("data", "all rows in each process", "sharded rows")
