"""Curvature and training on several processes: seconds alone, in one process, and in two.

"alone" does not divide anything, "one process" sums over blocks exactly, "two processes" share the
blocks, or have half of the rows each. The same file is the program of these processes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.distributed import on_own_core, start
from benchmarks.harness import bar, summary
from subbayes import Network, Training, distributed
from subbayes.data.data import Data
from subbayes.inference import linearised_laplace
from subbayes.likelihoods import Gaussian
from subbayes.training import train

Rows = tuple[torch.Tensor, torch.Tensor]


def _module(widths: tuple[int, ...]) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [
            layer
            for one, other in zip(widths, widths[1:], strict=False)
            for layer in (torch.nn.Linear(one, other), torch.nn.Tanh())
        ]
    return torch.nn.Sequential(*layers[:-1])


def _rows(n: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    return x, torch.sin(x[:, 0]) + 0.1 * torch.randn(n, generator=generator)


def _laplace(n: int, widths: tuple[int, ...], form: Any) -> torch.Tensor:
    network = Network(_module(widths))
    found = linearised_laplace(network, Gaussian(0.3), _rows(n), covariance=form, progress=False)
    return found.precision.variances()


def _train(n: int, widths: tuple[int, ...], batch_size: int) -> torch.Tensor:
    processes, data = distributed.current(), Data.of(_rows(n))
    if processes is not None and processes.count > 1:
        x, y = _rows(n)
        own = slice(processes.rank, None, processes.count)
        data = Data.of((x[own], y[own]), divided=True)
    settings = Training(epochs=2, batch_size=batch_size)
    found = train(_module(widths), Gaussian(0.3), data, settings, progress=False)
    return found.network.weights


SMALL = "training in batches of 128, 8-200-200-1"
WORK: dict[str, Callable[[int], torch.Tensor]] = {
    "diagonal, 8-200-200-1": lambda n: _laplace(4 * n, (8, 200, 200, 1), "diagonal"),
    "kfac, 8-200-200-1": lambda n: _laplace(2 * n, (8, 200, 200, 1), "kfac"),
    "primal, 8-30-30-1": lambda n: _laplace(n, (8, 30, 30, 1), "primal"),
    "training in batches of 4096, 8-400-400-1": lambda n: _train(4 * n, (8, 400, 400, 1), 4096),
    SMALL: lambda n: _train(n, (8, 200, 200, 1), 128),
}
"""What is timed, for a number of rows."""


def run(quick: bool, data_dir: str | None, say: Callable[..., None]) -> tuple[Any, list[Any]]:
    """Time one and two processes in turns."""
    n, rounds = (2_000, 1) if quick else (20_000, 5)
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in WORK}
    for _ in range(rounds):
        for how, count in (("alone", 1), ("one process", 1), ("two processes", 2)):
            every = start(how, count, n, 1, "benchmarks.distributed_rows")
            for name, parts in found.items():
                parts.setdefault(how, []).append(max(one[name]["seconds"] for one in every))
                parts.setdefault("digests", []).append(every[-1][name]["digest"])
    results = {}
    for name, parts in found.items():
        ratios = np.divide(parts["alone"], parts["two processes"])
        _, one, two, *_ = parts["digests"]
        seconds = {how: summary(values) for how, values in parts.items() if how != "digests"}
        results[name] = {"seconds": seconds, "ratio": float(np.median(ratios)), "same": one == two}
        say(f"{name}: {results[name]}")
    bars = [
        bar(f"{name}: two processes against one alone", one["ratio"], 1.6)
        for name, one in results.items()
        if name != SMALL
    ]
    bits = sum(not one["same"] for name, one in results.items() if "training" not in name)
    return results, [*bars, bar("curvatures with other bits in two processes", bits, 0, "lower")]


def main() -> None:
    """Work in one of the processes."""
    name, rows, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    on_own_core()
    if name != "alone":
        distributed.join()
    print(json.dumps(_seconds_of(rows, repeats)))
    distributed.leave()


def _seconds_of(n: int, repeats: int) -> dict[str, Any]:
    """Seconds of each piece of work, and digests of what they give; the first run warms up."""
    found: dict[str, Any] = {}
    for name, work in WORK.items():
        work(n // 10)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            result = work(n)
            times.append(time.perf_counter() - started)
        digest = hashlib.sha256(result.cpu().numpy().tobytes()).hexdigest()[:16]
        found[name] = {"seconds": min(times), "digest": digest}
    return found


if __name__ == "__main__":
    main()
