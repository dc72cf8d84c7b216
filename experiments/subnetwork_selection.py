"""Selection of the random weights of a ReLU network: error of the predictive covariance.

A network of two hidden layers of 128 ReLU units (float64) is trained on 80 % of a table; the exact
covariance of its linearised Laplace approximation at up to 150 held-out inputs is compared with
that of subnetworks of 20 to 1000 weights. Selections: the largest variance of the diagonal Laplace
approximation, magnitude, contribution to the predictive variance at the inputs of the data, and at
the held-out inputs (without their targets). For comparison, the whole last layer, and the minimum
error of any subspace of the rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import subbayes
from experiments.datasets import load_uci
from experiments.store import Record, Store, key_of
from experiments.subspace_errors import eckart_young, relative_error, trace_criterion
from subbayes.curvature.precision import Precision
from subbayes.curvature.precision_factory import precision
from subbayes.curvature.subspace_precision import SubspacePrecision
from subbayes.subspaces.subnetwork import subnetwork
from subbayes.utils.checks import InputError

DATA = ("diabetes", "energy", "wine_red")
SIZES = (20, 50, 100, 200, 500, 1000)
SELECTIONS = {
    "variance": "largest variance",
    "magnitude": "magnitude",
    "predictive, inputs of the data": "predictive, inputs of the data",
    "predictive, held-out inputs": "predictive, held-out inputs",
}
SETTINGS = {
    "hidden": [128, 128],
    "epochs": 100,
    "learning_rate": 3e-3,
    "train": 800,
    "new": 150,
    "prior_precision": 1.0,
    "procedure": 1,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--seeds", type=int, default=3, help="number of splits and trainings")
    parser.add_argument("--figure", default=None, help="write a figure to this PNG file")


def run(options: argparse.Namespace, say: Callable[..., None]) -> Record:
    """Compute the missing records and print a table."""
    store = Store(options.results)
    results: Record = {}
    for name in options.data:
        for seed in range(options.seeds):
            key = key_of(f"{name}-{seed}", SETTINGS)
            try:
                record = store.get(key, partial(compute_record, name, seed, options.data_dir))
            except InputError as error:
                say(f"{name} is skipped: {error}")
                break
            results.setdefault(name, []).append(record)
        if name in results:
            say(table(name, results[name]))
    if options.figure and results:
        figure(results, Path(options.figure))
    return {name: averages(records) for name, records in results.items()}


def split(name: str, seed: int, data_dir: str | None) -> tuple[torch.Tensor, ...]:
    """Return standardised training inputs and targets, and held-out inputs."""
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        X, y = load_diabetes(return_X_y=True)
    else:
        X, y, _ = load_uci(name, data_dir)
    order = np.random.default_rng(seed).permutation(len(X))
    train = order[: min(SETTINGS["train"], int(0.8 * len(X)))]
    new = order[len(train) : len(train) + SETTINGS["new"]]
    X = (X - X[train].mean(0)) / X[train].std(0).clip(1e-12)
    y = (y - y[train].mean()) / y[train].std()
    return torch.from_numpy(X[train]), torch.from_numpy(y[train]), torch.from_numpy(X[new])


def compute_record(name: str, seed: int, data_dir: str | None) -> Record:
    """Return the errors of all selections at all sizes, for one split and training."""
    x, y, new = split(name, seed, data_dir)
    module = subbayes.MLP(x.shape[1], tuple(SETTINGS["hidden"]), 1, "relu", seed=seed).double()
    trained = subbayes.training.train(
        module,
        subbayes.likelihoods.Gaussian(),
        (x, y),
        subbayes.Training(
            epochs=SETTINGS["epochs"],
            learning_rate=SETTINGS["learning_rate"],
            prior_scale=1.0,
            clip_norm=None,
        ),
        seed=seed,
        progress=False,
    )
    network, likelihood = trained.network, trained.likelihood
    psi = precision(network, likelihood, (x, y), prior_precision=SETTINGS["prior_precision"])
    full = psi.covariance(new)
    common = {
        "network": network,
        "likelihood": likelihood,
        "data": (x, y),
        "prior_precision": SETTINGS["prior_precision"],
    }
    errors: Record = {}
    began, spent = time.perf_counter(), {}
    for selection in SELECTIONS:
        by, _, where = selection.partition(", ")
        errors[selection] = [
            measure(
                psi,
                full,
                new,
                rank=size,
                by=by,
                **common,
                inputs=(new if "held-out" in where else None),
            )
            for size in SIZES
        ]
        spent[selection] = time.perf_counter() - began - sum(spent.values())
    errors["last layer"] = measure(psi, full, new, by="last-layer", **common)
    errors["best subspace"] = [eckart_young(full, size) for size in SIZES]
    return {
        "errors": errors,
        "seconds": spent,
        "weights": network.size,
        "noise": float(np.ravel(likelihood.noise)[0]),
    }


def measure(psi: Precision, full: torch.Tensor, new: torch.Tensor, **options: Any) -> list[float]:
    """Return relative error and share of the trace of one subnetwork."""
    space = subnetwork(options.pop("network"), **options)
    inside = SubspacePrecision(psi.V, space, SETTINGS["prior_precision"]).covariance(new)
    return [relative_error(inside, full), trace_criterion(inside, full)]


def averages(records: list[Record]) -> Record:
    """Return means over seeds."""
    return {
        name: np.mean([record["errors"][name] for record in records], 0).round(4).tolist()
        for name in records[0]["errors"]
    }


def table(name: str, records: list[Record]) -> str:
    """Format mean relative errors."""
    found = averages(records)
    lines = [
        f"{name} ({records[0]['weights']} weights, {len(records)} seeds), relative error",
        " " * 32 + "".join(f"{size:8d}" for size in SIZES),
    ]
    lines += [
        f"{label:32s}" + "".join(f"{error:8.3f}" for error, _ in found[key])
        for key, label in SELECTIONS.items()
    ]
    lines.append(
        f"{'best subspace of the rank':32s}"
        + "".join(f"{error:8.3f}" for error in found["best subspace"])
    )
    return "\n".join([*lines, f"the last layer: {found['last layer'][0]:.3f}", ""])


def figure(results: Record, path: Path) -> None:
    """Plot relative error against size, one panel per data set."""
    from subbayes.plots.style import COLORS, grid, label_axes, save

    (axes,) = grid(1, len(results), 3.6, 3.2)
    for ax, (name, records) in zip(axes, results.items(), strict=True):
        found = averages(records)
        for color, (key, label) in zip(COLORS, SELECTIONS.items(), strict=False):
            ax.plot(
                SIZES,
                [error for error, _ in found[key]],
                color=color,
                marker="o",
                markersize=4,
                label=label if ax is axes[0] else None,
            )
        ax.set_xscale("log")
        ax.set_ylim(0, 1.03)
        ax.text(0.03, 0.04, name.replace("_", " "), transform=ax.transAxes)
        label_axes(ax, "weights in the subnetwork", "relative error" if ax is axes[0] else "")
    axes[0].figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    save(axes[0].figure, path)
