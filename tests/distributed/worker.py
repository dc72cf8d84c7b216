"""One of several processes of a test: runs the cases that it is told, and prints their digests.

usage: worker.py [CASE...] with the variables that torchrun sets. The output of a case is one line
of JSON with its name and its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from devices.pretended import pretended_device

import subbayes
from distributed.engine_cases import digest, module, posterior, rows, sample, stopped
from subbayes import Sampling, Training, distributed
from subbayes.artifacts import folder as artifact
from subbayes.inference.engine import engine_of
from subbayes.likelihoods import Gaussian
from subbayes.models import processes as fit_processes
from subbayes.priors import Normal
from subbayes.subspace import RandomSubspace
from subbayes.utils.warning import set_first_process


def evaluations(size: str) -> dict[str, str]:
    """All ways to evaluate a density."""
    density, z = posterior(size), np.random.default_rng(0).standard_normal((6, 4))
    value, gradient = density.value_and_grad(z)
    points = torch.from_numpy(z).requires_grad_()
    density.log_prob(points).sum().backward()
    part = density.value_and_grad(z, np.arange(0, 60, 7))
    return {
        "log_likelihood": digest(density.log_likelihood(z)),
        "value": digest(value),
        "gradient": digest(gradient),
        "log_prob": digest(points.grad.numpy()),
        "rows": digest(*part),
        "pointwise": digest(density.pointwise(z)),
        "not finite": digest(density.value(np.full((1, 4), 1e200))),
    }


def streamed() -> dict[str, Any]:
    """A loader that is read for each evaluation, of batches that are no blocks."""
    read: set[int] = set()

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, i: int) -> Any:
            read.add(i)
            return table[0][i], table[1][i]

    table = rows(200)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=48)
    density = posterior(data=subbayes.data.Data.of(loader, memory_limit=0))
    z = np.random.default_rng(0).standard_normal((6, 4))
    read.clear()
    found = digest(*density.value_and_grad(z)), digest(density.pointwise(z))
    own = density._own_blocks().own
    first, last = own.start * 32 // 48, -(-own.stop * 32 // 48)  # whole batches
    expected = set(range(first * 48, min(last * 48, 200))) if own.start < own.stop else set()
    assert read == expected, "rows of others were read"
    return {"value": found}


def resumed(folder: str, stop: int, seconds: float = 1e-9) -> dict[str, Any]:
    """A run with a checkpoint, which stops all processes at an evaluation (0: never)."""
    density = posterior("uneven")
    count, inner = [0], density.value_and_grad

    def counted(z: np.ndarray, rows: Any = None) -> Any:
        count[0] += 1
        if count[0] == stop:
            os._exit(9)
        return inner(z, rows)

    density.value_and_grad = counted
    settings = Sampling(
        draws=60,
        chains=8,
        warmup=20,
        seed=3,
        progress=False,
        checkpoint=folder or None,
        checkpoint_seconds=seconds,
    )
    return {"z": digest(engine_of("hmc").run(density, settings).z)}


def forged(folder: str) -> dict[str, Any]:
    """The error of a checkpoint of another density, with a digest that fits."""
    processes = distributed.current()
    stopped("elliptical-slice", f"{folder}/saved", 60)
    if processes.rank == 0:
        tensors, facts, kind = artifact.read(f"{folder}/saved")
        tensors["checked.log_likelihood"].add_(100.0)
        artifact.write(f"{folder}/changed", kind, tensors, facts)
    processes.gather(None)
    try:
        return {"error": str(stopped("elliptical-slice", f"{folder}/changed", 0))}
    except subbayes.InputError as error:
        return {"error": str(error)}


def begins() -> dict[str, Any]:
    """Nothing: the line that it prints says that the processes have joined."""
    return {}


def faulty_run(folder: str) -> dict[str, Any]:
    """A run of some seconds, with a checkpoint at every exchange."""
    settings = Sampling(
        draws=80,
        chains=8,
        warmup=10,
        seed=3,
        progress=False,
        checkpoint=folder or None,
        checkpoint_seconds=0.1,
    )
    engine = engine_of("elliptical-slice")
    return {"z": digest(engine.run(posterior(batch_size=128, mode="eager"), settings).z)}


def elastic_run(folder: str, marker: str, rank: int, stop: int) -> dict[str, Any]:
    """A run in which a process kills itself at an evaluation, if no marker says it has before."""
    density = posterior(batch_size=128, mode="eager")
    count, inner, begun = [0], density.log_likelihood, Path(folder).is_dir()

    def counted(z: np.ndarray) -> Any:
        count[0] += 1
        if count[0] == stop and distributed.current().rank == rank and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(z)

    density.log_likelihood = counted
    settings = Sampling(
        draws=20,
        chains=8,
        warmup=5,
        seed=3,
        progress=False,
        checkpoint=folder or None,
        checkpoint_seconds=1e-9,
    )
    z = engine_of("elliptical-slice").run(density, settings).z
    return {"z": digest(z), "resumed": begun, "evaluations": count[0]}


def killed(rank: int) -> dict[str, Any]:
    """A run in which one process ends without a word."""
    density = posterior("empty", mode="eager")
    for i in range(100):
        if i == 20 and distributed.current().rank == rank:
            os._exit(3)
        density.log_likelihood(np.zeros((2, 4)))
    return {}


def fitted(folder: str = "", temperature: Any = 1.0) -> dict[str, Any]:
    """`fit`, and what the model predicts."""
    x, y = rows(200)
    model = subbayes.fit(
        module(),
        (x, y),
        temperature=temperature,
        training=Training(epochs=3, swa_epochs=8),
        sampling=Sampling(draws=10, progress=False, checkpoint=folder or None),
    )
    if folder:
        model.save(folder + "-model")
    return {"z": digest(model.draws.z), "mean": digest(model.predict(x[:5]).mean)}


def from_ensemble(folder: str = "") -> dict[str, Any]:
    """All weights, with chains that start at the members of an ensemble."""
    model = subbayes.fit(
        module(),
        rows(100),
        subspace="full",
        inference="hmc",
        training=Training(epochs=3),
        sampling=Sampling(
            draws=4,
            chains=3,
            warmup=2,
            initial="ensemble",
            progress=False,
            checkpoint=folder or None,
        ),
    )
    return {"starts": digest(model.starts), "z": digest(model.draws.z)}


class Scaled(torch.nn.Module):
    """A module with a number that is neither a parameter nor a buffer."""

    def __init__(self, inner: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of the inner module times the number."""
        return self.factor * self.inner(x)


