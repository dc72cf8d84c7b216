r"""Products with sparse matrices of weights.

With rows in tiles whose transposes fit the cache, an output unit is a weighted sum of contiguous
rows, one for each of its weights: what an embedding bag computes, by code generated for it. All
tiles are one table, whose bags are shared out among the threads. At a tenth of the weights that
takes a fifth of the time of the dense product, where general sparse products take as long as the
dense one.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from subbayes.networks.tracing.memory import reuse_memory
from subbayes.utils.checks import fail

__all__ = [
    "FEW",
    "Bags",
    "DrawnLayer",
    "Pattern",
    "ThinLinear",
    "csr",
    "thin_product",
    "tiling",
    "transposed",
]

_CACHED = 90_000  # numbers of a tile: with the weights they fit the cache of a core
_WIDE, _NARROW, _STEP = 128, 32, 16  # rows of a tile: at most, at least, and a multiple of
_TOGETHER = 32  # tiles in a table, which each have a copy of the weights
FEW = 16
"""Rows, fewer than which a general product is faster for."""


class Pattern:
    """Which weights of a layer are in.

    Args:
        inside: positions among all weights in a row, ascending.
        shape: units, and weights of each.

    Example:
        >>> Pattern(torch.tensor([1, 5]), (2, 3)).rows
        (tensor([0, 1, 2]), tensor([1, 2]))
    """

    def __init__(self, inside: Int[Tensor, "k"], shape: tuple[int, int]) -> None:
        self.inside, self.shape = inside, shape

    @classmethod
    def of(cls, whole: Bool[Tensor, "n"], shape: tuple[int, int]) -> Pattern:
        """The pattern of the weights that are in, of all in a row."""
        return cls(whole.nonzero()[:, 0], shape)

    @cached_property
    def rows(self) -> tuple[Int[Tensor, "u_and_one"], Int[Tensor, "k"]]:
        """The same as compressed rows: where each unit's weights begin, and their columns."""
        units, inputs = self.shape
        starts = torch.arange(0, (units + 1) * inputs, inputs, device=self.inside.device)
        return torch.searchsorted(self.inside, starts), self.inside % inputs

    @cached_property
    def bags(self) -> Bags:
        """For products with many rows."""
        return Bags(*self.rows, self.shape[1])


class Bags:
    """Compressed rows as bags of an embedding, for any number of tiles.

    Args:
        crow: where each unit's weights begin, and their number.
        columns: the input each weight reads.
        inputs: number of inputs.

    Example:
        >>> bags = Bags(torch.tensor([0, 1, 2]), torch.tensor([1, 2]), 3)
        >>> [part.tolist() for part in bags.of(torch.tensor([0.5, 1.0]), 2)]
        [[1, 2, 4, 5], [0, 1, 2, 3], [0.5, 1.0, 0.5, 1.0]]
    """

    def __init__(
        self, crow: Int[Tensor, "units_and_one"], columns: Int[Tensor, "k"], inputs: int
    ) -> None:
        self.crow, self.columns, self.inputs = crow, columns, inputs
        self._places: tuple[int, Tensor, Tensor] | None = None
        self._values: tuple[int, Tensor, Tensor] | None = None

    def of(
        self, values: Float[Tensor, "k"], tiles: int
    ) -> tuple[Int[Tensor, "k_times"], Int[Tensor, "units_times"], Float[Tensor, "k_times"]]:
        """Rows of a table of so many tiles, where the bags begin, and the weights of these rows.

        The last are remembered, with the tensor of values they were made from.
        """
        places, known = self._places, self._values  # other threads may put others there
        if places is None or places[0] != tiles:
            largest = tiles * max(self.inputs, len(self.columns))
            kind = torch.int32 if largest < 2**31 else torch.int64
            each = torch.arange(tiles, dtype=kind, device=self.columns.device)[:, None]
            places = (
                tiles,
                (self.columns.to(kind) + each * self.inputs).reshape(-1),
                (self.crow[:-1].to(kind) + each * len(self.columns)).reshape(-1),
            )
            self._places = places
        if known is None or known[0] != tiles or known[1] is not values:
            known = tiles, values, values.expand(tiles, -1).reshape(-1)
            self._values = known
        return *places[1:], known[2]


