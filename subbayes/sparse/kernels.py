r"""Products with sparse matrices of weights.

Inputs are cut into tiles of rows that fit the cache, and each tile is transposed. An output unit is
then a weighted sum of contiguous rows, one for each of its weights, which an embedding bag
computes. All tiles form one table, whose bags are shared between the threads. With a tenth of the
weights this takes a fifth of the time of the dense product; general sparse products take as long.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from subbayes.networks.tracing.memory import reuse_memory
from subbayes.utils.checks import fail
from subbayes.utils.warning import filtered_warnings

_TILE_SIZE = 90_000  # values in a tile, which fit the cache of a core with the weights
_MAX_WIDTH, _MIN_WIDTH, _WIDTH_STEP = 128, 32, 16  # rows of a tile
_MAX_TILES = 32  # tiles of a table, each of which needs a copy of the weights
MIN_ROWS = 16
"""Number of rows below which a general sparse product is faster."""


class SparsityPattern:
    """Which weights of a layer are included.

    Args:
        included: positions in the flattened weight, ascending.
        shape: number of units, and of weights of each unit.

    Example:
        >>> SparsityPattern(torch.tensor([1, 5]), (2, 3)).compressed_rows
        (tensor([0, 1, 2]), tensor([1, 2]))
    """

    def __init__(self, included: Int[Tensor, "k"], shape: tuple[int, int]) -> None:
        self.included, self.shape = included, shape

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "n"], shape: tuple[int, int]) -> SparsityPattern:
        """The pattern of a mask of the flattened weight."""
        return cls(mask.nonzero()[:, 0], shape)

    @cached_property
    def compressed_rows(self) -> tuple[Int[Tensor, "u_and_one"], Int[Tensor, "k"]]:
        """Start of the weights of each unit, and the columns of all weights."""
        units, inputs = self.shape
        starts = torch.arange(0, (units + 1) * inputs, inputs, device=self.included.device)
        return torch.searchsorted(self.included, starts), self.included % inputs

    @cached_property
    def bags(self) -> BagIndices:
        """The indices of products with many rows."""
        return BagIndices(*self.compressed_rows, self.shape[1])


class BagIndices:
    """Compressed rows as the bags of an embedding, for any number of tiles.

    Args:
        crow: start of the weights of each unit, and their total number.
        columns: input of each weight.
        inputs: number of inputs.

    Example:
        >>> bags = BagIndices(torch.tensor([0, 1, 2]), torch.tensor([1, 2]), 3)
        >>> [part.tolist() for part in bags.for_tiles(torch.tensor([0.5, 1.0]), 2)]
        [[1, 2, 4, 5], [0, 1, 2, 3], [0.5, 1.0, 0.5, 1.0]]
    """

    def __init__(
        self, crow: Int[Tensor, "units_and_one"], columns: Int[Tensor, "k"], inputs: int
    ) -> None:
        self.crow, self.columns, self.inputs = crow, columns, inputs
        self._indices: tuple[int, Tensor, Tensor] | None = None
        self._values: tuple[int, Tensor, Tensor] | None = None

    def for_tiles(
        self, values: Float[Tensor, "k"], tiles: int
    ) -> tuple[Int[Tensor, "k_times"], Int[Tensor, "units_times"], Float[Tensor, "k_times"]]:
        """Rows of a table of tiles, the start of each bag, and the weight of each row.

        The last result is cached with the tensor of values that it was made from.
        """
        indices, repeated = self._indices, self._values  # other threads may assign to these
        if indices is None or indices[0] != tiles:
            largest = tiles * max(self.inputs, len(self.columns))
            dtype = torch.int32 if largest < 2**31 else torch.int64
            each = torch.arange(tiles, dtype=dtype, device=self.columns.device)[:, None]
            indices = (
                tiles,
                (self.columns.to(dtype) + each * self.inputs).reshape(-1),
                (self.crow[:-1].to(dtype) + each * len(self.columns)).reshape(-1),
            )
            self._indices = indices
        if repeated is None or repeated[0] != tiles or repeated[1] is not values:
            repeated = tiles, values, values.expand(tiles, -1).reshape(-1)
            self._values = repeated
        return *indices[1:], repeated[2]


@dataclass(frozen=True)
class LayerDraw:
    """The weights and the bias of a layer in one draw.

    Attributes:
        pattern: which weights are included; None for all.
        values: the included weights.
        bias: all biases, if the layer has any.
    """

    pattern: SparsityPattern | None
    values: Float[Tensor, "k"]
    bias: Float[Tensor, "u"] | None

    def write_dense(self, out: Tensor) -> None:
        """Write the weights, and zeros elsewhere, into a tensor of the size of the layer."""
        flat = out.view(-1)
        if self.pattern is None:
            flat.copy_(self.values)
        else:
            flat.zero_()
            flat[self.pattern.included] = self.values.to(flat)


def sparse_linear(
    x: Float[Tensor, "*N i"],
    bags: BagIndices,
    values: Float[Tensor, "k"],
    bias: Float[Tensor, "o"] | None = None,
) -> Float[Tensor, "*N o"]:
    """Outputs of a linear layer whose weights are compressed sparse rows.

    Args:
        x: inputs. Inputs (tiles, width, i) are used without a copy if the rows of each tile are
            transposed in memory; outputs are then transposed too.
        bags: positions of the weights.
        values: the weights.
        bias: of the units.

    Raises:
        InputError: rows of another size.

    Example:
        >>> bags = BagIndices(torch.tensor([0, 1, 2]), torch.tensor([1, 2]), 3)
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> sparse_linear(x, bags, torch.tensor([10.0, 1.0]))
        tensor([[10.,  2.],
                [40.,  5.]])
    """
    if x.shape[-1] != bags.inputs:
        fail("inputs", f"{bags.inputs} numbers in each row", x.shape[-1])
    half = (
        x.dtype in (torch.half, torch.bfloat16)  # CSR has no product for these
        or torch.is_autocast_enabled(x.device.type)
    )
    if x.device.type == "cpu" and (half or x.shape[:-1].numel() >= MIN_ROWS):
        return bag_linear(x, bags, values, bias)
    rows = x.reshape(-1, x.shape[-1])
    found = (csr_tensor(bags.crow, bags.columns, values, bags.inputs) @ rows.T).T
    found = found if bias is None else found + bias
    return found.reshape(*x.shape[:-1], len(bags.crow) - 1)


def bag_linear(
    x: Float[Tensor, "*N i"],
    bags: BagIndices,
    values: Float[Tensor, "k"],
    bias: Float[Tensor, "o"] | None,
) -> Float[Tensor, "*N o"]:
    """The same by embedding bags; outputs are transposed in memory, as further layers need them."""
    reuse_memory()
    if x.ndim == 3 and _MIN_WIDTH <= x.shape[1] <= _MAX_WIDTH:  # tiles
        found = _bag_sums(x.transpose(1, 2).contiguous(), bags, values)
        if bias is not None:
            added = bias[:, None]
            found = found + added if found.requires_grad else found.add_(added)
        return found.transpose(1, 2)
    rows = x.reshape(-1, x.shape[-1])
    count, width = tile_layout(*rows.shape)
    found = _bag_sums(transposed_tiles(rows, count, width), bags, values)
    added = found.new_zeros(()) if bias is None else bias[:, None]
    if found.requires_grad:
        by_unit = (found + added).transpose(0, 1)
    else:  # join the tiles and add the bias in one pass
        by_unit = found.new_empty(found.shape[1], count, width)
        torch.add(found, added, out=by_unit.transpose(0, 1))
    n = math.prod(x.shape[:-1])
    return by_unit.flatten(1)[:, :n].T.reshape(*x.shape[:-1], len(bags.crow) - 1)


def transposed_tiles(
    rows: Float[Tensor, "n i"], tiles: int, width: int
) -> Float[Tensor, "tiles i width"]:
    """Rows in transposed tiles, filled up with zeros; see `tile_layout`."""
    n, inputs = rows.shape
    table = rows.new_empty(tiles, inputs, width)
    full = n // width
    # torch transposes three dimensions on all threads, two dimensions on one
    table[:full].copy_(rows[: full * width].unflatten(0, (full, width)).transpose(1, 2))
    if full < tiles:
        table[full:, :, : n - full * width].copy_(rows[None, full * width :].transpose(1, 2))
        table[full, :, n - full * width :] = 0.0
    return table


def tile_layout(n: int, inputs: int) -> tuple[int, int]:
    """Number and width of tiles that fit the cache, for n rows of inputs.

    Example:
        >>> tile_layout(1000, 784), tile_layout(1000, 400), tile_layout(20, 784)
        ((9, 112), (8, 128), (1, 32))
    """
    fitting = _TILE_SIZE // max(1, inputs) // _WIDTH_STEP * _WIDTH_STEP
    most = min(_MAX_WIDTH, max(_MIN_WIDTH, fitting))
    tiles = max(1, -(-n // most))
    return tiles, max(1, -(-n // (tiles * _WIDTH_STEP))) * _WIDTH_STEP


def _bag_sums(
    table: Float[Tensor, "tiles i width"], bags: BagIndices, values: Float[Tensor, "k"]
) -> Float[Tensor, "tiles o width"]:
    parts = []
    for tiles in table.split(_MAX_TILES):
        columns, starts, repeated = bags.for_tiles(values, len(tiles))
        sums = functional.embedding_bag(
            columns, tiles.flatten(0, 1), starts, mode="sum", per_sample_weights=repeated
        )
        parts.append(sums.unflatten(0, (len(tiles), len(bags.crow) - 1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def without_beta_warning() -> AbstractContextManager[None]:
    """Within, no warning of torch that sparse layouts are a beta feature.

    Example:
        >>> with without_beta_warning():
        ...     torch.eye(2).to_sparse_csr().layout
        torch.sparse_csr
    """
    return filtered_warnings("ignore", UserWarning, "Sparse CSR tensor support is in beta")


def csr_tensor(
    crow: Int[Tensor, "units_and_one"],
    columns: Int[Tensor, "k"],
    values: Float[Tensor, "k"],
    inputs: int,
) -> Tensor:
    """A sparse CSR tensor without warnings of torch."""
    with without_beta_warning():
        shape = len(crow) - 1, inputs
        return torch.sparse_csr_tensor(crow, columns, values, shape, check_invariants=False)