@contextlib.contextmanager
def on_another_device(is_other: bool) -> Iterator[torch.device]:
    """A pretended device, or the CPU."""
    with pretended_device() if is_other else contextlib.nullcontext(torch.device("cpu")) as device:
        yield device


def refused(what: str) -> dict[str, Any]:
    """The error of processes that do not agree."""
    rank = distributed.current().rank
    n = 60 + (rank == 1) * (what == "rows") + 4940 * (what == "one row of many")
    table: Any = rows(n)
    table[0][n - 3, 1] += rank * (what in ("values", "one row of many", "streamed"))
    if what == "streamed":
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*table), batch_size=16)
        table = subbayes.data.Data.of(loader, memory_limit=0)
    net: torch.nn.Module = module(rank if what == "weights" else 0)
    if what == "attribute":
        net = Scaled(net, 1.0 + 0.001 * rank)
    seed = rank if what == "seed" else 0
    options: dict[str, Any] = {"prior": 1.0 + rank * (what == "prior")}
    options["inference"] = "nuts" if rank and what == "engine" else "elliptical-slice"
    version = fit_processes.__version__
    fit_processes.__version__ = f"{version}.{rank}" if what == "version" else version
    try:
        with on_another_device(bool(rank) and what == "device") as device:
            subbayes.fit(
                net.to(device),
                table,
                training=Training(epochs=1),
                sampling=Sampling(seed=seed),
                **options,
            )
    except subbayes.InputError as error:
        return {"error": str(error)}
    finally:
        fit_processes.__version__ = version
    return {}


