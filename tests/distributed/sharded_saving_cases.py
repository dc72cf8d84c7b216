"""Cases of `worker.py` that save and load sharded weights."""

from __future__ import annotations

import copy
import dataclasses
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import subbayes
from distributed.sharded_cases import UNTRAINED, bits, off, plain, sharded, table
from subbayes import Sampling
from subbayes.artifacts import folder as artifact
from subbayes.artifacts import tensors as tensors_module
from subbayes.artifacts.tensors import fingerprint
from subbayes.distributed import sharded_weights
from subbayes.distributed.processes import Processes
from subbayes.networks.sharded.network import ShardedNetwork
from subbayes.training.trajectory import TrajectoryRecorder


def _recorded_steps() -> Any:
    """Directions of a trajectory of a sharded module, around its mean."""
    module = sharded(plain())
    return module, _recorder_of(module).pca(2)


def _recorder_of(module: nn.Module) -> TrajectoryRecorder:
    recorder, layout = TrajectoryRecorder(), ShardedNetwork(module).layout
    start, named = ShardedNetwork(module).weights, dict(module.named_parameters())
    for step in range(4):
        layout.write(named, start + 0.1 * step * torch.cos(start * (step + 1)))
        recorder.update(module)
    return recorder


def _saved(kind: str) -> tuple[Any, Any, Any]:
    """A fitted sharded module to save, and functions that make the module whole and sharded."""
    options: dict[str, Any] = {"subspace": "random", "inference": "elliptical-slice"}
    settings = Sampling(draws=4, chains=2, warmup=4, seed=1, progress=False)
    data = table(40, torch.float32 if kind == "float32" else torch.float64)

    def whole() -> nn.Module:
        if kind == "mlp":
            return subbayes.MLP(3, (5,), 1, seed=0).double()
        if kind == "frozen":
            torch.manual_seed(0)
            norm = nn.BatchNorm1d(7)
            norm.running_mean = torch.linspace(-1, 1, 7)
            return nn.Sequential(nn.Linear(3, 7), norm, nn.Tanh(), nn.Linear(7, 1)).double().eval()
        return plain(data[0].dtype)

    def divided() -> nn.Module:
        module = whole()
        named = dict(module.named_modules())
        parts = [name for name, part in named.items() if name and list(part.parameters(False))]
        return sharded(module, [*parts, ""])

    if kind == "frozen":
        options["parameters"] = "last-layer"
    module = divided()
    if kind == "trajectory":
        module, options["subspace"] = _recorded_steps()
    return subbayes.fit(module, data, sampling=settings, **options), whole, divided


def sharded_saving(folder: str, kind: str, chunk: int = 2**20) -> dict[str, Any]:
    """Save a fit of sharded weights, and load it around modules in one piece and sharded ones."""
    sharded_weights._CHUNK = chunk
    model, whole, divided = _saved(kind)
    path = f"{folder}/{kind}-{dist.get_world_size()}-{chunk}"
    x = table(9, model.network.dtype)[0]
    expected = model.predict(x)
    model.save(path)
    other = divided()
    for tensor in [*other.parameters(), *other.buffers()]:
        tensor.detach().mul_(2)
    before = bits(other)
    again, alone = subbayes.load(path, other), subbayes.load(path, whole())
    found = again.predict(x)
    again.save(path + "-again")
    data = table(40, model.network.dtype)
    density = subbayes.load(path, other, data=data).posterior
    z = model.draws.z[:, 0]
    return {
        "sharded": bool(np.array_equal(found.outputs, expected.outputs)),
        "whole": off(alone.predict(x).outputs, expected.outputs),
        "density": off(density.log_likelihood(z), model.posterior.log_likelihood(z)),
        "weights": all(map(torch.equal, bits(other), before)),
        "files": sorted(name.split("-")[0] for name in os.listdir(path)),
        "path": path,
        "saved again": contents(path) == contents(path + "-again"),
        "without a module": subbayes.load(path).network.size if kind == "mlp" else None,
    }


def contents(path: str) -> Any:
    found = artifact.read(path)
    return fingerprint(found.tensors, found.facts)


def whole_saving(folder: str, kind: str) -> dict[str, Any]:
    """Save the fit of the same module in one piece, and compare it with what others have saved."""
    options: dict[str, Any] = {"subspace": "random", "inference": "elliptical-slice"}
    settings = Sampling(draws=4, chains=2, warmup=4, seed=1, progress=False)
    model = subbayes.fit(plain(), table(40), training=UNTRAINED, sampling=settings, **options)
    model.save(f"{folder}/whole")
    tensors, facts, _ = artifact.read(f"{folder}/whole")
    others = [artifact.read(f"{folder}/{name}") for name in os.listdir(folder) if name[:6] == kind]
    for other in (*others, artifact.read(f"{folder}/whole")):
        facts["draws"]["meta"] = other.facts["draws"]["meta"] = None
        facts["likelihood"] = other.facts["likelihood"] = None  # equal up to rounding
    return {
        "facts": [repr(other.facts) == repr(facts) for other in others],  # NaN is not NaN
        "names": [list(other.tensors) == list(tensors) for other in others],
        "shift": [
            torch.equal(o.tensors["subspace.shift"], tensors["subspace.shift"]) for o in others
        ],
        "draws": max(off(other.tensors["z"], tensors["z"]) for other in others),
    }


