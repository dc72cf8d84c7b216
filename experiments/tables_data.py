"""Data of the benchmark of tables: raw columns, split and standardised as bde's benchmark does.

A fifth of the rows is the test part, `train_test_split(test_size=0.2, random_state=0)`; inputs and
targets are standardised by the training rows. Settings are selected on a fifth of the training rows
of the first seed, of which none is a test row. Protein has its five usual splits instead, one for
each seed, which overlap: a third of these rows are test rows of other splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from experiments import sparse_tabular
from experiments.datasets import find_file, load_uci
from subbayes.utils.checks import check_choice

__all__ = ["CLASSES", "DATASETS", "NUMBERS", "Rows", "of_table", "rows_of", "validation_rows"]

NUMBERS = ("airfoil", "bike", "concrete", "energy", "yacht", "protein")
"""Data sets with a number as the target."""

CLASSES = ("dry_bean", "phoneme", "bank_marketing", "adult")
"""Data sets with labels."""

DATASETS = NUMBERS + CLASSES
SHARE = 0.2
_LEFT_OUT = ("casual", "registered", "instant", "dteday")  # of the bike rentals


@dataclass(frozen=True)
class Rows:
    """Training and test rows.

    Attributes:
        x: training inputs, shape (n, d).
        y: training targets, standardised numbers or labels from 0, shape (n,).
        new: test inputs.
        true: test targets.
        classes: number of labels, 0 for numbers.
    """

    x: np.ndarray
    y: np.ndarray
    new: np.ndarray
    true: np.ndarray
    classes: int = 0


def rows_of(name: str, seed: int, data_dir: str | None) -> Rows:
    """Return the rows of a data set; the seed is that of the model, and the split of protein."""
    check_choice("dataset", name, DATASETS)
    if name == "protein":
        x, y, masks = load_uci(name, data_dir)
        test = masks[seed % len(masks)]
        return of_table(x, y, np.flatnonzero(~test), np.flatnonzero(test))
    x, y, classes = _table(name, data_dir)
    train, test = train_test_split(np.arange(len(y)), test_size=SHARE, random_state=0)
    if classes and name != "phoneme":
        frame, _ = sparse_tabular.table(name, data_dir)
        x = sparse_tabular.encoded(frame, train).astype(np.float64)
    return of_table(x, y, train, test, classes)


def of_table(
    x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray, classes: int = 0
) -> Rows:
    """Return rows standardised by the training rows.

    Args:
        x: inputs (n, d).
        y: numbers or labels from 0 (n,).
        train: positions of training rows.
        test: positions of test rows.
        classes: number of labels, 0 for numbers.
    """
    mean, scale = x[train].mean(0), x[train].std(0)
    x = (x - mean) / np.where(scale > 0, scale, 1.0)
    if not classes:
        y = (y - y[train].mean()) / y[train].std()
    return Rows(x[train], y[train], x[test], y[test], classes)


def validation_rows(rows: Rows) -> Rows:
    """Return the training rows split once more: a fifth of them in the place of the test rows."""
    order = np.arange(len(rows.y))
    train, held = train_test_split(order, test_size=SHARE, random_state=1)
    return replace(rows, x=rows.x[train], y=rows.y[train], new=rows.x[held], true=rows.y[held])


@cache
def _table(name: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray, int]:
    if name in ("airfoil", "bike"):
        file = {"airfoil": "airfoil", "bike": "bike_hourly"}[name]
        frame = pd.read_csv(find_file(f"bde/{file}.csv.gz", data_dir))
        frame = frame.drop(columns=[c for c in _LEFT_OUT if c in frame])
        y = frame.pop("target" if name == "airfoil" else "cnt")
        return frame.to_numpy(np.float64), y.to_numpy(np.float64), 0
    if name in NUMBERS:
        x, y, _ = load_uci(name, data_dir)
        return x, y, 0
    if name == "phoneme":
        with np.load(find_file("phoneme/phoneme.npz", data_dir), allow_pickle=False) as file:
            return file["X"].astype(np.float64), file["y"].astype(np.int64), len(file["classes"])
    _, y = sparse_tabular.table(name, data_dir)
    return np.zeros((len(y), 1)), y, int(y.max()) + 1
