"""Copies of a module that share the memory of its frozen parameters."""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from subbayes.utils.checks import fail

__all__ = ["private_copy", "set_values", "shared_copy"]


def _detached(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except RuntimeError:  # a result stored during a call under vmap
        return torch.empty(0)


def private_copy(module: nn.Module, copied: Container[str]) -> nn.Module:
    """A copy of the module in evaluation mode, which shares only the memory of frozen parameters.

    Parameters named in `copied` are copied, and trainable.
    """
    duplicate = shared_copy(module, copied)
    for name, parameter in duplicate.named_parameters():
        if name in copied:
            parameter.requires_grad_(True)
    return duplicate.eval()


def shared_copy(module: nn.Module, copied: Container[str] = ()) -> nn.Module:
    """A copy of the module that shares the memory of its frozen parameters, but those `copied`.

    Args:
        module: the module, which is not changed.
        copied: names of frozen parameters to copy.

    Raises:
        InputError: a module that cannot be copied, or whose parameters have no shapes yet.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer.weight.requires_grad_(False).data_ptr() == shared_copy(layer).weight.data_ptr()
        True
    """
    if any(map(is_lazy, module.parameters())):
        fail(
            "module",
            "parameters with shapes",
            "lazy parameters, whose shapes are unknown before the first batch",
            "Call the module on a batch once",
        )
    attributes = [value for m in module.modules() for value in vars(m).values()]
    detached = {  # results that hooks such as weight norm store, which deepcopy refuses
        id(value): _detached(value)
        for value in attributes
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    }
    shared: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False)  # a new object on the same memory
        for name, p in module.named_parameters()
        if type(p) is nn.Parameter and not p.requires_grad and name not in copied
    }
    try:
        return copy.deepcopy(module, detached | shared)
    except Exception as error:
        fail(
            "module",
            "a module that can be copied",
            f"{type(error).__name__}: {error}",
            "Remove references to objects that cannot be copied (trainers, open files) first",
        )


def set_values(tensor: Tensor, values: Tensor) -> None:
    """Replace the values of a parameter or buffer; memory of a frozen parameter may be shared."""
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        tensor.data = values.detach().to(tensor)
    else:
        tensor.copy_(values)
