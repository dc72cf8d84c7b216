"""Selection of the parameters of a module that are weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from subbayes.networks.adapters.names import adapter_names, check_kinds
from subbayes.utils.checks import InputTypeError, closest, fail

ADAPTERS, _ALL, LAST_LAYER = "adapters", "all", "last-layer"

Selection = str | list[str] | Callable[[str, Tensor], bool] | Mapping[str, Tensor | np.ndarray]


def aliases_of(module: nn.Module) -> dict[str, str]:
    """The first name of the parameter for each name of a module; tied parameters have several."""
    every = list(module.named_parameters(remove_duplicate=False))  # keeps the objects of the ids
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name) for name, parameter in every}


def layer_of(name: str) -> str:
    """The layer of a parameter, which may be part of a parametrisation such as weight norm.

    Example:
        >>> layer_of("head.parametrizations.weight.original0"), layer_of("head.bias")
        ('head', 'head')
    """
    if "parametrizations." in name:
        return re.split(r"(?:^|\.)parametrizations\.", name)[0]
    return name.rpartition(".")[0]


def selects_adapters(parameters: Any) -> bool:
    """Whether a selection is "adapters", alone or in a list.

    Example:
        >>> selects_adapters("adapters"), selects_adapters(["adapters", "head.*"])
        (True, True)
    """
    return parameters == ADAPTERS or (
        isinstance(parameters, (list, tuple)) and ADAPTERS in parameters
    )


def select(module: nn.Module, parameters: Selection) -> dict[str, Tensor | None]:
    """Names of the selected trainable parameters, each with its mask or None.

    "adapters" selects the trainable ones among them, or all if none is, as after loading a
    fine-tuned model for inference.
    """
    check_kinds(module)
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    adapters = _adapters(module, trainable) if selects_adapters(parameters) else set()
    if not adapters <= trainable.keys():
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad or n in adapters}
    aliases = {n: first for n, first in aliases_of(module).items() if first in trainable}
    if not trainable:
        fail(
            "module",
            "at least one trainable parameter",
            "none (all have requires_grad=False)"
            if any(True for _ in module.parameters())
            else "a module without parameters",
            "Set requires_grad for the parameters that should be random",
        )
    check_real(module)
    if isinstance(parameters, Mapping):
        return _masked(trainable, {aliases.get(n, n): mask for n, mask in parameters.items()})
    if callable(parameters) and not isinstance(parameters, nn.Module):
        wanted = {n for n, p in trainable.items() if parameters(n, p)}
    else:
        wanted = set()
        for pattern in _patterns(parameters):
            if pattern in (_ALL, ADAPTERS):
                found = set(trainable) if pattern == _ALL else adapters
            elif pattern == LAST_LAYER:
                last = layer_of(list(aliases)[-1])
                found = {first for n, first in aliases.items() if layer_of(n) == last}
            else:
                found = {first for n, first in aliases.items() if fnmatchcase(n, pattern)}
            if not found:
                _fail_of_pattern(pattern, trainable)
            wanted |= found
    if not wanted:
        _fail_of_pattern(parameters, trainable)
    return dict.fromkeys(n for n in trainable if n in wanted)


def _patterns(parameters: Any) -> list[str]:
    """Names and patterns of names in a list."""
    many = isinstance(parameters, (list, tuple))
    patterns = list(parameters) if many else [parameters]
    if not all(isinstance(pattern, str) for pattern in patterns):
        got = f"{type(parameters).__name__}{' of other objects' if many else ''}"
        expected = "names or patterns of names, such as 'all', 'last-layer', 'adapters' or '3.*'"
        remedy = "Name them as module.named_parameters() does, or set requires_grad and pass 'all'"
        raise InputTypeError("parameters", expected, got, remedy)
    return patterns


@contextmanager
def requiring_gradients(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Within it, the named parameters of a module require gradients.

    Args:
        module: the module, which is as before afterwards.
        names: of parameters; unknown ones are left out.

    Example:
        >>> layer = nn.Linear(2, 1).requires_grad_(False)
        >>> with requiring_gradients(layer, ["bias"]):
        ...     [name for name, p in layer.named_parameters() if p.requires_grad]
        ['bias']
        >>> layer.bias.requires_grad
        False
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    changed = [named[n] for n in names if n in named and not named[n].requires_grad]
    try:
        for parameter in changed:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(False)


def check_real(module: nn.Module) -> None:
    """Check that trainable parameters are real, since a weight vector holds real numbers.

    Raises:
        InputError: a complex parameter that requires gradients.

    Example:
        >>> check_real(nn.Linear(2, 1))
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            fail(
                "module",
                "real trainable parameters",
                f"{name} of {parameter.dtype}",
                "Store torch.view_as_real(parameter) and call torch.view_as_complex in forward, or "
                "freeze it with requires_grad_(False)",
            )


def _adapters(module: nn.Module, trainable: Mapping[str, Tensor]) -> set[str]:
    first = aliases_of(module)
    found = {first[name] for name in adapter_names(module)}
    return found & trainable.keys() or found


def _fail_of_pattern(pattern: Any, trainable: Iterable[str]) -> NoReturn:
    fail(
        "parameters",
        "a pattern that selects a trainable parameter",
        repr(pattern),
        closest(pattern, [_ALL, LAST_LAYER, ADAPTERS, *trainable]) or _some(trainable),
    )


def _some(trainable: Iterable[str]) -> str:
    return "Trainable are: " + ", ".join(list(trainable)[:8])


def _masked(
    trainable: Mapping[str, Tensor], masks: Mapping[str, Tensor | np.ndarray]
) -> dict[str, Tensor | None]:
    chosen: dict[str, Tensor | None] = {}
    unknown = [name for name in masks if name not in trainable]
    if unknown:
        fail(
            "parameters",
            "names of trainable parameters",
            ", ".join(map(repr, unknown)),
            closest(unknown[0], trainable) or _some(trainable),
        )
    for name, parameter in trainable.items():
        if name not in masks:
            continue
        mask = torch.as_tensor(masks[name])
        if mask.dtype != torch.bool or mask.shape != parameter.shape:
            fail(
                f"parameters[{name!r}]",
                f"a boolean mask of shape {tuple(parameter.shape)}",
                f"{mask.dtype} of shape {tuple(mask.shape)}",
            )
        if mask.any():
            chosen[name] = mask.to(parameter.device)
    if not chosen:
        fail("parameters", "a mask that selects at least one weight", "masks that select none")
    return chosen
