"""The Subspace estimators without options, beside what a user of scikit-learn would do otherwise.

Rows are those of `fit_defaults`, and differences are paired over test rows. The others are the
former default (the PCA subspace, elliptical slice sampling and a fixed prior), the perceptron of
scikit-learn with as many units, with and without early stopping, and its Gaussian process or its
logistic regression. Perceptrons of numbers have Gaussian noise with the standard deviation of the
residuals of a tenth of the rows, held out. The defaults were chosen on the divisions 0 to 2.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor

from experiments.fit_defaults import CASES, gain, markdown, rows_of
from experiments.markdown import add_write_option, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import split_names
from subbayes import SubspaceClassifier, SubspaceRegressor
from subbayes.utils.checks import check_count

__all__ = ["METHODS", "TABLES", "add_options", "run"]

Say = Callable[..., None]
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

TABLES = "diabetes", "bike", "wine", "breast_cancer", "digits", "phoneme"
METHODS = {
    "default": "Subspace estimators",
    "pca": "PCA + ESS, fixed prior",
    "mlp": "MLP",
    "stopped": "MLP, early stopping",
    "other": "GP or logistic regression",
}
"""Label in the table, by name of the method."""

_FIRST, _UNITS = 6, 50
_FORMER: dict[str, Any] = {"subspace": "pca", "inference": "elliptical-slice", "prior": 1.0}


def log_densities(method: str, rows: Rows, is_number: bool, seed: int) -> np.ndarray:
    """Log density of each test row under a method."""
    x, y, new, true = rows
    if method in ("default", "pca"):
        options = {} if method == "default" else _FORMER
        if is_number:
            regressor = SubspaceRegressor(random_state=seed, **options).fit(x, y)
            return np.ravel(regressor.predict_dist(new).log_prob(true))
        return _of_classes(SubspaceClassifier(random_state=seed, **options).fit(x, y), new, true)
    if method == "other" and is_number:
        kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
        process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed).fit(x, y)
        mean, sd = process.predict(new, return_std=True)
        return norm.logpdf(true, mean, sd)
    if method == "other":
        return _of_classes(LogisticRegression(max_iter=2000).fit(x, y), new, true)
    options = {
        "hidden_layer_sizes": (_UNITS,),
        "max_iter": 500,
        "early_stopping": method == "stopped",
        "random_state": seed,
    }
    if not is_number:
        return _of_classes(MLPClassifier(**options).fit(x, y), new, true)
    part, held, known, target = train_test_split(x, y, test_size=0.1, random_state=seed)
    residuals = MLPRegressor(**options).fit(part, known).predict(held) - target
    mean = MLPRegressor(**options).fit(x, y).predict(new)
    return norm.logpdf(true, mean, np.sqrt(np.mean(residuals**2)))


def _of_classes(model: Any, new: np.ndarray, true: np.ndarray) -> np.ndarray:
    chosen = model.predict_proba(new)[np.arange(len(true)), true]
    return np.log(np.clip(chosen, 1e-12, None))


def score(name: str, seed: int, data_dir: str | None = None) -> Record:
    """Fit all methods; return their scores, and gains of the default over the others."""
    parts = [part.numpy() for pair in rows_of(name, seed, data_dir) for part in pair]
    is_number = CASES[name][0] == "gaussian"
    rows: Rows = (parts[0], parts[1], parts[2], parts[3])
    terms = {}
    seconds = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in METHODS:
            started = time.process_time()
            terms[method] = log_densities(method, rows, is_number, seed)
            seconds[method] = time.process_time() - started
    record: Record = {"scores": {m: float(each.mean()) for m, each in terms.items()}}
    record["cpu_seconds"] = seconds
    record["gains"], record["errors"] = {}, {}
    for method, each in terms.items():
        difference = terms["default"] - each
        record["gains"][method] = float(difference.mean())
        record["errors"][method] = float(difference.std(ddof=1) / len(difference) ** 0.5)
    return record


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--only", default=",".join(TABLES), help="tables (default: %(default)s)")
    parser.add_argument("--first", type=int, default=_FIRST, help="first division of the rows")
    parser.add_argument("--seeds", type=int, default=3, help="number of divisions")
    parser.add_argument("--threads", type=int, default=1, help="threads")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute the missing records and print the table; return the gains."""
    torch.set_num_threads(check_count("threads", options.threads))
    cases, records = split_names(options.only, TABLES), []
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
    publish(markdown(records, METHODS, METHODS["default"]), "estimator_defaults", options, say)
    return {
        case: {method: gain(own, method) for method in METHODS}
        for case in cases
        if (own := [record for record in records if record["case"] == case])
    }
