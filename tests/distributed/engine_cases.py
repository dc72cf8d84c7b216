"""Cases of `worker.py` that run every engine, and the posterior that other cases share."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import subbayes
from subbayes import Sampling, Training, distributed
from subbayes.artifacts import folder as folders
from subbayes.data.data import Data
from subbayes.inference.engine import engine_of
from subbayes.inference.samplers import chains
from subbayes.inference.samplers.chains import Sampler
from subbayes.likelihoods import Gaussian
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.subspace import RandomSubspace

ENGINES = {
    "elliptical-slice": {},
    "nuts": {"warmup": 30},
    "hmc": {"warmup": 30},
    "mclmc": {"warmup": 120},
    "mams": {"warmup": 30},
    "slice": {"warmup": 10},
    "smc": {},
    "parallel-tempering": {"warmup": 20},
    "laplace": {},
    "vi": {"steps": 60},
    "full-rank-vi": {"steps": 40, "batch_size": 50},
    "realnvp": {"steps": 30},
}
SAMPLERS = [name for name in ENGINES if isinstance(engine_of(name), Sampler)]
MINIBATCHES = ("full-rank-vi",)
SIZES = {"even": 256, "uneven": 200, "empty": 60}


def digest(*arrays: Any) -> str:
    """A digest of the bits of some arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def rows(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A table with a smooth target."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return x, torch.sin(x[:, 0]) + 0.1 * torch.randn(n, generator=generator)


def module(seed: int = 0) -> torch.nn.Module:
    """A small network."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))


def posterior(
    size: str = "even", data: Any = None, device: str = "cpu", **options: Any
) -> subbayes.Posterior:
    """A posterior with blocks of 32 rows and 4 chains."""
    network = subbayes.Network(module().to(device))
    space = RandomSubspace(network.weights, 4, seed=1)
    data = rows(SIZES[size]) if data is None else data
    density = subbayes.Posterior(
        network, Gaussian(noise=0.3), data, space, **{"batch_size": 32} | options
    )
    density.block_size = replace(density.block_size, chains=4)  # so that 8 chains are two parts
    return density


def configured(name: str) -> tuple[Any, int | None]:
    """An engine of `ENGINES`, and its warm-up."""
    options = dict(ENGINES[name])
    warmup = options.pop("warmup", None)
    return replace(engine_of(name), **options), warmup


def sample(
    name: str, size: str = "even", chain_groups: int | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Draws of an engine."""
    engine, warmup = configured(name)
    settings = Sampling(
        draws=10, chains=8, warmup=warmup, seed=1, progress=False, chain_groups=chain_groups
    )
    draws = engine.run(posterior(size, device=device), settings)
    numbers = {k: v for k, v in draws.stats.items() if v.dtype != object}
    evaluated = draws.meta.get("batched_evaluations")
    return {"z": digest(draws.z), "stats": digest(*numbers.values()), "evaluations": evaluated}


def semi_structured(name: str, formula: str, deep: bool) -> dict[str, str]:
    """Draws of a model of effects, alone and beside a network, and its summary.

    With a network, groups with this many rows have centred coordinates.
    """
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(8), 30)
    x, a = rng.uniform(-1, 1, (2, len(groups)))
    y = np.sin(2 * x) + 2 * rng.standard_normal(8)[groups] + 0.3 * np.tanh(2 * a)
    y += 0.3 * rng.standard_normal(len(groups))
    frame = pd.DataFrame({"y": y, "x": x, "a": a, "g": groups.astype(str)})
    networks = {"net": subbayes.MLP(1, (3,), 1, "tanh", seed=0)}
    model = subbayes.Regression(formula)
    if deep:
        model = SemiStructuredRegression(f"{formula} + net(a)", networks=networks)
    training = Training(epochs=50, batch_size=None, validation=None, patience=None)
    options = {"subspace": SemiStructuredSubspace(3), "training": training} if deep else {}
    warmup = None if name in ("smc", "laplace") else 30
    settings = Sampling(draws=20, chains=4, warmup=warmup, seed=0, progress=False)
    fitted = model.fit(frame, inference=name, sampling=settings, **options)
    summary = fitted.summary().select_dtypes("number").to_numpy(float)
    return {"z": digest(fitted.draws.z), "summary": digest(summary)}


class _StoppedError(Exception):
    pass


def stopped(name: str, folder: str, stop: int) -> dict[str, Any]:
    """A run of an engine with a checkpoint, which all processes end at an evaluation (0: never)."""
    density, count = posterior("uneven"), [0]
    begun = (Path(folder) / "manifest.json").is_file()  # folders are made to see if they can be

    def counted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == stop:
                raise _StoppedError
            return inner(*arguments, **options)

        return call

    for method in ("value", "value_and_grad", "log_likelihood"):
        setattr(density, method, counted(getattr(density, method)))
    engine, warmup = configured(name)
    settings = Sampling(
        draws=60,
        chains=8,
        warmup=warmup,
        seed=3,
        progress=False,
        checkpoint=folder or None,
        checkpoint_seconds=1e-9,
        chain_groups=1 if stop else None,  # so that all are at the same evaluation
    )
    try:
        z = digest(engine.run(density, settings).z)
    except _StoppedError:
        z = None
    return {"z": z, "resumed": begun, "evaluations": count[0]}


def sample_divided(name: str, shares: list[int]) -> dict[str, Any]:
    """Draws of an engine with rows that each process has for itself."""
    engine, warmup = configured(name)
    first, rank = np.cumsum([0, *shares]), distributed.current().rank
    own = slice(int(first[rank]), int(first[rank + 1]))
    data = Data.of(tuple(part[own] for part in rows(sum(shares))), divided=True)
    settings = Sampling(draws=10, chains=8, warmup=warmup, seed=1, progress=False)
    draws = engine.run(posterior(data=data), settings)
    return {"z": digest(draws.z)}


def killed_while_saving(name: str, folder: str, save: int, piece: int) -> dict[str, Any]:
    """A run whose first process is killed in a save, in the middle of a piece of its bytes."""
    write, write_new, saves, pieces = chains.write, folders.write_new, [0], [0]

    def counted(*arguments: Any, **options: Any) -> None:
        saves[0] += 1
        pieces[0] = 0
        write(*arguments, **options)

    def interrupted(file: Path, parts: Iterable[bytes]) -> None:
        def until_the_kill() -> Iterator[bytes]:
            for part in parts:
                pieces[0] += 1
                if (saves[0], pieces[0]) == (save, piece):
                    yield bytes(part)[: len(part) // 2]
                    os.kill(os.getpid(), signal.SIGKILL)
                yield part

        write_new(file, until_the_kill())

    chains.write, folders.write_new = counted, interrupted
    return stopped(name, folder, 0)
