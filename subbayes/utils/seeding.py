"""Temporary seeds of torch's global generators, and seeds derived from seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from subbayes.utils.checks import check_seed

__all__ = ["derive_seed", "fork_rng"]


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


def derive_seed(seed: int, *path: int) -> int:
    """An independent seed from a seed and a path: member 3 of seed 0 has `derive_seed(0, 3)`.

    Example:
        >>> derive_seed(0, 1) != derive_seed(0, 2)
        True
    """
    check_seed(seed)
    state = np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
