"""A small artifact of every kind, and what a reader does with it: load, describe, predict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import subbayes
from subbayes import Sampling, Training, sparse
from subbayes.baselines.ensemble import WeightSamples, stack_likelihoods
from subbayes.baselines.mc_dropout import mc_dropout
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.data.data import Data
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.hmc import HMC
from subbayes.inference.samplers.mams import MAMS
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.samplers.nuts import NUTS
from subbayes.inference.samplers.parallel_tempering import ParallelTempering
from subbayes.inference.samplers.slice import SliceSampling
from subbayes.likelihoods import Categorical, Gaussian, Poisson
from subbayes.likelihoods.families import (
    BinomialFamily,
    CensoredFamily,
    PiecewiseExponentialFamily,
    TruncatedFamily,
)
from subbayes.models.settings import TableSettings
from subbayes.regression import LKJ, Dirichlet, Regression
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.sparse.configuration import SparseTraining
from subbayes.subspace import DenseSubspace
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.tables.estimators import SubspaceClassifier, SubspaceRegressor

__all__ = ["MODELS", "Example"]

Arrays = list[np.ndarray]

X = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] - X[:, 1] ** 2
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": list("xyz") * 8, "y": Y})
TERM_FRAME = FRAME.assign(d=[1, 1, 2, 2, 3, 3] * 4)

QUICK = Training(epochs=2, swa_epochs=3)
FEW = Sampling(draws=6, warmup=4, chains=2, progress=False)
ESTIMATOR: dict[str, Any] = {
    "network": {"hidden": (4,)},
    "subspace": subbayes.subspaces.PCA(rank=2),
    "training": QUICK,
    "sampling": {"draws": 6, "chains": 2},
    "random_state": 0,
}
SMALL = TableSettings().change(
    {
        "network.hidden": (4,),
        "training": {"epochs": 2, "swa_epochs": 3},
        "subspace.rank": 2,
        "sampling": {"draws": 6, "chains": 2},
    }
)


@dataclass(frozen=True)
class Example:
    """How to write an artifact, and how to use it.

    Attributes:
        make: writes it to a path.
        use: loads it, and returns what it predicts.
        checkpoint: whether it is a checkpoint, which only the user who wrote it resumes.
    """

    make: Callable[[Path], Any]
    use: Callable[[Path], Arrays]
    checkpoint: bool = False


# --- networks -------------------------------------------------------------------------------------


def _mlp(outputs: int = 1, dropout: float = 0.0) -> subbayes.MLP:
    return subbayes.MLP(2, (4,), outputs, "tanh", dropout, seed=0)


class Own(nn.Module):
    """A module of a user, with a frozen layer, a norm, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def _fitted(model: nn.Module, path: Path, y: torch.Tensor = Y, **options: Any) -> None:
    options = {"sampling": FEW} | options
    subbayes.fit(model, (X, y), training=QUICK, **options).save(path)


def _samples() -> WeightSamples:
    network = subbayes.Network(_mlp())
    weights = network.weights + 0.1 * torch.arange(3.0)[:, None]
    likelihood = stack_likelihoods([Gaussian((0.1 * s,)) for s in (1, 2, 3)])
    return WeightSamples(network, weights, likelihood, "three", [network.frozen] * 3)


def _laplace(form: str, path: Path) -> None:
    network = subbayes.Network(_mlp())
    options = {"low-rank": {"rank": 3}, "sampled": {"samples": 4}}.get(form, {})
    if form == "subspace":
        basis = torch.randn(3, network.size, generator=torch.Generator().manual_seed(1))
        found = linearised_laplace(
            network, Gaussian(0.3), (X, Y), DenseSubspace(network.weights, basis)
        )
    else:
        found = linearised_laplace(network, Gaussian(0.3), (X, Y), covariance=form, **options)
    found.save(path)


def _sparse(posterior: str) -> sparse.SparseNetwork:
    return sparse.fit(
        sparse.convert(_mlp(), posterior, seed=1),
        Gaussian(),
        (X, Y),
        SparseTraining(epochs=2),
        progress=False,
    )


