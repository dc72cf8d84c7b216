"""Which layers read the units of which others, found by tracing a module.

There is no edge where units branch (skip connections) or pass through an unknown operation, where
the reader works along another axis (linear layers have units along the last axis, convolutions
along the second), or where a size is a constant of the code, as in x.view(-1, 320), which would
be wrong with fewer units.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from subbayes.networks.layer_kinds import BATCH_NORMS
from subbayes.networks.network import arguments
from subbayes.networks.tracing.private_torch import has_hooks
from subbayes.sparse.module_surgery import LAYERS, own_parameters
from subbayes.sparse.traced_module import TracedModule, row_sources, users_of_values

_OVERWRITABLE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Hardtanh)
_BINARY_OPERATIONS = (operator.add, operator.mul, torch.add, torch.mul)


@dataclass
class Edge:
    """The units of the layer `source`, which only the layer `reader` reads.

    Attributes:
        source: name of a layer.
        reader: name of another.
        functions: operations in between, as functions of one constant for each unit.
        norms: names of the batch norms in between.
        norms_per_unit: whether these certainly normalise by unit. After a linear layer they do if
            its outputs are (n, units), and not if they are (n, t, units).
    """

    source: str
    reader: str
    functions: list[Callable[[Tensor], Tensor]]
    norms: list[str]
    norms_per_unit: bool


def edges(module: nn.Module, names: Collection[str], example: Any = None) -> list[Edge]:
    """The edges from given layers to linear or convolutional layers.

    A layer has no edge if it is called twice, is a grouped convolution, has hooks, or has weights
    that are shared, computed, or read by another module. Edges do not pass modules with hooks.

    Args:
        module: the module, in evaluation mode.
        names: of layers.
        example: inputs of the module, to find linear layers whose outputs are (n, units); without
            them only layers after a flattening are known to have such outputs.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1))
        >>> [(edge.source, edge.reader) for edge in edges(net, ("0", "2"))]
        [('0', '2')]
    """
    traced = TracedModule.trace(module)
    if traced is None:
        return []
    once = _called_once(traced)
    found = []
    for node in traced.graph.nodes:
        own = traced.called(node)
        if isinstance(own, LAYERS) and node.target in names and node.target in once:
            if getattr(own, "groups", 1) != 1:
                continue  # its units belong to groups of its inputs
            edge = _edge_from(node, traced)
            if edge is not None and once.issuperset((edge.reader, *edge.norms)):
                found.append(edge)
    unsure = [edge for edge in found if not edge.norms_per_unit]
    if unsure and example is not None:
        tables = _layers_with_tables(module, [edge.source for edge in unsure], example)
        for edge in unsure:
            edge.norms_per_unit = edge.source in tables
    return found


def readers_of_inputs(module: nn.Module, names: Collection[str]) -> tuple[list[str], bool]:
    """The layers that read the module's inputs, and whether these are certainly all.

    Inputs may first be flattened, normalised, pooled or passed through elementwise functions.

    Args:
        module: the module, in evaluation mode.
        names: of layers.

    Returns:
        The names in the order of their calls; empty if control flow depends on data.

    Example:
        >>> readers_of_inputs(nn.Sequential(nn.Flatten(), nn.Linear(4, 9), nn.Linear(9, 1)), ("1",))
        (['1'], True)
    """
    if "" in names:  # the module is a layer
        return [""], True
    traced = TracedModule.trace(module)
    if traced is None:
        return [], False
    found, alone = [], True
    waiting = [node for node in traced.graph.nodes if node.op == "placeholder"]
    while waiting:
        for user in users_of_values(waiting.pop(0)):
            if user.op == "call_module" and user.target in names:
                found.append(user)
            elif traced.passes_rows(user):
                waiting.append(user)
            else:
                alone = False
    in_order = [str(node.target) for node in traced.graph.nodes if node in found]
    return list(dict.fromkeys(in_order)), alone


@torch.no_grad()
def _layers_with_tables(module: nn.Module, names: Collection[str], example: Any) -> set[str]:
    """Layers whose outputs on an example are (n, units)."""
    found: set[str] = set()

    def note(name: str, _: nn.Module, __: Any, outputs: Tensor) -> None:
        if outputs.ndim == 2:
            found.add(name)

    hooks = [
        module.get_submodule(name).register_forward_hook(functools.partial(note, name))
        for name in names
    ]
    try:
        args, kwargs = arguments(example)
        module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(frozen=True)
class DataFlow:
    """How values flow through a module.

    Attributes:
        is_rowwise: whether the module maps the last dimension of its one input, row by row, by
            linear layers, elementwise functions, and sums and products of their outputs. Then
            inputs may have any number of leading dimensions.
        overwritable: elementwise modules that may work in place, because they alone read the
            outputs of a layer and read nothing else.
        read: layers whose parameters are read other than by calling them.
    """

    is_rowwise: bool
    overwritable: tuple[str, ...]
    read: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module, names: Collection[str]) -> DataFlow:
        """Trace a module.

        Args:
            module: the module.
            names: of the layers whose outputs may be overwritten.

        Example:
            >>> DataFlow.of(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1)), ("0",))
            DataFlow(is_rowwise=True, overwritable=('1',), read=frozenset())
            >>> DataFlow.of(nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)), ("0",)).is_rowwise
            False
        """
        traced = TracedModule.trace(module)
        if traced is None:
            return cls(False, ())
        nodes = traced.graph.nodes
        rowwise = not has_hooks(module) and all(_maps_rows(node, traced) for node in nodes)
        inputs = sum(node.op == "placeholder" for node in nodes)
        called = [node.target for node in nodes if node.op == "call_module"]
        return cls(
            rowwise and inputs == 1,
            tuple(
                str(reader.target)
                for node in nodes
                if traced.called(node) and node.target in names and len(node.users) == 1
                for reader in node.users
                if isinstance(traced.called(reader), _OVERWRITABLE)
                and called.count(reader.target) == 1
            ),
            _read_directly(traced),
        )

    def work_in_place(self, module: nn.Module) -> None:
        """Let overwritable modules work in place."""
        for name in self.overwritable:
            own: Any = module.get_submodule(name)
            own.inplace = True


def _maps_rows(node: fx.Node, traced: TracedModule) -> bool:
    if node.op in ("placeholder", "output"):
        return node.op == "placeholder" or isinstance(node.args[0], fx.Node)
    if node.op == "call_function" and node.target in _BINARY_OPERATIONS:
        return all(isinstance(a, fx.Node) for a in node.args) and not node.kwargs
    return isinstance(traced.called(node), nn.Linear) or traced.elementwise(node) is not None


def _called_once(traced: TracedModule) -> set[str]:
    """Modules that are called once and whose parameters nothing else reads."""
    calls = Counter(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
    read = _read_directly(traced)
    holders = _holders(traced.module)
    return {
        name
        for name, own in traced.module.named_modules()
        if calls[name] == 1
        and name not in read
        and not (isinstance(own, LAYERS) and "weight" not in own_parameters(own))
        and all(holders[id(p)] == 1 for p in own_parameters(own).values())
    }


def _holders(module: nn.Module) -> Counter[int]:
    """The number of modules that hold each parameter."""
    return Counter(id(p) for own in module.modules() for p in own_parameters(own).values())


def _read_directly(traced: TracedModule) -> frozenset[str]:
    """Modules whose parameters or buffers are read other than by calling them."""
    return frozenset(
        str(node.target).rpartition(".")[0] for node in traced.graph.nodes if node.op == "get_attr"
    )


def _edge_from(node: fx.Node, traced: TracedModule) -> Edge | None:
    """The edge from a layer through elementwise functions, pools and norms to its reader."""
    source = traced.called(node)
    assert isinstance(source, LAYERS)
    rowwise = any(traced.flattens(earlier) for earlier in row_sources(node, traced))
    edge = Edge(str(node.target), "", [], [], not isinstance(source, nn.Linear) or rowwise)
    flattened = False
    while len(users := users_of_values(node)) == 1:
        (node,) = users
        own = traced.called(node)
        if isinstance(own, LAYERS):
            edge.reader = str(node.target)
            edge.norms_per_unit |= not edge.norms
            return edge if _reads_units(own, source, flattened) else None
        function = traced.elementwise(node)
        if traced.flattens(node):
            flattened = True
        elif isinstance(own, BATCH_NORMS) and not flattened:
            edge.norms.append(str(node.target))
            edge.functions.append(functools.partial(_normalise, own))
        elif function is not None:
            edge.functions.append(function)
        elif flattened or not traced.pools(node, source.weight.ndim):
            return None
    return None


def _reads_units(reader: nn.Module, source: nn.Module, flattened: bool) -> bool:
    """Whether a layer reads the axis along which another has its units."""
    if isinstance(reader, nn.Linear):  # the last axis, after flattening with positions by unit
        return (
            flattened and reader.in_features % len(source.weight) == 0  # type: ignore[arg-type]
            if not isinstance(source, nn.Linear)
            else reader.in_features == source.out_features
        )  # a flattening with other axes would change the size
    return type(reader) is type(source) and getattr(reader, "groups", 1) == 1 and not flattened


def _normalise(norm: Any, constant: Tensor) -> Tensor:
    """Normalise one constant for each unit by stored statistics."""
    if norm.running_mean is None or norm.running_var is None:
        return torch.full_like(constant, torch.nan)  # depends on the batch
    return functional.batch_norm(
        constant[None],
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        False,
        0.0,
        norm.eps,
    )[0]
