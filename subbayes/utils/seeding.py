"""Temporary seeds of torch's global generators, the lock that guards them, and derived seeds."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import numpy as np
import torch

from subbayes.utils.checks import check_seed


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

_States = dict[str, torch.Tensor]

_outer: list[_States] = []
"""States to restore at the end of each fork of the thread that has the lock, outermost first."""


def _forget_in_child() -> None:
    if not torch_lock.is_mine:  # forks of a thread that the child does not have
        _outer.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=torch_lock.free_in_child)
    os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def fork_rng(seed: int | None, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators temporarily, and restore their states at exit.

    For operations that draw from the global generators: dropout, `reset_parameters`, the shuffling
    of a loader. Other threads that do the same wait until the end, or until `give_way`.

    Args:
        seed: the seed; None continues with the present states.
        device: the generator of a CUDA device is seeded too.

    Example:
        >>> with fork_rng(0):
        ...     a = torch.rand(2)
        >>> with fork_rng(0):
        ...     b = torch.rand(2)
        >>> bool((a == b).all())
        True
    """
    if seed is not None:
        check_seed(seed)
    device = torch.device(device)
    devices = {"cpu", str(device)} if device.type == "cuda" else {"cpu"}
    with torch_lock:
        states = _states(devices)
        _outer.append(states)
        try:
            if seed is not None:
                for one in devices:
                    _seed(one, seed)
            yield
        finally:
            _outer.pop()
            _set_states(states)


def give_way() -> None:
    """Let threads that wait for torch's global generators draw, and then continue as before.

    Called between the steps of long computations inside `fork_rng`, so that computations in several
    threads take turns, each with its own random numbers; elsewhere it does nothing.

    Example:
        >>> with fork_rng(0):
        ...     a = torch.rand(2)
        ...     give_way()
    """
    if torch_lock.is_awaited:
        with outside_forks():
            pass


@contextmanager
def outside_forks() -> Iterator[None]:
    """Within it the global generators and the lock are as outside all calls of `fork_rng`.

    For functions of the user, which may draw, or wait for other threads.

    Example:
        >>> with fork_rng(0):
        ...     with outside_forks():
        ...         a = torch.rand(2)
    """
    if not (_outer and torch_lock.is_mine):
        yield
        return
    outer = _outer.copy()
    own = _states({device for states in outer for device in states})
    for states in reversed(outer):
        _set_states(states)
    _outer.clear()
    try:
        with torch_lock.released():
            yield
    finally:
        _outer.extend(outer)
        seen: set[str] = set()
        for states in outer:  # at the end those that the outermost fork finds now
            states.update(_states(set(states) - seen))
            seen.update(states)
        _set_states(own)


def _states(devices: set[str]) -> _States:
    return {
        device: torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)
        for device in devices
    }


def _set_states(states: _States) -> None:
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def _seed(device: str, seed: int) -> None:
    if device == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def derive_seed(seed: int, *path: int) -> int:
    """An independent seed from a seed and a path: member 3 of seed 0 has `derive_seed(0, 3)`.

    Example:
        >>> derive_seed(0, 1) != derive_seed(0, 2)
        True
    """
    check_seed(seed)
    state = np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