def _semistructured(path: Path) -> None:
    model = SemiStructuredRegression(
        "y ~ a + C(c) + net(b)", networks={"net": subbayes.MLP(1, (3,), 1, seed=0)}
    )
    model.fit(
        FRAME,
        subspace=SemiStructuredSubspace(2),
        inference="elliptical-slice",
        training=Training(epochs=2, batch_size=None, weight_decay=1e-4, clip_norm=None),
        sampling=FEW,
    )
    model.save(path)


def _family(formula: str, family: Any, path: Path) -> None:
    frame = FRAME.assign(n=3 + np.arange(24) % 4, wins=np.arange(24) % 3, t=np.exp(FRAME["y"]))
    frame["dead"] = np.arange(24) % 2 == 0
    model = Regression(formula, family=family)
    model.fit(frame, inference="laplace", sampling=FEW)
    model.save(path)


def _terms(path: Path) -> None:
    """Terms of this package: smooths, groups, monotonic effects, Gaussian processes."""
    formula = (
        "y ~ s(a, bs='cr', k=4) + ti(a, b, k=4) + s(b, by=c, bs='tp', k=4) + (1 + b | c/d) + mo(d)"
        " + gp(b, k=3)"
    )
    priors = {"cor(c)": LKJ(2.0), "simplex(mo(d))": Dirichlet(2.0), "sigma": 1.0}
    model = Regression(formula, priors=priors)
    model.fit(TERM_FRAME, inference="elliptical-slice", sampling=FEW)
    model.save(path)


# --- use ------------------------------------------------------------------------------------------


def _load(path: Path, rows: Any = X, **options: Any) -> Arrays:
    module = options.pop("module", None)
    model = subbayes.load(path, None if module is None else module(), **options)
    predictive = model.predict(rows)
    repr(model)
    if hasattr(model, "describe"):
        model.describe()
    return [np.asarray(predictive.mean), np.asarray(predictive.std)]


def _load_estimator(path: Path) -> Arrays:
    model = subbayes.load(path)
    repr(model)
    return [np.asarray(model.predict(X.numpy()), dtype=float)]


def _resume_fit(path: Path) -> Arrays:
    """Write or resume the checkpoints of `fit`, of which the path is one folder."""
    found = subbayes.fit(
        _mlp(),
        (X, Y),
        subspace=subbayes.subspaces.PCA(rank=2),
        temperature="loo",
        training=QUICK,
        sampling=replace(FEW, checkpoint=path.parent),
    )
    assert found.draws is not None
    return [found.draws.z, np.asarray(found.predict(X).mean)]


def _resume_sampling(path: Path, engine: Any = None, draws: int = 6) -> Arrays:
    posterior = subbayes.Posterior(
        subbayes.Network(_mlp()),
        Gaussian(0.3),
        Data.of((X, Y)),
        subbayes.subspace.RandomSubspace(subbayes.Network(_mlp()).weights, 2),
    )
    found = (engine or EllipticalSlice()).sample(
        posterior, draws=draws, warmup=2, chains=2, checkpoint=path, progress=False
    )
    return [found.z, *map(np.nan_to_num, found.stats.values())]


def _resume_sparse(path: Path) -> Arrays:
    made = sparse.convert(_mlp(), seed=1)
    found = sparse.fit(
        made, Gaussian(), (X, Y), SparseTraining(epochs=2), checkpoint=path, progress=False
    )
    return [found.predict(X, n_draws=2).outputs.numpy()]


