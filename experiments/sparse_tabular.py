"""Sparse networks for six tables of the UCI repository: table A11 of Hubin and Storvik (2024).

One hidden layer of 500, ten folds. Numbers are standardised by the training rows, those that are
missing take their mean; categories become one column each, a missing one (`?`) among them. Records
are kept by data set, method and fold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd
from sklearn.model_selection import StratifiedKFold

from experiments import sparse_networks, sparse_networks_tables
from experiments.sparse_networks import Plan, Rows
from experiments.store import Record
from experiments.uci import asked
from subbayes.data.datasets import find_file
from subbayes.utils.checks import check_count

DATASETS = {
    "credit_approval": "A16",
    "raisin": "Class",
    "pistachio": "Class",
    "dry_bean": "Class",
    "bank_marketing": "y",
    "adult": "income",
}
"""The column of labels, from the least table to the largest."""

METHODS = ("LBBNN-SSP-MF", "LBBNN-SSP-MVN", "LBBNN-SSP-LFMVN", "BNN-GP-MF")
FOLDS = 10
_PLAN = Plan(hidden=(500,), early_epochs=200, paced=True)
_DROPPED = ("split",)  # the published halves of adult: folds take their place


@cache
def table(name: str, data_dir: str | None) -> tuple[pd.DataFrame, np.ndarray]:
    """Columns as they are, numbers or categories, and labels from 0."""
    path = find_file(f"{name}/{name}.csv.gz", data_dir)
    frame = pd.read_csv(path, na_values="?", skipinitialspace=True)
    frame = frame.drop(columns=[c for c in _DROPPED if c in frame])
    y, _ = pd.factorize(frame.pop(DATASETS[name]), sort=True)
    return frame, y.astype(np.int64)


def rows_of(name: str, fold: int, data_dir: str | None) -> Rows:
    """Training and test rows of a fold; folds are of one shuffle, with classes in proportion."""
    frame, y = table(name, data_dir)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    train, test = list(folds.split(y, y))[fold]
    x = encoded(frame, train)
    return Rows(x[train], y[train], x[test], y[test], int(y.max()) + 1)


def encoded(frame: pd.DataFrame, train: np.ndarray) -> np.ndarray:
    """Numbers standardised by the training rows, categories as indicators, float32."""
    numbers = frame.select_dtypes("number")
    center, scale = numbers.iloc[train].mean(), numbers.iloc[train].std(ddof=0)
    standard = ((numbers - center) / scale.where(scale > 0, np.inf)).fillna(0.0)
    others = frame.drop(columns=numbers.columns)
    parts = [standard.to_numpy()]
    if others.shape[1]:
        parts.append(pd.get_dummies(others.astype(object).fillna("?")).to_numpy(float))
    return np.column_stack(parts).astype(np.float32)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this experiment."""
    parser.add_argument("--datasets", default=",".join(DATASETS), help="with commas between")
    parser.add_argument("--folds", type=int, default=FOLDS, help="the first ones of ten")
    sparse_networks.add_options(parser, METHODS)


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute what is missing, table by table and method by method, and print the table."""
    plan = sparse_networks.plan_of(options, _PLAN if plan is None else plan)
    folds = range(min(FOLDS, check_count("folds", options.folds)))
    cases = [
        (name, method, fold)
        for name in asked(options.datasets, tuple(DATASETS))
        for method in options.methods
        for fold in folds
    ]
    found = sparse_networks.computed(
        cases, lambda name, fold: rows_of(name, fold, options.data_dir), options, plan, say
    )
    return sparse_networks.said(
        found, "sparse_tabular", sparse_networks_tables.tabular_markdown(found), options.write, say
    )
