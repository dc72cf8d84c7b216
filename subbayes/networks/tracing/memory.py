"""What activations cost, and how their memory is reused from one evaluation to the next."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from subbayes.data.data import take
from subbayes.networks.tracing.private_torch import count_bytes
from subbayes.utils.types import Inputs

if TYPE_CHECKING:
    from subbayes.networks.network import Network

__all__ = ["bytes_per_row", "reuse_memory"]


def bytes_per_row(network: Network, inputs: Inputs) -> int:
    """Bytes of activations that one more observation takes, for choosing batch sizes."""
    with torch.no_grad():
        one, two = (
            count_bytes(lambda n=n: network(network.weights, take(inputs, slice(n))))  # type: ignore[misc]
            for n in (1, 2)
        )
    return max(two - one, 1)


@functools.cache
def reuse_memory() -> None:
    """Make the C library keep freed blocks of a few MiB for the next evaluation.

    By default glibc returns the memory of each activation to the system and requests it again,
    page by page, which takes up to half of the time of a small network. It raises its thresholds to
    the size of the largest block that it has seen freed, up to 32 MiB: so free one, once in a
    process. Without this 32 compiled chains of `benchmarks ess` were 3.6 times as fast as the plain
    sampler instead of 5.8 times (bar: 5).
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)
