"""Predictions as a service makes them: few and many rows.

Each case is a function (quick, say) that returns figures and bars; `CASES` lists them.

**predict**: `model.predict` of 200 draws of an MLP and 36 of a CNN (4 for 50,000 rows), beside the
same with vectorised calls for 64 draws and with a call for each draw, on as many rows as 1 GiB of
activations allows. Processor time; each round takes the better peer.

**interval**, **streamed**: quantiles of mixtures, and many rows, see `streamed_serve`.

**dual**, **last layer**: linearised Laplace, see `laplace_serve`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.harness import bar, in_turns, processor_seconds, summary
from benchmarks.laplace_serve import dual, last_layer
from benchmarks.streamed_serve import interval, streamed
from subbayes import MLP, Network
from subbayes.baselines.ensemble import WeightSamples
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.predictions import averaging

Say = Callable[..., Any]
Result = tuple[dict[str, Any], list[dict[str, Any]]]
Case = Callable[[bool, Say], Result]


# --- predict: the better of all draws at once and one after the other --------------------------


def cnn() -> nn.Sequential:
    """Two convolutions for images of 28 x 28 pixels and ten classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 49, 10),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...]]] = {
    "MLP": (lambda: MLP(20, (50, 50), 1, seed=0), Gaussian(noise=1.0), (20,)),
    "CNN": (cnn, Categorical(10), (1, 28, 28)),
}
DRAWS = {"MLP": 200, "CNN": 36}


def model_of(name: str, draws: int) -> WeightSamples:
    """Weight vectors around a random network."""
    make, likelihood, _ = NETWORKS[name]
    network = Network(make())
    noise = torch.randn(draws, network.size, generator=torch.Generator().manual_seed(1))
    return WeightSamples(network, network.weights + 0.01 * noise, likelihood, "draws")


def all_at_once(network: Network, x: Tensor, draws: int, limit: int) -> tuple[int, int]:
    """Up to 64 draws in one vectorised call, and as many rows as the memory limit allows."""
    draws = min(draws, 64)
    return draws, max(1, limit // (network.bytes_per_row(x) * draws))


def one_by_one(network: Network, x: Tensor, draws: int, limit: int) -> tuple[int, int]:
    """One draw after the other, and as many rows as the memory limit allows."""
    return 1, limit // network.bytes_per_row(x)


def predict_with(size: Callable[..., tuple[int, int]], model: WeightSamples, x: Tensor) -> None:
    """Predict with a given rule for draws and rows of a call."""
    with mock.patch.object(averaging, "evaluation_size", size):
        model.predict(x)


def predict(quick: bool, say: Say) -> Result:
    """Seconds of a prediction by network and rows."""
    results: dict[str, Any] = {}
    bars = []
    for name, (_, _, shape) in NETWORKS.items():
        for rows in (1, 100, 2000) if quick else (1, 500, 50_000):
            model = model_of(name, 4 if name == "CNN" and rows > 500 else DRAWS[name])
            x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(2))
            repeats = max(1, 20 // rows)
            work = {
                "ours": model.predict,
                "all at once": partial(predict_with, all_at_once, model),
                "one by one": partial(predict_with, one_by_one, model),
            }
            cases = {
                what: partial(processor_seconds, partial(f, x), repeats) for what, f in work.items()
            }
            for f in work.values():
                f(x[:100])  # not counted
            figures = in_turns(cases, 15 if rows == 1 else 3)
            rounds = zip(*figures.values(), strict=True)
            ratio = statistics.median(own / min(peers) for own, *peers in rounds)
            what = f"{name}, {rows} rows"
            results[what] = {k: summary(v) for k, v in figures.items()} | {"ratio": ratio}
            medians = ", ".join(
                f"{k} {1e3 * statistics.median(v):.4g} ms" for k, v in figures.items()
            )
            say(f"predict {what}: {medians}")
            bars.append(bar(f"predict, {what}: time, in times of the better", ratio, 1.1, "lower"))
    return results, bars


CASES: dict[str, Case] = {
    "predict": predict,
    "interval": interval,
    "streamed": streamed,
    "dual": dual,
    "last layer": last_layer,
}


def run(quick: bool = False, say: Say = print, **_: Any) -> Result:
    """Measure all cases; returns the figures and the bars."""
    results: dict[str, Any] = {}
    bars: list[dict[str, Any]] = []
    for name, case in CASES.items():
        results[name], found = case(quick, say)
        bars += found
    return results, bars