MODELS: dict[str, Example] = {
    "fitted-pca": Example(partial(_fitted, _mlp(), subspace=subbayes.subspaces.PCA(rank=2)), _load),
    "fitted-full-linearised": Example(
        partial(_fitted, _mlp(), subspace="full", inference="laplace-linearised"), _load
    ),
    "fitted-full-ensemble": Example(
        partial(
            _fitted,
            _mlp(),
            subspace="full",
            inference="hmc",
            sampling=replace(FEW, initial="ensemble"),
        ),
        _load,
    ),
    "fitted-random-poisson": Example(
        partial(
            _fitted,
            _mlp(),
            y=CLASSES.float(),
            likelihood=Poisson(),
            subspace=subbayes.subspaces.Random(rank=2),
        ),
        _load,
    ),  # fmt: skip
    "fitted-own-classes": Example(
        partial(
            _fitted,
            _mlp(3),
            y=CLASSES,
            likelihood=Categorical(3),
            subspace=subbayes.subspaces.Subnetwork(rank=3),
            inference="laplace",
        ),
        _load,
    ),  # fmt: skip
    "fitted-own-module": Example(
        partial(_fitted, Own(), subspace=subbayes.subspaces.PCA(rank=2)), partial(_load, module=Own)
    ),
    "samples": Example(lambda path: _samples().save(path), _load),
    "mc-dropout": Example(
        lambda path: mc_dropout(_mlp(dropout=0.5), Gaussian(0.2), n_draws=4, seed=3).save(path),
        _load,
    ),
    "temperature-scaled": Example(
        lambda path: temperature_scaling(_samples(), (X, Y)).save(path), _load
    ),
    **{
        f"laplace-{form}": Example(
            partial(_laplace, form),
            partial(_load, data=(X, Y)) if form in ("dual", "low-rank") else _load,
        )
        for form in ("dual", "primal", "diagonal", "kfac", "low-rank", "sampled", "subspace")
    },
    **{
        f"sparse-{posterior}": Example(
            lambda path, posterior=posterior: _sparse(posterior).save(path), _load
        )
        for posterior in ("mean-field", "low-rank", "all")
    },
    "semi-structured": Example(_semistructured, partial(_load, rows=FRAME)),
    "semi-structured-binomial": Example(
        partial(_family, "wins ~ a", BinomialFamily(trials="n")),
        partial(_load, rows=FRAME.assign(n=3)),
    ),
    "semi-structured-censored": Example(
        partial(_family, "t ~ a", CensoredFamily(family="weibull", status="dead")),
        partial(_load, rows=FRAME),
    ),
    "semi-structured-truncated": Example(
        partial(_family, "t ~ a", TruncatedFamily(family="normal", lower=0.0)),
        partial(_load, rows=FRAME),
    ),
    "semi-structured-hazards": Example(
        partial(_family, "t ~ a", PiecewiseExponentialFamily(cuts=(0.5, 1.5))),
        partial(_load, rows=FRAME),
    ),
    **{
        f"fitted-{engine}": Example(
            partial(
                _fitted,
                _mlp(),
                subspace=subbayes.subspaces.PCA(rank=2),
                inference=engine,
                sampling=Sampling(draws=15, warmup=4, chains=2, progress=False),
            ),
            _load,
        )
        for engine in ("smc", "parallel-tempering", "laplace", "vi", "full-rank-vi", "realnvp")
    },
    "fitted-student": Example(
        partial(
            _fitted, _mlp(), likelihood="student-t", subspace=subbayes.subspaces.Random(rank=2)
        ),
        _load,
    ),
    "semi-structured-terms": Example(_terms, partial(_load, rows=TERM_FRAME)),
    "data-frame": Example(
        lambda path: DataFrameModel.fit(FRAME, "y", SMALL, progress=False).save(path),
        partial(_load, rows=FRAME),
    ),
    "data-frame-sparse": Example(
        lambda path: DataFrameModel.fit(FRAME, "c", SMALL, method="sparse", progress=False).save(
            path
        ),
        partial(_load, rows=FRAME),
    ),
    "estimator-regressor": Example(
        lambda path: SubspaceRegressor(**ESTIMATOR).fit(X.numpy(), Y.numpy()).save(path),
        _load_estimator,
    ),
    "estimator-classifier": Example(
        lambda path: SubspaceClassifier(**ESTIMATOR).fit(X.numpy(), CLASSES.numpy()).save(path),
        _load_estimator,
    ),
    **{
        f"sampling-{engine.name}": Example(
            partial(_resume_sampling, engine=engine, draws=4),
            partial(_resume_sampling, engine=engine),  # further, so that the state is used
            checkpoint=True,
        )
        for engine in (
            EllipticalSlice(),
            SliceSampling(),
            NUTS(),
            HMC(),
            MCLMC(),
            MAMS(),
            ParallelTempering(4),
        )
    },
    "trained": Example(_resume_fit, _resume_fit, checkpoint=True),
    "temperature": Example(_resume_fit, _resume_fit, checkpoint=True),
    "sparse-checkpoint": Example(_resume_sparse, _resume_sparse, checkpoint=True),
}
"""By name, which is that of the file or folder too."""
