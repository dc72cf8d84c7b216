"""Selecting the layers of a module, and replacing them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from subbayes.utils.checks import fail, fail_type

__all__ = [
    "LAYERS",
    "READERS",
    "select_layers",
    "has_hooks",
    "own_parameters",
    "parent_of",
    "replace_layer",
]

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""Layers that can be sparse: they are converted, pruned, and reduced on export."""

READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read the weights of their layers directly, at least in evaluation mode."""


def select_layers(
    module: nn.Module,
    keep: Collection[str],
    stays: Callable[[nn.Module, str, nn.Module], bool] | None = None,
) -> dict[str, nn.Module]:
    """The linear and convolutional layers of a module, except those to keep, by name.

    Args:
        module: the module.
        keep: names of layers, or of modules all of whose layers are kept.
        stays: function of a module, a name and a layer: whether to keep that layer as well.

    Raises:
        InputError: a name that is no layer, shared weights, weights that are computed from others.

    Example:
        >>> list(select_layers(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1)), "1"))
        ['0']
    """
    if not isinstance(keep, Collection):
        fail_type("keep", "names of layers", keep)
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    if wrong := [k for k in keep if not isinstance(k, str)]:
        fail_type("keep", "names of layers", wrong[0])
    found = {
        name: layer
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, LAYERS) and not (stays and stays(module, name, layer))
    }
    known = dict(module.named_modules(remove_duplicate=False))
    unknown = [name for name in keep if name not in known]
    if unknown:
        fail("keep", "names of layers: " + ", ".join(found), ", ".join(unknown))
    chosen: dict[str, nn.Module] = {
        name: layer
        for name, layer in found.items()
        if not any(k in ("", name) or name.startswith(f"{k}.") for k in keep)
    }
    _check_ready(chosen)
    _check_plain(chosen)
    _check_shared(module, chosen)
    return chosen


def _check_ready(chosen: Mapping[str, nn.Module]) -> None:
    lazy = [
        name for name, layer in chosen.items() if any(map(is_lazy, own_parameters(layer).values()))
    ]
    if lazy:
        fail(
            "module",
            "layers that know their sizes",
            f"lazy ones: {', '.join(lazy)}",
            "Call the module on some rows first",
        )


def _check_plain(chosen: Mapping[str, nn.Module]) -> None:
    odd = [
        name or type(layer).__name__
        for name, layer in chosen.items()
        if "weight" not in own_parameters(layer)
    ]
    if odd:
        fail(
            "module",
            "weights that are parameters",
            f"{', '.join(odd)}, whose weights are computed",
            "Remove the parametrisation (weight or spectral norm) first, or name "
            "these layers in keep=",
        )


def _check_shared(module: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        owner = name.rpartition(".")[0]
        if first != name and (owner in chosen or first.rpartition(".")[0] in chosen):
            fail(
                "module",
                "weights of one layer each",
                f"{first} and {name}, which share theirs",
                "Name these layers in keep=",
            )


def replace_layer(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Replace a layer of a module in place.

    Args:
        module: the module.
        name: of the layer; "" is the module itself.
        layer: the new layer.

    Example:
        >>> replace_layer(nn.Sequential(nn.ReLU()), "0", nn.Tanh())
        Sequential(
          (0): Tanh()
        )
        >>> replace_layer(nn.ReLU(), "", nn.Tanh())
        Tanh()
    """
    if not name:
        return layer
    setattr(parent_of(module, name), name.rpartition(".")[2], layer)
    return module


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself, without those of its submodules.

    Example:
        >>> list(own_parameters(nn.Linear(3, 1))), own_parameters(nn.Sequential(nn.Linear(3, 1)))
        (['weight', 'bias'], {})
    """
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks.

    Example:
        >>> layer = nn.ReLU()
        >>> handle = layer.register_forward_hook(print)
        >>> has_hooks(layer), has_hooks(nn.ReLU())
        (True, False)
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def parent_of(module: nn.Module, name: str) -> nn.Module:
    """The submodule that contains the one of a name.

    Example:
        >>> parent_of(nn.Sequential(nn.Sequential(nn.ReLU())), "0.0")
        Sequential(
          (0): ReLU()
        )
    """
    return module.get_submodule(name.rpartition(".")[0])
