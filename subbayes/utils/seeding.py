"""Temporary seeds of torch's global generators, and seeds derived from seeds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from subbayes.utils.checks import check_seed
from subbayes.utils.torch_lock import torch_lock

_States = dict[str, torch.Tensor]

_outer: list[_States] = []
"""States to restore at the end of each fork of the thread that has the lock, outermost first."""


def _forget_in_child() -> None:
    if not torch_lock.is_mine:  # forks of a thread that the child does not have
        _outer.clear()


if hasattr(os, "register_at_fork"):
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
