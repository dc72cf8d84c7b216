"""Cases of `worker.py` with weights that `fully_shard` divides among the processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import subbayes
from distributed.divided_cases import own_rows
from subbayes import Sampling, Training, distributed
from subbayes.data.data import Data
from subbayes.distributed.sharded_weights import local_part
from subbayes.inference.engine import engine_of
from subbayes.likelihoods import Gaussian
from subbayes.networks.sharded.network import ShardedNetwork
from subbayes.subspace import RandomSubspace
from subbayes.subspaces.random import Random
from subbayes.subspaces.sharded_random import ShardedRandomSubspace, sum_over_processes
from subbayes.training.trajectory import TrajectoryRecorder

UNTRAINED = Training(epochs=0, swa_epochs=0)


class Residual(nn.Module):
    """A network whose layers have numbers of rows that processes cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 7), nn.Linear(7, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(5))
        self.drop = nn.Dropout(0.5)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.drop(hidden + torch.tanh(self.middle(hidden)))
        if self.fails:
            raise RuntimeError("a layer fails")
        return self.last(hidden) * self.scale.mean()


def plain(dtype: torch.dtype = torch.float64) -> Residual:
    """The module in one piece."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Residual().to(dtype)


def sharded(
    module: nn.Module, parts: Any = ("first", "middle", "last", ""), device: str = "cpu"
) -> nn.Module:
    """The module with parts sharded among all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for name in parts:
        fully_shard(module.get_submodule(name), mesh=mesh)
    return module


