"""Warnings that point at the line of the user's own code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from subbayes.utils.first_process import is_first_process
from subbayes.utils.text_table import printable

__all__ = ["reworded_warnings", "warn_user", "warnings_once"]

_OWN = ("subbayes", "jaxtyping", "beartype", "contextlib", "functools")
_SAID: ContextVar[set[str] | None] = ContextVar("_SAID", default=None)
_REWORD: ContextVar[Callable[[str], str] | None] = ContextVar("_REWORD", default=None)


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
def reworded_warnings(reword: Callable[[str], str]) -> Iterator[None]:
    """Within, change the text of warnings, such as remedies that the caller does not offer.

    Args:
        reword: a function of the message to another one.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught, reworded_warnings(str.upper):
        ...     warn_user("few draws")
        >>> str(caught[0].message)
        'FEW DRAWS'
    """
    before = _REWORD.set(reword)
    try:
        yield
    finally:
        _REWORD.reset(before)


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
    if not is_first_process():
        return
    reword = _REWORD.get()
    message = printable(message if reword is None else reword(message))
    said = _SAID.get()
    if said is not None:
        if message in said:
            return
        said.add(message)
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
