"""Cases of `worker.py`: curvature of rows that all processes have, or of sharded rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import subbayes
from distributed.divided_cases import digest, module, own_rows, table
from subbayes import distributed
from subbayes.data.data import Data
from subbayes.inference import linearised_laplace, tune_prior
from subbayes.inference.laplace.linearised import LinearisedPosterior
from subbayes.likelihoods import Categorical, Gaussian, Likelihood
from subbayes.subspace import CoordinateSubspace, RandomSubspace
from subbayes.subspaces import optimal, subnetwork

BLOCKS_OF_25 = 90_000  # bytes of matrices, of which gradients of 40 rows may take a quarter
PRECISE = {"tolerance": 1e-8}
FORMS: dict[str, dict[str, Any]] = {
    "exact": {},
    "primal": {"covariance": "primal"},
    "dual": {"covariance": "dual"},
    "diagonal": {"covariance": "diagonal"},
    "kfac": {"covariance": "kfac"},
    "low-rank": {"covariance": "low-rank", "rank": 20, "tolerance": 1e-10},
    "low-rank alone": {"covariance": "low-rank", "rank": 50, "tolerance": None},
    "sampled": {"covariance": "sampled", "samples": 8, "solver": "primal"} | PRECISE,
    "sampled auto": {"covariance": "sampled", "samples": 8} | PRECISE,
    "subspace": {"subspace": "random"},
    "subnetwork": {"subspace": "coordinates"},
}
CLASSES = {"classes": {"covariance": "kfac", "mc_samples": 2}}
NEW = torch.linspace(-2, 2, 15).double().reshape(5, 3)


def in_float64(outputs: int = 1) -> torch.nn.Module:
    """A small module in float64."""
    net: Any = module().double()
    if outputs > 1:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            net[-1] = torch.nn.Linear(10, outputs).double()
    return net


def network(outputs: int = 1) -> subbayes.Network:
    """The network of this module."""
    return subbayes.Network(in_float64(outputs))


def rows(form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A table in float64, with classes for some forms."""
    x, y = (part.double() for part in table(200))
    return (x, (y > 0).long() + (y > 0.5).long()) if form in CLASSES else (x, y)


def fitted(form: str, data: Any, progress: bool = False) -> LinearisedPosterior:
    """The posterior in a form, in blocks of 25 rows."""
    options = dict((FORMS | CLASSES)[form])
    likelihood: Likelihood = Categorical() if form in CLASSES else Gaussian(0.3)
    net = network(3 if form in CLASSES else 1)
    space = options.pop("subspace", None)
    if space == "random":
        options["subspace"] = RandomSubspace(net.weights, 6, seed=1)
    elif space == "coordinates":
        options["subspace"] = CoordinateSubspace(net.weights, torch.arange(0, 50, 3))
    limit = None if form == "dual" else BLOCKS_OF_25
    return linearised_laplace(
        net, likelihood, data, memory_limit=limit, progress=progress, **options
    )


def facts(posterior: LinearisedPosterior) -> dict[str, Any]:
    """What users read from a posterior."""
    generator = torch.Generator().manual_seed(0)
    psi = posterior.precision
    tuned = tune_prior(posterior)
    return {
        "covariance": posterior.covariance(NEW).tolist(),
        "blocks": psi.blocks(NEW).tolist(),
        "variances": psi.variances().tolist(),
        "evidence": posterior.log_marginal_likelihood(),
        "tuned": [tuned.prior_precision, *np.ravel(getattr(tuned.likelihood, "noise", 0.0))],
        "draws": psi.sample(3, generator).tolist(),
    }


def shared_curvature(form: str) -> dict[str, Any]:
    """Of rows that every process has."""
    found = facts(fitted(form, rows(form)))
    return {"digest": digest(*found.values()), "facts": found}


def divided_curvature(form: str, shares: list[int], streamed: bool = False) -> dict[str, Any]:
    """Of sharded rows."""
    own = own_rows(shares, list(range(len(shares))))
    x, y = (part[own] for part in rows(form))
    data: Any = (x, y)
    if streamed:
        pairs = torch.utils.data.TensorDataset(x, y)
        data = torch.utils.data.DataLoader(pairs, batch_size=48)
    found = facts(fitted(form, Data.of(data, divided=True, memory_limit=0)))
    return {"digest": digest(*found.values()), "facts": found}


def saved_curvature(form: str, shares: list[int]) -> dict[str, Any]:
    """A posterior of divided rows after it was saved, with the rows of each process and without."""
    own = own_rows(shares, list(range(len(shares))))
    data = Data.of(tuple(part[own] for part in rows(form)), divided=True)
    given = rows(form) if form == "sampled auto" else data  # a file of all rows, and divided ones
    posterior, processes = fitted(form, given), distributed.current()
    with tempfile.TemporaryDirectory() as folder:
        path = processes.gather(folder)[0]
        posterior.save(f"{path}/model")
        processes.gather(None)  # it is written
        loaded = [
            subbayes.load(f"{path}/model", in_float64(), data=given)
            for given in (data, rows(form), *([] if form == "low-rank" else [None]))
        ]
        processes.gather(None)  # the folder is still there
    return {
        "same": [
            torch.allclose(one.covariance(NEW), posterior.covariance(NEW), rtol=1e-12, atol=0)
            for one in loaded
        ],
        "evidence": [
            one.log_marginal_likelihood() - posterior.log_marginal_likelihood()
            for one in loaded[:2]
        ],
    }


