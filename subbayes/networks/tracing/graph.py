"""Optimise a traced graph without changing its results.

Views that change nothing and repeated operations are removed, and pointwise operations write into
an operand that no other operation reads, which saves the allocation of every activation. On the
CPU, matrix products are combined with what surrounds them (`subbayes.networks.tracing.products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from subbayes.networks.tracing.nodes import axes, calls, is_pure, record_shapes, shape_of
from subbayes.networks.tracing.products import optimise_products

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.squeeze.dims,
    aten.squeeze_.dims,
    aten.unsqueeze.default,
    aten.transpose.int,
}
_NEW_VIEWS: dict[Any, Any] = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
_SAME_SHAPE_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.expand.default}
_ALLOCATES = {
    aten.bmm.default,
    aten.mm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
}
_IN_PLACE = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for overload, names in {
        "Tensor": ("add", "sub", "mul", "div"),
        "default": ("relu", "tanh", "sigmoid", "log", "exp"),
    }.items()
    for name in names
} | {aten.pow.Tensor_Scalar: aten.pow_.Scalar}
_SMOOTH = ("tanh", "sigmoid", "softplus", "gelu", "silu", "elu", "leaky_relu")
_POINTWISE = {
    getattr(aten, name).default
    for name in ("relu", *_SMOOTH, "threshold_backward", *(f"{name}_backward" for name in _SMOOTH))
}
_SMALL = 16  # entries of constants that are compared by value
_COMMUTES = {aten.add.Tensor, aten.mul.Tensor}


def optimise(
    graph_module: GraphModule, tensors: Sequence[Tensor], *, compiles: bool = False
) -> GraphModule:
    """Optimise a traced graph in place and return it; its results are the same.

    Args:
        graph_module: the graph.
        tensors: the tensors it was traced with, on which it is run to record shapes.
        compiles: whether a compiler follows, which adds in-place operations itself.
    """
    graph = graph_module.graph
    _use_new_views(graph)
    record_shapes(graph_module, tensors)
    _cancel_transpositions(graph)
    record_shapes(graph_module, tensors)
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _remove_repetitions(graph)
    _cancel_stacks(graph)
    graph.eliminate_dead_code()
    if all(tensor.device.type == "cpu" for tensor in tensors):
        optimise_products(graph_module, tensors)
    if not compiles:
        new_memory: set[Node] = set()
        for node in graph.nodes:
            if node.op == "call_function":
                _write_in_place(node, new_memory)
    graph.lint()
    graph_module.recompile()
    return graph_module


def fold_constants(
    graph_module: GraphModule, tensors: Sequence[Tensor], constant: Sequence[bool]
) -> list[Tensor]:
    """Precompute the operations whose arguments are the same in all calls.

    Args:
        graph_module: a traced graph; changed in place to take the results as further arguments.
        tensors: the tensors it was traced with.
        constant: for each tensor, whether it is the same in all calls.

    Returns:
        The further arguments.

    Example:
        >>> from subbayes.networks.tracing.private_torch import capture_graph
        >>> x, scale = torch.arange(3.0), torch.tensor(2.0)
        >>> graph = capture_graph(lambda x, scale: x * scale.exp().log(), [x, scale])
        >>> more = fold_constants(graph, [x, scale], [False, True])
        >>> more, graph(x, scale, *more)
        ([tensor(2.)], tensor([0., 2., 4.]))
    """
    graph = graph_module.graph
    if not all(map(is_pure, calls(graph))):
        return []  # an operation could overwrite a result that later calls read
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    values: dict[Node, Any] = {
        node: value
        for node, value, same in zip(placeholders, tensors, constant, strict=True)
        if same
    }
    foldable = set(values)  # operations without inputs are left to the compiler
    for node in graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(graph_module, str(node.target))
        elif node.op == "call_function" and all(
            source in values for source in node.all_input_nodes
        ):
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
            if foldable.intersection(node.all_input_nodes):
                foldable.add(node)
    found: list[Tensor] = []
    for node in [node for node in calls(graph) if node in foldable]:
        readers = [user for user in node.users if user not in foldable]
        if not readers or not isinstance(values[node], Tensor):
            continue
        with graph.inserting_after(placeholders[-1]):
            placeholders.append(graph.placeholder(f"folded{len(found)}"))
        node.replace_all_uses_with(placeholders[-1], delete_user_cb=readers.__contains__)
        found.append(values[node].clone())
    graph.eliminate_dead_code()
    graph_module.recompile()
    return found


def _use_new_views(graph: Graph) -> None:
    """Return a view in place of changing the shape of a tensor that nothing else reads.

    torch does so itself in products with vectors, and a write would prevent other steps.
    """
    for node in calls(graph):
        new, source = _NEW_VIEWS.get(node.target), node.args[0] if node.args else None
        if new is not None and isinstance(source, Node) and len(source.users) == 1:
            node.target = new


def _cancel_transpositions(graph: Graph) -> None:
    """Move transpositions past pointwise functions, and remove adjacent pairs.

    Otherwise a compiler copies the function's result into another memory layout.
    """
    for node in list(graph.nodes):
        operands = [arg for arg in node.args if isinstance(arg, Node)]
        if node.target not in _POINTWISE or not _transposed_alike(operands):
            continue
        with graph.inserting_before(node):
            result = graph.call_function(
                node.target,
                tuple(arg.args[0] if isinstance(arg, Node) else arg for arg in node.args),
                node.kwargs,
            )
            transposed = graph.call_function(aten.transpose.int, (result, *operands[0].args[1:]))
        transposed.meta = dict(node.meta)
        node.replace_all_uses_with(transposed)
        graph.erase_node(node)
    for node in list(graph.nodes):
        source = node.args[0] if node.target is aten.transpose.int else None
        if (
            isinstance(source, Node)
            and source.target is aten.transpose.int
            and axes(source) == axes(node)
        ):
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _transposed_alike(nodes: list[Node]) -> bool:
    """Whether all are transpositions of the same two axes of tensors of the same shape."""
    return bool(nodes) and all(
        node.target is aten.transpose.int
        and axes(node) == axes(nodes[0])
        and shape_of(node).shape == shape_of(nodes[0]).shape  # type: ignore[union-attr]
        for node in nodes
    )


def _remove_repetitions(graph: Graph) -> None:
    """Compute equal expressions once, if all operations are pure."""
    if not all(map(is_pure, calls(graph))):
        return
    for node in calls(graph):
        if node.target is aten.lift_fresh_copy.default:  # the constant is not modified
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    seen: dict[Any, Node] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"] + calls(graph):
        key = node.target, _hashable(node.args), _hashable(node.kwargs)
        if node.op == "get_attr":
            key = _constant(graph, node)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _cancel_stacks(graph: Graph) -> None:
    """Read the parts of a stack directly where it is taken apart, if all operations are pure.

    Pointwise operations alone do so, since others may depend on the layout of a part in memory.
    """
    if not all(map(is_pure, calls(graph))):
        return
    for node in calls(graph):
        if node.target is not aten.unbind.int:
            continue
        source, axis = node.args[0], _axis(node)
        assert isinstance(source, Node)
        if source.target is aten.transpose.int and axis in axes(source):
            swapped = axes(source)
            if max(swapped) - min(swapped) != 1:
                continue  # the parts are transposed too
            (axis,) = swapped - {axis}
            source = source.args[0]
        assert isinstance(source, Node)
        if source.target is not aten.stack.default or _axis(source) != axis:
            continue
        for part in list(node.users):
            direct: Any = source.args[0][part.args[1]]  # type: ignore[index]
            if _same_values(direct, part) and all(map(_is_pointwise, part.users)):
                part.replace_all_uses_with(direct)


def _same_values(direct: Node, part: Node) -> bool:
    """Whether a part of a stack has the dtype of the stack, and an equal or contiguous layout."""
    a, b = shape_of(direct), shape_of(part)
    if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return a.stride == b.stride or a.stride == torch.empty(a.shape, device="meta").stride()


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _axis(node: Node) -> int:
    """The axis of a stack, or along which a tensor is unbound, counted from the front."""
    shape = shape_of(node if node.target is aten.stack.default else node.args[0])
    assert shape is not None
    axis = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(axis, int)
    return axis % len(shape.shape)


def _constant(graph: Graph, node: Node) -> Any:
    """A key of a constant tensor: its value if it is small, else the node itself."""
    value = getattr(graph.owning_module, str(node.target), None)
    if not isinstance(value, Tensor) or value.numel() > _SMALL:
        return node
    return value.dtype, value.device, str(value.tolist())


def _hashable(value: Any) -> Any:
    """A key of arguments, in which equal numbers of different types differ."""
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    return type(value), value


def _alike(a: Any, b: Any) -> bool:
    """Whether the results of two nodes have the same shape, dtype and layout."""
    x, y = shape_of(a), shape_of(b)
    if x is None or y is None:
        return False
    return bool((x.shape, x.dtype, x.stride) == (y.shape, y.dtype, y.stride))


def _is_identity(node: Node) -> bool:
    """A view onto the same shape and strides, or a product with 1."""
    if not node.args or not _alike(node.args[0], node):
        return False
    if node.target in _SAME_SHAPE_VIEWS:
        return True
    return node.target is aten.mul.Scalar and bool(node.args[1] == 1)


def _is_sole_reader(node: Any, new_memory: set[Node]) -> bool:
    """Whether the memory of `node` is read by a single operation."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node.target in _ALLOCATES or node in new_memory:
            return True
        if node.target not in _VIEWS or node.target is aten.expand.default:
            return False
        node = node.args[0]
    return False


def _write_in_place(node: Node, new_memory: set[Node]) -> None:
    """Use the in-place form of a pointwise operation if it is the only reader of its operand."""
    if node.target not in _IN_PLACE:
        return
    new_memory.add(node)
    orders = [node.args]
    if node.target in _COMMUTES and len(node.args) == 2 and not node.kwargs:
        orders.append((node.args[1], node.args[0]))
    for args in orders:
        if _alike(args[0], node) and _is_sole_reader(args[0], new_memory):
            node.target = _IN_PLACE[node.target]
            node.args = tuple(args)
            return
