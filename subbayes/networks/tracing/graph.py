"""Optimise a traced graph without changing its results.

Transpositions around pointwise functions cancel, and views that change nothing are removed. On the
CPU, matrix products are combined with what surrounds them (`subbayes.networks.tracing.products`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from subbayes.networks.tracing.nodes import axes, record_shapes, shape_of
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
