"""Sparse networks for PHONEME: tables 4, 5, A4, A7 and A10 of Hubin and Storvik (2024).

The network 256-400-600-5 on log-periodograms of 4509 frames, all methods of the paper. As
there, 3500 rows are for training and 1000 for testing, drawn by the seed. The paper does not say
how inputs are scaled; here they are standardised by the training rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from experiments import sparse_networks, sparse_networks_tables
from experiments.datasets import find_file
from experiments.sparse_networks import METHODS, Plan, Rows
from experiments.store import Record
from subbayes.utils.checks import check_count

TRAIN, TEST = 3500, 1000


def rows_of(seed: int, data_dir: str | None) -> Rows:
    """Return random training and test rows, standardised by the training rows."""
    with np.load(find_file("phoneme/phoneme.npz", data_dir), allow_pickle=False) as file:
        x, y, classes = file["X"], file["y"].astype(np.int64), len(file["classes"])
    order = np.random.default_rng(seed).permutation(len(y))
    train, test = order[:TRAIN], order[TRAIN : TRAIN + TEST]
    center, scale = x[train].mean(0), x[train].std(0)
    x = ((x - center) / scale).astype(np.float32)
    return Rows(x[train], y[train], x[test], y[test], classes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument(
        "--seeds", type=int, default=10, help="number of splits, with a run of each method"
    )
    sparse_networks.add_options(parser, tuple(METHODS))


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute the missing records, seed by seed and method by method, and print the tables."""
    plan = replace(
        sparse_networks.plan_of(options, Plan() if plan is None else plan),
        densities=tuple(sparse_networks_tables.PRUNED["phoneme"]),
    )
    cases = [
        ("phoneme", method, seed)
        for seed in range(check_count("seeds", options.seeds))
        for method in options.methods
    ]
    found = sparse_networks.compute_records(
        cases, lambda _, seed: rows_of(seed, options.data_dir), options, plan, say
    )
    return sparse_networks.publish_records(
        found, "sparse_phoneme", sparse_networks_tables.markdown(found), options, say
    )
