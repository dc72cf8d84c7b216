"""Optimise a traced graph without changing its results.

Transpositions around pointwise functions cancel, and views that change nothing are removed. On the
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

_SAME_SHAPE_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.expand.default}
_SMOOTH = ("tanh", "sigmoid", "softplus", "gelu", "silu", "elu", "leaky_relu")
_POINTWISE = {
    getattr(aten, name).default
    for name in ("relu", *_SMOOTH, "threshold_backward", *(f"{name}_backward" for name in _SMOOTH))
}


def optimise(graph_module: GraphModule, tensors: Sequence[Tensor]) -> GraphModule:
    """Optimise a traced graph in place and return it; its results are the same.

    Args:
        graph_module: the graph.
        tensors: the tensors it was traced with, on which it is run to record shapes.
    """
    graph = graph_module.graph
    record_shapes(graph_module, tensors)
    _cancel_transpositions(graph)
    record_shapes(graph_module, tensors)
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    if all(tensor.device.type == "cpu" for tensor in tensors):
        optimise_products(graph_module, tensors)
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


def _is_identity(node: Node) -> bool:
    """A view onto the same shape and strides, or a product with 1, between products to combine."""
    x, y = shape_of(node.args[0]) if node.args else None, shape_of(node)
    if x is None or y is None or (x.shape, x.dtype, x.stride) != (y.shape, y.dtype, y.stride):
        return False
    if node.target in _SAME_SHAPE_VIEWS:
        return True
    return node.target is aten.mul.Scalar and bool(node.args[1] == 1)
