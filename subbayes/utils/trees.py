"""Tensors in nested tuples, lists and dicts, such as the inputs and targets of some rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from subbayes.utils.checks import fail
from subbayes.utils.types import Inputs, Targets


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


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same entries of the same memory; False for other empty ones.

    Example:
        >>> import torch
        >>> x = torch.arange(6)
        >>> is_same_view(x[:3], x[:3]), is_same_view(x[:3], x[::2])
        (True, False)
    """
    first, second = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (a, b))
    return a is b or (a.numel() > 0 and first == second)


def with_tensors(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """A copy of `tree` that holds other tensors, in the order of `tensors_of`."""
    rest = iter(tensors)
    return tree_map(lambda _: next(rest), tree)


def row_kind(tree: Any) -> Hashable:
    """Shapes of a row and dtypes of nested tensors, by name, which batches of the same kind share.

    Example:
        >>> import torch
        >>> row_kind({"x": torch.zeros(3, 2)}) == row_kind({"x": torch.ones(5, 2)})
        True
    """
    if isinstance(tree, Tensor):
        return tree.shape[1:], tree.dtype
    if isinstance(tree, dict):
        return tuple((name, row_kind(part)) for name, part in tree.items())
    return tuple(map(row_kind, tree)) if isinstance(tree, (tuple, list)) else None


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


# --- rows of inputs and targets -------------------------------------------------------------------


def leaves(values: Inputs | Targets) -> list[Tensor]:
    """The tensors of a tensor, tuple or dict."""
    return list(named_leaves(values).values())


def named_leaves(values: Inputs | Targets) -> dict[str, Tensor]:
    """The tensors of a tensor, tuple or dict, by key or position."""
    if isinstance(values, Tensor):
        return {"": values}
    if isinstance(values, dict):
        return values
    return {str(i): tensor for i, tensor in enumerate(values)}


def n_rows(values: Inputs | Targets) -> int:
    """Number of rows of inputs or targets."""
    first = leaves(values)[0]
    return first.shape[0] if first.ndim else 1


def take(values: Any, rows: Any) -> Any:
    """The given rows (slice or index tensor) of a tensor, tuple or dict of tensors."""
    if isinstance(rows, Tensor):  # may be on another device than the data
        return tree_map(lambda t: t[rows.to(t.device)], values)
    return tree_map(lambda t: t[rows], values)


def to_device(values: Any, device: torch.device) -> Any:
    """Move a tensor, tuple or dict of tensors from the CPU to a device.

    Raises:
        InputError: data on another accelerator.
    """
    return tree_map(lambda tensor: _move(tensor, device), values)


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type not in ("cpu", torch.device(device).type):
        fail(
            "data",
            f"tensors on the CPU or on {device}, where the module is",
            tensor.device,
            "Move the module or the data with .to(device)",
        )
    return tensor.to(device, non_blocking=True)
