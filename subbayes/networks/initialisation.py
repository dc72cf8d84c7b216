"""Initial weights for a module of a given architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.adapter_reset import reset_adapter
from subbayes.networks.adapters_in_use import loaded_adapters
from subbayes.networks.module_copy import shared_copy
from subbayes.networks.network import Network
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.seeding import fork_rng

__all__ = ["fresh_module", "fresh_weights", "module_with_fresh_weights", "reinitialise"]


def fresh_module(
    module: nn.Module, factory: Callable[[], nn.Module] | None, seed: int
) -> nn.Module:
    """A module with initial weights from a seed: `factory()`, or `reinitialise(module)`."""
    if factory is None:
        return reinitialise(module, seed)
    with fork_rng(seed):
        made = factory()
    if not isinstance(made, nn.Module):
        fail_type("factory", "a function that returns a module", made)
    return made


def reinitialise(module: nn.Module, seed: int) -> nn.Module:
    """A copy of a module with initial weights from each layer's `reset_parameters`.

    Frozen parameters keep their values, whose memory is shared; adapters of peft begin as new ones
    do, most without an effect; torch's global generators are restored afterwards.

    Args:
        module: the module, which is not changed.
        seed: seed of the initial weights.

    Raises:
        InputError: a layer has trainable parameters and no `reset_parameters`, or adapters whose
            initial values cannot be found, such as those of PiSSA.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> bool((reinitialise(layer, 0).weight == reinitialise(layer, 0).weight).all())
        True
    """
    other = shared_copy(module)
    configs = loaded_adapters(other)
    device = next((p.device for p in other.parameters()), torch.device("cpu"))
    with fork_rng(seed, device), torch.no_grad():
        done: list[str] = []
        for name, layer in other.named_modules():
            if any(name.startswith(f"{path}.") for path in done):
                continue
            with _without_frozen(layer):
                if reset_adapter(layer, configs):
                    done.append(name)
                else:
                    _reset(name, layer)
    return other


@contextmanager
def _without_frozen(layer: nn.Module) -> Iterator[None]:
    """Let what is written to frozen parameters of a layer, whose memory is shared, be lost."""
    own = list(layer.parameters(recurse=False))
    kept = [(p, p.data) for p in own if not p.requires_grad] if _is_trained(own) else []
    for parameter, values in kept:
        parameter.data = values.clone()
    try:
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values


def _is_trained(parameters: list[nn.Parameter]) -> bool:
    return any(p.requires_grad for p in parameters)


def _reset(name: str, layer: nn.Module) -> None:
    own = list(layer.parameters(recurse=False))
    if own and not _is_trained(own):
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
            "Add one, or pass factory=a function that returns a fresh module (to compare_methods: "
            "in place of the module)",
        )


def module_with_fresh_weights(
    network: Network, seed: int, factory: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """A copy of the module with fresh weights; its other parameters are frozen at their values.

    Args:
        network: the network.
        seed: seed of the weights.
        factory: function that returns a module with fresh weights; needed if a layer has no
            `reset_parameters`.

    Raises:
        InputError: masks select a part of a parameter, while `train` trains whole ones.

    Example:
        >>> head = Network(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "last-layer")
        >>> [p.requires_grad for p in module_with_fresh_weights(head, seed=0).parameters()]
        [False, False, True, True]
    """
    if network.masks:
        fail(
            "parameters",
            "whole parameters to train solutions",
            "masks",
            "Train them separately and pass them to connect as solutions=",
        )
    made = network.module_with(fresh_weights(network, factory, seed))
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in network.names)
    return made


def fresh_weights(
    network: Network, factory: Callable[[], nn.Module] | None, seed: int
) -> Float[Tensor, "D"]:
    """Initial weights from a seed for the architecture of a network."""
    module = fresh_module(network.module_with(), factory, seed)
    if factory is not None:
        chosen = network.masks or list(network.names)
        same = set(chosen) <= {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if same:
            same = Network(module, chosen, network.output).architecture == network.architecture
        if not same:
            fail(
                "factory",
                "modules of the same architecture as the module",
                "another architecture",
                "Return a fresh module of the same architecture",
            )
    return network.flatten(module)
