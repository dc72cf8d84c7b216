"""Initial values of the adapters of peft, for starts of ensembles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from subbayes.networks.adapters.names import tuner_layer
from subbayes.utils.checks import fail

_RESET = re.compile(r"reset_(\w+_)?parameters")
_WITHOUT_THE_BASE = ("gaussian", "orthogonal", "eva")  # others change the weights of the base model


def reset_adapter(module: nn.Module, configs: Mapping[str, Any]) -> bool:
    """Initialise the adapters of one layer of peft as the library does; False for other modules.

    The outputs are then those of a new adapter: for most kinds those of no adapter (B = 0 in LoRA,
    and the magnitudes of the weights of the base model in DoRA), unlike after `reset_parameters` of
    each part. LoRA always begins with B = 0, also where `init_lora_weights=False`.

    Args:
        module: the layer; changed in place.
        configs: the configurations of peft by name of the adapter, as far as there are any.

    Raises:
        InputError: initial values from the weights of the base model, such as those of PiSSA, which
            the base model then lacks; or a kind that cannot be initialised alone.
    """
    layer: Any = module
    if tuner_layer() is None or not isinstance(module, tuner_layer()):
        return False
    if not any(p.requires_grad for p in module.parameters()):
        return True
    name = next((name for name in dir(type(module)) if _RESET.fullmatch(name)), None)
    if name is None:
        return False
    for adapter in layer.active_adapters:
        config = configs.get(adapter)
        _check_initial_values(config)
        kind = getattr(config, "init_weights", True)
        if adapter in getattr(layer, "miss_block", ()):  # a function for each variant, of its shape
            if kind is False:
                layer.reset_miss_parameters_random(adapter)
            else:
                nn.init.zeros_(layer.miss_block[adapter])
            continue
        if adapter in getattr(layer, "c3a_kernel", ()):
            nn.init.zeros_(layer.c3a_kernel[adapter])  # which its function for True leaves as it is
            layer.reset_c3a_parameters(adapter, kind)
            continue
        if adapter in getattr(layer, "fourierft_spectrum", ()) and kind is False:
            nn.init.normal_(layer.fourierft_spectrum[adapter])
            continue
        gaussian = getattr(config, "init_lora_weights", True) == "gaussian"
        _reset(layer, name, adapter, "gaussian" if gaussian else True)
        if adapter in getattr(layer, "lora_magnitude_vector", ()):
            _reset_magnitude(layer, adapter, config)
    return True


def _check_initial_values(config: Any) -> None:
    found = getattr(config, "init_lora_weights", True)
    if isinstance(found, str) and found.lower() not in _WITHOUT_THE_BASE:
        fail(
            "module",
            "adapters whose initial values do not depend on the weights of the base model",
            f"init_lora_weights={found!r}, by which these have been changed",
            "Pass factory=a function that returns a fresh module",
        )


def _reset(layer: Any, name: str, adapter: str, kind: Any) -> None:
    try:
        getattr(layer, name)(adapter)
    except TypeError:  # of LoRA, whose kinds of initial values are an argument
        try:
            getattr(layer, name)(adapter, kind)
        except TypeError as error:
            _fail_of_kind(layer, error)


def _reset_magnitude(layer: Any, adapter: str, config: Any) -> None:
    """Set the magnitudes of DoRA to the norms of the weights of the base model, as B = 0."""
    own = layer.lora_magnitude_vector[adapter]
    try:
        layer.lora_variant[adapter].init(layer, adapter_name=adapter, config=config)
    except (AttributeError, KeyError, TypeError) as error:
        _fail_of_kind(layer, error)
    made = layer.lora_magnitude_vector[adapter]
    own.weight.data.copy_(made.weight)
    layer.lora_magnitude_vector[adapter] = own


def _fail_of_kind(layer: Any, error: Exception) -> NoReturn:
    fail(
        "module",
        "adapters that can be initialised layer by layer",
        f"a layer {type(layer).__name__} of peft, which cannot",
        "Pass factory=a function that returns a fresh module",
        cause=error,
    )
