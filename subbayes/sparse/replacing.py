"""Layers put in place of others."""

from __future__ import annotations

from torch import nn

__all__ = ["LAYERS", "replaced"]

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""What can be sparse: is converted, pruned, and made small on export."""


def replaced(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """The module with a layer in place of the one of this name, changed in place.

    Args:
        module: the module.
        name: of the layer that goes; "" is the module itself.
        layer: what comes for it.

    Example:
        >>> replaced(nn.Sequential(nn.ReLU()), "0", nn.Tanh())
        Sequential(
          (0): Tanh()
        )
        >>> replaced(nn.ReLU(), "", nn.Tanh())
        Tanh()
    """
    if not name:
        return layer
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)
    return module
