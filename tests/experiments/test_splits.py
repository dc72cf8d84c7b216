"""What the pages say of validation rows that are test rows of other splits, counted."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import sparse_phoneme, sparse_tabular
from experiments.datasets import load_uci
from experiments.summary import PAGE
from subbayes.utils.checks import InputError


def read(load, *given):
    try:
        return load(*given)
    except InputError as error:
        pytest.skip(f"data are absent: {error}")


def said():
    return " ".join(PAGE.read_text().split())


def test_phoneme():
    first = read(sparse_phoneme.rows_of, 0, None)
    train, test = sparse_phoneme.TRAIN, sparse_phoneme.TEST
    assert (len(first.y), len(first.y_new)) == (train, test)
    orders = [np.random.default_rng(seed).permutation(4509) for seed in range(10)]
    tested = {i for order in orders[1:] for i in order[train : train + test]}
    share = np.mean([i in tested for i in orders[0][:train]])
    assert (
        f"{100 * share:.1f} % of the 3500 training rows of the first seed are test rows" in said()
    )


def test_folds_of_tables():
    frame, _ = read(sparse_tabular.table, "raisin", None)
    folds = [sparse_tabular.rows_of("raisin", fold, None) for fold in range(10)]
    assert sum(len(rows.y_new) for rows in folds) == len(frame)  # each row is tested once
    assert "each of these training rows is a test row of one of the other nine folds" in said()


def test_protein():
    _, _, masks = read(load_uci, "protein", None)
    share = masks[1:][:, ~masks[0]].any(0).mean()
    assert f"training rows of the first split, {100 * share:.0f} % are test rows of one" in said()
