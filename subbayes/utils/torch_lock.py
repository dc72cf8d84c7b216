"""The lock that guards the global state of torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class TorchLock:
    """A reentrant lock that a thread can hand over in the middle of its work.

    Waiting threads queue at a second lock: at the end of `released` it is passed before the first
    one is taken back, so that another thread has had its turn.

    Example:
        >>> lock = TorchLock()
        >>> with lock, lock:
        ...     lock.is_awaited
        False
    """

    def __init__(self) -> None:
        self._lock, self._queue = threading.RLock(), threading.Lock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        """Take the lock, after other threads have released it."""
        if not self._lock.acquire(blocking=False):
            with self._queue:
                self._lock.acquire()
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
        self._lock.release()

    @property
    def is_awaited(self) -> bool:
        """Whether this thread holds the lock and another one waits for it."""
        return self.is_mine and self._queue.locked()

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._holder == threading.get_ident()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock of this thread, and take it back at the end, after those who wait.

        An interruption from the keyboard while it waits is raised afterwards.
        """
        depth, self._depth, self._holder = self._depth, 0, None
        for _ in range(depth):
            self._lock.release()
        try:
            yield
        finally:
            interruption = self._take_back(depth)
            if interruption is not None:
                raise interruption

    def _take_back(self, depth: int) -> KeyboardInterrupt | None:
        interruption = None
        while True:
            try:
                with self._queue:
                    self._lock.acquire()
                break
            except KeyboardInterrupt as error:  # callers release what they hold
                interruption = error
        for _ in range(depth - 1):
            self._lock.acquire()
        self._depth, self._holder = depth, threading.get_ident()
        return interruption

    def free_in_child(self) -> None:
        """Forget a thread of the parent process that held the lock at a fork."""
        if not self.is_mine:
            self.__init__()  # type: ignore[misc]


torch_lock = TorchLock()
"""Held while a call changes global flags of torch, draws from its global generators, swaps the
weights of a module or traces one."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=torch_lock.free_in_child)
