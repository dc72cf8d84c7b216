"""Cases of `worker.py`: training on rows that are divided among processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import subbayes
from distributed.divided_cases import digest, module, own_rows, table
from subbayes import Sampling, Training, distributed
from subbayes.data.data import Data
from subbayes.likelihoods import Gaussian, Weighted
from subbayes.training import swa, train

STEPS = {
    "whole": Training(
        epochs=12, batch_size=None, learning_rate=0.02, prior_scale=1.0, clip_norm=1.0
    ),
    "minibatches": Training(
        epochs=4, batch_size=64, optimizer="sgd", momentum=0.9, learning_rate=0.05
    ),
    "validation": Training(epochs=40, validation=0.25, patience=3, batch_size=32),
    "averaging": Training(swa_epochs=12, batch_size=256, swa_learning_rate=0.05, prior_scale=1.0),
}


def in_float64() -> torch.nn.Module:
    """The small module in float64."""
    return module().double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """The table in float64."""
    x, y = table(200)
    return x.double(), y.double()


def own_data(shares: list[int], kind: str = "tensors") -> Data:
    """The rows of this process."""
    x, y = rows()
    if kind == "sampler":
        every = TensorDataset(x, y)
        sampler: Any = DistributedSampler(every, shuffle=True, seed=3)
        return Data.of(DataLoader(every, batch_size=16, sampler=sampler), divided=True)
    own = own_rows(shares, list(range(len(shares))))
    if kind == "loader":
        pairs = TensorDataset(x[own], y[own])
        loader = DataLoader(pairs, batch_size=16, shuffle=len(pairs) > 0)
        return Data.of(loader, divided=True, memory_limit=0)
    data = Data.of((x[own], y[own]), divided=True)
    return data.weighted((torch.arange(200) % 3)[own]) if kind == "weights" else data


def facts(result: Any) -> dict[str, Any]:
    """What training returns."""
    return {
        "weights": result.network.weights.tolist(),
        "history": result.history,
        "noise": result.likelihood.unweighted.noise,
        "best": getattr(result, "best_epoch", None),
    }


def trained(data: Any, settings: str, weighted: bool = False) -> dict[str, Any]:
    """A module after some steps."""
    likelihood: Any = Weighted(Gaussian()) if weighted else Gaussian()
    function: Any = swa if settings == "averaging" else train
    return facts(function(in_float64(), likelihood, data, STEPS[settings], seed=5, progress=False))


def divided_training(settings: str, shares: list[int], kind: str = "tensors") -> dict[str, Any]:
    """Training on the rows of each process."""
    found = trained(own_data(shares, kind), settings, kind == "weights")
    found["same"] = len(set(distributed.current().gather(repr(found))))
    return found


def divided_time_limit(shares: list[int]) -> dict[str, Any]:
    """Training that one of the processes stops, whose clock is ahead."""
    limit = 1e9 if distributed.current().rank == 0 else 1e-9
    settings = Training(epochs=50, time_limit=limit)
    found = train(in_float64(), Gaussian(0.3), own_data(shares), settings, progress=False)
    return {"epochs": len(found.history["train_loss"])}


def divided_lines(shares: list[int], subspace: str) -> dict[str, Any]:
    """The lines of a user: `fit`, which trains, and predictions; and those of all rows."""
    new = torch.linspace(-2, 2, 15).reshape(5, 3)
    training = Training(
        epochs=30, swa_epochs=12, batch_size=None, learning_rate=0.02, prior_scale=1.0
    )
    sampling = Sampling(draws=20, chains=2, warmup=10, seed=1, progress=False)
    x, y = table(200)
    own = own_rows(shares, list(range(len(shares))))
    options: dict[str, Any] = {"training": training, "sampling": sampling}
    if subspace == "optimal":
        options["subspace"] = subbayes.subspaces.Optimal(rank=3, inputs=new)
        options["inference"] = "laplace-linearised"
    else:
        options["inference"] = "elliptical-slice"
    models = [
        subbayes.fit(module(), data, **options)
        for data in (Data.of((x[own], y[own]), divided=True), (x, y))
    ]
    means = [model.predict(new).mean for model in models]
    return {
        "same": len(set(distributed.current().gather(digest(*means[:1])))),
        "difference": float(abs(means[0] - means[1]).max()),
        "rmse": [model.evaluate((x, y))["rmse"] for model in models],
        "rank": [model.subspace.rank for model in models],
    }
