"""Global state of torch that the package changes temporarily."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.distributions import Distribution, Normal
from torch.nn.attention import SDPBackend, sdpa_kernel

from subbayes.utils.trees import tree_map

_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextmanager
def attention_without_fused_kernels() -> Iterator[None]:
    """Use the math kernel of attention; fused kernels have no forward-mode or batching rule."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def recurrence_without_fused_kernels() -> Iterator[None]:
    """Turn off oneDNN, whose LSTM has no derivative and no batching rule in functorch."""
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled


def outside_inference_mode(function: _Function) -> _Function:
    """Let a function that differentiates be called in `torch.inference_mode()`.

    Inference mode is off during the call, and tensors among its arguments that were made in it are
    copied, because autograd does not take them.

    Example:
        >>> @outside_inference_mode
        ... def slope(x):
        ...     return torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0]
        >>> with torch.inference_mode():
        ...     slope(torch.tensor([3.0]))
        tensor([6.])
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with torch.inference_mode(False):
            args, options = tree_map(_as_normal, (args, options))
            return function(*args, **options)

    return call  # type: ignore[return-value]


def _as_normal(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


@contextmanager
def keep_argument_validation() -> Iterator[None]:
    """Restore the validation of `torch.distributions`, which torch's compiler and zuko turn off."""
    validates = _distributions_validate()
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validates)


def _distributions_validate() -> bool:
    try:
        Normal(torch.tensor(0.0), torch.tensor(-1.0))
    except ValueError:
        return True
    return False
