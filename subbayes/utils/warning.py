"""Warnings that point at the line of the user's own code, of the first of several processes."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Literal

from subbayes.utils.text_table import printable

_OWN = ("subbayes", "jaxtyping", "beartype", "contextlib", "functools")
_is_first = True
_SAID: ContextVar[set[str] | None] = ContextVar("_SAID", default=None)
_UNSAID: ContextVar[bool] = ContextVar("_UNSAID", default=False)


@contextmanager
def warnings_once() -> Iterator[None]:
    """Within, say each warning once, although several parts of a call check the same thing.

    Python itself forgets what it has said whenever someone uses `warnings.catch_warnings`.
    """
    before = _SAID.set(_SAID.get() or set())
    try:
        yield
    finally:
        _SAID.reset(before)


@contextmanager
def unsaid_warnings() -> Iterator[None]:
    """Within, leave out the library's own warnings, of the same thread.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught, unsaid_warnings():
        ...     warn_user("few draws")
        >>> caught
        []
    """
    before = _UNSAID.set(True)
    try:
        yield
    finally:
        _UNSAID.reset(before)


@contextmanager
def filtered_warnings(
    action: Literal["ignore", "error"], category: type[Warning], start: str = ""
) -> Iterator[None]:
    """Within, ignore warnings of other libraries, or raise them; for a category as small as can be.

    Threads may be within at the same time, unlike with `warnings.catch_warnings`, of which two
    that overlap leave the filters of the first one in place for good. Other threads are subject to
    the filter meanwhile.

    Args:
        action: what to do.
        category: the class of the warnings.
        start: how their text starts; a regular expression.

    Example:
        >>> with filtered_warnings("error", DeprecationWarning):
        ...     warnings.warn("old", DeprecationWarning)
        Traceback (most recent call last):
            ...
        DeprecationWarning: old
    """
    entry: Any = (action, re.compile(f"(?#subbayes){start}"), category, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, entry)
    try:
        yield
    finally:
        # `catch_warnings` of another thread may have replaced the list by a copy
        current: Any = warnings.filters
        for each in (filters,) if current is filters else (filters, current):
            with suppress(ValueError):
                each.remove(entry)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside the library.

    Args:
        message: one line, with the remedy.
        category: the class of the warning.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warn_user("y: its scale is unusual")
        >>> str(caught[0].message)
        'y: its scale is unusual'
    """
    if not is_first_process() or _UNSAID.get():
        return
    message = printable(message)
    said = _SAID.get()
    if said is not None:
        if message in said:
            return
        said.add(message)
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


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
