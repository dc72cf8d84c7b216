"""A sparse network: which inputs matter, and the small network that is left."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from examples.demo.section import (
    Effort,
    Figure,
    Finding,
    Gain,
    Section,
    mean_with_error,
    with_error,
)
from subbayes import plots
from subbayes.baselines import deep_ensemble
from subbayes.likelihoods import Gaussian, Standardized
from subbayes.networks.mlp import MLP
from subbayes.reports.rendering import Table
from subbayes.tables.estimators import SparseRegressor
from subbayes.training.configuration import Training

N, N_TEST, HIDDEN = 500, 2000, (50, 50)
OURS, DENSE, TREES = "the small network", "the whole network", "gradient boosting"
PROCESS = "Gaussian process"
COLUMNS = [f"x{i}" for i in range(1, 11)]


def network_that_is_left(seed: int, effort: Effort, folder: Path) -> Section:
    """Fit a sparse network, and write the small one to `small.safetensors`."""
    import pandas as pd
    from sklearn.datasets import make_friedman1
    from sklearn.ensemble import HistGradientBoostingRegressor

    x, y = make_friedman1(N + N_TEST, noise=1.0, random_state=seed)
    frame = pd.DataFrame(x, columns=COLUMNS)
    train = frame[:N]
    test = frame[N:]
    sparse = SparseRegressor(
        network={"hidden": HIDDEN},
        training={"epochs": effort.sparse_epochs},
        likelihood="gaussian",
        random_state=seed,
    ).fit(train, y[:N])
    small = sparse.small_network()
    path = small.to_safetensors(folder / "small.safetensors", overwrite=True)
    dense, predicted = _dense(train.to_numpy(), y[:N], test.to_numpy(), seed, effort)
    trees = HistGradientBoostingRegressor(random_state=seed).fit(train, y[:N])
    process = _gaussian_process().fit(train, y[:N])
    inputs = torch.tensor(test.to_numpy()).float()
    with torch.no_grad():
        means = {OURS: small.module(inputs)[:, 0].double().numpy()}
    means |= {DENSE: predicted, TREES: trees.predict(test), PROCESS: process.predict(test)}
    numbers = {OURS: count(small.module), DENSE: count(dense)}
    sizes = {
        OURS: path.stat().st_size,
        DENSE: 4 * numbers[DENSE],
        TREES: len(pickle.dumps(trees)),
        PROCESS: len(pickle.dumps(process)),
    }
    squares = {name: (mean - y[N:]) ** 2 for name, mean in means.items()}
    rmse = {name: float(np.sqrt(each.mean())) for name, each in squares.items()}
    errors = {name: mean_with_error(each)[1] / (2 * rmse[name]) for name, each in squares.items()}
    inclusion = sparse.feature_inclusion_
    included = [str(name) for name, p in inclusion.items() if p > 0.5]
    right = included == COLUMNS[:5]
    return Section(
        "sparse",
        "The network that is left",
        (
            f"Friedman's first problem: ten inputs, of which x1 to x5 matter, {N} training and "
            f"{N_TEST} test rows. Each weight of a network with two layers of {HIDDEN[0]} units is "
            "included or excluded with a probability; the small network keeps those with a "
            "probability above one half. Beside it stand the whole network, trained with weight "
            "decay (the best of ten settings on these test rows), and two methods of scikit-learn "
            "with their defaults.",
        ),
        (
            Table(
                ["prediction by", "numbers other than 0", "bytes", "RMSE"],
                [
                    [
                        name,
                        str(numbers.get(name, "")),
                        str(sizes[name]),
                        with_error(rmse[name], errors[name], 3),
                    ]
                    for name in means
                ],
                "± one standard error over test rows. The noise of the data is 1. Bytes of the "
                "small network are those of its file, those of scikit-learn of its pickles.",
            ),
        ),
        tuple(
            Gain.of(
                "the small network", other, -squares[OURS], -squares[other], "mean squared error"
            )
            for other in (DENSE, TREES, PROCESS)
        ),
        (
            Finding(
                "good" if right else "bad",
                f"Inputs with a probability above one half: {', '.join(included)}"
                f"{', those that matter' if right else ', not x1 to x5'}.",
            ),
            Finding(
                "good",
                f"It has {numbers[OURS]} numbers where the whole network has {numbers[DENSE]}.",
            ),
        ),
        {
            "inclusion": Figure(
                lambda: plots.feature_inclusion(inclusion),
                "Probability that an input is connected to the output.",
            )
        },
        {
            name: {"rmse": [rmse[name], errors[name]], "bytes": sizes[name]}
            | ({"numbers": numbers[name]} if name in numbers else {})
            for name in means
        }
        | {"inclusion": inclusion.to_dict()},
    )


def _dense(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int, effort: Effort
) -> tuple[nn.Module, np.ndarray]:
    """The whole network, trained with weight decay, and its predictions."""
    rows, test = (torch.tensor((part - x.mean(0)) / x.std(0)).float() for part in (x, x_test))
    target = torch.tensor(y)
    module = MLP(x.shape[1], HIDDEN, 1, "tanh", seed=seed)
    model = deep_ensemble(
        module,
        Standardized.of(Gaussian(), target),
        (rows, target),
        Training(epochs=effort.epochs, prior_scale=0.3),
        members=1,
        seed=seed,
        progress=False,
    )
    return module, model.predict(test).mean


def _gaussian_process() -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel() * RBF(np.ones(len(COLUMNS))) + WhiteKernel(0.1)
    return GaussianProcessRegressor(kernel, normalize_y=True)


def count(module: nn.Module) -> int:
    """How many parameters and buffers of a module are not 0.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> _ = nn.init.zeros_(layer.bias)
        >>> count(layer)
        6
    """
    return sum(int((tensor != 0).sum()) for tensor in module.state_dict().values())
