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


def settings_of(module: nn.Module) -> dict[str, dict[str, str]]:
    """The class of a module and of each submodule, and settings that outputs depend on.

    Linear layers are `Linear` in every layout. Of classes of torch, and of layers whose size export
    changes, the settings are the attributes but the sizes; of other classes what `extra_repr`
    returns.

    Example:
        >>> settings_of(nn.LeakyReLU(0.5))
        {'': {'class': 'LeakyReLU', 'negative_slope': '0.5'}}
    """
    return {name: _settings(own) for name, own in module.named_modules()}


def differences(module: nn.Module, settings: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Submodules of another class or with other settings than those of a network, in words.

    Settings that one of two versions of torch does not have are not compared.

    Args:
        module: a module.
        settings: as `settings_of` returns them.

    Example:
        >>> differences(nn.ELU(2.0), settings_of(nn.ELU()))
        ['the module (alpha=2.0 instead of 1.0)']
    """
    return [
        f"{name or 'the module'} ({key}={value[:_SHOWN]} instead of {saved[:_SHOWN]})"
        for name, own in settings_of(module).items()
        for key, value in own.items()
        if (saved := settings.get(name, own).get(key, value)) != value
    ]


def _settings(module: nn.Module) -> dict[str, str]:
    if isinstance(module, (CsrLinear, TiledLinear)):
        return {"class": nn.Linear.__name__}
    found = {"class": type(module).__name__}
    if isinstance(module, DROPOUTS):
        return found
    resized = isinstance(module, (*LAYERS, *BATCH_NORMS))
    if not (resized or type(module).__module__.startswith("torch.")):
        return found | {"extra_repr": without_addresses(module.extra_repr())}
    return found | {
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
