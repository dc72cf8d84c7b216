"""A module traced by torch.fx, and the operations of its nodes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from subbayes.networks.layer_kinds import BATCH_NORMS
from subbayes.networks.tracing.private_torch import has_hooks
from subbayes.sparse.module_surgery import LAYERS
from subbayes.utils.seeding import torch_lock

# Operations are types of modules, functions, and methods of tensors; see `operation`.
_ELEMENTWISE_CLASSES = (
    "ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU SiLU Mish Hardswish Hardtanh Hardsigmoid Tanh "
    "Sigmoid LogSigmoid Softplus Softsign"
)
_ELEMENTWISE_FUNCTIONS = (
    "relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardtanh hardsigmoid tanh "
    "sigmoid logsigmoid softplus softsign clamp clamp_min"
)
ELEMENTWISE: set[Any] = {getattr(nn, name) for name in _ELEMENTWISE_CLASSES.split()} | {
    getattr(space, name)
    for space in (functional, torch, Tensor)
    for name in _ELEMENTWISE_FUNCTIONS.split()
    if hasattr(space, name)
}
_IDENTITIES = {
    nn.Identity,
    nn.Dropout,
    nn.Dropout2d,
    functional.dropout,
    functional.dropout2d,
    Tensor.contiguous,
}
_POOLS: dict[int, set[Any]] = {  # by number of dimensions of the weight of the layer before
    2: set(),
    3: {
        *(nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
        *(functional.max_pool1d, functional.avg_pool1d, functional.adaptive_avg_pool1d),
        *(functional.adaptive_max_pool1d, torch.max_pool1d, torch.adaptive_avg_pool1d),
    },
    4: {
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
        *(functional.max_pool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d),
        *(functional.adaptive_max_pool2d, torch.max_pool2d),
    },
}
_AVERAGE_POOLS = {nn.AvgPool1d, nn.AvgPool2d, functional.avg_pool1d, functional.avg_pool2d}
_AVERAGE_POOL_ARGUMENTS = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)


class TracedModule:
    """The graph of a module, and what its nodes compute.

    Args:
        module: the module, in evaluation mode.
        graph: its graph; see `trace`.

    Attributes:
        modules: submodules by name.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.module, self.graph = module, graph
        self.modules = dict(module.named_modules())

    @classmethod
    def trace(cls, module: nn.Module) -> TracedModule | None:
        """Trace a module; None if its control flow depends on data.

        Example:
            >>> traced = TracedModule.trace(nn.Sequential(nn.Linear(2, 1), nn.ReLU()))
            >>> [node.target for node in traced.graph.nodes]
            ['input', '0', '1', 'output']
        """
        try:
            with torch_lock:
                return cls(module, fx.Tracer().trace(module))
        except Exception:
            return None

    # --- single nodes -----------------------------------------------------------------------

    def called(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, unless hooks could change the result."""
        own = self.modules[str(node.target)] if node.op == "call_module" else None
        return None if own is None or has_hooks(own) else own

    def operation(self, node: fx.Node) -> Any:
        """The operation that a node applies to its first argument, if it reads no other tensor."""
        own = self.called(node)
        if node.op == "call_module" and own is None:
            return None
        if any(
            not isinstance(a, bool | int | float | str | tuple | list | None)
            or isinstance(a, tuple | list)
            and any(isinstance(b, fx.Node) for b in a)
            for a in (*node.args[1:], *node.kwargs.values())
        ):
            return None
        if own is not None:
            return type(own)
        return getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target

    def elementwise(self, node: fx.Node) -> Callable[[Tensor], Tensor] | None:
        """The function that a node applies elementwise, if it is known."""
        own, operation = self.called(node), self.operation(node)
        if operation in _IDENTITIES:
            return _identity
        # nn.PReLU may have a slope for each unit
        if operation not in ELEMENTWISE or getattr(own, "num_parameters", 1) != 1:
            return None
        return own or functools.partial(_apply, operation, node.args[1:], dict(node.kwargs))

    def pools(self, node: fx.Node, dims: int) -> bool:
        """Whether a node pools positions and maps constants to themselves, at borders too.

        Args:
            node: the node.
            dims: number of dimensions of the weight of the layer before.
        """
        own, operation = self.called(node), self.operation(node)
        if operation not in _POOLS[dims] or operation not in _AVERAGE_POOLS:
            return operation in _POOLS[dims]
        given = (
            vars(own)
            if own
            else dict(zip(_AVERAGE_POOL_ARGUMENTS, node.args, strict=False)) | node.kwargs
        )
        return (
            given.get("padding", 0) in (0, (0,), (0, 0), [0], [0, 0])
            and given.get("divisor_override") is None
        )

    def flattens(self, node: fx.Node) -> bool:
        """Whether a node flattens each row."""
        own, operation = self.called(node), self.operation(node)
        if isinstance(own, nn.Flatten):
            return (own.start_dim, own.end_dim) == (1, -1)
        if operation in (torch.flatten, Tensor.flatten):
            given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
            return given in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1})
        views = node.op != "call_module" and node.target in ("view", "reshape", torch.reshape)
        if not views or node.kwargs:
            return False
        shape = node.args[1:]
        if len(shape) == 1 and isinstance(shape[0], tuple | list):
            shape = tuple(shape[0])
        if len(shape) != 2 or shape[1] != -1 or not isinstance(shape[0], fx.Node):
            return False
        rows, read = shape[0], node.args[0]
        if not _is_row_count(rows) or not isinstance(read, fx.Node):
            return False
        shaped: Any = rows.args[0]
        counted = shaped.args[0] if rows.target is operator.getitem else shaped
        return counted in row_sources(read, self)

    def passes_rows(self, node: fx.Node) -> bool:
        """Whether a node is a batch norm, a pool, a flattening or an elementwise function."""
        return (
            isinstance(self.called(node), BATCH_NORMS)
            or self.elementwise(node) is not None
            or self.flattens(node)
            or any(self.pools(node, dims) for dims in _POOLS)
        )


def row_sources(node: fx.Node, traced: TracedModule) -> Iterator[fx.Node]:
    """A node, and the nodes before it with the same rows."""
    yield node
    while (
        node.args
        and isinstance(node.args[0], fx.Node)
        and (isinstance(traced.called(node), LAYERS) or traced.passes_rows(node))
    ):
        node = node.args[0]
        yield node


def users_of_values(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the values of a node, not only its number of rows."""
    return [user for user in node.users if not _reads_row_count(user)]


def _reads_row_count(node: fx.Node) -> bool:
    """Whether a node computes only the number of rows of another."""
    if _is_row_count(node):
        return True
    return _is_shape(node) and all(
        _is_row_count(user) or not user.users and user.target is operator.getitem
        for user in node.users
    )


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.target is getattr and node.args[1:] == ("shape",)


def _is_row_count(node: fx.Node) -> bool:
    """Whether a node is x.size(0) or x.shape[0]."""
    if node.op == "call_method":
        return node.target == "size" and node.args[1:] == (0,)
    return (
        node.target is operator.getitem
        and node.args[1:] == (0,)
        and isinstance(node.args[0], fx.Node)
        and _is_shape(node.args[0])
    )


def _identity(x: Tensor) -> Tensor:
    return x


def _apply(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Tensor:
    return call(x, *args, **kwargs)
