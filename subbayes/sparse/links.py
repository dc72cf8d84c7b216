"""Which layer reads the units of which, and whether rows are read one by one, by tracing a module.

Where units branch (skip connections) or pass through something unknown there is no link.
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

from subbayes.sparse.replacing import LAYERS

__all__ = ["Flow", "Link", "links"]

_PER_VALUE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus,
              nn.Hardtanh, nn.Identity, nn.Dropout, nn.Dropout2d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d,
          nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)
_FUNCTIONS = (functional.relu, functional.gelu, functional.silu, functional.elu, torch.relu,
              torch.tanh, torch.sigmoid, functional.leaky_relu, functional.softplus,
              functional.dropout)
_METHODS = ("relu", "tanh", "sigmoid")
_OVERWRITE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Hardtanh)
_JOINS = (operator.add, operator.mul, torch.add, torch.mul)


@dataclass
class Link:
    """Units of `source` that `reader` alone reads, through `path`."""

    source: str
    reader: str
    path: list[Callable[[Tensor], Tensor]]
    norms: list[str]
    flattened: bool


def links(module: nn.Module, names: Collection[str]) -> list[Link]:
    """The links from layers of these names that lead to a linear or convolutional layer.

    A layer that is called twice has none, nor has a grouped convolution.

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
        if node.op == "call_module" and node.target in names and called.count(node.target) == 1:
            if getattr(modules[str(node.target)], "groups", 1) != 1:
                continue  # its units go with groups of its inputs
            link = _followed(node, modules)
            if link is not None and called.count(link.reader) == 1:
                found.append(link)
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
    known = node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
    return known and not any(isinstance(a, fx.Node) for a in node.args[1:])


def _followed(node: fx.Node, modules: dict[str, nn.Module]) -> Link | None:
    """From a layer to the one that reads it, if only values, pools and norms are between."""
    link = Link(str(node.target), "", [], [], False)
    while len(node.users) == 1:
        (node,) = node.users
        if node.op == "call_module":
            own = modules[str(node.target)]
            if isinstance(own, LAYERS):
                link.reader = str(node.target)
                return link if getattr(own, "groups", 1) == 1 else None
            if isinstance(own, nn.modules.batchnorm._BatchNorm) and not link.flattened:
                link.norms.append(str(node.target))
                link.path.append(functools.partial(_normalised, own))
            elif isinstance(own, nn.Flatten) and own.start_dim == 1 and own.end_dim == -1:
                link.flattened = True
            elif not isinstance(own, _PER_VALUE) and not (
                    isinstance(own, _POOLS) and not link.flattened and _even(own)):
                return None
            if isinstance(own, _PER_VALUE):
                link.path.append(own)
        elif node.op in ("call_function", "call_method"):
            if _flattens(node):
                link.flattened = True
                continue
            if not _is_plain(node):
                return None
            call = (node.target if node.op == "call_function"
                    else operator.methodcaller(str(node.target)))
            link.path.append(_with_arguments(call, node))
        else:
            return None
    return None


def _normalised(norm: nn.modules.batchnorm._BatchNorm, constant: Tensor) -> Tensor:
    """What normalisation by stored statistics makes of a constant of each unit."""
    if norm.running_mean is None or norm.running_var is None:
        return torch.full_like(constant, torch.nan)  # by those of the batch: it is not known
    return functional.batch_norm(constant[None], norm.running_mean, norm.running_var, norm.weight,
                                 norm.bias, False, 0.0, norm.eps)[0]


def _even(pool: nn.Module) -> bool:
    """Whether a pool leaves constants as they are, at borders too."""
    padding = getattr(pool, "padding", 0)
    return not isinstance(pool, (nn.AvgPool1d, nn.AvgPool2d)) or padding in (0, (0,), (0, 0))


def _flattens(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "flatten" and tuple(node.args[1:]) in ((1,), (1, -1))
    return node.target is torch.flatten and tuple(node.args[1:]) in ((1,), (1, -1))


def _with_arguments(call: Any, node: fx.Node) -> Callable[[Tensor], Tensor]:
    if node.op == "call_method":
        return call
    more, named = node.args[1:], dict(node.kwargs)
    if call is functional.dropout:
        named["training"] = False
    return lambda x: call(x, *more, **named)
