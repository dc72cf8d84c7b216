"""Small UCI regression: tables 2, 3 and 4 of Izmailov et al. (2019).

One hidden layer of 50 units, a heteroscedastic likelihood with a global variance, batches of a
tenth of the rows, the 20 usual splits. Learning rates, weight decay, epochs and temperature are
selected for each data set by the likelihood of validation rows within the training part of a few
splits. Mean-field variational inference uses the trajectories selected for elliptical slice
sampling, at its own temperature, and has its own records.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import uci_small_tables
from experiments.markdown import add_write_option, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import (
    Array,
    Case,
    Say,
    add_datasets_option,
    case,
    fields_of,
    finite_or_none,
    posterior_of,
    sampling_record,
    scores,
    split_names,
)
from experiments.uci_small_methods import (
    FIXED,
    PLANS,
    PROCEDURE,
    VI_FIXED,
    Chosen,
    Plan,
    predict_sgd,
    run_paths,
    sample_ess,
    sample_vi,
    train,
)
from experiments.uci_small_selection import select_settings, select_vi_temperature
from experiments.uci_tables import METHODS, summary_of
from subbayes import Predictive
from subbayes.baselines.map import point_estimate
from subbayes.baselines.swag import swag
from subbayes.data.datasets import load_uci
from subbayes.training.trainer import SwaResult
from subbayes.utils.checks import InputError, check_count
from subbayes.utils.seeding import derive_seed

DATASETS = ("yacht", "boston", "energy", "concrete", "naval")
_DIVERGED = (
    "path_rates: expected rates at which training stays finite, got one that diverged. "
    "Lower the grid."
)


def run_dataset(
    name: str, splits: int, data_dir: str | None, folder: str, plan: Plan, say: Say = print
) -> list[Record]:
    """Return the records of the splits of a data set, computing those that are missing.

    Args:
        name: data set.
        splits: number of splits, from the first of the usual ones.
        data_dir: folder of the data.
        folder: folder of the records.
        plan: settings.
        say: prints a line.
    """
    X, y, masks = load_uci(name, data_dir)
    check_count("splits", splits)
    return run_table(name, X, y, masks[:splits], masks, folder, plan, say)


def run_table(
    name: str,
    X: Array,
    y: Array,
    masks: Array,
    tuning_masks: Array,
    folder: str,
    plan: Plan,
    say: Say,
) -> list[Record]:
    """Do the work of `run_dataset` on arrays: X (n, d), y (n,), and test masks (splits, n)."""
    torch.set_num_threads(1)
    store = Store(Path(folder) / f"{name}.json")
    choice = select_settings(name, X, y, tuning_masks, plan, store, say)
    settings = {
        "dataset": name,
        "chosen": dataclasses.asdict(choice),
        "plan": fields_of(plan, *FIXED),
        "procedure": PROCEDURE,
    }
    records = _records_of_splits(
        store,
        f"{name}-",
        "split",
        settings,
        masks,
        say,
        lambda missing: _run([case_of(X, y, masks, s) for s in missing], plan, choice),
    )
    temperature = select_vi_temperature(name, X, y, tuning_masks, plan, choice, store, say)
    settings = {
        "dataset": name,
        "base": dataclasses.asdict(choice.pca),
        "rate": choice.pca_rate,
        "temperature": temperature,
        "plan": fields_of(plan, *VI_FIXED),
        "procedure": PROCEDURE,
    }
    further = _records_of_splits(
        store,
        f"{name}-vi-",
        "vi-split",
        settings,
        masks,
        say,
        lambda missing: _run_vi(
            [case_of(X, y, masks, s) for s in missing], plan, choice, temperature
        ),
    )
    return [
        record | {"methods": record["methods"] | more["methods"], "vi": more["vi"]}
        for record, more in zip(records, further, strict=True)
    ]


def case_of(X: Array, y: Array, masks: Array, split: int) -> Case:
    """Return training and test rows of a split."""
    return case(
        X, y, np.flatnonzero(~masks[split]), np.flatnonzero(masks[split]), derive_seed(split)
    )


def _records_of_splits(
    store: Store,
    prefix: str,
    kind: str,
    settings: Record,
    masks: Array,
    say: Say,
    runs: Callable[[list[int]], Iterator[Record]],
) -> list[Record]:
    """Return the records of all splits; those that are missing are computed together."""
    keys = [
        key_of(f"{prefix}{split:02d}", settings | {"split": split}) for split in range(len(masks))
    ]
    missing = [split for split, key in enumerate(keys) if key not in store]
    if missing:
        for split, record in zip(missing, runs(missing), strict=True):
            store.put(keys[split], settings | {"kind": kind, "split": split} | record)
            scores_text = (
                f"{m} {found['log_likelihood']:.3f}"
                for m, found in record["methods"].items()
                if m in METHODS
            )
            say(f"{settings['dataset']} {split:2d}: " + ", ".join(scores_text))
    return [store[key] for key in keys]


def _run(cases: list[Case], plan: Plan, choice: Chosen) -> Iterator[Record]:
    """Train all cases together, then sample and score each."""
    started = time.process_time()
    members = {
        base: train(cases, plan, [base] * len(cases))
        for base in {choice.sgd, choice.swag, choice.pca}
    }
    trained = time.process_time()
    paths = {
        (base, rate): run_paths(members[base], cases, plan, base, rate)
        for base, rate in choice.paths
    }
    seconds = {
        "training": (trained - started) / len(cases),
        "trajectory": (time.process_time() - trained) / len(cases),
    }
    for s, c in enumerate(cases):
        yield _record(
            c,
            predict_sgd(members[choice.sgd], s, c.inputs),
            paths[choice.swag, choice.swag_rate][s],
            paths[choice.pca, choice.pca_rate][s],
            plan,
            choice.temperature,
            seconds,
        )


def _record(
    c: Case,
    sgd: Predictive,
    swag_path: SwaResult | None,
    pca_path: SwaResult | None,
    plan: Plan,
    temperature: float,
    seconds: dict[str, float],
) -> Record:
    if swag_path is None or pca_path is None:
        raise InputError(_DIVERGED)
    seed = c.table.seed
    posterior = posterior_of(pca_path, c.table, plan.rank).with_temperature(temperature)
    started = time.process_time()
    draws = sample_ess(posterior, plan, seed)
    drawn = time.process_time()
    methods = {
        "SGD": scores(sgd, c.y),
        "SWA": scores(point_estimate(pca_path).predict(c.inputs), c.y),
        "SWAG": scores(swag(swag_path, plan.swag_draws, seed=seed).predict(c.inputs), c.y),
        "PCA + ESS": scores(posterior.predict(draws, c.inputs), c.y),
    }
    seconds = seconds | {"sampling": drawn - started, "scoring": time.process_time() - drawn}
    return {
        "methods": methods,
        "sampling": sampling_record(posterior, draws),
        "versions": versions(),
        "threads": 1,
        "seconds": {k: round(v, 2) for k, v in seconds.items()},
    }


def _run_vi(cases: list[Case], plan: Plan, choice: Chosen, temperature: float) -> Iterator[Record]:
    """Train all cases together along the selected trajectory, then fit and score each."""
    started = time.process_time()
    members = train(cases, plan, [choice.pca] * len(cases))
    paths = run_paths(members, cases, plan, choice.pca, choice.pca_rate)
    seconds = {"training": (time.process_time() - started) / len(cases)}
    for path, c in zip(paths, cases, strict=True):
        if path is None:
            raise InputError(_DIVERGED)
        started = time.process_time()
        posterior = posterior_of(path, c.table, plan.rank).with_temperature(temperature)
        draws = sample_vi(posterior, plan, c.table.seed)
        fit = {
            name: finite_or_none(draws.meta[name]) for name in ("elbo", "elbo_error", "steps")
        } | {
            name: finite_or_none(getattr(draws, name))
            for name in ("log_evidence", "log_evidence_error", "pareto_k")
        }
        drawn = time.process_time()
        yield {
            "methods": {"PCA + VI": scores(posterior.predict(draws, c.inputs), c.y)},
            "centre": scores(point_estimate(path).predict(c.inputs), c.y),
            "vi": fit
            | {"converged": draws.converged, "rank": posterior.rank, "temperature": temperature},
            "versions": versions(),
            "threads": 1,
            "seconds": {
                k: round(v, 2)
                for k, v in (
                    seconds | {"fit": drawn - started, "scoring": time.process_time() - drawn}
                ).items()
            },
        }


# --- the command ------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_datasets_option(parser, DATASETS)
    parser.add_argument("--splits", type=int, default=20, help="number of the 20 usual splits")
    parser.add_argument(
        "--workers", type=int, default=1, help="number of data sets run in parallel"
    )
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute the missing records and print the tables; return a summary."""
    names = split_names(options.datasets, DATASETS)
    jobs = [
        (name, options.splits, options.data_dir, options.results, PLANS.get(name, Plan()))
        for name in names
    ]
    if options.workers == 1:
        records = [run_dataset(*job, say=say) for job in jobs]
    else:
        with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
            records = list(pool.map(_run_silently, *zip(*jobs, strict=True)))
    found = dict(zip(names, records, strict=True))
    publish(uci_small_tables.markdown(found), "uci_small", options.write, say)
    return summary_of(found)


def _run_silently(*job: Any) -> list[Record]:
    return run_dataset(*job, say=lambda *_: None)
