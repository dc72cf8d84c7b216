"""What identifies the architecture of a module."""

from __future__ import annotations

from torch import nn

from subbayes.utils.addresses import without_addresses

__all__ = ["architecture_of"]


def architecture_of(module: nn.Module) -> str:
    """The printed form of a module, which identifies its architecture.

    Example:
        >>> architecture_of(nn.Tanh())
        'Tanh: Tanh()'
    """
    return without_addresses(f"{type(module).__qualname__}: {module!r}")
