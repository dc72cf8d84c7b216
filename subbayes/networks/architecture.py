"""What identifies the architecture of a module."""

from __future__ import annotations

import re

from torch import nn

__all__ = ["architecture_of"]


def architecture_of(module: nn.Module) -> str:
    """The printed form of a module, which identifies its architecture.

    Example:
        >>> architecture_of(nn.Tanh())
        'Tanh: Tanh()'
    """
    text = f"{type(module).__qualname__}: {module!r}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # addresses of functions
