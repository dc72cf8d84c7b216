"""Training steps of small networks: replayed from a traced graph, and eager.

Seconds of 4000 steps on one thread, with the tracing, of single networks on 1024 rows in batches,
and of a curve through 13 networks of 8 hidden units on all rows, as a semi-structured model trains
it. Eager steps are those with `SUBBAYES_PRIVATE_TORCH=0`. The loss is the mean over the last tenth
of the epochs: the steps are the same up to rounding, which grows in training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import bar, summary
from subbayes import MLP, Training
from subbayes.likelihoods import Gaussian
from subbayes.training.curve import train_curve
from subbayes.training.trainer import train

ROWS, FEATURES = 1024, 8


def table() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a smooth function with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    noise = 0.1 * torch.randn(ROWS, generator=generator)
    return x, x[:, 0].sin() + 0.5 * x[:, 1] * x[:, 2] + noise


def cases(steps: int) -> dict[str, Callable[[], Any]]:
    """Trainings of so many steps by name."""
    data, settings = table(), Training(validation=None, patience=None)

    def single(hidden: tuple[int, ...], activation: str, rows: int) -> Callable[[], Any]:
        own = replace(settings, epochs=steps * rows // ROWS, batch_size=rows)
        network = MLP(FEATURES, hidden, 1, activation, seed=0)
        return lambda: train(network, Gaussian(), data, own, progress=False)

    def curve() -> Any:
        own = replace(settings, epochs=steps, batch_size=None)
        network = MLP(FEATURES, (8,), 1, "tanh", seed=0)
        return train_curve(network, Gaussian(), data, own, degree=12, progress=False)

    return {
        "50 hidden units, batches of 64": single((50,), "relu", 64),
        "50-50, batches of 256": single((50, 50), "tanh", 256),
        "128-128, batches of 64": single((128, 128), "relu", 64),
        "curve of degree 12, 1024 rows": curve,
    }


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure both in turn; see the module's text."""
    del data_dir
    steps, repeats = (1600, 1) if quick else (4000, 3)
    found: dict[str, Any] = {}
    before = os.environ.get("SUBBAYES_PRIVATE_TORCH")
    try:
        for name, training in cases(steps).items():
            seconds: dict[str, list[float]] = {"eager": [], "traced": []}
            losses = {}
            for way in ["eager", "traced"] * repeats:
                os.environ["SUBBAYES_PRIVATE_TORCH"] = "0" if way == "eager" else "1"
                started = time.perf_counter()
                history = training().history["train_loss"]
                seconds[way].append(time.perf_counter() - started)
                losses[way] = float(np.mean(history[-max(1, len(history) // 10) :]))
            case: dict[str, Any] = {way: summary(values) for way, values in seconds.items()}
            case["ratio"] = case["eager"]["median"] / case["traced"]["median"]
            found[name] = case | {"loss": losses}
            say(
                f"{name:32s} eager {case['eager']['median']:5.2f} s, traced "
                f"{case['traced']['median']:5.2f} s, ratio {case['ratio']:.2f}; "
                f"loss {losses['eager']:.4f} and {losses['traced']:.4f}"
            )
    finally:
        os.environ.pop("SUBBAYES_PRIVATE_TORCH", None)
        if before is not None:
            os.environ["SUBBAYES_PRIVATE_TORCH"] = before
    slowest = min(case["ratio"] for case in found.values())
    name = "traced steps, with tracing, against eager ones: smallest ratio"
    return {"steps": steps, "cases": found}, [bar(name, slowest, 1.0, better="higher")]