def divided_subspaces(shares: list[int] | None = None) -> dict[str, Any]:
    """Subspaces that follow from the curvature of sharded rows, or of all."""
    data: Any = rows("exact")
    if shares is not None:
        own = own_rows(shares, list(range(len(shares))))
        data = Data.of(tuple(part[own] for part in data), divided=True)
    net = network()
    best = optimal(net, Gaussian(0.3), data, inputs=NEW, rank=2, covariance="primal")
    choose = {"by": "variance"}, {"by": "predictive", "inputs": NEW}, {"by": "wasserstein"}
    return {
        "optimal": (best.basis().T @ best.basis()).tolist(),
        **{
            options["by"]: subnetwork(net, Gaussian(0.3), data, rank=5, **options).indices.tolist()
            for options in choose
        },
    }


def _divided() -> Data:
    own = own_rows([100, 100], [0, 1])
    return Data.of(tuple(part[own] for part in rows("exact")), divided=True)


def _other_weights() -> Any:
    net = network()
    moved = net.with_weights(net.weights + distributed.current().rank)
    return linearised_laplace(moved, Gaussian(0.3), rows("exact"))


def _other_rows() -> Any:
    x, y = rows("exact")
    return linearised_laplace(network(), Gaussian(0.3), (x + distributed.current().rank, y))


def _not_finite() -> Any:
    x, y = rows("exact")
    own = own_rows([100, 100], [0, 1])
    x = torch.where(torch.arange(200)[:, None] < 150, x, 1e200)  # the squares are infinite
    net = subbayes.Network(torch.nn.Linear(3, 1).double())
    net = net.with_weights(torch.ones(4).double())
    return linearised_laplace(net, Gaussian(0.3), Data.of((x[own], y[own]), divided=True))


def _other_limit() -> Any:
    limit = 2**30 if distributed.current().rank else BLOCKS_OF_25
    options: dict[str, Any] = {"covariance": "diagonal", "memory_limit": limit}
    return linearised_laplace(network(), Gaussian(0.3), rows("exact"), **options)


def _limit_of_one() -> Any:
    limit = 2**30 if distributed.current().rank else None  # the default limit of a block too
    return linearised_laplace(network(), Gaussian(0.3), rows("exact"), memory_limit=limit)


def _other_body() -> Any:
    module: Any = in_float64()
    with torch.no_grad():
        module[0].weight += distributed.current().rank
    head = subbayes.Network(module, parameters=["2.weight", "2.bias"])
    return linearised_laplace(head, Gaussian(0.3), rows("exact"))


def _engine_of_other_rows() -> Any:
    x, y = rows("exact")
    net = network()
    data = (x + distributed.current().rank, y)
    space = RandomSubspace(net.weights, 3, seed=0)
    density = subbayes.Posterior(net, Gaussian(0.3), data, space)
    return subbayes.inference.LinearisedLaplace().sample(density, draws=4, progress=False)


def _labels() -> Any:
    x, y = rows("classes")
    y[150] = 7  # in the rows of the second process
    own = own_rows([100, 100], [0, 1])
    data = Data.of((x[own], y[own]), divided=True)
    return linearised_laplace(network(3), Categorical(), data, covariance="kfac")


def _scores_by_solves() -> Any:
    return fitted("low-rank", _divided()).evaluate(_divided())


def _other_inputs() -> Any:
    return fitted("low-rank", _divided()).predict(NEW + distributed.current().rank)


def _with(**options: Any) -> Callable[[], Any]:
    return lambda: linearised_laplace(network(), Gaussian(0.3), _divided(), **options)


REFUSED: dict[str, Callable[[], Any]] = {
    "dual": _with(covariance="dual"),
    "solver": _with(covariance="sampled", solver="dual"),
    "weights": _other_weights,
    "rows": _other_rows,
    "not finite": _not_finite,
    "limit": _other_limit,
    "limit of one": _limit_of_one,
    "body": _other_body,
    "engine": _engine_of_other_rows,
    "labels": _labels,
    "scores": _scores_by_solves,
    "predictions": _other_inputs,
    "inputs": lambda: optimal(network(), Gaussian(0.3), _divided(), covariance="primal"),
}


def refused_curvature() -> dict[str, str]:
    """The errors of what cannot be done."""
    found = {}
    for name, attempt in REFUSED.items():
        try:
            found[name] = f"no error: {attempt()!r}"
        except subbayes.InputError as error:
            found[name] = f"{error}"
    return found
