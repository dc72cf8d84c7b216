"""Available memory, and checks before large allocations."""

from __future__ import annotations

import os
from pathlib import Path

from subbayes.utils.checks import fail

__all__ = ["available_memory", "check_memory", "format_bytes"]

_PAGES = Path("/proc/meminfo")


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
