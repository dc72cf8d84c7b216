r"""Products with sparse matrices of weights, and draws of networks through them.

With rows in tiles whose transposes fit the cache, an output unit is a weighted sum of contiguous
rows, one for each of its weights: what an embedding bag computes, by code generated for it. At a
tenth of the weights that takes a fifth of the time of the dense product, where general sparse
products take as long as the dense one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from subbayes.data import n_rows, take
from subbayes.evaluation import bytes_per_row, reuse_memory
from subbayes.network import Network
from subbayes.prediction import input_batches
from subbayes.progress import bar
from subbayes.sparse.replacing import replaced

__all__ = ["DrawnLayer", "Pattern", "ThinLinear", "csr", "thin_outputs", "thin_product"]

_TILE = 256  # rows whose transpose fits the cache
_FEW = 16  # rows for which a general product is faster


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

    @cached_property
    def rows(self) -> tuple[Int[Tensor, "u"], Int[Tensor, "k"]]:
        """The same as compressed rows: where each unit's weights begin, and their columns."""
        units, inputs = self.shape
        starts = torch.arange(0, (units + 1) * inputs, inputs, device=self.inside.device)
        return torch.searchsorted(self.inside, starts), self.inside % inputs


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

    Example:
        >>> thin, pattern = ThinLinear(nn.Linear(3, 2)), Pattern(torch.tensor([1, 5]), (2, 3))
        >>> thin.hold(DrawnLayer(pattern, torch.tensor([10.0, 1.0]), None))
        >>> thin(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[20.,  3.]])
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        shape = layer.out_features, layer.in_features
        self.whole = Pattern(torch.arange(layer.weight.numel(), device=layer.weight.device), shape)
        self.held: DrawnLayer | None = None
        self._last: tuple[Tensor, list[Tensor]] | None = None

    def hold(self, drawn: DrawnLayer) -> None:
        """Take the weights of a draw."""
        self.held = drawn

    def forward(self, x: Float[Tensor, "*N i"]) -> Float[Tensor, "*N u"]:
        """Outputs of the draw that is held; the inputs of the last call are remembered."""
        assert self.held is not None
        crow, columns = (self.held.pattern or self.whole).rows
        if self._last is None or self._last[0] is not x:
            self._last = x, _tiles(x.reshape(-1, x.shape[-1]))
        return _product(x, self._last[1], crow, columns, self.held.values, self.held.bias)


def thin_product(
    x: Float[Tensor, "*N i"], crow: Int[Tensor, "units_and_one"], columns: Int[Tensor, "k"],
    values: Float[Tensor, "k"], inputs: int, bias: Float[Tensor, "o"] | None = None,
) -> Float[Tensor, "*N o"]:
    """Outputs of a linear layer whose weights are compressed sparse rows.

    Args:
        x: inputs.
        crow: where each unit's weights begin, and their number.
        columns: the input each weight reads.
        values: the weights.
        inputs: number of inputs.
        bias: of the units.

    Example:
        >>> crow, columns = torch.tensor([0, 1, 2]), torch.tensor([1, 2])
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> thin_product(x, crow, columns, torch.tensor([10.0, 1.0]), 3)
        tensor([[10.,  2.],
                [40.,  5.]])
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.device.type == "cpu" and len(rows) >= _FEW:
        return _product(x, _tiles(rows), crow, columns, values, bias)
    found = (csr(crow, columns, values, inputs) @ rows.T).T
    found = found if bias is None else found + bias
    return found.reshape(*x.shape[:-1], len(crow) - 1)


def _tiles(rows: Float[Tensor, "n i"]) -> list[Tensor]:
    """Transposed rows, as many at a time as fit the cache."""
    return [tile.T.contiguous() for tile in rows.split(_TILE)]


def _product(
    x: Tensor, tiles: list[Tensor], crow: Tensor, columns: Tensor, values: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Outputs, transposed in memory, which a further product is glad of."""
    reuse_memory()
    parts = [functional.embedding_bag(columns, tile, crow[:-1], mode="sum",
                                      per_sample_weights=values) for tile in tiles]
    found = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).T
    if bias is not None:
        found = found + bias if found.requires_grad else found.add_(bias)
    return found.reshape(*x.shape[:-1], len(crow) - 1)


def csr(
    crow: Int[Tensor, "units_and_one"], columns: Int[Tensor, "k"], values: Float[Tensor, "k"],
    inputs: int,
) -> Tensor:
    """A tensor of that layout, which torch calls a beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(crow, columns, values, (len(crow) - 1, inputs))


@torch.no_grad()
def thin_outputs(
    network: Network, names: tuple[str, ...], draws: Sequence[Mapping[str, DrawnLayer]],
    inputs: Any, *, memory_limit: int = 2**30, progress: bool | None = False,
) -> Float[Tensor, "S N C"]:
    """Outputs of networks that differ in the weights of some layers.

    Args:
        network: the network, from which all else is taken.
        names: the layers.
        draws: weights of these layers, for each draw.
        inputs: new inputs in the form the module takes, or a loader of them or of pairs.
        memory_limit: bytes of activations held at once.
        progress: show a progress bar; None shows it on a terminal.

    Raises:
        InputError: inputs the module does not take or that hold NaN.
    """
    module, layers = _with_thin_layers(network.module_with(), names)
    parts = []
    for batch in input_batches(inputs):
        network.check(batch)
        step = min(_TILE, max(1, memory_limit // bytes_per_row(network, batch)))
        starts = range(0, n_rows(batch), step)
        with bar(len(starts), "Predicting", progress, "batches") as steps:
            for start in starts:
                rows = take(batch, slice(start, start + step))
                found = []
                for draw in draws:
                    _hold(layers, draw)
                    found.append(network.call(module, rows))
                parts.append(torch.stack(found))
                steps.update(1)
    return torch.cat(parts, 1)


def _with_thin_layers(
    module: nn.Module, names: tuple[str, ...]
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A module with `ThinLinear` in place of its linear layers of these names; the layers."""
    layers: dict[str, nn.Module] = {}
    for name in names:
        layer = module.get_submodule(name)
        if isinstance(layer, nn.Linear):
            layer = ThinLinear(layer)
            module = replaced(module, name, layer)
        layers[name] = layer
    return module, layers


def _hold(layers: Mapping[str, nn.Module], draw: Mapping[str, DrawnLayer]) -> None:
    for name, layer in layers.items():
        if isinstance(layer, ThinLinear):
            layer.hold(draw[name])
            continue
        draw[name].dense(layer.weight)  # type: ignore[arg-type]
        bias = draw[name].bias
        if bias is not None:
            layer.bias.copy_(bias)  # type: ignore[operator]
