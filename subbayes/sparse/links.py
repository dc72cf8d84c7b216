"""Which layer reads the units of which, and whether rows are read one by one, by tracing a module.

Where units branch (skip connections) or pass through something unknown there is no link. Nor is
there one where the reader works along another axis: units of linear layers are along the last axis,
channels of convolutions along the second.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from subbayes.sparse.replacing import LAYERS

__all__ = ["Flow", "Link", "links"]

_PER_VALUE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus,
              nn.Hardtanh, nn.Identity, nn.Dropout, nn.Dropout2d)
_POOLS: dict[int, tuple[type[nn.Module], ...]] = {  # by dimensions of the weight of what they pool
    2: (),
    3: (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
    4: (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)}
_FUNCTIONS = (functional.relu, functional.gelu, functional.silu, functional.elu, torch.relu,
              torch.tanh, torch.sigmoid, functional.leaky_relu, functional.softplus,
              functional.dropout)
_METHODS = ("relu", "tanh", "sigmoid")
_OVERWRITE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Hardtanh)
_JOINS = (operator.add, operator.mul, torch.add, torch.mul)


@dataclass
class Link:
    """Units of `source` that `reader` alone reads, through `path`.

    Attributes:
        source: a layer.
        reader: another.
        path: what happens to the units between, as functions of a constant for each.
        norms: those in between.
        by_unit: whether these surely have a number for each unit. After a linear layer they do if
            its outputs are (n, units), and not if these are (n, t, units).
    """

    source: str
    reader: str
    path: list[Callable[[Tensor], Tensor]]
    norms: list[str]
    by_unit: bool


def links(module: nn.Module, names: Collection[str], example: Any = None) -> list[Link]:
    """The links from layers of these names that lead to a linear or convolutional layer.

    A layer that is called twice has none, nor has a grouped convolution.

    Args:
        module: the module, in evaluation mode.
        names: of layers.
        example: inputs of the module: they show which outputs of linear layers are (n, units).
            Without them those are known that come after flattening.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1))
        >>> [(link.source, link.reader) for link in links(net, ("0", "2"))]
        [('0', '2')]
    """
    graph = _graph(module)
    if graph is None:
        return []
    modules = dict(module.named_modules())
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    found = []
    for node in graph.nodes:
        own = _called(node, modules)
        if isinstance(own, LAYERS) and node.target in names and called.count(node.target) == 1:
            if getattr(own, "groups", 1) != 1:
                continue  # its units go with groups of its inputs
            link = _followed(node, modules)
            if link is not None and called.count(link.reader) == 1:
                found.append(link)
    unsure = [link for link in found if not link.by_unit]
    if unsure and example is not None:
        tables = _tables(module, [link.source for link in unsure], example)
        for link in unsure:
            link.by_unit = link.source in tables
    return found


@torch.no_grad()
def _tables(module: nn.Module, names: Collection[str], example: Any) -> set[str]:
    """Layers whose outputs on an example are (n, units)."""
    found: set[str] = set()

    def note(name: str, _: nn.Module, __: Any, outputs: Tensor) -> None:
        if outputs.ndim == 2:
            found.add(name)

    hooks = [module.get_submodule(name).register_forward_hook(functools.partial(note, name))
             for name in names]
    try:
        module(example)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(frozen=True)
class Flow:
    """What is known of how numbers flow through a module.

    Attributes:
        by_row: whether it reads the last dimension of its one input, row by row: there is nothing
            but linear layers, functions of single numbers, and sums and products of what these
            give. Then inputs may have any number of leading dimensions.
        functions: modules, functions of single numbers, that alone read the outputs of a layer
            and read nothing else: they may overwrite these.
    """

    by_row: bool
    functions: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module, names: Collection[str]) -> Flow:
        """By tracing a module.

        Args:
            module: the module.
            names: of the layers whose outputs may be overwritten.

        Example:
            >>> Flow.of(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1)), ("0",))
            Flow(by_row=True, functions=('1',))
            >>> Flow.of(nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)), ("0",))
            Flow(by_row=False, functions=())
        """
        graph = _graph(module)
        if graph is None:
            return cls(False, ())
        modules = dict(module.named_modules())
        plain = all(_reads_rows(node, modules) for node in graph.nodes)
        inputs = sum(node.op == "placeholder" for node in graph.nodes)
        called = [node.target for node in graph.nodes if node.op == "call_module"]
        return cls(plain and inputs == 1, tuple(
            str(reader.target) for node in graph.nodes
            if node.op == "call_module" and node.target in names and len(node.users) == 1
            for reader in node.users
            if reader.op == "call_module" and called.count(reader.target) == 1
            and isinstance(modules[str(reader.target)], _OVERWRITE)))

    def overwrite(self, module: nn.Module) -> None:
        """Have the functions overwrite what they read."""
        for name in self.functions:
            own: Any = module.get_submodule(name)
            own.inplace = True


def _reads_rows(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], (nn.Linear, *_PER_VALUE))
    if node.op == "call_function" and node.target in _JOINS:
        return all(isinstance(a, fx.Node) for a in node.args) and not node.kwargs
    if node.op in ("call_function", "call_method"):
        return _is_plain(node)
    return node.op == "placeholder" or node.op == "output" and isinstance(node.args[0], fx.Node)


def _graph(module: nn.Module) -> fx.Graph | None:
    """What a module does, unless its control flow depends on data."""
    try:
        return fx.Tracer().trace(module)
    except Exception:
        return None


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is a known function of the single numbers of one tensor."""
    known = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, ())
    others = (*node.args[1:], *node.kwargs.values())
    return node.target in known and not any(isinstance(a, fx.Node) for a in others)


