"""Fresh initial weights for a module of a given architecture."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.network import Network
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.seeding import fork_rng

__all__ = ["fresh", "fresh_weights", "reinitialised", "with_fresh_weights"]


def fresh(module: nn.Module, factory: Callable[[], nn.Module] | None, seed: int) -> nn.Module:
    """A module with initial weights of a seed."""
    if factory is None:
        return reinitialised(module, seed)
    with fork_rng(seed):
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
    with fork_rng(seed, device), torch.no_grad():
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


def with_fresh_weights(
    network: Network, seed: int, factory: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """A copy of the module with fresh weights; its other parameters are frozen at their values.

    Args:
        network: the network.
        seed: of the weights.
        factory: makes a module with fresh weights; needed where a layer has no
            `reset_parameters`.

    Raises:
        InputError: weights that are parts of parameters, since `train` moves whole ones.

    Example:
        >>> head = Network(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "last-layer")
        >>> [p.requires_grad for p in with_fresh_weights(head, seed=0).parameters()]
        [False, False, True, True]
    """
    if network.masks:
        fail(
            "parameters",
            "whole parameters to train solutions of their own",
            "masks",
            "Train them elsewhere and pass them to connect as solutions=",
        )
    drawn = fresh_weights(network, factory, seed)
    made = network.module_with(drawn)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in network.names)
    return made


def fresh_weights(
    network: Network, factory: Callable[[], nn.Module] | None, seed: int
) -> Float[Tensor, "D"]:
    """Initial weights of a seed, for a module of the same architecture."""
    module = fresh(network.module_with(), factory, seed)
    if factory is not None:
        made = Network(module, network.masks or list(network.names), network.output)
        if made.architecture != network.architecture:
            fail(
                "factory",
                "modules of the architecture of the module",
                "another",
                "Return a fresh module of the same architecture",
            )
    return network.flatten(module)
