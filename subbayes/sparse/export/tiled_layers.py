"""Layers and networks that read and return tiles of rows, to copy nothing between layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.network import Network
from subbayes.networks.tracing.private_torch import has_hooks, is_traced, most_forward_hooks
from subbayes.sparse.dependency_graph import DataFlow
from subbayes.sparse.kernels import (
    MIN_ROWS,
    LayerDraw,
    SparsityPattern,
    bag_linear,
    tile_layout,
    transposed_tiles,
)
from subbayes.sparse.module_surgery import READERS, parent_of, replace_layer
from subbayes.utils.progress import progress_bar
from subbayes.utils.seeding import torch_lock
from subbayes.utils.trees import n_rows, take
from subbayes.utils.types import Inputs, Outputs

_ROWS = "_subbayes_rows"
_ROWS_AT_ONCE = 2048


class TiledLinear(nn.Linear):
    """A linear layer that reads and returns transposed tiles without a copy.

    Example:
        >>> layer, tiles = nn.Linear(3, 2), torch.randn(4, 3, 32).transpose(1, 2)
        >>> expected = layer(tiles)
        >>> layer.__class__ = TiledLinear
        >>> found = layer(tiles)
        >>> bool(torch.allclose(found, expected, atol=1e-6)), found.stride()
        (True, (64, 1, 32))
    """

    def forward(self, input: Float[Tensor, "*N i"]) -> Float[Tensor, "*N o"]:
        """Outputs, with the memory layout of the inputs."""
        tiles = input.transpose(1, 2) if input.ndim == 3 else None
        if tiles is None or not tiles.is_contiguous():
            return super().forward(input)
        weight = self.weight.expand(len(tiles), -1, -1)
        found = (
            torch.bmm(weight, tiles)
            if self.bias is None
            else torch.baddbmm(self.bias[:, None], weight, tiles)
        )
        return found.transpose(1, 2)


class SampledLinear(nn.Module):
    """A linear layer with the weights of one draw at a time.

    Args:
        layer: the layer that it replaces.
        keeps_tiles: whether outputs may be transposed in memory, for layers that map row by row.

    Example:
        >>> pattern = SparsityPattern(torch.tensor([1, 5]), (2, 3))
        >>> layer = SampledLinear(nn.Linear(3, 2))
        >>> layer.draw = LayerDraw(pattern, torch.tensor([10.0, 1.0]), None)
        >>> layer(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[20.,  3.]])
    """

    draw: LayerDraw  # whose weights are used

    def __init__(self, layer: nn.Linear, keeps_tiles: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.keeps_tiles = keeps_tiles

    @property
    def weight(self) -> Float[Tensor, "u i"]:
        """The dense weight, for modules that read it directly."""
        found = self.draw.values.new_empty(self.out_features, self.in_features)
        self.draw.write_dense(found)
        return found

    @property
    def bias(self) -> Float[Tensor, "u"] | None:
        """The bias."""
        return self.draw.bias

    def forward(self, input: Float[Tensor, "*N i"]) -> Float[Tensor, "*N u"]:
        """Outputs for the current draw; see `bag_linear`."""
        draw, pattern = self.draw, self.draw.pattern
        if pattern is None:
            every = torch.arange(len(draw.values), device=draw.values.device)
            pattern = SparsityPattern(every, (self.out_features, self.in_features))
        found = bag_linear(input, pattern.bags, draw.values, draw.bias)
        return found if self.keeps_tiles else found.contiguous()


class SampledNetwork:
    """A network evaluated at draws of the weights of some layers, by sparse products.

    Args:
        network: the network, with all other weights.
        names: of these layers.

    Example:
        >>> net = SampledNetwork(Network(nn.Sequential(nn.Linear(3, 2), nn.ReLU())), ("0",))
        >>> pattern = SparsityPattern(torch.tensor([1, 5]), (2, 3))
        >>> one = LayerDraw(pattern, torch.tensor([10.0, 1.0]), None)
        >>> net.outputs([{"0": one}], torch.tensor([[1.0, 2.0, 3.0]])).tolist()
        [[[20.0, 3.0]]]
    """

    def __init__(self, network: Network, names: tuple[str, ...]) -> None:
        self.network, self.names = network, names
        module = network.module_with()
        flow = DataFlow.of(module, names)
        flow.work_in_place(module)
        self._max_inputs = _max_inputs(module) if flow.is_rowwise else 0
        for name in layers_for_products(module, names, flow):
            layer = module.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            module = replace_layer(module, name, SampledLinear(layer, flow.is_rowwise))
        if flow.is_rowwise:
            _keep_tiles(module)
        self._module = module

    @torch.no_grad()
    def outputs(
        self,
        draws: Sequence[Mapping[str, LayerDraw]],
        inputs: Inputs,
        *,
        memory_limit: int = 2**30,
        progress: bool | None = False,
    ) -> Outputs:
        """Outputs for each draw.

        Args:
            draws: weights of the layers, for each draw.
            inputs: one batch, in the form that the module takes.
            memory_limit: bytes of activations held at once.
            progress: show a progress bar; None shows it on a terminal.

        Raises:
            InputError: inputs that the module does not take.
        """
        self.network.check(inputs)
        step = min(_ROWS_AT_ONCE, max(1, memory_limit // self.network.bytes_per_row(inputs)))
        starts, parts = range(0, n_rows(inputs), step), []
        with progress_bar(len(starts), "Predicting", progress, "batches") as steps:
            for start in starts:
                rows = take(inputs, slice(start, start + step))
                with torch_lock:  # the module holds one draw at a time
                    parts.append(self._outputs(draws, rows))
                steps.update(1)
        return torch.cat(parts, 1)

    def _outputs(
        self, draws: Sequence[Mapping[str, LayerDraw]], rows: Any
    ) -> Float[Tensor, "S n C"]:
        module, found = self._module, []
        layers = {name: module.get_submodule(name) for name in self.names}
        tiles = _to_tiles(rows, self._max_inputs) if isinstance(rows, Tensor) else None
        for draw in draws:
            _set_draws(layers, draw)
            found.append(
                self.network.call(module, rows)
                if tiles is None
                else self.network.as_outputs(_from_tiles(module(tiles), len(rows)), rows)
            )
        return torch.stack(found)


def layers_for_products(module: nn.Module, names: Iterable[str], flow: DataFlow) -> list[str]:
    """The linear layers without hooks, whose weights nothing else reads.

    Args:
        module: the module.
        names: of layers.
        flow: of the module.
    """
    return [
        name
        for name in names
        if isinstance(own := module.get_submodule(name), nn.Linear)
        and not has_hooks(own)
        and not (name and (name in flow.read or isinstance(parent_of(module, name), READERS)))
    ]


def use_tiles(module: nn.Module) -> nn.Module:
    """Let a module process tiles of rows, without copies between its layers.

    Args:
        module: a module that maps row by row (`dependency_graph.DataFlow`), changed in place; a
            single layer is not changed.

    Returns:
        The module, with a forward pre-hook and a forward hook; inputs (N, i) pass through it as
        (tiles, width, i) if they make more than one tile.
    """
    max_inputs = _max_inputs(module)
    if max_inputs:
        _keep_tiles(module)
        module.register_forward_pre_hook(_ToTiles(max_inputs))
        module.register_forward_hook(_FromTiles())
    return module


def _keep_tiles(module: nn.Module) -> None:
    """Let the layers of a module return tiles in the memory layout of their inputs."""
    own: Any
    for own in module.modules():
        if hasattr(own, "keeps_tiles"):
            own.keeps_tiles = True
        elif type(own) is nn.Linear and own is not module:
            own.__class__ = TiledLinear  # in place, to keep its hooks and references to it


def _max_inputs(module: nn.Module) -> int:
    """The largest number of inputs of a submodule; 0 for a single layer."""
    return max(
        (
            int(layer.in_features)  # type: ignore[arg-type]
            for layer in module.modules()
            if layer is not module and hasattr(layer, "in_features")
        ),
        default=0,
    )


def _to_tiles(x: Tensor, max_inputs: int) -> Float[Tensor, "tiles width i"] | None:
    """Rows in tiles, padded with zeros; None if they make one tile."""
    on_cpu = x.device.type == "cpu" and x.is_floating_point()
    if not (max_inputs and on_cpu and x.ndim == 2 and len(x) >= MIN_ROWS):
        return None
    count, width = tile_layout(len(x), max_inputs)
    return transposed_tiles(x, count, width).transpose(1, 2) if count > 1 else None


def _from_tiles(outputs: Float[Tensor, "tiles width o"], n: int) -> Float[Tensor, "n o"]:
    return outputs.flatten(0, 1)[:n]


class _ToTiles:
    """A pre-hook that cuts inputs into tiles, with the number of rows as an attribute."""

    def __init__(self, max_inputs: int) -> None:
        self.max_inputs = max_inputs

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            return None
        if is_traced() or _has_hooks(module):
            return None
        tiles = _to_tiles(inputs[0], self.max_inputs)
        if tiles is None:
            return None
        setattr(tiles, _ROWS, len(inputs[0]))
        return (tiles,)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks beside the two for tiles, which would see tiles."""
    return most_forward_hooks(module) > 1 or any(map(has_hooks, islice(module.modules(), 1, None)))


class _FromTiles:
    """A hook that joins tiles of outputs to contiguous rows."""

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        n = getattr(inputs[0], _ROWS, None) if inputs else None
        if n is not None:
            return _from_tiles(outputs, n)
        return outputs.contiguous() if isinstance(outputs, Tensor) else None


def _set_draws(layers: Mapping[str, nn.Module], draw: Mapping[str, LayerDraw]) -> None:
    for name, layer in layers.items():
        if isinstance(layer, SampledLinear):
            layer.draw = draw[name]
            continue
        draw[name].write_dense(layer.weight)  # type: ignore[arg-type]
        bias = draw[name].bias
        if bias is not None:
            layer.bias.copy_(bias)  # type: ignore[operator]
