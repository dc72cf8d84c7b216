"""Saving a network in an artifact, without its weights, and rebuilding it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from subbayes.networks.mlp import MLP
from subbayes.networks.network import Network
from subbayes.utils.checks import fail
from subbayes.utils.tensor_file import add_prefix, strip_prefix

__all__ = ["known_outputs", "network_facts", "network_from", "network_tensors"]


def network_tensors(network: Network) -> dict[str, Tensor]:
    """Frozen parameters, buffers and masks of a network."""
    found = add_prefix("network.frozen", network.frozen)
    return found | add_prefix("network.mask", network.masks)


def network_facts(network: Network) -> dict[str, Any]:
    """The architecture of a network, and the settings of an `MLP`.

    Example:
        >>> network_facts(Network(MLP(2, (), 1)))["module"]["n_inputs"]
        2
    """
    module = network.module_with()
    return {
        "architecture": network.architecture,
        "names": list(network.names),
        "module": module.settings if isinstance(module, MLP) else None,
    }


def known_outputs(facts: Mapping[str, Any], output: Any = None) -> int | None:
    """Number of outputs of a saved `MLP`; None for other modules, or if `output` picks some.

    Example:
        >>> known_outputs(network_facts(Network(MLP(2, (), 1))))
        1
    """
    return None if facts["module"] is None or output is not None else facts["module"]["n_outputs"]


def network_from(
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    weights: Tensor,
    module: nn.Module | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Network:
    """Rebuild a network at the given weights.

    Args:
        tensors: tensors of the artifact, with those of `network_tensors`.
        facts: the result of `network_facts`.
        weights: its weights (D,), which determine the device and dtype.
        module: a module of the same architecture, unless it is an `MLP`.
        output: selects the output tensor of the module, as for `Network`.

    Raises:
        InputError: no module, or one of another architecture.
    """
    if module is None:
        if facts["module"] is None:
            fail(
                "module",
                f"a module of the saved architecture {_short(facts['architecture'])}",
                "none",
                "Pass load(path, module=...): code is not saved, only weights",
            )
        module = MLP(**facts["module"], seed=0)  # does not touch torch's global generator
    chosen = strip_prefix("network.mask", tensors) or facts["names"]
    known = chosen
    if isinstance(module, nn.Module):
        known = dict(module.named_parameters(remove_duplicate=False))
    if any(name not in known for name in chosen):
        _refuse_module(facts, f"{type(module).__name__}: {module!r}")
    network = Network(module, chosen, output)
    if network.architecture != facts["architecture"]:
        _refuse_module(facts, network.architecture)
    if (network.device, network.dtype) != (weights.device, weights.dtype):
        network = network.to(weights.device, weights.dtype)
    frozen = strip_prefix("network.frozen", tensors)
    for name in frozen.keys() | network.frozen.keys():
        shapes = [tuple(of[name].shape) if name in of else None for of in (network.frozen, frozen)]
        if shapes[0] != shapes[1]:
            fail("path", f"{name} of shape {shapes[0]}, as the module has", shapes[1])
    return network.with_buffers(frozen).with_weights(weights)


def _refuse_module(facts: Mapping[str, Any], got: str) -> None:
    saved = facts["architecture"]
    lines = zip_longest(saved.splitlines(), got.splitlines(), fillvalue="no such line")
    expected, found = next((pair for pair in lines if pair[0] != pair[1]), (saved, got))
    fail(
        "module",
        f"the saved architecture {_short(saved.partition(':')[0])}, with {_short(expected)!r}",
        repr(_short(found)),
        "Build it with the same layers, sizes and name of the class",
    )


def _short(text: str, width: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
