"""Seconds of trainings of an ensemble, by which a preset chooses its epochs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from subbayes.training.many_steps import TRACED_AFTER

_TRACING = 1.0  # seconds that tracing a step takes
_SHARE = 0.25  # of the seconds for candidates that measuring traced steps may take
_EPOCHS = 10  # untraced epochs whose time is measured


def training_seconds(
    train: Callable[[int], Any], steps: int, available: float
) -> tuple[float, float]:
    """Measure the seconds of a training without its epochs, and of an epoch.

    Steps are traced after the first 50, and are faster then by a factor of up to 9. Two trainings
    of different lengths are timed that are either both traced, so that tracing and the slow steps
    before it count as time without epochs, or, for epochs of few steps, where that takes too long,
    both not traced: the seconds of an epoch are then an upper bound. The first training of a
    process also loads and initialises libraries, and is not counted.

    Args:
        train: trains an ensemble for a number of epochs.
        steps: number of steps of an epoch.
        available: seconds for all candidates.
    """
    train(1)
    traced = -(-(TRACED_AFTER + 2) // steps)  # epochs, with a step after the one that traces
    if 3 * steps <= TRACED_AFTER:
        overhead, each = _line(train, 1, min(TRACED_AFTER // steps, 1 + _EPOCHS))
        if 2 * (overhead + _TRACING) + 3 * traced * each > _SHARE * available:
            return overhead, each
    return _line(train, traced, traced + max(traced, 2))


def _line(train: Callable[[int], Any], short: int, long: int) -> tuple[float, float]:
    """Seconds without epochs, and of an epoch, from trainings of two lengths."""
    seconds = []
    for epochs in (short, long):
        started = time.perf_counter()
        train(epochs)
        seconds.append(time.perf_counter() - started)
    each = max((seconds[1] - seconds[0]) / (long - short), 1e-4)
    return max(seconds[0] - short * each, 0.0), each
