"""Adapters of a fine-tuned module: which parameters they are.

The library peft is never imported here: a module with its layers exists only after the caller has
imported it. Adapters of other libraries, and of one's own, are found by the usual names.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from subbayes.networks.adapters.in_use import active_adapters, check_single_adapter, loaded_adapters
from subbayes.utils.checks import fail

_USUAL_NAMES = re.compile(
    r"(^|\.|_)(lora|loha|lokr|hada|oft|boft|hra|vera|dora|ia3|adalora)_"
    r"|(^|\.)(adapters?|adaption_prompt|adaption_gate|adapter_\w+|\w+_adapter)(\.|$)",
    re.IGNORECASE,
)
_SAVED_BESIDE = re.compile(r"(^|\.)(modules_to_save|ranknum)\.")  # the latter are ranks of AdaLoRA
_SAVED = re.compile(r"(^|\.)(modules_to_save|original_module)\.")
_WITHOUT_EFFECT = (  # entries of configurations that do not change outputs, or are checked apart
    "architectures", "dtype", "id2label", "label2id", "name_or_path", "problem_type", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip
_NAMES = re.compile(  # fields of configurations of peft that do not change outputs
    r"(^|_)(paths?|dirs?|revision|name_or_path|auto_mapping|inference_mode|peft_version)$"
    r"|^adapters$"  # paths of those that X-LoRA mixes
)
_EXCHANGES_PARAMETERS = {  # of peft, by class of the layer, with what to do instead
    "ParamWrapper": (
        "those of LoraConfig(target_parameters=...), which replace parameters in each call",
        "Use target_modules, which takes linear layers, or another kind of adapter",
    ),
    "MultiheadAttention": (
        "those of nn.MultiheadAttention, which make its parameters anew in each call",
        "Use target_modules without it, such as the linear layers of the model",
    ),
}
_IN_USE = "adapters that the outputs depend on"


def adapter_names(module: nn.Module) -> list[str]:
    """Names of the parameters of the adapters of a module.

    Layers of peft list their own. Without them, names such as `lora_A` or `ia3_l` are looked for.
    Heads that are trained beside the adapters (`modules_to_save` of peft) are not adapters.

    Args:
        module: the module.

    Raises:
        InputError: no adapters, or names that select every parameter.

    Example:
        >>> layer = nn.ModuleDict({"base": nn.Linear(2, 2), "lora_A": nn.Linear(2, 1, bias=False)})
        >>> adapter_names(layer)
        ['lora_A.weight']
    """
    named, found = dict(module.named_parameters(remove_duplicate=False)), _found_in(module)
    layers = ", ".join(dict.fromkeys(type(m).__name__ for m in module.modules())) or "none"
    if not found:
        layers = layers if len(layers) < 80 else layers[:79] + "…"
        fail(
            "parameters",
            "adapters in the module, such as lora_A or ia3_l",
            f"none in its layers {layers}",
            "Pass the model of peft before merging its adapters, or a pattern of names",
        )
    if len(found) == len(named):
        fail(
            "parameters",
            "adapters beside the weights of a base model",
            f"names of adapters for all {len(found)} parameters",
            "Pass parameters='all' for all weights, or a pattern of names",
        )
    return found


def has_adapters(module: nn.Module) -> bool:
    """Whether a module has adapters that `adapter_names` finds.

    Raises:
        InputError: adapters that are merged or disabled.

    Example:
        >>> has_adapters(nn.Linear(2, 2))
        False
    """
    return bool(_found_in(module))


def _found_in(module: nn.Module) -> list[str]:
    """Names of the parameters of adapters; of peft if there are any, else by the usual names."""
    named = dict(module.named_parameters(remove_duplicate=False))
    wanted = set(_of_peft(module)) or {
        n for n in named if _USUAL_NAMES.search(n) and not _SAVED.search(n)
    }
    return [name for name in named if name in wanted]


def is_of_base(name: str) -> bool:
    """Whether a frozen parameter belongs to the base model, not to a head of its own.

    Example:
        >>> is_of_base("layer.weight"), is_of_base("head.modules_to_save.default.weight")
        (True, False)
    """
    return not _SAVED_BESIDE.search(name)


def base_names_of(parameters: Mapping[str, Tensor], frozen: Iterable[str]) -> tuple[str, ...]:
    """Names of the frozen parameters of a base model beside adapters."""
    return tuple(n for n in frozen if is_of_base(n) and not parameters[n].requires_grad)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is, or holds, a model of the library transformers."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and any(isinstance(part, base) for part in module.modules())


def settings_digest(module: nn.Module) -> str:
    """A digest of what changes outputs beside the weights: configurations, scales of adapters.

    Modules that have neither have the same digest.

    Of peft, it holds every field of the configurations of the adapters in use that is not the
    default of its class, except names, paths, revisions and the mode. A field that a later version
    adds is then not in it, as long as it has its default.
    """
    layer = tuner_layer()
    configs: dict[int, dict[str, Any]] = {}
    scales: list[Any] = []
    for path, part in module.named_modules():
        config: Any = getattr(part, "config", None)
        if callable(getattr(config, "to_dict", None)):
            configs[id(config)] = {
                key: value
                for key, value in config.to_dict().items()
                if key not in _WITHOUT_EFFECT and not key.startswith("_")
            }
        if layer is not None and isinstance(part, layer):
            scales.append((path, getattr(part, "scaling", None)))
    parts = [list(configs.values()), scales, _peft_settings(module)]
    text = json.dumps(parts, sort_keys=True, default=_kind)
    return hashlib.sha256(text.encode()).hexdigest()


def _peft_settings(module: nn.Module) -> dict[str, Any]:
    """The configurations of peft by name of the adapter, of those in use."""
    configs = loaded_adapters(module)
    return {name: _settings_of(configs[name]) for name in active_adapters(module)}


def _settings_of(config: Any) -> dict[str, Any]:
    """The class of a configuration of peft, and its fields that are not the defaults."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    defaults = {field.name: _plain(_default(field)) for field in fields}
    found = {str(key): _plain(value) for key, value in config.to_dict().items()}
    return {"class": type(config).__name__} | {
        key: value
        for key, value in found.items()
        if not _NAMES.search(key) and not (key in defaults and value == defaults[key])
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default  # MISSING equals no value


def _plain(value: Any) -> Any:
    """Types that JSON has; names in any order, in which peft holds them as lists or sets."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_plain(item) for item in value]
        return sorted(set(items)) if all(isinstance(item, str) for item in items) else items
    return value


def _kind(value: Any) -> str:
    """The type of a value that JSON does not have; its text may hold an address."""
    return type(value).__name__


def _of_peft(module: nn.Module) -> Iterator[str]:
    """Names of the parameters of peft's adapters in use."""
    layer = tuner_layer()
    if layer is None:
        return
    check_active(module)
    check_single_adapter(module)
    for path, part in module.named_modules():
        own = [name for name, _ in part.named_parameters(remove_duplicate=False)]
        if not isinstance(part, layer):
            continue
        own = [name for name in own if name.partition(".")[0] in part.adapter_layer_names]
        active = getattr(part, "active_adapters", None)
        for name in own:
            adapter = name.split(".")[1:2]  # `default` in `lora_A.default.weight`
            if not isinstance(active, (list, tuple)) or not adapter or adapter[0] in active:
                yield f"{path}.{name}" if path else name


def _check_active(part: Any) -> None:
    """Check that outputs depend on the adapters of a layer."""
    if getattr(part, "merged", False):
        remedy = "Call unmerge_adapter() of the model first"
        fail("parameters", _IN_USE, "adapters merged into the weights of the base model", remedy)
    if getattr(part, "disable_adapters", False):
        fail("parameters", _IN_USE, "disabled adapters", "Call enable_adapter_layers() first")


def check_active(module: nn.Module) -> None:
    """Check that the outputs of a module depend on peft's adapters.

    Raises:
        InputError: adapters that are merged or disabled.
    """
    layer = tuner_layer()
    for part in module.modules() if layer is not None else ():
        if isinstance(part, layer):
            _check_active(part)


def check_kinds(module: nn.Module) -> None:
    """Check that a module has no layers of peft that cannot be called with other weights.

    `functional_call` exchanges the parameters of a module, as the forward of some layers does.
    Adapters that are tied share memory, not parameters, and would be random independently. The
    gradients of DoRA leave out the norm of the weights (Liu et al. 2024, section 4.3).

    Raises:
        InputError: such a layer.
    """
    layer = tuner_layer()
    for path, part in module.named_modules() if layer is not None else ():
        if not isinstance(part, layer):
            continue
        kind = type(part).__name__
        if kind in _EXCHANGES_PARAMETERS and type(part).__module__.startswith("peft."):
            what, remedy = _EXCHANGES_PARAMETERS[kind]
            fail("module", "adapters of peft with parameters of their own", what, remedy)
        if getattr(part, "lora_magnitude_vector", ()):
            remedy = "Leave use_dora=True out"
            fail("module", "adapters whose gradients are those of the outputs", "DoRA", remedy)
        kwargs = getattr(part, "kwargs", None)
        if isinstance(kwargs, dict) and kwargs.get("tied_adapter"):
            got = f"those of {path}, tied to the embedding by LoraConfig(ensure_weight_tying=True)"
            remedy = "Leave ensure_weight_tying out, or adapt only one of the two layers"
            fail("module", "adapters of peft with parameters of their own", got, remedy)


def tuner_layer() -> Any:
    """The base class of the layers of peft; None where it is not imported."""
    return getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
