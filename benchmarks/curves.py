"""Training of curves: seconds per epoch and peak memory against the number of control points.

Curves of k + 1 control points trained at once (Dold et al. 2024, algorithm 1 and figure 17, which
has k = 1, 3, 7, 15), beside plain training of one network and beside a plain loop that has autograd
carry the gradient through a (k + 1, D) tensor of control points. Two networks: three hidden layers
of 16, as in the paper, and two of 256. Epochs are timed from the end of the first. Memory is that
of a network of 4 million weights, in a process of its own, in copies of the weights; Adam needs
three for each control point.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness import bar, in_turns, peak_memory, summary
from subbayes import MLP, Network, Training
from subbayes.likelihoods import Gaussian
from subbayes.training.curve import train_curve
from subbayes.training.trainer import train
from subbayes.training.weight_curve import coefficients

DEGREES = (1, 3, 7, 15)
NETWORKS = {"16-16-16": (16, 16, 16), "256-256": (256, 256)}
LARGE = (100, (1900, 1900))  # inputs and hidden widths: 4 million weights
ROWS, BATCH = 2000, 100


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """A small regression problem."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=ROWS)
    return torch.from_numpy(x).float(), torch.from_numpy(y).float()


class Clock:
    """A callback that notes when epochs end."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self, *_: Any) -> None:
        """An epoch has ended."""
        self.ticks.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of an epoch, the first left out."""
        return (self.ticks[-1] - self.ticks[0]) / (len(self.ticks) - 1)


def autograd(
    module: nn.Module, data: Any, degree: int, epochs: int, batch_size: int | None
) -> float:
    """The loop one would write down: one tensor of control points, one optimiser, autograd."""
    network = Network(module)
    x, y = data
    points = nn.Parameter(
        torch.stack([Network(MLP(**module.settings, seed=i)).weights for i in range(degree + 1)])
    )
    raw = nn.Parameter(torch.zeros(1))
    optimizer, clock = torch.optim.Adam([points, raw], lr=1e-3, fused=True), Clock()
    for _ in range(epochs):
        for some in torch.randperm(len(y)).split(batch_size or len(y)):
            c = coefficients(torch.rand(()), degree + 1).float()
            outputs = network(c @ points, x[some])
            loss = -Gaussian().with_parameters(raw).log_prob(outputs, y[some]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clock()
    return clock.seconds


def curve(module: nn.Module, data: Any, degree: int, epochs: int, batch_size: int | None) -> float:
    """Ours."""
    clock = Clock()
    train_curve(
        module,
        Gaussian(),
        data,
        Training(epochs=epochs, learning_rate=1e-3, batch_size=batch_size, clip_norm=None),
        degree=degree,
        progress=False,
        callback=None if batch_size is None else clock,
    )
    return clock.seconds if clock.ticks else 0.0


def plain(module: nn.Module, data: Any, epochs: int, batch_size: int | None) -> float:
    """One network, no curve."""
    clock = Clock()
    train(
        module,
        Gaussian(),
        data,
        Training(epochs=epochs, learning_rate=1e-3, batch_size=batch_size, clip_norm=None),
        progress=False,
        callback=clock,
    )
    return clock.seconds


def memory(how: str, degree: int) -> float:
    """Peak memory in MiB of three steps of training a large network."""
    inputs, hidden = LARGE
    begin = (
        "import torch; torch.set_num_threads(1)\n"
        "from benchmarks import curves\nfrom subbayes import MLP\n"
        f"module = MLP({inputs}, {hidden}, 1, seed=0)\n"
        f"data = torch.randn(24, {inputs}), torch.randn(24)\n"
    )
    work = (
        "curves.plain(module, data, 3, None)"
        if how == "plain"
        else f"curves.{how}(module, data, {degree}, 3, None)"
    )
    return peak_memory(begin + work)


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    epochs, rounds = (8, 3) if quick else (20, 5)
    data, results, bars = rows(), {}, []
    for name, hidden in NETWORKS.items():
        module = MLP(4, hidden, 1, seed=0)
        found = _times(module, data, epochs, rounds)
        results[name] = {
            "weights": Network(module).size,
            "seconds_per_epoch": {case: summary(values) for case, values in found.items()},
        }
        for case, values in found.items():
            say(f"{name:9s} {case:16s} {1e3 * summary(values)['median']:8.1f} ms/epoch")
        bars += _time_bars(name, found)
    found_memory, weights = _memory(quick, say)
    results["memory"] = {"weights": weights, "peak_mib": found_memory}
    return results, bars + _memory_bars(found_memory, weights)


def _times(module: nn.Module, data: Any, epochs: int, rounds: int) -> dict[str, list[float]]:
    cases = {"plain": partial(plain, module, data, epochs, BATCH)}
    for k in DEGREES:
        cases[f"curve, k = {k}"] = partial(curve, module, data, k, epochs, BATCH)
        cases[f"autograd, k = {k}"] = partial(autograd, module, data, k, epochs, BATCH)
    return in_turns(cases, rounds)


def _time_bars(name: str, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Ratios round by round, so that the machine's drift cancels, and their medians."""

    def ratio(a: list[float], b: list[float]) -> float:
        return float(np.median(np.divide(a, b)))

    ours = np.array([np.divide(found[f"curve, k = {k}"], found["plain"]) for k in DEGREES])
    slope = float(np.median(np.polyfit(DEGREES, ours, 1)[0]))
    return [
        bar(
            f"{name}: k = 1 over plain training",
            ratio(found["curve, k = 1"], found["plain"]),
            1.6,
            "lower",
        ),
        bar(
            f"{name}: added by a control point, in epochs of plain training",
            slope,
            0.03 if name == "16-16-16" else 0.15,
            "lower",
        ),
        bar(
            f"{name}: k = 15 over autograd through the control points",
            ratio(found["curve, k = 15"], found["autograd, k = 15"]),
            1.1,
            "lower",
        ),
    ]


def _memory(quick: bool, say: Callable[..., None]) -> tuple[dict[str, dict[str, float]], int]:
    inputs, hidden = LARGE
    weights = Network(MLP(inputs, hidden, 1)).size
    found: dict[str, dict[str, float]] = {"plain": {"": memory("plain", 0)}}
    for how in ("curve", "autograd"):
        found[how] = {str(k): memory(how, k) for k in ((1, 7) if quick else DEGREES)}
    for how, by_degree in found.items():
        for k, value in by_degree.items():
            say(f"{weights} weights, {how} {k:2s} {value:8.0f} MiB")
    return found, weights


def _memory_bars(found: dict[str, dict[str, float]], weights: int) -> list[dict[str, Any]]:
    """Copies of the weights for each further control point, by least squares."""

    def copies(how: str) -> float:
        k = np.array([int(k) for k in found[how]])
        return float(np.polyfit(k, list(found[how].values()), 1)[0] * 2**20 / (4 * weights))

    return [
        bar(
            "copies of the weights for each control point (Adam needs 3)",
            copies("curve"),
            3.1,
            "lower",
        ),
        bar("the same over that of autograd", copies("curve") / copies("autograd"), 0.8, "lower"),
    ]
