"""One density on several processes: seconds of an evaluation, bytes that are exchanged, memory.

Each of two processes has a core of its own and one thread, and notes the time of its processor too:
the rest is waiting, for other processes or for other programs. The same file is the program of
these processes: they evaluate value and gradient of 8 chains and print what they have measured.
Densities from 1 ms on are evaluated without blocks, in blocks by one process, and by two; their
processor times show what blocks cost and what two processes divide.
With weights that `fully_shard` divides, each of one and of four processes measures its peak memory
beyond what it takes before it makes the module.
"""

from __future__ import annotations

import hashlib
import itertools
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

from benchmarks.harness import bar, in_turns, own_peak, summary
from subbayes import Network, Posterior, distributed
from subbayes.distributed.chain_groups import divided_chains
from subbayes.likelihoods import Gaussian, HeteroscedasticGaussian
from subbayes.subspace import FullSubspace, RandomSubspace

ROOT = Path(__file__).parents[1]
RANK, CHAINS = 20, 8
_DENSITY_MS = 50.0  # of one process
WIDTH, LAYERS = 1024, 16  # of the network with sharded weights
DENSITIES: dict[str, tuple[int, tuple[int, ...], int]] = {
    "1052 rows, 16-16-16-16, 10 chains": (1052, (5, 16, 16, 16, 16, 2), 10),
    "1052 rows, 16-16-16-16, 1 chain": (1052, (5, 16, 16, 16, 16, 2), 1),
    "10 000 rows, 64-64, 4 chains": (10_000, (20, 64, 64, 2), 4),
    "10 000 rows, 64-64, 1 chain": (10_000, (20, 64, 64, 2), 1),
    "100 000 rows, 100-100, 4 chains": (100_000, (20, 100, 100, 2), 4),
}
"""Rows, widths of layers and chains, of all weights with a Gaussian of predicted variance."""
_SMALL, _BUSY_MS = "1052 rows, 16-16-16-16, 10 chains", 100.0


def run(quick: bool, data_dir: str | None, say: Callable[..., None]) -> tuple[Any, list[Any]]:
    """Time one and two processes in turns."""
    rounds, evaluations = (2, 15) if quick else (5, 40)
    found: dict[str, dict[str, Any]] = {}
    processor: dict[str, list[float]] = {}
    rows = _rows_of(float(start("one process", 1, 20_000, 15)[0]["ms"]))

    def measure(name: str, count: int) -> float:
        found[name], *_ = every = start(name, count, rows, evaluations)
        processor[name] = [one["processor_ms"] for one in every]
        say(f"{name}: {found[name]['ms']:.1f} ms, of processors {processor[name]}")
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
        "processor ms of each process": processor,
        "ratio": summary(ratios.tolist()),
        "blocks": found["two processes"]["blocks"],
        "digests": {name: one["digest"] for name, one in found.items()},
    }
    results["blocks and all rows at once"] = blocks = _costs_of_blocks(
        *((1, 2) if quick else (7, 5))
    )
    say(f"processor ms: {blocks}")
    results["sharded weights"] = memory = _sharded_memory(quick)
    say(f"peak memory with sharded weights, MiB: {memory}")
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
        bar("blocks of 1 ms against all rows at once", blocks[_SMALL]["blocks"], 1.3, "lower"),
        bar("share of each of two processes", blocks[_SMALL]["share of each"], 0.7, "lower"),
        bar(
            "peak memory of each of 4 processes with sharded weights against that of one",
            max(memory["four processes"]) / memory["one process"][0],
            0.35,
            "lower",
        ),
        bar("largest difference of its values and gradients", memory["difference"], 1e-4, "lower"),
    ]
    return results, bars


def _rows_of(ms: float) -> int:
    """The number of rows of a density that takes about 50 ms, from the time of 20 000."""
    return int(np.clip(round(20_000 * _DENSITY_MS / ms, -3), 5_000, 200_000))


def _costs_of_blocks(rounds: int, densities: int) -> dict[str, dict[str, Any]]:
    """Median processor ms of an evaluation, and medians of the ratios in each round."""
    ones, twos = [], []
    for _ in range(rounds):
        ones += start("blocks", 1, densities, 1)
        twos.append(start("blocks", 2, densities, 1))
    found = {}
    for name in list(DENSITIES)[:densities]:
        alone = np.array([one[name]["alone"] for one in ones])
        single = np.array([one[name]["blocks"] for one in ones])
        double = np.array([max(process[name]["blocks"] for process in two) for two in twos])
        found[name] = {
            "rows and chains of a call": ones[0][name]["size"],
            "processor ms": [round(float(np.median(ms)), 3) for ms in (alone, single, double)],
            "blocks": float(np.median(single / alone)),
            "share of each": float(np.median(double / single)),
        }
    return found