@dataclass(frozen=True)
class DrawnLayer:
    """Weights and bias of one layer in a draw.

    Attributes:
        pattern: which weights are in; None stands for all.
        values: these weights.
        bias: all biases, if the layer has any.
    """

    pattern: Pattern | None
    values: Float[Tensor, "k"]
    bias: Float[Tensor, "u"] | None

    def dense(self, out: Tensor) -> None:
        """Write the weights, and zeros where there are none, into a tensor of the layer's size."""
        flat = out.view(-1)
        if self.pattern is None:
            flat.copy_(self.values)
        else:
            flat.zero_()
            flat[self.pattern.inside] = self.values


class ThinLinear(nn.Module):
    """A linear layer that holds the weights of one draw after the other.

    Args:
        layer: the layer it stands for.
        by_row: whether outputs may lie transposed in memory, for what reads them row by row.

    Example:
        >>> thin, pattern = ThinLinear(nn.Linear(3, 2)), Pattern(torch.tensor([1, 5]), (2, 3))
        >>> thin.hold(DrawnLayer(pattern, torch.tensor([10.0, 1.0]), None))
        >>> thin(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[20.,  3.]])
    """

    def __init__(self, layer: nn.Linear, by_row: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.by_row = by_row
        self.held: DrawnLayer | None = None

    def _pattern(self, drawn: DrawnLayer) -> Pattern:
        if drawn.pattern is not None:
            return drawn.pattern
        whole = torch.arange(len(drawn.values), device=drawn.values.device)
        return Pattern(whole, (self.out_features, self.in_features))

    def hold(self, drawn: DrawnLayer) -> None:
        """Take the weights of a draw."""
        self.held = drawn

    @property
    def weight(self) -> Float[Tensor, "u i"]:
        """The weights that are held, with zeros, for modules that read them themselves."""
        assert self.held is not None
        found = self.held.values.new_empty(self.out_features, self.in_features)
        self.held.dense(found)
        return found

    @property
    def bias(self) -> Float[Tensor, "u"] | None:
        """The biases that are held."""
        assert self.held is not None
        return self.held.bias

    def forward(self, input: Float[Tensor, "*N i"]) -> Float[Tensor, "*N u"]:
        """Outputs of the draw that is held; see `thin_product`."""
        assert self.held is not None
        found = _product(
            _Tiles.of(input), self._pattern(self.held).bags, self.held.values, self.held.bias
        )
        return found if self.by_row else found.contiguous()


def thin_product(
    x: Float[Tensor, "*N i"],
    bags: Bags,
    values: Float[Tensor, "k"],
    bias: Float[Tensor, "o"] | None = None,
) -> Float[Tensor, "*N o"]:
    """Outputs of a linear layer whose weights are compressed sparse rows.

    Args:
        x: inputs. Those of shape (tiles, width, i) are taken as they lie in memory, if the rows
            of each tile lie transposed there, and outputs lie so too.
        bags: which weights there are.
        values: the weights.
        bias: of the units.

    Raises:
        InputError: rows of another size.

    Example:
        >>> bags = Bags(torch.tensor([0, 1, 2]), torch.tensor([1, 2]), 3)
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> thin_product(x, bags, torch.tensor([10.0, 1.0]))
        tensor([[10.,  2.],
                [40.,  5.]])
    """
    if x.shape[-1] != bags.inputs:
        fail("inputs", f"{bags.inputs} numbers in each row", x.shape[-1])
    half = (
        x.dtype in (torch.half, torch.bfloat16)  # for which there is no product with CSR
        or torch.is_autocast_enabled(x.device.type)
    )
    if x.device.type == "cpu" and (half or x.shape[:-1].numel() >= FEW):
        return _product(_Tiles.of(x), bags, values, bias)
    rows = x.reshape(-1, x.shape[-1])
    found = (csr(bags.crow, bags.columns, values, bags.inputs) @ rows.T).T
    found = found if bias is None else found + bias
    return found.reshape(*x.shape[:-1], len(bags.crow) - 1)


@dataclass(frozen=True)
class _Tiles:
    """Transposed rows in tiles of equal width; zeros fill the last.

    Attributes:
        table: the tiles.
        shape: of the inputs, but for the last dimension.
        kept: whether the inputs came in tiles, as the outputs will leave.
    """

    table: Float[Tensor, "tiles i width"]
    shape: tuple[int, ...]
    kept: bool

    @classmethod
    def of(cls, x: Float[Tensor, "*N i"]) -> _Tiles:
        """As many rows at a time as fit the cache, or as the inputs have in their tiles."""
        if x.ndim == 3 and _NARROW <= x.shape[1] <= _WIDE:
            return cls(x.transpose(1, 2).contiguous(), x.shape[:-1], True)
        rows = x.reshape(-1, x.shape[-1])
        return cls(transposed(rows, *tiling(*rows.shape)), x.shape[:-1], False)


def transposed(
    rows: Float[Tensor, "n i"], tiles: int, width: int
) -> Float[Tensor, "tiles i width"]:
    """Rows in tiles, each transposed; zeros fill the last.

    Args:
        rows: the rows.
        tiles: how many there are, see `tiling`.
        width: rows of each.
    """
    n, inputs = rows.shape
    table = rows.new_empty(tiles, inputs, width)
    full = n // width
    even = rows[: full * width].unflatten(0, (full, width))  # in 3 dims all threads copy
    table[:full].copy_(even.transpose(1, 2))
    if full < tiles:
        table[full, :, : n - full * width].copy_(rows[full * width :].T)
        table[full, :, n - full * width :] = 0.0
    return table


def tiling(n: int, inputs: int) -> tuple[int, int]:
    """Number and width of tiles that fit the cache.

    Args:
        n: rows in all.
        inputs: numbers of each.

    Example:
        >>> tiling(1000, 784), tiling(1000, 400), tiling(20, 784)
        ((9, 112), (8, 128), (1, 32))
    """
    most = min(_WIDE, max(_NARROW, _CACHED // max(1, inputs) // _STEP * _STEP))
    tiles = max(1, -(-n // most))
    return tiles, max(1, -(-n // (tiles * _STEP))) * _STEP


def _product(
    tiles: _Tiles, bags: Bags, values: Float[Tensor, "k"], bias: Float[Tensor, "o"] | None
) -> Float[Tensor, "*N o"]:
    """Outputs, transposed in memory, which a further product is glad of."""
    reuse_memory()
    count, _, width = tiles.table.shape
    parts = [_bagged(table, bags, values) for table in tiles.table.split(_TOGETHER)]
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    added = found.new_zeros(()) if bias is None else bias[:, None]
    if tiles.kept:
        return (found + added if found.requires_grad else found.add_(added)).transpose(1, 2)
    if found.requires_grad:
        by_unit = (found + added).transpose(0, 1)
    else:  # side by side, and the bias added on the way
        by_unit = found.new_empty(found.shape[1], count, width)
        torch.add(found, added, out=by_unit.transpose(0, 1))
    n = math.prod(tiles.shape)
    return by_unit.flatten(1)[:, :n].T.reshape(*tiles.shape, len(bags.crow) - 1)


def _bagged(
    table: Float[Tensor, "tiles i width"], bags: Bags, values: Float[Tensor, "k"]
) -> Float[Tensor, "tiles o width"]:
    columns, starts, repeated = bags.of(values, len(table))
    found = functional.embedding_bag(
        columns, table.flatten(0, 1), starts, mode="sum", per_sample_weights=repeated
    )
    return found.unflatten(0, (len(table), len(bags.crow) - 1))


def csr(
    crow: Int[Tensor, "units_and_one"],
    columns: Int[Tensor, "k"],
    values: Float[Tensor, "k"],
    inputs: int,
) -> Tensor:
    """A tensor of that layout, which torch calls a beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(crow, columns, values, (len(crow) - 1, inputs))
