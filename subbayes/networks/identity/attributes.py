"""Tensors that a module keeps as plain attributes, beside its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from subbayes.artifacts.files import fail_damaged
from subbayes.utils.checks import fail
from subbayes.utils.trees import tensors_of, with_tensors

_OF_MODULES = frozenset(vars(nn.Module()))
_COMPUTED = ("_g", "_orig")  # suffixes of parameters from which hooks compute an attribute


def attribute_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Plain tensors, also in lists and dicts, by the name of the attribute and their position.

    `state_dict` leaves them out, although outputs may depend on them.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer.scale = torch.tensor(3.0)
        >>> attribute_tensors(layer)
        {'scale.0': tensor(3.)}
    """
    found: dict[str, Tensor] = {}
    for _, name, _, value in _attributes(module):
        for i, tensor in enumerate(tensors_of(value)):
            with suppress(RuntimeError):  # a result that was stored in a call under vmap
                found[f"{name}.{i}"] = as_real(tensor.detach().clone())
    return found


def set_attributes(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Set plain tensors of a module, in place.

    Args:
        module: the module.
        saved: what `attribute_tensors` returned for a module of the same architecture.

    Raises:
        InputError: an attribute that holds other values than tensors.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer.scale = torch.tensor(3.0)
        >>> set_attributes(layer, {"scale.0": torch.tensor(2.0)})
        >>> layer.scale
        tensor(2.)
    """
    for part, name, key, value in _attributes(module):
        old = tensors_of(value)
        new = [saved[f"{name}.{i}"] for i in range(len(old)) if f"{name}.{i}" in saved]
        if old and len(new) == len(old):
            setattr(part, key, with_tensors(value, map(_as, new, old)))
        elif f"{name}.0" in saved and value is not None:  # None: the forward computes it
            fail(
                "module",
                f"tensors as its attribute {name!r}, as it was saved",
                f"{len(old)} in {type(value).__name__}",
                "Make the module in the same way as the saved one",
            )


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which files hold; other tensors as they are.

    Example:
        >>> as_real(torch.tensor(1 + 2j))
        tensor([1., 2.])
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_complex(tensor: Tensor, own: Tensor) -> Tensor:
    """Invert `as_real` for a tensor that takes the place of `own`.

    Raises:
        InputError: a tensor that holds no pairs.

    Example:
        >>> as_complex(torch.tensor([1.0, 2.0]), torch.tensor(0j))
        tensor(1.+2.j)
    """
    if not own.is_complex():
        return tensor
    if tensor.dtype != own.real.dtype or not tensor.ndim or tensor.shape[-1] != 2:
        fail_damaged("pairs of real and imaginary parts", f"{tensor.dtype}, {tuple(tensor.shape)}")
    return torch.view_as_complex(tensor.contiguous())


def _as(tensor: Tensor, own: Tensor) -> Tensor:
    return as_complex(tensor, own).to(own)


def _attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, Any]]:
    """Submodule, full name, name and value of the attributes."""
    for path, part in module.named_modules():
        computed = {
            name.removesuffix(end)
            for name, _ in part.named_parameters(recurse=False)
            for end in _COMPUTED
            if name.endswith(end)
        }
        for name in sorted(vars(part).keys() - _OF_MODULES - computed):
            value = vars(part)[name]
            if all(map(_is_plain, tensors_of(value))):
                yield part, f"{path}.{name}".lstrip("."), name, value


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)
    return type(tensor) is Tensor and dense
