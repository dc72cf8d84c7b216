"""What identifies the architecture of a module."""

from __future__ import annotations

from torch import nn

from subbayes.networks.embeddings import without_options
from subbayes.networks.tracing.private_torch import uncompiled
from subbayes.utils.text_table import without_addresses


def architecture_of(module: nn.Module) -> str:
    """The printed form of a module, which identifies its architecture.

    Example:
        >>> architecture_of(nn.Tanh())
        'Tanh: Tanh()'
    """
    module = uncompiled(module)
    return without_options(without_addresses(f"{type(module).__qualname__}: {module!r}"))
