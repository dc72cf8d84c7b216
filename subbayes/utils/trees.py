"""Tensors in nested tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["row_kind", "tensors_of", "tree_map", "with_tensors"]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and dicts, in order.

    Example:
        >>> import torch
        >>> tensors_of(({"a": torch.tensor(1), "b": torch.tensor(2)}, torch.tensor(3)))
        [tensor(1), tensor(2), tensor(3)]
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for part in tree for tensor in tensors_of(part)]


def with_tensors(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """A copy of `tree` that holds other tensors, in the order of `tensors_of`."""
    rest = iter(tensors)
    return tree_map(lambda _: next(rest), tree)


def row_kind(tree: Any) -> Any:
    """Shapes of a row and dtypes of nested tensors, which batches that can be joined share.

    Example:
        >>> import torch
        >>> row_kind({"x": torch.zeros(3, 2)}) == row_kind({"x": torch.ones(5, 2)})
        True
    """
    return tree_map(lambda tensor: (tensor.shape[1:], tensor.dtype), tree)


def tree_map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """A copy of `tree` with `function` applied to its tensors.

    Example:
        >>> import torch
        >>> tree_map(lambda t: t + 1, [torch.tensor(1), {"a": (torch.tensor(2),)}])
        [tensor(2), {'a': (tensor(3),)}]
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: tree_map(function, part) for key, part in tree.items()}
    if not isinstance(tree, (tuple, list)):
        return tree
    parts: Iterator[Any] = (tree_map(function, part) for part in tree)
    if hasattr(tree, "_fields"):
        return type(tree)(*parts)
    return type(tree)(parts)
