"""Sparse networks for MNIST and FashionMNIST: tables 2, 3, 5, A2, A3, A5, A6, A8, A9 of the paper.

Hubin and Storvik (2024): the network 784-400-600-10, pixels in [0, 1], all methods. There is
a record per data set, method and seed; an interrupted training resumes from its last epoch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from experiments import sparse_networks, sparse_networks_tables
from experiments.images import load
from experiments.sparse_networks import METHODS, Plan, Rows
from experiments.store import Record
from experiments.uci import add_datasets_option, split_names
from subbayes.utils.checks import check_count

DATASETS = ("mnist", "fashion_mnist")
_PLAN = Plan(early_epochs=200)  # of methods that learn their priors
_LEARNED = {method for method in METHODS if method.startswith("LBBNN")}


@lru_cache(1)
def rows_of(name: str, data_dir: str | None) -> Rows:
    """Return rows of pixels in [0, 1]."""
    images = load(name, data_dir)
    x, x_new = (
        (of.reshape(len(of), -1) / np.float32(255)).astype(np.float32)
        for of in (images.x, images.x_new)
    )
    return Rows(x, images.y.astype(np.int64), x_new, images.y_new.astype(np.int64), 10)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_datasets_option(parser, DATASETS)
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of each method")
    sparse_networks.add_options(parser, tuple(METHODS))


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute the missing records, seed by seed and method by method, and print the tables."""
    plan = sparse_networks.plan_of(options, _PLAN if plan is None else plan)
    fixed = replace(plan, early_epochs=Plan().early_epochs)  # has no effect there
    seeds = check_count("seeds", options.seeds)
    found: list[Record] = []
    for name in split_names(options.datasets, DATASETS):
        densities = tuple(sparse_networks_tables.PRUNED[name])
        for own, methods in ((plan, _LEARNED), (fixed, METHODS.keys() - _LEARNED)):
            cases = [
                (name, m, seed) for seed in range(seeds) for m in options.methods if m in methods
            ]
            found += sparse_networks.compute_records(
                cases,
                lambda name, _: rows_of(name, options.data_dir),
                options,
                replace(own, densities=densities),
                say,
            )
    return sparse_networks.publish_records(
        found, "sparse_images", sparse_networks_tables.markdown(found), options, say
    )
