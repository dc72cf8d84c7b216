"""Select the layers of a module, and replace them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from subbayes.utils.checks import fail

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""Layers that can be sparse, are pruned, and become smaller on export."""

READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read the weights of their layers directly, at least in evaluation mode."""


def select_layers(
    module: nn.Module,
    keep: Collection[str],
    excludes: Callable[[nn.Module, str, nn.Module], bool] | None = None,
) -> dict[str, nn.Module]:
    """The linear and convolutional layers of a module, except those to keep, by name.

    Args:
        module: the module.
        keep: names of layers, or of modules all of whose layers are kept.
        excludes: function of a module, a name and a layer: whether to keep that layer too.

    Raises:
        InputError: an unknown layer, shared weights, weights that are computed from others.

    Example:
        >>> list(select_layers(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1)), "1"))
        ['0']
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    found = {
        name: layer
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, LAYERS) and not (excludes and excludes(module, name, layer))
    }
    known = dict(module.named_modules(remove_duplicate=False))
    unknown = [name for name in keep if name not in known]
    if unknown:
        fail("keep", "names of layers: " + ", ".join(found), ", ".join(unknown))
    selected: dict[str, nn.Module] = {
        name: layer
        for name, layer in found.items()
        if not any(k in ("", name) or name.startswith(f"{k}.") for k in keep)
    }
    _check_parameters(selected)
    _check_shared(module, selected)
    return selected


def _check_parameters(selected: Mapping[str, nn.Module]) -> None:
    parameters = {name: own_parameters(layer) for name, layer in selected.items()}
    lazy = [name for name, own in parameters.items() if any(map(is_lazy, own.values()))]
    if lazy:
        fail(
            "module",
            "layers with known sizes",
            f"lazy ones: {', '.join(lazy)}",
            "Call the module on some rows first",
        )
    computed = [
        name or type(selected[name]).__name__
        for name, own in parameters.items()
        if "weight" not in own
    ]
    if computed:
        fail(
            "module",
            "weights that are parameters",
            f"{', '.join(computed)}, whose weights are computed",
            "Remove the parametrisation (weight or spectral norm) first, or name "
            "these layers in keep=",
        )


def _check_shared(module: nn.Module, selected: Mapping[str, nn.Module]) -> None:
    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        owner = name.rpartition(".")[0]
        if first != name and (owner in selected or first.rpartition(".")[0] in selected):
            fail(
                "module",
                "layers that do not share weights",
                f"{first} and {name}, which are the same tensor",
                "Name these layers in keep=",
            )


def replace_layer(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Replace a layer of a module in place, and return the module.

    Args:
        module: the module.
        name: of the layer; "" for the module itself.
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


def parent_of(module: nn.Module, name: str) -> nn.Module:
    """The submodule that contains a submodule.

    Example:
        >>> parent_of(nn.Sequential(nn.Sequential(nn.ReLU())), "0.0")
        Sequential(
          (0): ReLU()
        )
    """
    return module.get_submodule(name.rpartition(".")[0])
