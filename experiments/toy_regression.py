"""Toy regression: figures 1, 3, 8 and 9 of Izmailov et al. (2019), on their 400 points.

Random, PCA and curve subspaces of a five-layer network, sampled by elliptical slice sampling, NUTS,
mean-field variational inference and RealNVP; SWAG, mean-field variational inference over all
weights and a Gaussian process for comparison. On synthetic data ("twins"), drawn from networks with
random weights, the coverage of the true function is measured.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.markdown import add_write_option
from experiments.store import Record
from experiments.toy_regression_data import (
    ENGINES,
    METHODS,
    SUBSPACES,
    Plan,
    Points,
    paper_points,
    summary,
    twin,
)
from experiments.toy_regression_methods import (
    ArrayCache,
    Arrays,
    Results,
    Trained,
    record_key,
    run_method,
    train_solutions,
)
from experiments.uci import Say, split_names
from subbayes import curvature
from subbayes.utils.checks import check_count


def run_points(
    points: Points,
    methods: tuple[str, ...],
    plan: Plan,
    seed: int,
    cache: ArrayCache,
    figures: bool,
) -> Results:
    """Train and run every method; recorded methods are run again only if figures need them."""
    torch.set_num_threads(1)
    model = functools.cache(lambda: train_solutions(points, plan, seed, cache))
    arrays, records = {}, {}
    for method in methods:
        name = f"{points.name} {method}"
        settings = asdict(plan) | {"data": points.name, "seed": seed, "method": method}
        key = record_key(name, settings)
        if figures or key not in cache.store:
            arrays[method] = cache(
                name, settings, functools.partial(_with_summary, method, points, model, plan, seed)
            )
        records[method] = cache.store[key]
    return Results(points, plan, seed, records, arrays, model)


def _with_summary(
    method: str, points: Points, model: Callable[[], Trained], plan: Plan, seed: int
) -> tuple[Arrays, Record]:
    arrays, record = run_method(method, points, model(), plan, seed)
    return arrays, record | summary(arrays["curves"], points, record.get("noise", model().noise))


def spectra_of(found: Results, cache: ArrayCache) -> dict[str, Any]:
    """Return spectra of the Hessian and of the Fisher information at the first solution."""
    network, data = found.model.network.to("cpu", torch.float64), found.points.data
    inputs = data[0].double(), data[1].double()

    def compute() -> tuple[Arrays, Record]:
        arrays, record = {}, {}
        for kind in ("hessian", "fisher"):
            product = curvature.Curvature(
                network, found.model.likelihood, inputs, kind, batch_size=400
            )
            pairs = curvature.eigenvalues(
                product,
                min(40, product.size),
                which="magnitude",
                basis=80,
                restarts=3,
                tolerance=1e-3,
                progress=False,
            )
            arrays[kind] = np.stack([pairs.values, pairs.residuals])
            record[kind] = {
                "products": pairs.products,
                "largest": float(pairs.values[0]),
                "residual": float(pairs.residuals.max()),
            }
        return arrays, record

    return cache(
        f"{found.points.name} spectra",
        {
            "data": found.points.name,
            "noise": found.model.noise,
            "weights": float(network.weights.sum()),
        },
        compute,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--methods", default=",".join(METHODS), help="names separated by commas")
    parser.add_argument(
        "--twins", type=int, default=2, help="number of synthetic data sets with known function"
    )
    parser.add_argument("--temperature", type=float, default=Plan.temperature)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--page", default=None, metavar="FILE", help="write the gallery to this HTML file"
    )
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say, plan: Plan | None = None) -> Record:
    """Compute the missing records and print the tables; return the records by data set."""
    from experiments import toy_regression_page as page

    methods = split_names(options.methods, METHODS, "methods")
    plan = Plan(temperature=options.temperature) if plan is None else plan
    cache = ArrayCache(Path(options.results), say)
    paper = paper_points(options.data_dir)
    sets = [
        paper,
        *(twin(s, paper, plan) for s in range(1, 1 + check_count("twins", options.twins, 0))),
    ]
    figures = bool(options.page or options.write)
    found = [
        run_points(points, methods, plan, options.seed, cache, figures and points is paper)
        for points in sets
    ]
    say(page.markdown(found))
    if figures:
        rows = [[f"{subspace} + {engine}" for subspace in SUBSPACES] for engine in ENGINES]
        page.write(found, spectra_of(found[0], cache), rows, options.page, options.write)
    return {one.points.name: one.records for one in found}