def _in_blocks(n: int, widths: tuple[int, ...], chains: int) -> dict[str, Any]:
    """Processor ms of an evaluation of a density, alone and among all processes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, widths[0], generator=generator)
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(n, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [
            layer
            for pair in itertools.pairwise(widths)
            for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())
        ]
    network = Network(torch.nn.Sequential(*layers[:-1]))
    space = FullSubspace(network.weights)
    posterior = Posterior(network, HeteroscedasticGaussian(1e-2), (x, y), space)
    z = 0.05 * np.random.default_rng(0).standard_normal((chains, posterior.rank))
    found: dict[str, Any] = {}
    if os.environ["WORLD_SIZE"] == "1":
        distributed.leave()
        found["alone"] = _processor_ms(posterior, z)
        distributed.join()
    with divided_chains(posterior, chains, None) as groups:
        found["blocks"] = _processor_ms(posterior, z[groups.own])
    size = posterior.block_size
    return found | {"size": [size.rows, size.chains]}


def _processor_ms(posterior: Posterior, z: np.ndarray) -> float:
    """Processor time of an evaluation; every process makes the same number of them."""
    evaluations = max(4, int(_BUSY_MS * 1e6 / (posterior.n * posterior.rank)))
    posterior.value_and_grad(z)
    posterior.value_and_grad(z)
    times = []
    for _ in range(evaluations):
        worked = time.process_time()
        posterior.value_and_grad(z)
        times.append(time.process_time() - worked)
    return 1e3 * statistics.median(times)


def _sharded_memory(quick: bool) -> dict[str, Any]:
    """Peak MiB of each process, and how far values and gradients of one and of four differ."""
    layers = 6 if quick else LAYERS
    one, four = (start("sharded", count, layers, 2) for count in (1, 4))
    numbers = np.array([found["numbers"] for found in (*one, *four)])
    return {
        "weights": layers * WIDTH * WIDTH,
        "one process": [found["mib"] for found in one],
        "four processes": [found["mib"] for found in four],
        "before the module": max(found["before"] for found in four),
        "difference": float(np.ptp(numbers, axis=0).max() / np.abs(numbers).max()),
    }


def start(
    name: str, count: int, rows: int, evaluations: int, module: str = "benchmarks.distributed"
) -> list[dict[str, Any]]:
    """What each process has measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    words = [sys.executable, "-m", module, name, str(rows), str(evaluations)]
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


def _sharded(layers: int) -> dict[str, Any]:
    """Peak memory of a posterior with sharded weights, beyond that of a small one."""
    import torch.distributed as dist

    distributed.join()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    _sharded_numbers(1, width=64)  # imports, and the memory that torch reuses
    before = own_peak()
    numbers = _sharded_numbers(layers, WIDTH)
    peak = own_peak() - before
    distributed.leave()
    return {"mib": peak, "before": before, "numbers": numbers}


def _sharded_numbers(layers: int, width: int) -> list[float]:
    """Values and a gradient of a network that no process makes in one piece."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from subbayes.networks.sharded.network import ShardedNetwork
    from subbayes.subspaces.sharded_random import ShardedRandomSubspace

    with torch.device("meta"):
        parts = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        module = torch.nn.Sequential(*parts)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in module:
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)  # otherwise each layer stays whole until the end of a call
    module.to_empty(device="cpu")
    for part in module:
        held = part.weight.to_local()
        first = dist.get_rank() * len(held)
        with torch.no_grad():
            for i in range(len(held)):
                row = torch.arange(width) + (first + i) * 7.3
                held[i] = torch.sin(row * (row % 11)) / width**0.5
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, width, generator=generator), torch.zeros(64, width)
    network = ShardedNetwork(module)
    space = ShardedRandomSubspace(network, RANK)
    posterior = Posterior(network, Gaussian(noise=0.3), (x, y), space)
    z = np.random.default_rng(0).standard_normal((2, RANK))
    value, gradient = posterior.value_and_grad(z)
    return [*value.tolist(), *gradient[0].tolist()]


def on_own_core() -> None:
    """Bind this process to a core of its own."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(os.environ["RANK"]) % (os.cpu_count() or 1)})


def main() -> None:
    """Evaluate the density in one of the processes."""
    name, rows, evaluations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if name == "sharded":
        print(json.dumps(_sharded(rows)))
        return
    if name == "blocks":
        distributed.join()
        print(json.dumps({key: _in_blocks(*DENSITIES[key]) for key in list(DENSITIES)[:rows]}))
        distributed.leave()
        return
    on_own_core()
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
    before, times, busy = processes.traffic if processes else 0, [], []
    for _ in range(evaluations):
        started, worked = time.perf_counter(), time.process_time()
        posterior.value_and_grad(z)
        times.append(time.perf_counter() - started)
        busy.append(time.process_time() - worked)
    sent = (processes.traffic - before) // evaluations if processes else 0
    facts = {
        "ms": 1e3 * statistics.median(times),
        "processor_ms": round(1e3 * statistics.median(busy), 2),
        "bytes": sent,
        "blocks": posterior.block_size.count if processes else 1,
        "digest": hashlib.sha256(value.tobytes() + gradient.tobytes()).hexdigest()[:16],
    }
    print(json.dumps(facts))
    distributed.leave()


if __name__ == "__main__":
    main()
