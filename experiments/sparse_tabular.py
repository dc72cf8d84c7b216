"""Sparse networks for six tables of the UCI repository: table A11 of Hubin and Storvik (2024).

One hidden layer of 500 units, ten folds. Numbers are standardised by the training rows, missing
ones replaced by the mean; categories are one-hot encoded, with a missing value (`?`) as a category.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd
from sklearn.model_selection import StratifiedKFold

from experiments import sparse_networks, sparse_networks_tables
from experiments.datasets import find_file
from experiments.sparse_networks import Plan, Rows
from experiments.store import Record
from experiments.uci import add_datasets_option, split_names
from subbayes.utils.checks import check_count

DATASETS = {
    "credit_approval": "A16",
    "raisin": "Class",
    "pistachio": "Class",
    "dry_bean": "Class",
    "bank_marketing": "y",
    "adult": "income",
}
"""Column of labels, by data set in order of size."""

METHODS = ("LBBNN-SSP-MF", "LBBNN-SSP-MVN", "LBBNN-SSP-LFMVN", "BNN-GP-MF")
FOLDS = 10
_PLAN = Plan(hidden=(500,), early_epochs=200, paced=True)
_DROPPED = ("split",)  # the published halves of adult, replaced by folds


@cache
def table(name: str, data_dir: str | None) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the unencoded columns, and labels from 0."""
    path = find_file(f"{name}/{name}.csv.gz", data_dir)
    frame = pd.read_csv(path, na_values="?", skipinitialspace=True)
    frame = frame.drop(columns=[c for c in _DROPPED if c in frame])
    y, _ = pd.factorize(frame.pop(DATASETS[name]), sort=True)
    return frame, y.astype(np.int64)


def rows_of(name: str, fold: int, data_dir: str | None) -> Rows:
    """Return training and test rows of a fold of a stratified split."""
    frame, y = table(name, data_dir)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    train, test = list(folds.split(y, y))[fold]
    x = encoded(frame, train)
    return Rows(x[train], y[train], x[test], y[test], int(y.max()) + 1)


def encoded(frame: pd.DataFrame, train: np.ndarray) -> np.ndarray:
    """Return numbers standardised by the training rows, and indicators of categories."""
    numbers = frame.select_dtypes("number")
    center, scale = numbers.iloc[train].mean(), numbers.iloc[train].std(ddof=0)
    standard = ((numbers - center) / scale.where(scale > 0, np.inf)).fillna(0.0)
    others = frame.drop(columns=numbers.columns)
    parts = [standard.to_numpy()]
    if others.shape[1]:
        parts.append(pd.get_dummies(others.astype(object).fillna("?")).to_numpy(float))
    return np.column_stack(parts).astype(np.float32)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_datasets_option(parser, DATASETS)
    parser.add_argument("--folds", type=int, default=FOLDS, help="number of folds, of ten")
    sparse_networks.add_options(parser, METHODS)


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute the missing records, table by table and method by method, and print the table."""
    plan = sparse_networks.plan_of(options, _PLAN if plan is None else plan)
    folds = range(min(FOLDS, check_count("folds", options.folds)))
    cases = [
        (name, method, fold)
        for name in split_names(options.datasets, DATASETS)
        for method in options.methods
        for fold in folds
    ]
    found = sparse_networks.compute_records(
        cases, lambda name, fold: rows_of(name, fold, options.data_dir), options, plan, say
    )
    return sparse_networks.publish_records(
        found, "sparse_tabular", sparse_networks_tables.tabular_markdown(found), options, say
    )
