"""One density on one and on two processes: seconds of an evaluation, and bytes that are exchanged.

Each process has a core of its own and one thread. The same file is the program of these processes:
they evaluate value and gradient of 8 chains and print what they have measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import bar, in_turns, summary
from subbayes import Network, Posterior, distributed
from subbayes.likelihoods import Gaussian
from subbayes.subspace import RandomSubspace

ROOT = Path(__file__).parents[1]
RANK, CHAINS = 20, 8


def run(quick: bool, data_dir: str | None, say: Callable[..., None]) -> tuple[Any, list[Any]]:
    """Time one and two processes in turns."""
    rows = 20_000
    rounds, evaluations = (2, 15) if quick else (5, 40)
    found: dict[str, dict[str, Any]] = {}

    def measure(name: str, count: int) -> float:
        found[name] = _start(name, count, rows, evaluations)[0]
        say(f"{name}: {found[name]['ms']:.1f} ms")
        return float(found[name]["ms"])

    times = in_turns(
        {
            "alone": lambda: measure("alone", 1),
            "one process": lambda: measure("one process", 1),
            "two processes": lambda: measure("two processes", 2),
        },
        rounds,
    )
    ratios = np.divide(times["one process"], times["two processes"])
    results = {
        "rows": rows,
        "rank": RANK,
        "chains": CHAINS,
        "ms": {name: summary(values) for name, values in times.items()},
        "ratio": summary(ratios.tolist()),
        "blocks": found["two processes"]["blocks"],
        "digests": {name: one["digest"] for name, one in found.items()},
    }
    digests = {found[name]["digest"] for name in ("one process", "two processes")}
    bars = [
        bar(
            f"bytes of an evaluation for each chain, k = {RANK}",
            found["two processes"]["bytes"] / CHAINS,
            32 * (RANK + 4),
            "lower",
        ),
        bar("two processes on two cores against one on one core", statistics.median(ratios), 1.8),
        bar("different bits of one and two processes", len(digests) - 1, 0, "lower"),
    ]
    return results, bars


def _start(name: str, count: int, rows: int, evaluations: int) -> list[dict[str, Any]]:
    """What each process has measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    words = [sys.executable, "-m", "benchmarks.distributed", name, str(rows), str(evaluations)]
    processes = [
        subprocess.Popen(
            words,
            env=os.environ | variables | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(count)
    ]
    return [json.loads(process.communicate()[0]) for process in processes]


def main() -> None:
    """Evaluate the density in one of the processes."""
    name, rows, evaluations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(os.environ["RANK"]) % (os.cpu_count() or 1)})
    processes = None if name == "alone" else distributed.join()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator)
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(rows, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(8, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1)
        )
    network = Network(module)
    space = RandomSubspace(network.weights, RANK, seed=0)
    posterior = Posterior(network, Gaussian(noise=0.3), (x, y), space)
    z = np.random.default_rng(0).standard_normal((CHAINS, RANK))
    value, gradient = (np.ascontiguousarray(part) for part in posterior.value_and_grad(z))
    posterior.value_and_grad(z)
    before, times = processes.traffic if processes else 0, []
    for _ in range(evaluations):
        started = time.perf_counter()
        posterior.value_and_grad(z)
        times.append(time.perf_counter() - started)
    sent = (processes.traffic - before) // evaluations if processes else 0
    facts = {
        "ms": 1e3 * statistics.median(times),
        "bytes": sent,
        "blocks": posterior.block_size.count if processes else 1,
        "digest": hashlib.sha256(value.tobytes() + gradient.tobytes()).hexdigest()[:16],
    }
    print(json.dumps(facts))
    distributed.leave()


if __name__ == "__main__":
    main()
