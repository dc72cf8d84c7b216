"""Changes of the weights of a base model, whose memory a network shares with the caller's module.

A change of the module in place, such as merging adapters or training on, changes what the network
computes. torch counts modifications in place, but not those of `parameter.data`, by which adapters
are merged, nor those of fused optimisers. So predictions read the counters and a sample of
the numbers, and all of them (a checksum) where a counter has moved; saving always reads all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from subbayes.networks.tracing.private_torch import version_of

_MOST = 2**24  # numbers that are read; of larger models evenly spaced ones
_SAMPLED = 2**14  # numbers that each prediction reads; at least one of each tensor
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
    if not _is_plain(tensor):
        return 0  # of other formats nothing is known
    return int(_spaced(tensor, stride).sum())


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta


def _spaced(tensor: Tensor, step: int) -> Tensor:
    """The bits of every so many numbers of a tensor, as whole numbers."""
    part = tensor.detach().reshape(-1)[::step].contiguous()
    return part.view(_WHOLE.get(part.element_size(), torch.uint8))


class SharedWeights:
    """What tensors held when this was made: their checksums, versions, and a sample of each.

    Args:
        tensors: by name; they are not copied.

    Example:
        >>> tensors = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
        >>> shared = SharedWeights(tensors)
        >>> _ = tensors["b"].data.add_(1)
        >>> shared.changed(tensors, tensors)
        'b'
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._checksums = checksums(tensors)
        self._versions = _versions(tensors)
        self._step = max(1, sum(tensor.numel() for tensor in tensors.values()) // _SAMPLED)
        self._sample = self._sample_of(tensors)

    def changed(
        self, tensors: Mapping[str, Tensor], names: Iterable[str], *, every_number: bool = False
    ) -> str | None:
        """The name of a tensor that has changed; None if there is none.

        Args:
            tensors: the tensors, among others.
            names: those that are compared.
            every_number: compare checksums also if versions and samples are as they were.
        """
        tensors = {name: tensors[name] for name in self._checksums}
        seen = _versions(tensors), self._sample_of(tensors)
        if seen == (self._versions, self._sample) and not every_number:
            return None
        now = checksums(tensors)
        for name in names:
            if now.get(name) != self._checksums.get(name):
                return name
        self._versions, self._sample = seen  # none of those that are compared
        return None

    def _sample_of(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Sums of the bits of evenly spaced numbers of all tensors, by their size and device."""
        parts: dict[tuple[int, torch.device], list[Tensor]] = {}
        for tensor in tensors.values():
            if _is_plain(tensor) and tensor.numel():
                kind = tensor.element_size(), tensor.device
                parts.setdefault(kind, []).append(_spaced(tensor, self._step))
        return [int(torch.cat(part).sum()) for part in parts.values()]


def _versions(tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(map(version_of, tensors.values()))
