"""Initial weights for a module of a given architecture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from subbayes.networks.adapters.in_use import loaded_adapters
from subbayes.networks.adapters.names import tuner_layer
from subbayes.networks.module_copy import set_values, shared_copy
from subbayes.networks.network import Network
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.seeding import fork_rng
from subbayes.utils.types import ModuleFactory, Weights


def fresh_module(module: nn.Module, factory: ModuleFactory | None, seed: int) -> nn.Module:
    """A module with initial weights from a seed: `factory()`, or `reinitialise(module)`.

    Frozen parameters of the module, and buffers of its frozen parts, are kept in both cases.

    Raises:
        InputTypeError: the factory does not return a module.
        InputError: the factory returns a module without the frozen parameters of `module`, or
            with others of their names; or what `reinitialise` raises.
    """
    if factory is None:
        return reinitialise(module, seed)
    with fork_rng(seed):
        made = factory()
    if not isinstance(made, nn.Module):
        fail_type("factory", "a function that returns a module", made)
    _keep_frozen(made, module)
    return made


def _keep_frozen(made: nn.Module, module: nn.Module) -> None:
    """Give a module of a factory the frozen parts of `module`: their values and their modes."""
    frozen = _frozen_tensors(module)
    own = _named_tensors(made)
    if any(name not in own or own[name].shape != kept.shape for name, kept in frozen.items()):
        _fail_of_architecture()
    with torch.no_grad():
        for name, kept in frozen.items():
            if isinstance(own[name], nn.Parameter):
                own[name].requires_grad_(False)
            set_values(own[name], kept)
    for path, part in _frozen_parts(module):
        made.get_submodule(path).training = part.training


def _fail_of_architecture() -> NoReturn:
    fail(
        "factory",
        "modules of the same architecture as the module",
        "another architecture",
        "Return a fresh module of the same architecture",
    )


def reinitialise(module: nn.Module, seed: int) -> nn.Module:
    """A copy of a module with initial weights from each layer's `reset_parameters`.

    A part is reset after those in it, as constructors do. Frozen parameters keep their values,
    whose memory is shared, and frozen parts their buffers; LoRA begins without an
    effect; torch's global generators are restored afterwards.

    Args:
        module: the module, which is not changed.
        seed: seed of the initial weights.

    Raises:
        InputError: a trainable parameter that no `reset_parameters` sets, such as those of weight
            norm, or adapters of peft other than LoRA.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> bool((reinitialise(layer, 0).weight == reinitialise(layer, 0).weight).all())
        True
    """
    other = shared_copy(module)
    device = next((p.device for p in other.parameters()), torch.device("cpu"))
    with fork_rng(seed, device), torch.no_grad():
        _reset(other, loaded_adapters(other), set(), set())
        _check_reset(other)
    return other


_WITHOUT_THE_BASE = ("gaussian", "orthogonal", "eva")  # others change the weights of the base model
_UNSET = 0.739085
"""Value of trainable parameters before they are reset, which no initial value is."""


def _reset(
    part: nn.Module, configs: Mapping[str, Any], adapters: set[nn.Module], done: set[nn.Module]
) -> None:
    """Reset a part after those in it; frozen parts and the layers of `adapters` stay as they are.

    Args:
        part: the part, which is changed.
        configs: the configurations of peft by name of the adapter.
        adapters: layers of adapters that are reset, to which those of the part are added.
        done: parts that are reset, as one may be registered under two names.
    """
    if part in done or _is_frozen(part):
        return
    done.add(part)
    if isinstance(part, tuner_layer() or ()):
        with _unchanged(part, _frozen_tensors(part)):
            _reset_lora(part, configs)
        adapters.add(part)
        return
    for child in part.children():
        _reset(child, configs, adapters, done)
    for parameter in part.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.fill_(_UNSET)
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if callable(reset):
        within = [f"{path}." for path, one in part.named_modules() if one in adapters]
        names = [n for n in _named_tensors(part) if n.startswith(tuple(within))]
        with _unchanged(part, [*names, *_frozen_tensors(part)]):
            reset()


def _reset_lora(layer: Any, configs: Mapping[str, Any]) -> None:
    """Initialise a layer of LoRA as peft does, with B = 0, so that it has no effect.

    Args:
        layer: the layer, which is changed.
        configs: the configurations of peft by name of the adapter, as far as there are any.

    Raises:
        InputError: another kind of adapter, or initial values from the weights of the base model,
            such as those of PiSSA, which have changed that model.
    """
    remedy = "Pass factory=a function that returns a fresh module"
    if not hasattr(layer, "reset_lora_parameters"):
        fail("module", "LoRA, whose initial values are known", type(layer).__name__, remedy)
    for adapter in layer.active_adapters:
        initial = getattr(configs.get(adapter), "init_lora_weights", True)
        if isinstance(initial, str) and initial not in _WITHOUT_THE_BASE:
            expected = "adapters whose initial values do not depend on the weights of the base"
            fail("module", expected, f"init_lora_weights={initial!r}", remedy)
        layer.reset_lora_parameters(adapter, "gaussian" if initial == "gaussian" else True)


@contextmanager
def _unchanged(part: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Let what is written to some parameters and buffers of a part be lost.

    Memory of frozen parameters is shared with the module of the user.
    """
    kept = []
    for path, _, name in (full.rpartition(".") for full in names):
        owner = part.get_submodule(path)
        tensor = getattr(owner, name)
        kept.append((owner, name, tensor, tensor.data))
    for _, _, tensor, values in kept:
        tensor.data = values.clone()
    try:
        yield
    finally:
        for owner, name, tensor, values in kept:
            tensor.data = values
            setattr(owner, name, tensor)


