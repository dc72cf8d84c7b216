"""Digests of tensors that come in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def batch_digests(parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, str]:
    """A digest of each named tensor over all batches.

    Args:
        parts: pairs of a kind and its tensors by name; those of the same kind and name follow each
            other along the first axis.

    Example:
        >>> x = torch.arange(4.0)
        >>> batch_digests([("inputs", {"x": x})]) == batch_digests(
        ...     [("inputs", {"x": x[:3]}), ("inputs", {"x": x[3:]})])
        True
    """
    digests: dict[str, Any] = {}
    for kind, tensors in parts:
        for name, tensor in tensors.items():
            start = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape[1:])}".encode())
            digest = digests.setdefault(f"{kind} {name}", start)
            whole = tensor.detach().cpu().contiguous()
            # a single number is contiguous with any stride, which `view` does not take
            flat = whole.as_strided((whole.numel(),), (1,))
            digest.update(flat.view(torch.uint8).numpy())
    return {name: digest.hexdigest() for name, digest in digests.items()}
