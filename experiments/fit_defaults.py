"""`fit` without options beside what a user would do otherwise, on rows that nothing is chosen on.

The others are the trained network (of the default training, whose prior is flat) with the
temperature or noise of a fifth of the rows, held out; linearised Laplace of all weights and of the
last layer with the prior of the largest evidence, and of all weights with the prior of those rows;
what `recommend` makes of them; and the PCA subspace with elliptical slice sampling. Differences are
paired over test rows, and averaged over random divisions of the rows. The defaults were chosen on
the divisions 0 to 5.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import sklearn.datasets
import torch
from torch import Tensor, nn

import subbayes
from experiments import defaults, recommend_data
from experiments.markdown import add_write_option, markdown_table, number, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import split_names
from subbayes import Network, Sampling, Training
from subbayes.baselines.map import point_estimate
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.data.data import Data
from subbayes.inference import choose_prior, linearised_laplace, tune_prior
from subbayes.likelihoods import as_likelihood
from subbayes.training.pipeline import Trained, train_trajectory
from subbayes.utils.checks import check_count

__all__ = ["CASES", "METHODS", "add_options", "markdown", "rows_of", "run"]

Say = Callable[..., None]
Part = tuple[Tensor, Tensor]

CASES: dict[str, tuple[str, int]] = {
    "numbers": ("gaussian", 100),
    "counts": ("poisson", 100),
    "classes": ("categorical", 100),
    "sine": ("gaussian", 60),
    "diabetes": ("gaussian", 300),
    "bike": ("gaussian", 1000),
    "wine": ("categorical", 120),
    "breast_cancer": ("categorical", 400),
    "digits": ("categorical", 1000),
    "dry_bean": ("categorical", 1000),
    "phoneme": ("categorical", 1000),
}
"""Likelihood and number of training rows, by name of the data."""

METHODS = {
    "default": "`fit`",
    "pca": "PCA + ESS",
    "temperature": "network, scaled",
    "laplace": "Laplace, evidence",
    "last-layer": "last layer, evidence",
    "validated": "Laplace, held-out rows",
    "recommend": "`recommend`",
}
"""Label in the table, by name of the method."""

_FIRST, _UNITS, _TEST, _HELD_OUT = 6, 50, 2000, 0.2
_MOST_EXACT = 2000  # weights of an exact posterior


def rows_of(name: str, seed: int, data_dir: str | None = None) -> tuple[Part, Part]:
    """Return training and test rows: standardised columns, and targets if they are numbers.

    Example:
        >>> (x, y), (new, true) = rows_of("wine", 0)
        >>> x.shape, len(true)
        (torch.Size([120, 13]), 58)
    """
    if name in defaults.CASES:
        train, (new, true) = defaults.data_of(name, seed)
        return train, (new, torch.from_numpy(np.ascontiguousarray(true)))
    rng, (likelihood, n) = np.random.default_rng(seed), CASES[name]
    if name == "sine":
        x = rng.uniform(-3, 3, (n + 500, 1))
        y = np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=len(x))
    elif name in ("bike", "dry_bean", "phoneme"):
        x, y = recommend_data.columns_of(name, data_dir)
    else:
        x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    order = rng.permutation(len(y))[: n + _TEST]
    x, y = np.asarray(x, dtype=float)[order], np.asarray(y)[order]
    scale = x[:n].std(0)
    inputs = torch.from_numpy((x - x[:n].mean(0)) / np.where(scale == 0, 1, scale)).float()
    if likelihood == "gaussian":
        targets = torch.from_numpy((y - y[:n].mean()) / y[:n].std()).float()
    else:
        targets = torch.from_numpy(y).long()
    return (inputs[:n], targets[:n]), (inputs[n:], targets[n:])


class _Fits:
    """The networks that methods share, trained when they are needed.

    Args:
        likelihood: its name.
        rows: for training.
        seed: of initial weights, and of everything else.
    """

    def __init__(self, likelihood: str, rows: Part, seed: int) -> None:
        x, y = rows
        self.likelihood, self.rows, self.seed = likelihood, rows, seed
        outputs = int(y.max()) + 1 if likelihood == "categorical" else 1
        torch.manual_seed(seed)
        self.module = nn.Sequential(
            nn.Linear(x.shape[1], _UNITS), nn.Tanh(), nn.Linear(_UNITS, outputs)
        )
        held = int(_HELD_OUT * len(y))
        order = torch.randperm(len(y))
        self.held_out = x[order[:held]], y[order[:held]]
        self.others = x[order[held:]], y[order[held:]]
        self.sampling = Sampling(seed=seed, progress=False)
        self._trained: dict[str, Trained] = {}

    def trained(self, part: str) -> Trained:
        """The network of all rows, or of those that are not held out."""
        if part not in self._trained:
            data = Data.of(self.rows if part == "all" else self.others)
            outputs = self.module[-1].out_features
            likelihood = as_likelihood(self.likelihood).for_outputs(
                torch.zeros(1, outputs), data.first()[1]
            )
            self._trained[part] = train_trajectory(
                self.module, likelihood, data, Training(), seed=self.seed, progress=False
            )
        return self._trained[part]

    def laplace(self, part: str, last_layer: bool = False) -> dict[str, Any]:
        """Arguments of `linearised_laplace` around a trained network."""
        found = self.trained(part)
        network = found.network
        if last_layer:
            network = Network(network.module_with(), "last-layer")
        form = "exact" if network.size <= _MOST_EXACT else "kfac"
        return {
            "network": network,
            "likelihood": found.likelihood,
            "data": found.data,
            "covariance": form,
        }

    def model(self, method: str) -> Any:
        """Fit a method."""
        fit = {"likelihood": self.likelihood, "sampling": self.sampling}
        if method == "default":
            return subbayes.fit(self.module, self.rows, **fit)
        if method == "pca":
            return subbayes.fit(self.module, self.rows, subspace="pca", training=Training(), **fit)
        if method == "laplace":
            return tune_prior(linearised_laplace(**self.laplace("all")))
        if method == "last-layer":
            return tune_prior(linearised_laplace(**self.laplace("all", last_layer=True)))
        if method == "validated":
            return choose_prior(**self.laplace("others"), validation=self.held_out)[0]
        result = self.trained("others").result
        network = point_estimate(result)
        if method == "temperature":
            counts = self.likelihood == "poisson"
            return network if counts else temperature_scaling(network, self.held_out)
        return subbayes.recommend(
            network.network.module_with(network.weights[0]),
            self.others,
            validation=self.held_out,
            likelihood=network.likelihood,
            seed=self.seed,
        )


def score(name: str, seed: int, data_dir: str | None = None) -> Record:
    """Fit all methods; return their scores, and differences of the default from the others."""
    rows, (new, true) = rows_of(name, seed, data_dir)
    fits, scores, seconds = _Fits(CASES[name][0], rows, seed), {}, {}
    with warnings.catch_warnings():  # of few rows, and of what is compared
        warnings.simplefilter("ignore")
        for method in METHODS:
            started = time.process_time()
            predictive = fits.model(method).predict(new)
            scores[method] = np.ravel(predictive.log_prob(true.numpy()))
            seconds[method] = time.process_time() - started
    record: Record = {"scores": {m: float(each.mean()) for m, each in scores.items()}}
    record["cpu_seconds"] = seconds
    record["gains"], record["errors"] = {}, {}
    for method, each in scores.items():
        difference = scores["default"] - each
        record["gains"][method] = float(difference.mean())
        record["errors"][method] = float(difference.std(ddof=1) / len(difference) ** 0.5)
    return record


def markdown(
    records: list[Record], methods: dict[str, str] = METHODS, default: str = "`fit`"
) -> str:
    """Return a table: the score of the default, and its gains over the other methods."""
    others = [method for method in methods if method != "default"]
    rows = []
    for case in dict.fromkeys(record["case"] for record in records):
        own = [record for record in records if record["case"] == case]
        cells = [case, number(float(np.mean([r["scores"]["default"] for r in own])))]
        for method in others:
            mean, error = gain(own, method)
            cells.append(f"{'+' if mean > 0 else ''}{number(mean)} ± {number(error)}")
        rows.append(cells)
    head = ["data", default, *(methods[method] for method in others)]
    title = f"log-likelihood of a test row by {default}, and its gain over the others"
    return markdown_table(head, rows, title)


def gain(records: list[Record], method: str) -> tuple[float, float]:
    """Mean gain of the default over a method, and its standard error from the test rows."""
    mean = float(np.mean([record["gains"][method] for record in records]))
    errors = np.array([record["errors"][method] for record in records])
    return mean, float(np.sqrt(np.sum(errors**2)) / len(errors))


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--only", default=",".join(CASES), help="data sets (default: %(default)s)")
    parser.add_argument("--first", type=int, default=_FIRST, help="first division of the rows")
    parser.add_argument("--seeds", type=int, default=3, help="number of divisions")
    parser.add_argument("--threads", type=int, default=1, help="threads")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute the missing records and print the table; return the gains."""
    torch.set_num_threads(check_count("threads", options.threads))
    cases, records = split_names(options.only, tuple(CASES)), []
    for case in cases:
        store = Store(options.results, case)
        for seed in range(options.first, options.first + check_count("seeds", options.seeds)):
            facts = {"case": case, "seed": seed, "methods": METHODS}
            records.append(
                store.get(
                    key_of(f"{case}-{seed}", facts),
                    lambda facts=facts, case=case, seed=seed: (
                        facts | score(case, seed, options.data_dir) | {"versions": versions()}
                    ),
                    lambda record, name=f"{case} {seed}": say(f"{name}: {record['scores']}"),
                )
            )
    publish(markdown(records), "fit_defaults", options, say)
    return {
        case: {method: gain(own, method) for method in METHODS}
        for case in cases
        if (own := [record for record in records if record["case"] == case])
    }