def refused_posterior(what: str) -> dict[str, Any]:
    """The error of processes that sample different posteriors, without `fit`."""
    rank = distributed.current().rank
    net, table = Scaled(module(), 1.0 + rank * (what == "attribute")), rows(60)
    if what == "data":
        table[1][50] += rank
    scale, temperature = 1.0 + rank * (what == "prior"), 1.0 + rank * (what == "temperature")
    draws, seed = 5 + rank * (what == "draws"), rank * (what == "seed")
    engine = engine_of("nuts" if rank and what == "engine" else "elliptical-slice")
    with on_another_device(bool(rank) and what == "device") as device:
        network = subbayes.Network(net.to(device))
        density = subbayes.Posterior(
            network,
            Gaussian(noise=0.3),
            table,
            RandomSubspace(network.weights, 4, seed=rank * (what == "subspace")),
            Normal(scale),
            temperature,
            batch_size=10 + rank * (what == "batch size"),
            mode="eager",
        )
        try:
            engine.run(density, Sampling(draws=draws, chains=2, seed=seed, progress=False))
        except subbayes.InputError as error:
            return {"error": str(error)}
    return {}


def one_fails() -> dict[str, Any]:
    """An error in the training, which only the first process does."""
    x, y = rows(60)
    with contextlib.suppress(AttributeError):
        y = y * 1e30
    try:
        subbayes.fit(module(), (x, y), training=Training(epochs=2, learning_rate=1e30))
    except subbayes.InputError as error:
        return {"error": str(error)}
    return {}


def groups(number: int) -> dict[str, Any]:
    """The error of a number of groups that does not fit."""
    try:
        sample("elliptical-slice", chain_groups=number)
    except subbayes.InputError as error:
        return {"error": str(error)}
    return {}


def traffic(rank: int) -> dict[str, Any]:
    """Bytes that an evaluation passes to collectives, for each chain."""
    network = subbayes.Network(module())
    space = RandomSubspace(network.weights, rank, seed=1)
    density = subbayes.Posterior(network, Gaussian(noise=0.3), rows(200), space, batch_size=32)
    processes, z = distributed.current(), np.zeros((3, rank))
    before = processes.traffic
    density.value_and_grad(z)
    return {"bytes": (processes.traffic - before) / len(z)}


def left() -> dict[str, Any]:
    """Numbers of process groups after joining a group of the program, and after leaving it."""
    state, groups = distributed.processes, dist.distributed_c10d._world.pg_map
    own = state._current
    before, found = set(groups), []
    for _ in range(2):
        state._current = None  # as if the program had made the group
        joined = distributed.join()
        with joined.split(2):
            joined.gather(0, "chains")
        found.append(len(set(groups) - before))
        distributed.leave()
        found.append(len(set(groups) - before))
    state._current = own
    set_first_process(own.rank == 0)
    return {"groups": found, "own": before <= set(groups)}


MODULES = ("engine", "sharded", "padded", "divided", "curvature", "training")


def case_of(name: str) -> Callable[..., dict[str, Any]]:
    """A case of this file or of one beside it; that of adapters imports transformers."""
    if name in globals():
        return globals()[name]
    for file in (*MODULES, "sharded_adapter"):
        module = import_module(f"distributed.{file}_cases")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)


def run(text: str) -> None:
    """Print the result of a case, a JSON list of a name and its arguments."""
    name, *arguments = json.loads(text)
    print(json.dumps([text, case_of(name)(*arguments)]), flush=True)


def main() -> None:
    """Run the cases of the command line, or without any those of the standard input."""
    distributed.join()
    for text in sys.argv[1:] or sys.stdin:
        run(text.strip())
    distributed.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the end of torch's threads, which rarely aborts after all is done


if __name__ == "__main__":
    main()