def _check_reset(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not (parameter.requires_grad and parameter.numel()):
            continue
        if bool((parameter == parameter.new_tensor(_UNSET)).all()):
            path, _, own = name.rpartition(".")
            layer = module.get_submodule(path)
            where = f"{type(layer).__name__} {path}".strip()
            has_own = hasattr(layer, "reset_parameters") or hasattr(layer, "_reset_parameters")
            fail(
                "module",
                "a reset_parameters method in every layer with parameters",
                f"one in {where} that does not set {own}" if has_own else f"none in {where}",
                ("Set it there" if has_own else "Add one")
                + ", or pass factory=a function that returns a fresh module (to compare_methods: "
                "in place of the module)",
            )


def _is_frozen(part: nn.Module) -> bool:
    """Whether a part has parameters, and none that is trainable."""
    flags = [p.requires_grad for p in part.parameters()]
    return bool(flags) and not any(flags)


def _frozen_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts that are frozen, and those in them, by all of their names."""
    frozen: tuple[str, ...] = ()
    for path, part in module.named_modules(remove_duplicate=False):
        if not f"{path}.".startswith(frozen) and _is_frozen(part):
            frozen = (*frozen, f"{path}." if path else "")
        if f"{path}.".startswith(frozen):
            yield path, part


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(remove_duplicate=False))


def _frozen_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters, and buffers of frozen parts, by all of their names."""
    paths = {path for path, _ in _frozen_parts(module)}
    return {
        name: tensor
        for name, tensor in _named_tensors(module).items()
        if (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
        or name.rpartition(".")[0] in paths
    }


def module_with_fresh_weights(
    network: Network, seed: int, factory: ModuleFactory | None = None
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


def fresh_weights(network: Network, factory: ModuleFactory | None, seed: int) -> Weights:
    """Initial weights from a seed for the architecture of a network."""
    module = fresh_module(network.module_with(), factory, seed)
    if factory is not None:
        chosen = network.masks or list(network.names)
        same = set(chosen) <= {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if same:
            same = Network(module, chosen, network.output).architecture == network.architecture
        if not same:
            _fail_of_architecture()
    return network.flatten(module)
