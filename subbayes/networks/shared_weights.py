"""Checksums of the weights of a base model, whose memory a network shares with the caller's module.

A change of the module in place, such as merging adapters or training on, changes what the network
computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    from subbayes.networks.network import Network

__all__ = ["changed_weights", "checksums", "warn_of_changed_weights"]

_MOST = 2**24  # numbers that are read; of larger models evenly spaced ones
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Sums of the bits of tensors by name, which no order of summation changes.

    Example:
        >>> checksums({"a": torch.tensor([1, 2])})
        {'a': 3}
    """
    stride = max(1, sum(tensor.numel() for tensor in tensors.values()) // _MOST)
    return {name: _checksum(tensor, stride) for name, tensor in tensors.items()}


def _checksum(tensor: Tensor, stride: int) -> int:
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return 0  # of other formats nothing is known
    part = tensor.detach().reshape(-1)[::stride].contiguous()
    return int(part.view(_WHOLE.get(part.element_size(), torch.uint8)).sum())


def changed_weights(network: Network) -> str | None:
    """The name of a parameter of the base model that has changed since the network was made."""
    if not network.base_names:
        return None
    was, frozen = network.base_checksums, network.frozen
    now = checksums({name: frozen[name] for name in was})
    return next((name for name in network.base_names if now.get(name) != was.get(name)), None)


def warn_of_changed_weights(network: Network) -> None:
    """Warn of predictions with a base model that has changed since the network was made."""
    if (name := changed_weights(network)) is not None:
        warn_user(
            f"module: weights of the base model have changed since the posterior was fitted or "
            f"loaded ({name}), and its predictions with them: load it around a fresh base model, "
            "and merge adapters or train in a copy"
        )
