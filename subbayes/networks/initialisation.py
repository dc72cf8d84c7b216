"""Fresh initial weights for a module of a given architecture."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from subbayes.utils.checks import fail, fail_type
from subbayes.utils.seeding import forked

__all__ = ["fresh", "reinitialised"]


def fresh(module: nn.Module, factory: Callable[[], nn.Module] | None, seed: int) -> nn.Module:
    """A module with initial weights of a seed."""
    if factory is None:
        return reinitialised(module, seed)
    with forked(seed):
        made = factory()
    if not isinstance(made, nn.Module):
        fail_type("factory", "a function that returns a module", made)
    return made


def reinitialised(module: nn.Module, seed: int) -> nn.Module:
    """A copy of a module with fresh initial weights.

    Each layer's `reset_parameters` is called, with torch's global generators seeded for it and
    put back. Frozen parameters keep their values.

    Args:
        module: the module, which is not changed.
        seed: of the initial weights.

    Raises:
        InputError: a layer with parameters of its own but no `reset_parameters`.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> bool((reinitialised(layer, 0).weight == reinitialised(layer, 0).weight).all())
        True
    """
    other = copy.deepcopy(module)
    frozen = {n: p.detach().clone() for n, p in other.named_parameters() if not p.requires_grad}
    device = next((p.device for p in other.parameters()), torch.device("cpu"))
    with forked(seed, device), torch.no_grad():
        for name, layer in other.named_modules():
            _reset(name, layer)
        for name, parameter in other.named_parameters():
            if name in frozen:
                parameter.copy_(frozen[name])
    return other


def _reset(name: str, layer: nn.Module) -> None:
    own = list(layer.parameters(recurse=False))
    if own and not any(p.requires_grad for p in own):
        return
    reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
    if callable(reset):
        reset()
    elif own:
        where = f"{type(layer).__name__} {name}".strip()
        fail(
            "module",
            "a reset_parameters method in every layer with parameters",
            f"none in {where}",
            "Add one, or pass factory=a function that makes a fresh module",
        )
