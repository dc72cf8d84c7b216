"""What the submodules of a module are and how they are set, beside their tensors.

It identifies the module that an exported network belongs to, whose code is not saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from subbayes.networks.layer_kinds import BATCH_NORMS, DROPOUTS
from subbayes.sparse.export.csr_linear import CsrLinear
from subbayes.sparse.export.tiled_layers import TiledLinear
from subbayes.sparse.module_surgery import LAYERS
from subbayes.utils.text_table import without_addresses

_SIZES = ("in_features", "out_features", "in_channels", "out_channels", "num_features")
_WITHOUT_EFFECT = ("dropout", "inplace", "momentum", "training")  # in evaluation mode
_SHOWN = 60  # characters of a setting


def classes_of(module: nn.Module) -> dict[str, str]:
    """The class of a module and of each submodule; linear layers are `Linear` in every layout.

    Example:
        >>> classes_of(nn.Sequential(nn.Linear(2, 1), nn.Tanh()))
        {'': 'Sequential', '0': 'Linear', '1': 'Tanh'}
    """
    return {
        name: nn.Linear.__name__ if _is_linear(own) else type(own).__name__
        for name, own in module.named_modules()
    }


def settings_of(module: nn.Module) -> dict[str, dict[str, str]]:
    """The settings of a module and of each submodule that export keeps and outputs depend on.

    Of classes of torch, and of layers whose size export changes, they are the attributes but the
    sizes; of other classes what `extra_repr` returns.

    Example:
        >>> settings_of(nn.LeakyReLU(0.5))
        {'': {'negative_slope': '0.5'}}
    """
    return {name: found for name, own in module.named_modules() if (found := _settings(own))}


def differences(
    module: nn.Module, layers: Mapping[str, str], settings: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Submodules of another class or with other settings than those of a network, in words.

    Settings that one of two versions of torch does not have are not compared.

    Args:
        module: a module.
        layers: as `classes_of` returns them.
        settings: as `settings_of` returns them.

    Example:
        >>> saved = classes_of(nn.ELU()), settings_of(nn.ELU())
        >>> differences(nn.ELU(2.0), *saved), differences(nn.Tanh(), *saved)
        (['the module (alpha=2.0 instead of 1.0)'], ['the module (Tanh)'])
    """
    found = []
    for name, kind in classes_of(module).items():
        if layers.get(name, kind) != kind:
            found.append(f"{name or 'the module'} ({kind})")
    for name, own in settings_of(module).items():
        saved = settings.get(name, {})
        for key in own:
            if saved.get(key, own[key]) != own[key]:
                change = f"{key}={own[key][:_SHOWN]} instead of {saved[key][:_SHOWN]}"
                found.append(f"{name or 'the module'} ({change})")
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (CsrLinear, TiledLinear))


def _settings(module: nn.Module) -> dict[str, str]:
    if isinstance(module, DROPOUTS) or _is_linear(module):
        return {}
    resized = isinstance(module, (*LAYERS, *BATCH_NORMS))
    if not (resized or type(module).__module__.startswith("torch.")):
        return {"extra_repr": without_addresses(module.extra_repr())}
    return {
        name: getattr(value, "__name__", repr(value))  # activations may be functions
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in (*_SIZES, *_WITHOUT_EFFECT)
        and (_is_plain(value) or hasattr(value, "__name__"))
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
