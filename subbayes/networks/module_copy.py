"""Copies of modules, with shared memory of frozen parameters, and calls with other values."""

from __future__ import annotations

import copy
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from subbayes.distributed.sharded_weights import is_sharded
from subbayes.networks.adapters.names import is_of_base
from subbayes.networks.embeddings import differentiate_embeddings
from subbayes.networks.tracing.private_torch import map_forward_hooks
from subbayes.utils.checks import fail
from subbayes.utils.seeding import torch_lock

_INPUT_GRADIENTS = re.compile("make_inputs?_requires?_grads?")


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of shared parameters and buffers in other submodules, with the first name.

    A submodule that is registered under two names counts once.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> _ = model.append(model[0])
        >>> tied_names(model)
        {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for path, part in module.named_modules():
        own = [*part.named_parameters(path, False, False), *part.named_buffers(path, False, False)]
        for name, tensor in own:
            if first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
    return tied


def call_with(
    module: nn.Module,
    values: Mapping[str, Tensor] | None,
    tied: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call a module with other parameters and buffers.

    By itself, `functional_call` leaves tensors in place of the parameters of a submodule that is
    registered under two names, because it exchanges them twice. Activation checkpointing is off in
    a call with other values: the backward pass would call layers again with the module's own.

    Args:
        module: the module, which is as before afterwards.
        values: the parameters and buffers by their first names; by default the module's own.
        tied: from `tied_names`.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if values is None:
        return module(*args, **kwargs or {})
    others = {name: values[first] for name, first in tied.items() if first in values}
    with _without_checkpointing(module):
        return functional_call(module, {**values, **others}, args, kwargs, tie_weights=False)


@contextmanager
def _without_checkpointing(module: nn.Module) -> Iterator[None]:
    """Turn off the activation checkpointing of models of transformers, which is on in training."""
    each = module.modules() if module.training else ()
    parts: list[Any] = [part for part in each if getattr(part, "gradient_checkpointing", False)]
    for part in parts:
        part.gradient_checkpointing = False
    try:
        yield
    finally:
        for part in parts:
            part.gradient_checkpointing = True


def _detached(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except RuntimeError:  # a result stored during a call under vmap
        return torch.empty(0)


def private_copy(
    module: nn.Module, trainable: Container[str], copy_frozen: bool = True
) -> nn.Module:
    """A copy of the module in evaluation mode.

    Hooks of fine-tuning by which embeddings require gradients stay, for training with activation
    checkpointing, but do nothing under transforms of `torch.func`, which refuse them.
    Embeddings have the derivatives of their outputs, see `embeddings`.

    Args:
        module: the module, which is not changed.
        trainable: names of parameters that are trainable in the copy.
        copy_frozen: copy frozen parameters too; if False, the memory of those of a base model is
            shared. Frozen heads beside adapters are copied, since artifacts hold them.
    """
    every = {name for name, _ in module.named_parameters()}
    shared = () if copy_frozen else [n for n in every if is_of_base(n) and n not in trainable]
    duplicate = shared_copy(module, every.difference(shared))
    for name, parameter in duplicate.named_parameters():
        if name in trainable:
            parameter.requires_grad_(True)
    for part in duplicate.modules():
        map_forward_hooks(part, _outside_transforms)
    differentiate_embeddings(duplicate)
    return duplicate.eval()


def check_in_one_process(module: nn.Module) -> None:
    """Check that the weights of a module to copy are not sharded.

    Raises:
        InputError: weights that `fully_shard` has divided.
    """
    if is_sharded(module):
        fail(
            "module",
            "weights in one process",
            "weights sharded by fully_shard",
            "Use fit with subspace='random' and a sampler, or a ShardedNetwork",
        )


def _outside_transforms(hook: Any) -> Any:
    """A hook that does nothing under transforms, in place of one of `enable_input_require_grads`.

    transformers, peft and their examples use the same name for it.
    """
    if _INPUT_GRADIENTS.fullmatch(getattr(hook, "__name__", "")):
        return partial(_call_outside_transforms, hook)
    return hook


def _call_outside_transforms(hook: Any, *args: Any) -> Any:
    with suppress(RuntimeError):  # as transforms raise for requires_grad_()
        return hook(*args)


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
    check_in_one_process(module)
    if any(map(is_lazy, module.parameters())):
        fail(
            "module",
            "parameters with shapes",
            "lazy parameters, whose shapes are unknown before the first batch",
            "Call the module on a batch once",
        )
    with torch_lock:  # a call in another thread puts other tensors into the module for a time
        return _shared_copy(module, copied)


def _shared_copy(module: nn.Module, copied: Container[str]) -> nn.Module:
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


class CopiedUnderLock:
    """Base class of objects that hold a module, which other threads may call while it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with a module of its own."""
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        with torch_lock:
            other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def set_values(tensor: Tensor, values: Tensor) -> None:
    """Replace the values of a parameter or buffer; memory of a frozen parameter may be shared."""
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        tensor.data = values.detach().to(tensor)
    else:
        tensor.copy_(values)
