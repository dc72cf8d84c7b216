"""Cases of `worker.py`: training on sharded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import subbayes
from distributed.divided_cases import digest, module, own_rows, table
from subbayes import Sampling, Training, distributed
from subbayes.data.data import Data
from subbayes.distributed.divided_rows import every_row
from subbayes.likelihoods import CategoricalTokens, Gaussian, Weighted
from subbayes.training import swa, train
from subbayes.training.minibatches import Minibatches, split_validation

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


class _RunningMean(torch.nn.Module):
    """A layer with a buffer that follows the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.inner = module()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return self.inner(x - self.mean)


class _Unused(torch.nn.Module):
    """A layer that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = in_float64(), torch.nn.Linear(2, 1).double()
        with torch.no_grad():
            self.unused.weight.fill_(1.0)
            self.unused.bias.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def divided_unused(shares: list[int]) -> dict[str, Any]:
    """Weights without a gradient, which a prior leaves as they are."""
    found = train(_Unused(), Gaussian(0.3), own_data(shares), STEPS["whole"], progress=False)
    return {"weights": found.module.unused.weight.tolist()}


def divided_tokens() -> dict[str, Any]:
    """Rows of texts that are padded to other lengths in each process, with a label of padding."""
    lengths = ([3, 3, 4, 4], [5, 5, 3, 3])[distributed.current().rank]
    batches = [
        (torch.full((2, n), 2), torch.tensor([[1] * (n - 1) + [0]] * 2)) for n in lengths[::2]
    ]
    pairs = [(x, y) for some in batches for x, y in zip(*some, strict=True)]
    loader = DataLoader(pairs, batch_size=2)
    net = torch.nn.Embedding(3, 3)
    with torch.no_grad():
        net.weight.copy_(torch.eye(3))
    likelihood = CategoricalTokens(ignore_index=0)
    data = Data.of(loader, divided=True, memory_limit=0)
    found = train(net, likelihood, data, Training(epochs=3), progress=False)
    return {"weights": found.network.weights.tolist(), "loss": found.history["train_loss"]}


def divided_few(shares: list[int]) -> dict[str, Any]:
    """How many rows all processes take in each step, and hold out."""
    own = own_rows(shares, [0, 1], sum(shares))
    x, y = (part[: sum(shares)][own] for part in rows())
    data = Data.of((x, y), divided=True)
    kept, held = split_validation(data, Training(validation=0.2), None, 0)
    network = subbayes.Network(in_float64())
    minibatches = Minibatches(data, Gaussian(0.3), network, 4, 0, divided=True)
    steps = [minibatches.shared.rows for _ in minibatches.shared.in_step(minibatches.shuffled())]
    return {"steps": steps, "held": [every_row(kept), every_row(held)]}


def divided_resumed(folder: str) -> dict[str, Any]:
    """`fit` with a checkpoint, twice: the second time it does not train."""
    training = Training(epochs=100_000, time_limit=0.3, swa_epochs=12)
    sampling = Sampling(draws=20, chains=2, warmup=10, checkpoint=folder, progress=False)
    x, y = table(200)
    own = own_rows([70, 130], [0, 1])
    data = Data.of((x[own], y[own]), divided=True)
    models = [subbayes.fit(module(), data, training=training, sampling=sampling) for _ in range(2)]
    return {"draws": [digest(model.draws.z) for model in models]}


def divided_time_limit(shares: list[int]) -> dict[str, Any]:
    """Training that one of the processes stops, whose clock is ahead."""
    limit = 1e9 if distributed.current().rank == 0 else 1e-9
    settings = Training(epochs=50, time_limit=limit)
    found = train(in_float64(), Gaussian(0.3), own_data(shares), settings, progress=False)
    return {"epochs": len(found.history["train_loss"])}


def _other_body() -> Any:
    net: Any = in_float64()
    with torch.no_grad():
        net[0].weight += distributed.current().rank
    return train(net, Gaussian(0.3), own_data([70, 130]), parameters=["2.weight"], progress=False)


def _inputs_of_each() -> Any:
    x, y = (part[own_rows([100, 100], [0, 1])] for part in table(200))
    method = subbayes.subspaces.Optimal(rank=2, inputs=x[:6])
    return subbayes.fit(module(), Data.of((x, y), divided=True), subspace=method)


def _stopped_by_one() -> Any:
    def stops(epoch: int, _: Any) -> bool:
        return distributed.current().rank == 0 and epoch == 3

    settings = Training(epochs=20)
    own = own_data([70, 130])
    found = train(in_float64(), Gaussian(0.3), own, settings, callback=stops, progress=False)
    return len(found.history["train_loss"])


def _validated(data: Any, validation: Any) -> Any:
    settings = Training(epochs=5, patience=2)
    return train(in_float64(), Gaussian(0.3), data, settings, validation=validation, progress=False)


def _validation_of_each() -> Any:
    x, y = (part[own_rows([70, 130], [0, 1])] for part in rows())
    return _validated(own_data([70, 130]), (x, y))


ATTEMPTS: dict[str, Callable[[], Any]] = {
    "buffers": lambda: train(
        _RunningMean(), Gaussian(0.3), _own_in_float32(), Training(epochs=3), progress=False
    ),
    "body": _other_body,
    "inputs": _inputs_of_each,
    "callback": _stopped_by_one,
    "validation alone": lambda: _validated(rows(), own_data([70, 130])),
    "validation of each": _validation_of_each,
    "loader": lambda: subbayes.training.connect(
        subbayes.Network(in_float64()), Gaussian(0.3), own_data([100, 100], "loader")
    ),
    "fraction": lambda: split_validation(own_data([100, 100]), Training(validation=1e-4), None, 0),
    "weights": lambda: _zero_weights(),
}


def _own_in_float32() -> Data:
    x, y = (part[own_rows([70, 130], [0, 1])] for part in table(200))
    return Data.of((x, y), divided=True)


def _zero_weights() -> Any:
    """Rows of weight 0 only, in one process."""
    own = own_data([100, 100])
    weights = torch.full((own.n,), float(distributed.current().rank))
    data, likelihood = own.weighted(weights), Weighted(Gaussian(0.3))
    found = train(in_float64(), likelihood, data, STEPS["whole"], seed=5, progress=False)
    x, y = (part[100:] for part in rows())
    alone = train(in_float64(), Gaussian(0.3), (x, y), STEPS["whole"], seed=5, progress=False)
    posterior = subbayes.Posterior(
        found.network, likelihood, data, subbayes.subspace.RandomSubspace(found.network.weights, 2)
    )
    return {
        "difference": float((found.network.weights - alone.network.weights).abs().max()),
        "value": bool(np.isfinite(posterior.value(np.zeros((1, 2))))[0]),
    }


def divided_attempts() -> dict[str, Any]:
    """Errors of what processes cannot do together, or what they find."""
    found = {}
    for name, attempt in ATTEMPTS.items():
        try:
            found[name] = attempt()
        except (subbayes.InputError, TypeError) as error:
            found[name] = f"{error}"
    return found


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
