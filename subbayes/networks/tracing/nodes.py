"""Operations of a traced graph: shapes of their results, and what else they do."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

_SHAPE = "shape of the result"


@dataclass(frozen=True)
class Shape:
    """Shape, dtype and strides of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]


class _ShapeRecorder(Interpreter):
    """Record the shapes of results; unlike `ShapeProp` it does not print errors."""

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        found = super().run_node(n)
        if isinstance(found, Tensor):
            n.meta[_SHAPE] = Shape(found.shape, found.dtype, found.stride())
        return found


def record_shapes(graph_module: GraphModule, tensors: Sequence[Tensor]) -> None:
    """Run a graph, whose code need not be compiled, and record the shapes of its results."""
    with torch.no_grad():
        _ShapeRecorder(graph_module).run(*tensors)


def shape_of(node: Any) -> Shape | None:
    """What is known of a node's result, if it is a single tensor."""
    found: Shape | None = node.meta.get(_SHAPE) if isinstance(node, Node) else None
    return found


def axes(node: Node) -> set[int]:
    """The two axes that a transposition swaps, counted from the front."""
    shape = shape_of(node)
    assert shape is not None
    swapped: tuple[Any, ...] = node.args[1:3]
    return {axis % len(shape.shape) for axis in swapped}


def calls(graph: Graph) -> list[Node]:
    """The operations of a graph, in their order."""
    return [node for node in graph.nodes if node.op == "call_function"]


def is_random(node: Node) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def writes(node: Node) -> bool:
    """Whether an operation writes into its operands."""
    return node.is_impure() and not is_random(node)


def undisturbed(first: Node, last: Node) -> bool:
    """Whether no operation between two writes, so that the first may be done at the last."""
    node = first.next
    while node is not last:
        if node.op == "call_function" and node.target is not operator.getitem and writes(node):
            return False
        node = node.next
    return True
