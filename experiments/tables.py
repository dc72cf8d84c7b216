"""Tables of numbers and labels: all weights from an ensemble beside boosters, forests and others.

The protocol is that of the benchmark of bde (Sommer et al. 2025): a fifth of the rows is the test
part, columns are standardised by the training rows, networks have four hidden layers of 16 units,
ensembles have ten members, and each method runs with five seeds. Where a method has several
candidates, its settings are those of the best score on a fifth of the training rows, which is
recorded before a test row is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from experiments.markdown import add_recorded_option, add_write_option, publish
from experiments.store import Record, Store, device_name, key_of, versions
from experiments.tables_data import DATASETS, Rows, rows_of, validation_rows
from experiments.tables_methods import METHODS, Plan, run_method
from experiments.tables_page import markdown, summary
from experiments.uci import split_names
from subbayes.utils.checks import check_choice, check_count

__all__ = ["PLANS", "add_options", "run", "run_dataset"]

Say = Callable[..., None]

_BATCHES = replace(Plan().training, epochs=300, patience=30, batch_size=256, learning_rate=1e-2)
PLANS: dict[str, Plan] = {
    "airfoil": Plan(warmup=40_000, thin=300, selection=(5000, 37)),
    "bike": Plan(warmup=24_000, thin=200, selection=(500, 3), training=_BATCHES, lengthen=1),
    **dict.fromkeys(("phoneme", "dry_bean"), Plan(warmup=800, thin=8, training=_BATCHES)),
    **dict.fromkeys(
        ("protein", "bank_marketing", "adult"), Plan(warmup=200, thin=2, training=_BATCHES)
    ),
}
"""Sizes by the CPU time that a seed takes on one core: four minutes for airfoil, 24 to 32 for bike,
and half a minute to two minutes for the others."""

DEFAULT = ("airfoil", "bike")


def run_dataset(
    name: str,
    rows: Callable[[int], Rows],
    store: Store,
    methods: Sequence[str],
    seeds: int,
    plan: Plan,
    say: Say,
    *,
    computes: bool = True,
) -> list[Record]:
    """Return the records of a data set, computing those that are missing.

    Args:
        name: of the data set.
        rows: returns its rows for a seed.
        store: of the records.
        methods: names of methods; those that do not take so many rows are left out.
        seeds: number of seeds.
        plan: sizes of the methods.
        say: prints a line.
        computes: whether missing records are computed; without, they are left out.
    """
    found = []
    for method in methods:
        if len(rows(0).y) > METHODS[method].most_rows:
            continue
        settings = _select(name, method, rows(0), store, plan, say, computes)
        for seed in range(check_count("seeds", seeds) if settings is not None else 0):
            parts = rows(seed)
            facts = _facts(name, method, plan, settings) | {"seed": seed}
            key = key_of(f"{name}-{method}-{seed}", facts)
            if not computes and key not in store:
                continue
            found.append(
                store.get(
                    key,
                    lambda facts=facts, parts=parts: (
                        facts
                        | {
                            "kind": "test",
                            "threads": torch.get_num_threads(),
                            "device": device_name(plan.device),
                            "versions": versions(),
                        }
                        | run_method(facts["method"], parts, facts["seed"], plan, facts["settings"])
                        | {"load": os.getloadavg()[0]}
                    ),
                    lambda record: say(_line(record)),
                )
            )
    return found


def _select(
    name: str, method: str, rows: Rows, store: Store, plan: Plan, say: Say, computes: bool
) -> Record | None:
    """The candidate with the best score on validation rows, with the first seed.

    None if there are missing scores that are not to be computed.
    """
    candidates = METHODS[method].candidates
    if len(candidates) == 1:
        return candidates[0]
    parts, scores, plan = validation_rows(rows), [], plan.for_selection()
    for candidate in candidates:
        facts = _facts(name, method, plan, candidate) | {"kind": "validation"}
        key = key_of(f"{name}-{method}-validation", facts)
        if not computes and key not in store:
            return None
        record = store.get(
            key, lambda facts=facts: facts | run_method(method, parts, 0, plan, facts["settings"])
        )
        scores.append(record["nll"])
    best = candidates[min(range(len(scores)), key=scores.__getitem__)]
    say(f"{name} {METHODS[method].label}: {best} of {len(candidates)} candidates")
    return best


def _facts(name: str, method: str, plan: Plan, settings: Record) -> Record:
    """What determines a record."""
    sizes = dataclasses.asdict(plan)
    return {
        "dataset": name,
        "method": method,
        "settings": settings,
        "plan": {key: sizes[key] for key in METHODS[method].fields},
    }


def _line(record: Record) -> str:
    scores = ("rmse", "nll", "nll_mixture", "coverage", "crps", "brier")
    shown = ", ".join(f"{key} {record[key]:.4f}" for key in scores if key in record)
    label, seconds = METHODS[record["method"]].label, record["seconds"]["total"]
    return f"{record['dataset']} {label} {record['seed']}: {shown}, {seconds:.1f} s"


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument(
        "--only",
        default=",".join(DEFAULT),
        help=f"data sets, separated by commas, of {', '.join(DATASETS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--methods",
        default=",".join(METHODS),
        help=f"methods, separated by commas, of {', '.join(METHODS)} (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of each method")
    parser.add_argument("--threads", type=int, default=2, help="threads of each method")
    parser.add_argument("--device", default="cpu", help="device of the networks")
    add_recorded_option(parser)
    parser.add_argument(
        "--mode",
        default=None,
        choices=("trace", "compile", "eager"),
        help="how the density of all weights is evaluated (default: compiled)",
    )
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say, plan: Plan | None = None) -> Record:
    """Compute the missing records and print the tables; return a summary."""
    names = split_names(options.only, DATASETS)
    methods = options.methods.split(",")
    for method in methods:
        check_choice("methods", method, METHODS)
    torch.set_num_threads(check_count("threads", options.threads))
    found = {}
    for name in names:
        sizes = plan or PLANS.get(name, Plan())
        found[name] = run_dataset(
            name,
            lambda seed, name=name: rows_of(name, seed, options.data_dir),
            Store(options.results, name),
            methods,
            options.seeds,
            replace(sizes, mode=options.mode or sizes.mode, device=options.device),
            say,
            computes=not options.recorded,
        )
    found = {name: records for name, records in found.items() if records}
    publish(markdown(found, options.data_dir), "tables", options, say)
    return summary(found)
