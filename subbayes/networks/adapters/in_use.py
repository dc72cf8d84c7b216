"""Adapters of peft by name: those in use, and others that are loaded beside them.

Outputs do not depend on the latter, nor on the layers that `modules_to_save` replaces by trained
copies, so artifacts do not either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from subbayes.distributed.sharded_weights import without_shards
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


def _unused(module: nn.Module) -> tuple[Collection[str], Collection[str]]:
    """The names of all adapters, and of those that are not in use."""
    known, used = loaded_adapters(module).keys(), active_adapters(module)
    return known, (known - set(used) if used else ())


def _parts_by_adapter(module: nn.Module, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Path and container of parts by name of their adapter."""
    for path, part in module.named_modules():
        kinds = (nn.ModuleDict, nn.ParameterDict)
        if isinstance(part, kinds) or type(part).__name__ == "BufferDict":
            container: Any = part  # all three iterate over names
            if len(container) and all(name in known for name in container):
                yield path, container


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


def unused_names(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers of adapters of peft that are not in use.

    Those of `replaced_names` are among them.

    Example:
        >>> unused_names(nn.Linear(2, 1))
        set()
    """
    known, unused = _unused(module)
    paths = [
        f"{path}.{name}"
        for path, container in (_parts_by_adapter(module, known) if unused else ())
        for name in container
        if name in unused
    ]
    return _names_below(module, paths) | replaced_names(module)


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


def without_unused(module: nn.Module) -> nn.Module:
    """The module without adapters of peft that are not in use, to look at, not to call.

    Args:
        module: the module, which is not changed and may be sharded; returned if it has none.
    """
    known, unused = _unused(module)
    if not unused:
        return module
    other = without_shards(module)
    for _, container in list(_parts_by_adapter(other, known)):
        for name in [name for name in container if name in unused]:
            delattr(container, name)
        if isinstance(container, nn.ParameterDict):
            container._keys = {key: None for key in container._keys if key not in unused}
    for part in other.modules():
        plain = [own for own in vars(part).values() if type(own) is dict]  # such as `scaling`
        for own in plain:
            if own and all(name in known for name in own):
                for name in unused:
                    own.pop(name, None)
    return other


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
