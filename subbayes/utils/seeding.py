"""Temporary seeds of torch's global generators, and seeds derived from seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from subbayes.utils.checks import check_seed

__all__ = ["derive_seed", "fork_rng", "is_state_of"]

_WORDS = 624  # random words that torch's generator of the CPU makes at a time


@contextmanager
def fork_rng(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators temporarily, and restore their states at exit.

    For operations that draw from the global generators: dropout, `reset_parameters`, the shuffling
    of a loader.

    Args:
        seed: the seed.
        device: the generator of a CUDA device is seeded too.

    Example:
        >>> with fork_rng(0):
        ...     a = torch.rand(2)
        >>> with fork_rng(0):
        ...     b = torch.rand(2)
        >>> bool((a == b).all())
        True
    """
    check_seed(seed)
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def is_state_of(generator: torch.Generator, state: torch.Tensor) -> bool:
    """Whether a generator can safely take a state that was read from a file.

    torch takes every position within its block of random words, also one from which it would read
    beyond the block. In a state of its own the words that are left and those that are used are 625,
    with the next one, or the block is not made yet.

    Args:
        generator: the generator.
        state: as `generator.get_state()` returns it.

    Example:
        >>> generator = torch.Generator()
        >>> is_state_of(generator, generator.get_state())
        True
        >>> is_state_of(generator, torch.zeros_like(generator.get_state()))
        False
    """
    own = generator.get_state()
    if state.shape != own.shape or state.dtype != own.dtype:
        return False
    if generator.device.type != "cpu":  # a seed and an offset
        return True
    return all(map(_is_position, (own, state)))  # that of its own has this layout too


def _is_position(state: torch.Tensor) -> bool:
    raw = state.numpy().tobytes()
    left, seeded = np.frombuffer(raw, dtype=np.int32, count=2, offset=8).tolist()
    used = int(np.frombuffer(raw, dtype=np.uint64, count=1, offset=16)[0])
    inside = 1 <= left <= _WORDS and left + used == _WORDS + 1
    return seeded == 1 and (inside or (left, used) == (1, 0))


def derive_seed(seed: int, *path: int) -> int:
    """An independent seed from a seed and a path: member 3 of seed 0 has `derive_seed(0, 3)`.

    Example:
        >>> derive_seed(0, 1) != derive_seed(0, 2)
        True
    """
    check_seed(seed)
    state = np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