def table(n: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with a smooth target."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=dtype)
    return x, torch.sin(x[:, 0]) + 0.1 * torch.randn(n, generator=generator, dtype=dtype)


def two_posteriors(
    n: int, data: Any = None, device: str = "cpu", **options: Any
) -> tuple[Any, Any]:
    """The same posterior with sharded weights, on a device, and with whole ones on the CPU."""
    options = {"batch_size": 32} | options
    module = sharded(plain().to(device), device=device)
    network, whole = ShardedNetwork(module), subbayes.Network(plain())
    return (
        subbayes.Posterior(
            network,
            Gaussian(noise=0.3),
            table(n) if data is None else data,
            ShardedRandomSubspace(network, 4, seed=1),
            **options,
        ),
        subbayes.Posterior(
            whole,
            Gaussian(noise=0.3),
            table(n),
            RandomSubspace(whole.weights, 4, seed=1),
            **options,
        ),
    )


def off(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number."""
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def bits(module: nn.Module) -> list[torch.Tensor]:
    """Copies of the shards of this process."""
    return [p.to_local().clone() for p in module.parameters()]  # type: ignore[attr-defined]


def sharded_values(n: int, device: str = "cpu") -> dict[str, float]:
    """Differences between all evaluations with sharded and with whole weights."""
    density, whole = two_posteriors(n, device=device)
    return _differences(density, whole, np.arange(0, n, 7))


def _differences(density: Any, whole: Any, rows: np.ndarray | None) -> dict[str, float]:
    z = np.random.default_rng(0).standard_normal((3, 4))

    def gradient(one: Any) -> np.ndarray:
        points = torch.from_numpy(z).requires_grad_()
        one.log_prob(points).sum().backward()
        return points.grad.numpy()

    found = {
        "log_likelihood": off(density.log_likelihood(z), whole.log_likelihood(z)),
        "log_prob": off(gradient(density), gradient(whole)),
        "pointwise": off(density.pointwise(z), whole.pointwise(z)),
        "predict": off(
            density.predict(z, table(5)[0]).outputs, whole.predict(z, table(5)[0]).outputs
        ),
    }
    names = ("value", "gradient")
    pairs = zip(names, density.value_and_grad(z), whole.value_and_grad(z), strict=True)
    found |= {name: off(a, b) for name, a, b in pairs}
    if rows is not None:
        some = density.value_and_grad(z, rows), whole.value_and_grad(z, rows)
        parts = zip(names, *some, strict=True)
        found |= {f"{name} of rows": off(a, b) for name, a, b in parts}
    return found


def sharded_basis() -> dict[str, Any]:
    """The basis of all processes, and what `project` finds."""
    network, whole_network = ShardedNetwork(sharded(plain())), subbayes.Network(plain())
    method = Random(3)
    whole: Any = method.subspace_class(whole_network)(whole_network.weights, 3, seed=5)
    space: Any = ShardedRandomSubspace(network, 3, 5)
    w = torch.linspace(-1, 1, whole.size).double()
    own = torch.cat([w[part] for part in space.layout.slices])
    parts = distributed.current().gather((space.layout.slices, space.basis(), space.shift))
    basis, shift = torch.full((3, space.size), torch.nan).double(), torch.zeros(space.size).double()
    for slices, block, centre in parts:
        at = torch.cat([torch.arange(part.start, part.stop) for part in slices])
        assert basis[:, at].isnan().all(), "two processes hold the same weight"
        basis[:, at], shift[at] = block, centre
    z = torch.tensor([0.5, -1.0, 2.0]).double()
    return {
        "same bits": torch.equal(basis, whole.basis()),
        "same centre": torch.equal(shift, whole.shift),
        "largest part": max(block.shape[1] for _, block, _ in parts) / space.size,
        "project": float((space.project(space.weights(z)) - z).abs().max()),
        "project others": float((space.project(own) - whole.project(w)).abs().max()),
        "pull": float((sum_over_processes(space.pull(own)) - whole.pull(w)).abs().max()),
        "digest": space.config()["shift"],
    }


def sharded_fit(inference: str, draws: int, size: str = "float64") -> dict[str, Any]:
    """`fit` of a sharded module, against that of a whole one, and what it leaves behind."""
    dtype = getattr(torch, size)
    module, data = sharded(plain(dtype)).train(), table(100, dtype)
    module.last.weight.grad = module.last.weight.detach().clone()
    slope = local_part(module.last.weight.grad).clone()
    before, buffers = bits(module), torch.get_rng_state()
    settings = Sampling(draws=draws, chains=2, warmup=8, seed=1, progress=False)
    options: dict[str, Any] = {"inference": inference, "sampling": settings}
    model = subbayes.fit(module, data, **options)  # in its default subspace, "random"
    options |= {"subspace": "random", "training": UNTRAINED}
    whole = subbayes.fit(plain(dtype), data, **options)
    x = table(7, dtype)[0]
    same = all(map(torch.equal, bits(module), before))
    return {
        "draws": off(model.draws.z, whole.draws.z),
        "noise": off(model.likelihood.noise, whole.likelihood.noise),
        "mean": off(model.predict(x).mean, whole.predict(x).mean),
        "weights": same and bool(torch.equal(torch.get_rng_state(), buffers)),
        "mode": all(part.training for part in module.modules()),
        "gradients": torch.equal(local_part(module.last.weight.grad), slope),
        "others": module.first.weight.grad is None,
        "z": model.draws.z.tolist(),
        "processes": distributed.current().gather(float(model.draws.z.sum())),
    }


def sharded_moments() -> dict[str, Any]:
    """Mean and covariance of the Laplace approximation of a linear model, which is exact."""
    module = nn.Sequential(nn.Linear(3, 1, bias=False).double())
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
    whole = RandomSubspace(subbayes.Network(copy.deepcopy(module)).weights, 2, seed=3)
    x, y = table(40)
    network = ShardedNetwork(sharded(module, ("0",)))
    space = ShardedRandomSubspace(network, 2, seed=3)
    density = subbayes.Posterior(network, Gaussian(noise=0.5), (x, y), space, batch_size=16)
    draws = engine_of("laplace").run(density, Sampling(draws=4, chains=1, progress=False))
    design = (x @ whole.basis().T).numpy()
    precision = np.eye(2) + design.T @ design / 0.25
    mean = np.linalg.solve(precision, design.T @ (y - x @ whole.shift).numpy() / 0.25)
    return {
        "mean": off(draws.moments.mean, mean),
        "covariance": off(draws.moments.covariance, np.linalg.inv(precision)),
    }


def sharded_error() -> dict[str, Any]:
    """A forward that fails midway, with and without gradients: what it leaves behind."""
    density, _ = two_posteriors(100)
    module = density.network._module
    before, z = bits(module), np.full((2, 4), 0.5)
    expected, found = density.value_and_grad(z), {}
    for name in ("log_likelihood", "value_and_grad"):
        module.fails = True
        try:
            getattr(density, name)(z)
        except RuntimeError as error:
            found[f"{name}: error"] = str(error)
        module.fails = False
        found[f"{name}: weights"] = all(map(torch.equal, bits(module), before))
        found[f"{name}: mode"] = module.training
    again = density.value_and_grad(z)
    return found | {"again": all(map(np.array_equal, again, expected))}


def sharded_run(folder: str, stop: int) -> dict[str, Any]:
    """A run with a checkpoint, which stops all processes at an evaluation (0: never)."""
    density, _ = two_posteriors(100)
    count, inner = [0], density.log_likelihood

    def counted(z: np.ndarray) -> Any:
        count[0] += 1
        if count[0] == stop:
            os._exit(9)
        return inner(z)

    density.log_likelihood = counted
    settings = Sampling(
        draws=10, chains=2, seed=3, progress=False, checkpoint=folder, checkpoint_seconds=1e-9
    )
    return {"z": engine_of("elliptical-slice").run(density, settings).z.tolist()}


def _mixed() -> Any:
    return subbayes.fit(sharded(plain(), ("first",)), table(20), subspace="random")


def _one_process() -> Any:
    modules = sharded(plain()), plain()
    return subbayes.fit(modules[dist.get_rank()], table(20), subspace="random")


def _two_axes() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
    module = plain()
    fully_shard(module, mesh=mesh)
    return subbayes.fit(module, table(20), subspace="random")


def _part_of_the_processes() -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    module = plain()
    fully_shard(module, mesh=DeviceMesh("cpu", [dist.get_rank()]))
    return subbayes.fit(module, table(20), subspace="random")


def _first_version() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(plain(), device_id=torch.device("cpu"))
    return subbayes.fit(module, table(20), subspace="random")


def _fit(**options: Any) -> Callable[[], Any]:
    return lambda: subbayes.fit(sharded(plain()), table(20), **({"subspace": "random"} | options))


REFUSED: dict[str, Callable[[], Any]] = {
    "mixed": _mixed,
    "one process": _one_process,
    "two axes": _two_axes,
    "part of the processes": _part_of_the_processes,
    "first version": _first_version,
    "network": lambda: subbayes.Network(sharded(plain())),
    "masks": _fit(parameters={"first.weight": torch.ones(7, 3, dtype=torch.bool)}),
    "epochs": _fit(training=Training(epochs=5)),
    "pca": _fit(subspace="pca"),
    "optimal": _fit(subspace="optimal"),
    "subnetwork": _fit(subspace="subnetwork"),
    "curve": _fit(subspace="curve"),
    "full": _fit(subspace="full"),
    "linearised": _fit(inference="laplace-linearised"),
    "evidence": _fit(prior="evidence"),
    "chain groups": _fit(sampling=Sampling(chain_groups=2)),
    "rank": lambda: ShardedRandomSubspace(ShardedNetwork(sharded(plain())), 1000),
    "size": lambda: subbayes.Posterior(
        ShardedNetwork(sharded(plain())),
        Gaussian(noise=0.3),
        table(20),
        RandomSubspace(torch.zeros(3).double(), 2),
    ),
    "sparse": lambda: subbayes.sparse.convert(sharded(plain())),
    "trajectory": lambda: TrajectoryRecorder().update(sharded(plain())),
    "kind": _fit(subspace=Random(2, kind="sparse")),
    "device": lambda: ShardedNetwork(sharded(plain())).to("cpu"),
}


def sharded_refused() -> dict[str, str]:
    """The errors of what cannot be done with sharded weights."""
    found = {}
    for name, attempt in REFUSED.items():
        try:
            found[name] = f"no error: {attempt()!r}"
        except (subbayes.InputError, TypeError, ValueError) as error:
            found[name] = f"{error}"
    return found


def sharded_rows_of_each(shares: list[int]) -> dict[str, float]:
    """Sharded weights, and rows that each process has for itself."""
    rows = own_rows(shares, list(range(len(shares))), sum(shares))
    x, y = table(sum(shares))
    data = Data.of((x[rows], y[rows]), divided=True)
    return _differences(*two_posteriors(sum(shares), data), None)


def sharded_scores(shares: list[int], form: str = "rows") -> dict[str, Any]:
    """Scores of sharded test rows, with sharded weights, and of all rows with whole ones.

    Args:
        shares: numbers of rows of the processes.
        form: "rows", "loader", or "noise", rows with noise scales of their own.
    """
    rows = own_rows(shares, list(range(len(shares))), sum(shares))
    x, y = table(sum(shares))
    scale = 0.2 + x[:, 1].abs()
    known: Any = (y, scale) if form == "noise" else y
    own: Any = (x[rows], (y[rows], scale[rows]) if form == "noise" else y[rows])
    if form == "loader":
        own = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*own), 16)
    options: dict[str, Any] = {
        "likelihood": Gaussian(noise="per-observation" if form == "noise" else 0.3),
        "subspace": "random",
        "inference": "elliptical-slice",
        "training": UNTRAINED,
        "sampling": Sampling(draws=5, chains=2, warmup=4, seed=1, progress=False),
    }
    model = subbayes.fit(sharded(plain()), (x, known), **options)
    whole = subbayes.fit(plain(), (x, known), **options)
    given = Data.of(own, divided=True, memory_limit=0)
    return {
        "found": model.evaluate(given),
        "all rows": model.evaluate((x, known)),
        "whole": whole.evaluate((x, known)),
    }
