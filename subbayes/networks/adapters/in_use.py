"""Adapters of peft by name, and the layers that they replace.

Outputs do not depend on layers that `modules_to_save` replaces by trained copies, so artifacts do
not either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from subbayes.utils.checks import fail


def loaded_adapters(module: nn.Module) -> dict[str, Any]:
    """The configurations of peft by name of the adapter; empty for other modules."""
    found: dict[str, Any] = {}
    for part in module.modules():
        configs = getattr(part, "peft_config", None)
        if isinstance(configs, Mapping):
            found |= configs
    return found


def active_adapters(module: nn.Module) -> list[str]:
    """The names of the adapters of peft in use, sorted."""
    used: set[str] = set()
    for part in module.modules():
        names = getattr(part, "active_adapters", None)
        if isinstance(names, (list, tuple)):
            used.update(names)
    return sorted(used & loaded_adapters(module).keys())


def replaced_names(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers of layers that peft calls trained copies of instead.

    A fresh head of a classifier (`modules_to_save`) is such a layer: it has other random weights in
    each process. Those that are tied to a layer in use are not among them.

    Example:
        >>> replaced_names(nn.Linear(2, 1))
        set()
    """
    paths = []
    for path, part in module.named_modules():
        own, used = dict(part.named_children()), getattr(part, "active_adapters", None)
        copies = own.get("modules_to_save")
        if not (isinstance(copies, nn.ModuleDict) and "original_module" in own and used):
            continue
        if not getattr(part, "disable_adapters", False) and all(name in copies for name in used):
            paths.append(f"{path}.original_module".lstrip("."))
    return _names_below(module, paths)


def _names_below(module: nn.Module, paths: Collection[str]) -> set[str]:
    """Names of the tensors below some paths, without those that have names elsewhere too."""
    if not paths:
        return set()
    every = dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )
    found = {name for name in every if any(f"{name}.".startswith(f"{path}.") for path in paths)}
    elsewhere = {id(tensor) for name, tensor in every.items() if name not in found}
    return {name for name in found if id(every[name]) not in elsewhere}


def check_single_adapter(module: nn.Module) -> None:
    """Check that no adapters of peft are loaded beside those in use.

    Raises:
        InputError: such adapters.
    """
    if others := sorted(loaded_adapters(module).keys() - set(active_adapters(module))):
        names = ", ".join(map(repr, others))
        remedy = "Call model.delete_adapter(name) for each of them"
        fail("parameters", "no adapters of peft but those in use", f"{names} too", remedy)


def check_active_adapters(saved: Collection[str], module: nn.Module) -> None:
    """Check that the adapters in use have the names of those that an artifact was saved with.

    Raises:
        InputError: others, with how to load or choose those.
    """
    used = active_adapters(module)
    if used == sorted(saved) or not used:
        return
    names = [", ".join(map(repr, some)) or "none" for some in (sorted(saved), used)]
    missing = [name for name in saved if name not in loaded_adapters(module)]
    remedy = f"Call model.set_adapter({names[0]}) before"
    if missing:
        remedy = (
            f"Load it by that name: PeftModel.from_pretrained(base, folder of the adapter, "
            f"adapter_name={missing[0]!r})"
        )
    fail("module", f"the adapter {names[0]} in use, as saved", f"the adapter {names[1]}", remedy)
