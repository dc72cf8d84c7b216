"""Small UCI regression: tables 2, 3 and 4 of Izmailov et al. (2019).

One hidden layer of 50 units, a heteroscedastic likelihood with a global variance, batches of a
tenth of the rows, the 20 usual splits. Learning rates, weight decay, epochs and temperature are
selected for each data set by the likelihood of validation rows within the training part of a few
splits. Mean-field variational inference uses the trajectories selected for elliptical slice
sampling, at its own temperature, and has its own records; so have deep ensembles, the subspaces of
curves, and NUTS.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from experiments import uci_small_tables
from experiments.datasets import load_uci
from experiments.markdown import add_write_option, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import (
    Array,
    Case,
    Say,
    add_datasets_option,
    fields_of,
    finite_or_none,
    posterior_of,
    sampling_record,
    scores,
    split_names,
)
from experiments.uci_small_further import METHODS as FURTHER
from experiments.uci_small_further import run_further
from experiments.uci_small_methods import (
    DIVERGED,
    FIXED,
    FURTHER_FIXED,
    PLANS,
    PROCEDURE,
    VI_FIXED,
    Chosen,
    Phases,
    Plan,
    predict_sgd,
    sample_ess,
    sample_vi,
)
from experiments.uci_small_selection import select_settings, select_temperature
from experiments.uci_tables import METHODS, summary_of
from subbayes import Predictive
from subbayes.baselines.map import point_estimate
from subbayes.baselines.swag import swag
from subbayes.training.trainer import SwaResult
from subbayes.utils.checks import InputError, check_count

DATASETS = ("yacht", "boston", "energy", "concrete", "naval")
_Runs = Callable[[tuple[int, ...]], Iterator[Record]]


def run_dataset(
    name: str,
    splits: int,
    data_dir: str | None,
    folder: str,
    plan: Plan,
    further: bool = False,
    say: Say = print,
) -> list[Record]:
    """Return the records of the splits of a data set, computing those that are missing.

    Args:
        name: data set.
        splits: number of splits, from the first of the usual ones.
        data_dir: folder of the data.
        folder: folder of the records.
        plan: settings.
        further: deep ensembles, curves and NUTS too.
        say: prints a line.
    """
    X, y, masks = load_uci(name, data_dir)
    check_count("splits", splits)
    return run_table(name, X, y, masks[:splits], masks, folder, plan, say, further)


def run_table(
    name: str,
    X: Array,
    y: Array,
    masks: Array,
    tuning_masks: Array,
    folder: str,
    plan: Plan,
    say: Say,
    further: bool = False,
) -> list[Record]:
    """Do the work of `run_dataset` on arrays: X (n, d), y (n,), and test masks (splits, n)."""
    torch.set_num_threads(1)
    store = Store(folder, name)
    phases = Phases(X, y, masks, plan)
    choice = select_settings(name, X, y, tuning_masks, plan, store, say)

    def of_splits(part: str, settings: Record, fixed: Sequence[str], runs: _Runs) -> list[Record]:
        of_all = {"plan": fields_of(plan, *fixed), "procedure": PROCEDURE}
        return _records_of_splits(
            store, name, part, {"dataset": name} | settings | of_all, len(masks), say, runs
        )

    records = of_splits(
        "",
        {"chosen": dataclasses.asdict(choice)},
        FIXED,
        lambda missing: _run(missing, phases, choice),
    )
    pca = {"base": dataclasses.asdict(choice.pca), "rate": choice.pca_rate}
    select = partial(select_temperature, name, X, y, tuning_masks, plan, choice, store, say)
    temperature = select("vi")
    fits = of_splits(
        "vi-",
        pca | {"temperature": temperature},
        VI_FIXED,
        lambda missing: _run_vi(missing, phases, choice, temperature),
    )
    found = [
        record | {"methods": record["methods"] | fit["methods"], "vi": fit["vi"]}
        for record, fit in zip(records, fits, strict=True)
    ]
    if not further:
        return found
    on_curve = select("curve")
    others = of_splits(
        "further-",
        pca
        | {"ends": dataclasses.asdict(choice.sgd)}
        | {"temperature": choice.temperature, "curve_temperature": on_curve},
        FURTHER_FIXED,
        lambda missing: run_further(missing, phases, choice, on_curve),
    )
    return [
        record | {"methods": record["methods"] | other["methods"], "further": other}
        for record, other in zip(found, others, strict=True)
    ]


def _records_of_splits(
    store: Store, name: str, part: str, settings: Record, splits: int, say: Say, runs: _Runs
) -> list[Record]:
    """Return the records of all splits; those that are missing are computed together."""
    keys = [
        key_of(f"{name}-{part}{split:02d}", settings | {"split": split}) for split in range(splits)
    ]
    missing = tuple(split for split, key in enumerate(keys) if key not in store)
    if missing:
        for split, record in zip(missing, runs(missing), strict=True):
            store.put(keys[split], settings | {"kind": f"{part}split", "split": split} | record)
            scores_text = (
                f"{m} {found['log_likelihood']:.3f}"
                for m, found in record["methods"].items()
                if m in METHODS + FURTHER
            )
            say(f"{name} {split:2d}: " + ", ".join(scores_text))
    return [store[key] for key in keys]


def _run(splits: tuple[int, ...], phases: Phases, choice: Chosen) -> Iterator[Record]:
    """Train all splits together, then sample and score each."""
    members = {base: phases.members(splits, base) for base in {choice.sgd, choice.swag, choice.pca}}
    paths = {(base, rate): phases.paths(splits, base, rate) for base, rate in choice.paths}
    seconds = {
        "training": sum(seconds for _, seconds in members.values()),
        "trajectory": sum(seconds for _, seconds in paths.values()),
    }
    for s, c in enumerate(phases.cases(splits)):
        yield _record(
            c,
            predict_sgd(members[choice.sgd][0], s, c.inputs),
            paths[choice.swag, choice.swag_rate][0][s],
            paths[choice.pca, choice.pca_rate][0][s],
            phases.plan,
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
        raise InputError(DIVERGED)
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


def _run_vi(
    splits: tuple[int, ...], phases: Phases, choice: Chosen, temperature: float
) -> Iterator[Record]:
    """Train all splits together along the selected trajectory, then fit and score each."""
    plan = phases.plan
    paths, seconds_of_path = phases.paths(splits, choice.pca, choice.pca_rate)
    seconds = {"training": phases.members(splits, choice.pca)[1] + seconds_of_path}
    for path, c in zip(paths, phases.cases(splits), strict=True):
        if path is None:
            raise InputError(DIVERGED)
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
    parser.add_argument(
        "--further",
        default="",
        help="data sets with deep ensembles, curves and NUTS too, separated by commas",
    )
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute the missing records and print the tables; return a summary."""
    names = split_names(options.datasets, DATASETS)
    further = split_names(options.further, names, "further") if options.further else ()
    jobs = [
        (
            name,
            options.splits,
            options.data_dir,
            options.results,
            PLANS.get(name, Plan()),
            name in further,
        )
        for name in names
    ]
    if options.workers == 1:
        records = [run_dataset(*job, say=say) for job in jobs]
    else:
        with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
            records = list(pool.map(_run_silently, *zip(*jobs, strict=True)))
    found = dict(zip(names, records, strict=True))
    publish(uci_small_tables.markdown(found), "uci_small", options, say)
    return summary_of(found)


def _run_silently(*job: Any) -> list[Record]:
    return run_dataset(*job, say=lambda *_: None)