def sharded_saving_refused(folder: str) -> dict[str, Any]:
    """The errors of saving and loading that fail in all processes, and what they leave behind."""
    model, whole, divided = _saved("plain")
    rank, count = dist.get_rank(), dist.get_world_size()
    sharded_weights._CHUNK = 20
    place = f"{folder}/refused-{count}"
    good = f"{place}/good"
    model.save(good)
    weights = model.subspace.shift

    def broken() -> Any:
        spoilt = copy.copy(model.subspace)
        spoilt.shift = weights * (torch.nan if rank == count - 1 else 1.0)
        return dataclasses.replace(model, subspace=spoilt).save(f"{place}/broken")

    def failing(method: str) -> Callable[[], Any]:
        def attempt() -> Any:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0:
                    if method == "_bytes_of":
                        patch.setattr(tensors_module, method, _at_piece(3, 20, no_space))
                    else:
                        patch.setattr(os if method == "replace" else artifact, method, no_space)
                return model.save(f"{place}/{method}")

        return attempt

    attempts: dict[str, Callable[[], Any]] = {
        "paths": lambda: model.save(f"{place}/path-{rank}"),
        "not a path": lambda: model.save(f"{place}/a" if rank else 3),  # type: ignore[arg-type]
        "taken": lambda: model.save(good),
        "not finite": broken,
        "disk full": failing("write_new"),
        "disk full in the middle": failing("_bytes_of"),
        "disk full at the end": failing("replace"),
        "another artifact": lambda: subbayes.load(good if rank else f"{good}-2", divided()),
        "no artifact": lambda: subbayes.load(f"{place}/none", divided()),
        "another module": lambda: subbayes.load(
            good, sharded(nn.Sequential(nn.Linear(3, 1)).double(), ("0", ""))
        ),
        "another dtype": lambda: subbayes.load(
            good, sharded(plain(torch.float32), ("first", "middle", "last", ""))
        ),
        "another kind": lambda: subbayes.load(f"{place}/full", divided()),
        "altered": lambda: subbayes.load(f"{place}/altered", divided()),
        "endless": lambda: subbayes.load(f"{place}/endless", divided()),
        "wide": lambda: subbayes.load(f"{place}/wide", divided()),
        "another shift": lambda: subbayes.load(good if rank else f"{place}/moved", divided()),
        "infinite": lambda: subbayes.load(f"{place}/infinite", divided()),
    }
    model.save(f"{good}-2", n_draws=2)
    if rank == 0:
        tensors, facts, kind = artifact.read(good)
        none = {"network": facts["network"] | {"names": []}}
        basis = {"subspace.basis": torch.zeros(2**40, 0), "subspace.shift": torch.zeros(0)}
        artifact.write(f"{place}/endless", kind, tensors | basis, facts | none)
        one = next(n for n, p in divided().named_parameters() if p.numel() < 9)
        size = dict(divided().named_parameters())[one].numel()
        wide = {"subspace.basis": torch.zeros(9, size), "subspace.shift": torch.zeros(size)}
        named = {"network": facts["network"] | {"names": [one]}}
        artifact.write(f"{place}/wide", kind, tensors | wide, facts | named)
        moved = {"subspace.shift": tensors["subspace.shift"] + 1.0}
        artifact.write(f"{place}/moved", kind, tensors | moved, facts)
        infinite = tensors["subspace.shift"].clone()
        infinite[0] = np.inf
        artifact.write(f"{place}/infinite", kind, tensors | {"subspace.shift": infinite}, facts)
        facts["subspace"] = {"name": "FullSubspace", "rank": len(tensors["subspace.shift"])}
        facts["settings"]["subspace"] = "full"
        tensors["z"] = torch.zeros(2, 2, len(tensors["subspace.shift"])).double()
        facts["draws"]["meta"] = {}
        artifact.write(
            f"{place}/full", kind, {k: t for k, t in tensors.items() if "stat" not in k}, facts
        )
        shutil.copytree(good, f"{place}/altered")
        (file,) = Path(f"{place}/altered").glob("tensors-*")
        numbers = bytearray(file.read_bytes())
        numbers[-9] ^= 1
        file.write_bytes(numbers)
    dist.barrier()
    found = {}
    for name, attempt in attempts.items():
        try:
            found[name] = f"no error: {attempt()!r}"
        except (subbayes.InputError, subbayes.InputTypeError) as error:
            found[name] = str(error)
    dist.barrier()
    left = sorted(str(file.relative_to(place)) for file in Path(place).rglob("*"))
    return found | {"left": [name.split("-")[0] for name in left if "good" not in name]}


def no_space(*_: Any, **__: Any) -> Any:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _at_piece(number: int, size: int, act: Callable[[], Any]) -> Callable[..., Any]:
    """Write tensors, and act at one of the pieces with so many numbers."""
    count, inner = [0], tensors_module._bytes_of

    def counted(piece: torch.Tensor) -> Any:
        count[0] += len(piece) == size
        if count[0] == number:
            act()
        return inner(piece)

    return counted


def save_killed(path: str, rank: int) -> dict[str, Any]:
    """A process that is killed in the middle of a save (-1: none), and what is in the folder."""
    sharded_weights._CHUNK = 20
    model, _, _ = _saved("plain")
    if rank == 0 == dist.get_rank():
        tensors_module._bytes_of = _at_piece(3, 20, _kill)
    elif dist.get_rank() == rank:
        inner, count = Processes.receive, [0]

        def received(*arguments: Any) -> Any:
            count[0] += 1
            return _kill() if count[0] == 3 else inner(*arguments)

        Processes.receive = received  # type: ignore[method-assign]
    model.save(path, overwrite=True)
    return {"files": sorted(name.split("-")[0] for name in os.listdir(path))}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
