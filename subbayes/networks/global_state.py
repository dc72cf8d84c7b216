"""Global state of torch that the package changes temporarily, and the lock that guards it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributions import Distribution, Normal
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["attention_without_fused_kernels", "keep_argument_validation", "torch_lock"]

torch_lock = threading.RLock()
"""Held while a call changes global flags of torch, swaps the weights of a module or traces one."""


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
