"""Available memory, and checks before large allocations."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from subbayes.utils.checks import fail

_PAGES = Path("/proc/meminfo")
T = TypeVar("T")
_ACCELERATOR = 16


class BoundedCache(Generic[T]):
    """Values by key, of which the `size` last added are kept; threads may share it.

    Copies are empty.

    Example:
        >>> cache = BoundedCache(size=1)
        >>> cache.get("a", lambda: 1), cache.get("a", lambda: 2)
        (1, 1)
        >>> cache.get("b", lambda: 3), cache.get("a", lambda: 4)
        (3, 4)
    """

    def __init__(self, size: int = 64) -> None:
        self.size = size
        self._values: dict[Hashable, T] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value of a key, computed if it is absent; an exception leaves it absent."""
        with self._lock:
            if key in self._values:
                return self._values[key]
        value = compute()  # without the lock: two threads may compute the same value
        with self._lock:
            self._values[key] = value
            while len(self._values) > self.size:
                del self._values[next(iter(self._values))]
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size,)


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None if unknown.

    Example:
        >>> size = available_memory()
        >>> size is None or size > 0
        True
    """
    try:
        lines = dict(line.split(":") for line in _PAGES.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def check_memory(argument: str, what: str, needed: int, remedy: str) -> None:
    """Raise `InputError` if an allocation would exceed the available memory.

    Args:
        argument: the argument that determines the size.
        what: what is allocated, in words.
        needed: bytes.
        remedy: what to do about it.

    Example:
        >>> check_memory("draws", "a few numbers", 80, "")
    """
    free = available_memory()
    if free is not None and needed > free:
        expected = f"{what} to fit into {format_bytes(free)} of free memory"
        fail(argument, expected, f"about {format_bytes(needed)}", remedy)


def format_bytes(size: float) -> str:
    """A number of bytes as text.

    Example:
        >>> format_bytes(3 * 2**30), format_bytes(5e5)
        ('3.0 GiB', '0.5 MiB')
    """
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:.1f} {name}"


def temporary_size(size: int, device: torch.device) -> int:
    """The size of temporary tensors on a device, from the one that fits into a CPU's caches.

    An accelerator takes 16 times as much: there, starting an operation takes longer than an
    operation on a small tensor.

    Example:
        >>> temporary_size(2**20, torch.device("cpu")) == 2**20
        True
    """
    return size if device.type == "cpu" else _ACCELERATOR * size


def index_dtype(size: int) -> torch.dtype:
    """The smallest dtype of indices below `size` that `index_select` takes within `vmap`."""
    return torch.int32 if size < 2**31 and _vectorises_int32() else torch.int64


@functools.cache
def _vectorises_int32() -> bool:
    """Whether `vmap` knows indices of 32 bits; torch 2.7 does not."""
    index = torch.zeros(1, dtype=torch.int32)
    try:
        torch.func.vmap(lambda z: z.index_select(-1, index))(torch.zeros(1, 1))
    except RuntimeError:
        return False
    return True
