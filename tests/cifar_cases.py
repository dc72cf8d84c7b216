"""A few generated images and a small plan for the CIFAR experiment."""

from __future__ import annotations

import dataclasses

import numpy as np

from experiments.cifar_methods import QUICK, Plan
from experiments.images import Images

TINY = dataclasses.replace(
    Plan(**QUICK),
    width=0.125,
    images=60,
    validation=20,
    test=12,
    batch_size=20,
    epochs=8,
    swa_epochs=4,
    snapshots=4,
    rank=3,
    tuning_draws=4,
    draws=4,
    vi_steps=8,
    vi_batch_size=10,
)


def coloured_images(n=60, n_new=12):
    """Images with a colour for each class, in noise."""
    rng, y, y_new = np.random.default_rng(0), np.arange(n) % 10, np.arange(n_new) % 10
    colours = rng.uniform(40, 215, (10, 1, 1, 3))
    x, x_new = (
        (colours[own] + rng.uniform(-40, 40, (len(own), 32, 32, 3))).astype(np.uint8)
        for own in (y, y_new)
    )
    return Images(x, y, x_new, y_new)
