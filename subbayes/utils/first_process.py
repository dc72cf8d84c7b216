"""Whether this process is the one that writes files and prints, of several that run one program."""

from __future__ import annotations

_is_first = True


def is_first_process() -> bool:
    """Whether this process writes files, shows progress and warns: rank 0 of several processes.

    Example:
        >>> is_first_process()
        True
    """
    return _is_first


def set_first_process(value: bool) -> None:
    """Say whether this process is the first; `subbayes.distributed.join` calls it."""
    global _is_first
    _is_first = value
