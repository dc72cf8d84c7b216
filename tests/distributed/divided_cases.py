"""Cases of `worker.py` with rows that each process has for itself."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import subbayes
from subbayes import Sampling, Training, distributed
from subbayes.data.data import Data
from subbayes.diagnostics import loo
from subbayes.likelihoods import Gaussian, Likelihood, Weighted
from subbayes.subspace import RandomSubspace

UNTRAINED = Training(epochs=0, swa_epochs=0)
BLOCK = 32


def digest(*arrays: Any) -> str:
    """A digest of the bits of some arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def table(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with a smooth target."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return x, torch.sin(x[:, 0]) + 0.1 * torch.randn(n, generator=generator)


def module() -> torch.nn.Module:
    """A small network."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))


def own_rows(shares: list[int], order: list[int], n: int = 200) -> slice:
    """The rows of this process: the parts of the table in some order of the processes."""
    assert sum(shares) == n
    place = order.index(distributed.current().rank)
    ends = np.cumsum([shares[rank] for rank in order])
    return slice(int(ends[place] - shares[order[place]]), int(ends[place]))


def divided(rows: slice, streamed: bool = False) -> Data:
    """The rows of this process, from tensors or a loader."""
    x, y = (part[rows] for part in table(200))
    if not streamed:
        return Data.of((x, y), divided=True)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=48)
    return Data.of(loader, memory_limit=0, divided=True)


def posterior(data: Any, likelihood: Likelihood | None = None) -> subbayes.Posterior:
    """A posterior with blocks of 32 rows."""
    network = subbayes.Network(module())
    space = RandomSubspace(network.weights, 4, seed=1)
    likelihood = likelihood or Gaussian(noise=0.3)
    return subbayes.Posterior(network, likelihood, data, space, batch_size=BLOCK, mode="eager")


def _numbers(density: Any) -> dict[str, Any]:
    z = np.random.default_rng(0).standard_normal((6, 4))
    value, gradient = density.value_and_grad(z)
    points = torch.from_numpy(z).requires_grad_()
    density.log_prob(points).sum().backward()
    return {
        "value": digest(value),
        "log_likelihood": digest(density.log_likelihood(z)),
        "gradient": digest(gradient),
        "log_prob": digest(points.grad.numpy()),
        "each row": digest(np.sort(density.pointwise(z))),
        "n": density.n,
    }


def divided_values(
    shares: list[int], order: list[int] | None = None, streamed: bool = False
) -> dict[str, Any]:
    """Digests of all evaluations of sharded rows."""
    rows = own_rows(shares, order or list(range(len(shares))))
    density = posterior(divided(rows, streamed))
    pointwise = density.pointwise(np.zeros((1, 4)))
    return _numbers(density) | {"in order": digest(pointwise) if order is None else ""}


def whole_values() -> dict[str, Any]:
    """The same digests of rows that every process has."""
    density = posterior(table(200))
    return _numbers(density) | {"in order": digest(density.pointwise(np.zeros((1, 4))))}


def divided_sum(shares: list[int]) -> dict[str, Any]:
    """The log-likelihood, and the terms of its blocks, which process 0 evaluates alone."""
    density = posterior(divided(own_rows(shares, list(range(len(shares))))))
    z = np.random.default_rng(0).standard_normal((4, 4))
    (x, y), terms, start = table(200), [], 0
    found = density.log_likelihood(z)
    for share in shares:
        for first in range(start, start + share, BLOCK):
            rows = slice(first, min(first + BLOCK, start + share))
            terms.append(posterior((x[rows], y[rows])).log_likelihood(z).tolist())
        start += share
    return {"found": found.tolist(), "terms": terms}


def divided_fit(shares: list[int], inference: str) -> dict[str, Any]:
    """`fit` of sharded rows, and of all rows."""
    settings = Sampling(draws=8, chains=4, warmup=6, seed=1, progress=False, mode="eager")
    options: dict[str, Any] = {"inference": inference, "sampling": settings}
    options |= {"subspace": "random", "training": UNTRAINED}
    rows = own_rows(shares, list(range(len(shares))))
    model = subbayes.fit(module(), divided(rows), **options)
    whole = subbayes.fit(module(), table(200), **options)
    return {
        "draws": float(np.abs(model.draws.z - whole.draws.z).max()),
        "noise": float(np.abs(np.subtract(model.likelihood.noise, whole.likelihood.noise)).max()),
        "same": len(set(distributed.current().gather(digest(model.draws.z)))),
    }


def divided_linearised(shares: list[int]) -> dict[str, Any]:
    """Linearised Laplace of rows in blocks of 32, beside that of all rows at once."""
    engine = subbayes.inference.LinearisedLaplace()
    options: dict[str, Any] = {"draws": 8, "chains": 2, "seed": 1, "progress": False}
    rows = own_rows(shares, list(range(len(shares))))
    found = engine.sample(posterior(divided(rows)), **options)
    whole = engine.sample(posterior(table(200)), **options)
    evidence = np.float64([found.log_evidence, whole.log_evidence])
    return {
        "digest": digest(found.z, evidence[:1]),
        "draws": float(np.abs(found.z - whole.z).max()),
        "evidence": float(np.abs(np.diff(evidence)[0])),
    }


def divided_laplace(shares: list[int], method: str) -> dict[str, Any]:
    """Models of linearised Laplace of sharded rows, and of all rows."""
    x, new = table(200)[0], torch.linspace(-2, 2, 15).reshape(5, 3)
    engine = subbayes.inference.LinearisedLaplace
    options: dict[str, Any] = {
        "evidence": {"subspace": "full", "prior": "evidence"},
        "optimal": {"subspace": subbayes.subspaces.Optimal(rank=3, inputs=new)},
        "subnetwork": {"subspace": subbayes.subspaces.Subnetwork(rank=9, by="variance")},
    }[method]
    options = {"inference": engine(), "training": UNTRAINED} | options
    settings = Sampling(draws=16, chains=2, seed=1, progress=False)
    rows = own_rows(shares, list(range(len(shares))))
    models = [
        subbayes.fit(module(), data, likelihood=Gaussian(0.3), sampling=settings, **options)
        for data in (divided(rows), table(200))
    ]
    scores = [models[0].evaluate(data) for data in (divided(rows), table(200))]
    found, expected = (np.stack([p.mean, p.std]) for p in (m.predict(x) for m in models))
    return {
        "predictions": float(np.abs(found - expected).max()),
        "scores": scores,
        "prior": [float(np.mean(m.prior.scale)) for m in models],
        "same": len(set(distributed.current().gather(digest(found)))),
    }


def divided_same_rows() -> dict[str, Any]:
    """Warnings of rows that two processes have, as tensors and from a loader, and of others."""
    x, y = table(200)
    pairs = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(pairs, batch_size=48, shuffle=True)
    cases = {
        "tensors": Data.of((x, y), divided=True),
        "loader": Data.of(loader, divided=True, memory_limit=0),
        "others": divided(own_rows([100, 100], [0, 1])),
    }
    found = {}
    for name, data in cases.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior(data)
        found[name] = [str(one.message) for one in caught if "same rows" in str(one.message)]
    return found


def divided_loaded(shares: list[int]) -> dict[str, Any]:
    """A model of `fit`, saved and loaded with the rows of each process."""
    rows = divided(own_rows(shares, list(range(len(shares)))))
    settings = Sampling(draws=8, chains=2, warmup=4, seed=1, progress=False)
    options: dict[str, Any] = {"subspace": "random", "training": UNTRAINED, "sampling": settings}
    model = subbayes.fit(module(), rows, inference="elliptical-slice", **options)
    processes = distributed.current()
    with tempfile.TemporaryDirectory() as folder:
        path = processes.gather(folder)[0]
        model.save(f"{path}/model")
        processes.gather(None)  # it is written
        loaded = subbayes.load(f"{path}/model", module(), data=rows)
        processes.gather(None)  # the folder is still there
    z = np.zeros((2, 5))
    return {"values": [one.posterior.value(z).tolist() for one in (model, loaded)]}


def divided_scores(shares: list[int], noise: bool = False) -> dict[str, Any]:
    """Scores of sharded test rows, and of all of them in each process."""
    likelihood = Gaussian(noise="per-observation") if noise else Gaussian(0.3)
    x, y = table(200)
    scale = (0.2 + x[:, 1].abs()).double()
    known = (y, scale) if noise else y
    sampling = Sampling(draws=5, chains=2, warmup=4, seed=1, progress=False, mode="eager")
    model = subbayes.fit(
        module(),
        (x, known),
        likelihood=likelihood,
        subspace="random",
        training=UNTRAINED,
        sampling=sampling,
    )
    rows = own_rows(shares, list(range(len(shares))))
    own = x[rows], (y[rows], scale[rows]) if noise else y[rows]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[rows], y[rows]), 48)
    given = Data.of(own if noise else loader, divided=True, memory_limit=0)
    return {"found": model.evaluate(given), "expected": model.evaluate((x, known))}


def _weighted_scores(rows: slice, divided: bool, streamed: bool) -> dict[str, Any]:
    """The weights of rows, and leave-one-out scores of one copy of each."""
    x, y = (part[rows] for part in table(200))
    weights = (torch.arange(200) % 4).double()[rows]
    data = Data.of((x, y), divided=divided).weighted(weights)
    if streamed:
        in_tuples = [(x[i], (y[i], weights[i])) for i in range(len(y))]
        loader = torch.utils.data.DataLoader(in_tuples, batch_size=48)
        data = Data.of(loader, memory_limit=0, divided=divided)
    density = posterior(data, Weighted(Gaussian(noise=0.3)))
    found = density.row_weights
    terms = density.pointwise(0.1 * np.random.default_rng(0).standard_normal((400, 4)))
    result = loo(terms, row_weights=found, quiet=True)
    return {"weights": found.tolist(), "elpd": result.elpd, "se": result.se, "n": result.n_rows}


def divided_weights(shares: list[int], streamed: bool = False) -> dict[str, Any]:
    """Scores of sharded weighted rows, and of all rows in each process."""
    rows = own_rows(shares, list(range(len(shares))))
    return {
        "found": _weighted_scores(rows, True, streamed),
        "expected": _weighted_scores(slice(0, 200), False, False),
    }


def divided_centre(inference: str = "elliptical-slice") -> dict[str, Any]:
    """`fit` in a `Subspace` around other weights, of sharded rows, and of all rows."""
    settings = Sampling(draws=5, chains=2, warmup=4, seed=1, progress=False, mode="eager")
    weights = subbayes.Network(module()).weights + 0.1
    options: dict[str, Any] = {"subspace": RandomSubspace(weights, 3), "inference": inference}
    rows = own_rows([96, 104], [0, 1])
    models = [
        subbayes.fit(module(), data, sampling=settings, **options)
        for data in (divided(rows), table(200))
    ]
    return {
        "draws": float(np.abs(models[0].draws.z - models[1].draws.z).max()),
        "noise": float(np.abs(np.subtract(*(one.likelihood.noise for one in models))).max()),
        "centre": all(torch.equal(one.network.weights, weights) for one in models),
    }


def divided_run(folder: str, shares: list[int]) -> dict[str, Any]:
    """A run with a checkpoint."""
    density = posterior(divided(own_rows(shares, list(range(len(shares))))))
    engine = subbayes.inference.EllipticalSlice()
    try:
        draws = engine.sample(density, draws=5, chains=2, checkpoint=folder, progress=False)
    except subbayes.InputError as error:
        return {"error": str(error)}
    return {"z": digest(draws.z)}


def _data(rows: slice | None = None) -> Data:
    return divided(own_rows([100, 100], [0, 1]) if rows is None else rows)


def _other_shapes() -> Any:
    x, y = table(20)
    x = x[:, : 2 + distributed.current().rank]
    return posterior(Data.of((x, y), divided=True))


def _fit(module: Callable[[], Any] = module, **options: Any) -> Callable[[], Any]:
    return lambda: subbayes.fit(module(), _data(), **({"subspace": "random"} | options))


def _normalised() -> torch.nn.Module:
    return torch.nn.Sequential(module(), torch.nn.BatchNorm1d(1))


def _around_other_weights(net: torch.nn.Module) -> Any:
    return RandomSubspace(subbayes.Network(net).weights + 0.1, 3)


def _one_divided() -> Any:
    return _data() if distributed.current().rank else table(200)


def _sampled(data: Any) -> Any:
    return subbayes.inference.EllipticalSlice().sample(posterior(data), draws=2, progress=False)


def _mixed_calls() -> Any:
    processes = distributed.current()
    return processes.gather(1) if processes.rank else processes.on_first(lambda: 1)


REFUSED: dict[str, Callable[[], Any]] = {
    "batchnorm": _fit(_normalised, subspace=_around_other_weights(_normalised())),
    "one divided": lambda: subbayes.fit(module(), _one_divided(), subspace="random"),
    "posterior of one divided": lambda: _sampled(_one_divided()),
    "mixed calls": _mixed_calls,
    "shapes": _other_shapes,
    "empty": lambda: posterior(_data(slice(0, 0))),
    "epochs": _fit(_normalised, training=Training(epochs=5)),
    "curve": _fit(subspace="curve"),
    "optimal": _fit(subspace="optimal"),
    "predictive": _fit(subspace="subnetwork"),
    "minibatches": _fit(inference=subbayes.inference.MeanFieldVI(batch_size=10, steps=8)),
    "rows": lambda: posterior(_data()).value_and_grad(np.zeros((1, 4)), np.arange(3)),
    "chain groups": _fit(sampling=Sampling(chain_groups=2)),
    "train": lambda: subbayes.training.train(_normalised(), Gaussian(), _data()),
    "many": lambda: subbayes.training.train_many([module()], Gaussian(), _data()),
}


def divided_refused() -> dict[str, str]:
    """The errors of what cannot be done with sharded rows."""
    found = {}
    for name, attempt in REFUSED.items():
        try:
            found[name] = f"no error: {attempt()!r}"
        except (subbayes.InputError, TypeError, ValueError) as error:
            found[name] = f"{error}"
    return found
