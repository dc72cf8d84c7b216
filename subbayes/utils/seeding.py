"""Seeds: torch's global generators borrowed and given back, and seeds derived from seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from subbayes.utils.checks import check_count

__all__ = ["derive_seed", "fork_rng"]


@contextmanager
def fork_rng(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators inside, and put them back as they were after.

    For what draws from the global generators and cannot be told otherwise: dropout,
    `reset_parameters`, a loader's shuffling.

    Args:
        seed: the seed inside.
        device: a CUDA device's generator is borrowed too.

    Example:
        >>> with fork_rng(0):
        ...     a = torch.rand(2)
        >>> with fork_rng(0):
        ...     b = torch.rand(2)
        >>> bool((a == b).all())
        True
    """
    check_count("seed", seed, 0)
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def derive_seed(seed: int, *path: int) -> int:
    """A seed for one part of a seeded whole: member 3 of seed 0 is `derive_seed(0, 3)`.

    Example:
        >>> derive_seed(0, 1) != derive_seed(0, 2)
        True
    """
    check_count("seed", seed, 0)
    state = np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
