"""Memory of activations: its size, and its reuse between evaluations."""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass

import torch

from subbayes.utils.checks import fail

_THRESHOLDS = (-1, -3)  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
REUSED_BYTES = 32 * 2**20
"""Memory of activations below this total is reused in the next evaluation (see `reuse_memory`);
allocating more takes longer than the arithmetic of a small network."""


def activation_bytes(device: torch.device) -> int:
    """Bytes of activations of one evaluation by default.

    1 GiB; on a CUDA device a quarter of its memory, rounded down to a power of two, if that is
    more: many small batches would take longer to launch than to compute.

    Example:
        >>> activation_bytes(torch.device("cpu")) == 2**30
        True
    """
    if device.type != "cuda":
        return 2**30
    quarter = torch.cuda.get_device_properties(device).total_memory // 4
    return max(2**30, 1 << (quarter.bit_length() - 1))


@dataclass(frozen=True)
class ActivationLimits:
    """Bytes of activations of one evaluation, and of a block of rows on many processes.

    Args:
        given: a limit for both; None for the default.
        least: the least that is needed, for the default.

    Raises:
        InputError: by `check`, of a row that needs more.

    Example:
        >>> ActivationLimits().of(torch.device("cpu")) == ActivationLimits().block == 2**30
        True
    """

    given: int | None = None
    least: int = 0

    @property
    def block(self) -> int:
        """Bytes of a block, by default the same on every device, as sums depend on it."""
        return max(2**30, self.least) if self.given is None else self.given

    def of(self, device: torch.device) -> int:
        """Bytes of one evaluation on a device."""
        return max(activation_bytes(device), self.least) if self.given is None else self.given

    def check(self, row: int, device: torch.device) -> int:
        """The same, where it suffices for a row of one chain, of so many bytes."""
        limit = self.of(device)
        if row > limit:
            fail(
                "memory_limit",
                f"at least {row / 2**20:.3g} MiB for one row of one chain",
                f"{limit / 2**20:.3g} MiB",
                "Raise the limit",
            )
        return limit


@functools.cache
def reuse_memory() -> None:
    """Make the C library keep freed blocks of a few MiB for the next evaluation.

    By default glibc returns the memory of each activation to the system and requests it again,
    page by page, which takes up to half of the time of a small network. Its threshold rises to the
    size of the largest freed block, up to 32 MiB; so one such block is freed, once per process. In
    `benchmarks ess` 32 compiled chains are 5.8 times as fast as the plain sampler with this, and
    3.6 times without.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


@functools.cache
def return_memory() -> None:
    """Make the C library give freed blocks of 256 KiB or more back to the system, against speed.

    Parameters that FSDP2 gathers and frees leave holes in the heap of glibc, which keeps blocks of
    up to 32 MiB: they would be a third of the memory of four processes in `benchmarks distributed`.
    `reuse_memory` has no effect afterwards. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for threshold in _THRESHOLDS:
            library.mallopt(threshold, 2**18)