def _followed(node: fx.Node, modules: dict[str, nn.Module]) -> Link | None:
    """From a layer to the one that reads it, if only values, pools and norms are between."""
    source = _called(node, modules)
    assert isinstance(source, LAYERS)
    link = Link(str(node.target), "", [], [], not isinstance(source, nn.Linear)
                or _is_table(node, modules))
    flattened = False
    while len(node.users) == 1:
        (node,) = node.users
        own = _called(node, modules)
        if isinstance(own, LAYERS):
            link.reader, link.by_unit = str(node.target), link.by_unit or not link.norms
            return link if _reads(own, source, flattened) else None
        if _flattens(node, modules):
            flattened = True
        elif isinstance(own, _BatchNorm) and not flattened:
            link.norms.append(str(node.target))
            link.path.append(functools.partial(_normalised, own))
        elif isinstance(own, _PER_VALUE):
            link.path.append(own)
        elif _is_plain(node):
            call = (node.target if node.op == "call_function"
                    else operator.methodcaller(str(node.target)))
            link.path.append(_with_arguments(call, node))
        elif flattened or not isinstance(own, _POOLS[source.weight.ndim]) or not _even(own):
            return None
    return None


def _reads(reader: nn.Module, source: nn.Module, flattened: bool) -> bool:
    """Whether a layer reads the axis that has the units of another."""
    if isinstance(reader, nn.Linear):  # the last one, after flattening with positions by unit
        return (flattened if not isinstance(source, nn.Linear)
                else reader.in_features == source.out_features)  # so flattening joined none
    return type(reader) is type(source) and getattr(reader, "groups", 1) == 1 and not flattened


def _is_table(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether outputs surely are (n, units): what they are made of was flattened."""
    while node.args and isinstance(node.args[0], fx.Node):
        if _flattens(node, modules):
            return True
        kept = isinstance(_called(node, modules), (nn.Linear, _BatchNorm, *_PER_VALUE))
        if not kept and not _is_plain(node):
            return False
        node = node.args[0]
    return False


def _called(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    return modules[str(node.target)] if node.op == "call_module" else None


def _normalised(norm: _BatchNorm, constant: Tensor) -> Tensor:
    """What normalisation by stored statistics makes of a constant of each unit."""
    if norm.running_mean is None or norm.running_var is None:
        return torch.full_like(constant, torch.nan)  # by those of the batch: it is not known
    return functional.batch_norm(constant[None], norm.running_mean, norm.running_var, norm.weight,
                                 norm.bias, False, 0.0, norm.eps)[0]


def _even(pool: nn.Module) -> bool:
    """Whether a pool leaves constants as they are, at borders too."""
    if not isinstance(pool, (nn.AvgPool1d, nn.AvgPool2d)):
        return True
    return pool.padding in (0, (0,), (0, 0)) and getattr(pool, "divisor_override", None) is None


def _flattens(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node leaves rows of numbers."""
    own = _called(node, modules)
    if own is not None:
        return isinstance(own, nn.Flatten) and (own.start_dim, own.end_dim) == (1, -1)
    known = node.target == "flatten" or node.target is torch.flatten
    return known and tuple(node.args[1:]) in ((1,), (1, -1)) and not node.kwargs


def _with_arguments(call: Any, node: fx.Node) -> Callable[[Tensor], Tensor]:
    if node.op == "call_method":
        return call
    more, named = node.args[1:], dict(node.kwargs)
    if call is functional.dropout:
        named["training"] = False
    return lambda x: call(x, *more, **named)
