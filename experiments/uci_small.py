"""Small UCI regression: tables 2, 3 and 4 of Izmailov et al. (2019).

One hidden layer of 50, heteroscedastic with a global variance, batches of a tenth of the rows,
the 20 usual splits. Learning rates, weight decay, epochs and temperature are chosen for each
data set by likelihood on validation rows of the training part of a few splits. Mean-field
variational inference runs along the trajectories that suit elliptical slice sampling, at a
temperature of its own, in records of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import batched, uci_small_tables
from experiments.batched import Members
from experiments.store import Record, Store, key_of, versions
from experiments.uci import (
    Array,
    Case,
    Say,
    asked,
    best,
    case,
    fields_of,
    moment_matched,
    order,
    posterior_of,
    scores,
    summary,
    summary_of,
    worst_rhat,
)
from subbayes import Draws, Posterior, Predictive
from subbayes.baselines.map import point_estimate
from subbayes.baselines.swag import swag
from subbayes.data.datasets import load_uci
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.variational.variational import MeanFieldVI
from subbayes.predictions.averaging import average
from subbayes.training.trainer import SwaResult
from subbayes.utils.checks import InputError, check_count
from subbayes.utils.seeding import derive_seed

DATASETS = ("yacht", "boston", "energy", "concrete", "naval")
METHODS = ("SGD", "SWAG", "PCA + ESS", "PCA + VI")
FIXED = (
    "hidden",
    "path_epochs",
    "clip_norm",
    "snapshots",
    "rank",
    "swag_draws",
    "chains",
    "draws",
    "rhat",
    "longest",
)
"""The part of a plan that the splits depend on, beside what was chosen."""

VI_FIXED = (
    "hidden",
    "path_epochs",
    "clip_norm",
    "snapshots",
    "rank",
    "vi_steps",
    "vi_samples",
    "vi_batch_size",
    "vi_draws",
)
"""The same for variational inference."""

_DIVERGED = (
    "path_rates: expected rates at which training stays finite, got one that diverged. "
    "Lower the grid."
)

PROCEDURE = 1
"""Raise it when the code below changes what the same settings give."""


@dataclass(frozen=True)
class Plan:
    """What is fixed, and the grids from which the rest is chosen.

    Attributes:
        hidden: widths of the hidden layers.
        learning_rates: grid of Adam's first rate, cosine to 0.
        weight_decays: grid.
        epochs: grid of passes of the first phase.
        bases: the second phase is tried from so many first phases, the best at each number of
            epochs.
        path_rates: grid of the constant rate of SGD along the trajectory.
        further_rates: tried in turn as long as the largest tried is the best.
        path_epochs: passes along the trajectory, a snapshot after each.
        clip_norm: largest gradient along the trajectory.
        snapshots: how many of the last snapshots span it (the paper's M).
        rank: of the PCA subspace.
        temperatures: grid.
        tuning_splits: so many of the first splits lend their training part to the choice.
        validations: random validation splits of each; the trajectory's rate and the temperature
            are chosen on the first of them.
        validation: fraction of the training part held out.
        tuning_chains: of elliptical slice sampling while choosing.
        tuning_draws: draws a chain then, after as many for warm-up.
        chains: of the final sampling.
        draws: draws a chain, all used for prediction, after half as many for warm-up.
        rhat: where the worst R-hat is above this, the chains are run anew at twice the length,
        longest: up to this many times `draws`.
        swag_draws: weight vectors of SWAG.
        vi_steps: of the variational fit, at most.
        vi_samples: draws in each of them.
        vi_batch_size: rows in each of them; all, where there are no more.
        vi_draws: draws of the fitted Gaussian.
    """

    hidden: tuple[int, ...] = (50,)
    learning_rates: tuple[float, ...] = (3e-3, 1e-2)
    weight_decays: tuple[float, ...] = (1e-2, 3e-2, 1e-1, 3e-1)
    epochs: tuple[int, ...] = (100, 300, 1000)
    bases: int = 2
    path_rates: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2)
    further_rates: tuple[float, ...] = (3e-2, 1e-1)
    path_epochs: int = 100
    clip_norm: float = 1.0
    snapshots: int = 20
    rank: int = 20
    temperatures: tuple[float, ...] = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    tuning_splits: int = 5
    validations: int = 2
    validation: float = 0.1
    tuning_chains: int = 4
    tuning_draws: int = 100
    chains: int = 8
    draws: int = 400
    rhat: float = 1.05
    longest: int = 8
    swag_draws: int = 200
    vi_steps: int = 2000
    vi_samples: int = 8
    vi_batch_size: int = 1000
    vi_draws: int = 400


PLANS = {
    "naval": Plan(
        weight_decays=(1e-5, 1e-4),
        epochs=(1000,),
        bases=1,
        path_rates=(1e-5, 1e-4, 1e-3),
        further_rates=(),
        path_epochs=50,
        tuning_splits=2,
        validations=1,
        tuning_draws=50,
        temperatures=(1.0, 30.0, 1000.0),
        chains=4,
        draws=200,
        longest=1,
    )
}
"""Naval has 40 times the rows: fewer choices and shorter chains."""


@dataclass(frozen=True)
class Base:
    """Settings of the first phase."""

    learning_rate: float
    weight_decay: float
    epochs: int


@dataclass(frozen=True)
class Chosen:
    """What validation chose for a data set: each method has what suits it best."""

    sgd: Base
    swag: Base
    swag_rate: float
    pca: Base
    pca_rate: float
    temperature: float

    @property
    def paths(self) -> set[tuple[Base, float]]:
        """The trajectories needed."""
        return {(self.swag, self.swag_rate), (self.pca, self.pca_rate)}


# --- the methods ------------------------------------------------------------------------------


def train(cases: list[Case], plan: Plan, bases: list[Base]) -> Members:
    """The first phase of all cases, each with settings of its own (but for the epochs)."""
    return batched.train(
        [c.table for c in cases],
        hidden=plan.hidden,
        epochs=bases[0].epochs,
        learning_rate=[b.learning_rate for b in bases],
        weight_decay=[b.weight_decay for b in bases],
        batch_size=_tenth(cases),
    )


def along(
    members: Members, cases: list[Case], plan: Plan, base: Base, rate: float
) -> list[SwaResult | None]:
    """The trajectories of all members at a constant rate."""
    return batched.average(
        members,
        epochs=plan.path_epochs,
        learning_rate=[rate] * len(cases),
        weight_decay=[base.weight_decay] * len(cases),
        batch_size=_tenth(cases),
        max_snapshots=plan.snapshots,
        clip_norm=plan.clip_norm,
    )


def _tenth(cases: list[Case]) -> int:
    return -(-len(cases[0].table.y) // 10)


def predict_sgd(members: Members, s: int, inputs: Tensor) -> Predictive:
    """The solution of the first phase alone."""
    network = members.network(s)
    return average(network, members.likelihood(s), network.weights[None], inputs)


def predict_swag(path: SwaResult, plan: Plan, inputs: Tensor, seed: int) -> Predictive:
    """SWAG's Gaussian around the trajectory."""
    return swag(path, plan.swag_draws, seed=seed).predict(inputs)


def sampled(posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Draws of chains that are long enough to agree, or as long as the plan allows."""
    for factor in (2**i for i in range(plan.longest.bit_length())):
        draws = EllipticalSlice().sample(
            posterior, draws=factor * plan.draws, chains=plan.chains, seed=seed, progress=False
        )
        if worst_rhat(draws) <= plan.rhat:
            break
    return draws


def fitted(posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Draws of the mean-field Gaussian nearest to the posterior."""
    batch_size = plan.vi_batch_size if plan.vi_batch_size < posterior.data.n else None
    return MeanFieldVI(steps=plan.vi_steps, samples=plan.vi_samples, batch_size=batch_size).sample(
        posterior, chains=1, draws=plan.vi_draws, seed=seed, progress=False
    )


# --- choosing ---------------------------------------------------------------------------------


def tuning_cases(X: Array, y: Array, masks: Array, plan: Plan) -> list[Case]:
    """Validation cases, cut from the training part of the first splits."""
    cases = []
    for v in range(plan.validations):
        for split in range(min(plan.tuning_splits, len(masks))):
            rows = np.flatnonzero(~masks[split])
            order = np.random.default_rng([split, v]).permutation(rows)
            n = round(plan.validation * len(rows))
            cases.append(case(X, y, order[n:], order[:n], derive_seed(split, v)))
    return cases


def try_training(cases: list[Case], plan: Plan, epochs: int) -> list[Record]:
    """Validation likelihood of SGD alone, at all learning rates and weight decays."""
    grid = [
        Base(rate, decay, epochs) for rate in plan.learning_rates for decay in plan.weight_decays
    ]
    members = train(cases * len(grid), plan, [base for base in grid for _ in cases])
    tried = []
    for i, base in enumerate(grid):
        at = range(i * len(cases), (i + 1) * len(cases))
        values = [
            moment_matched(predict_sgd(members, s, c.inputs), c.y)
            if members.finite(s)
            else -math.inf
            for s, c in zip(at, cases, strict=True)
        ]
        tried.append(dataclasses.asdict(base) | summary(values))
    return tried


def try_path(
    cases: list[Case], members: Members, plan: Plan, base: Base, rate: float
) -> list[Record]:
    """Validation likelihood of SWAG, and of the subspace at every temperature."""
    paths = along(members, cases, plan, base, rate)
    swags = [
        moment_matched(predict_swag(p, plan, c.inputs, c.table.seed), c.y) if p else -math.inf
        for p, c in zip(paths, cases, strict=True)
    ]
    rows = np.array([_tempered(p, c, plan) for p, c in zip(paths, cases, strict=True)])
    return [{"method": "SWAG", "rate": rate} | summary(swags)] + [
        {"method": "PCA + ESS", "rate": rate, "temperature": t} | summary(column)
        for t, column in zip(plan.temperatures, rows.T.tolist(), strict=True)
    ]


def _tempered(path: SwaResult | None, c: Case, plan: Plan) -> list[float]:
    """Validation likelihoods of short runs at every temperature."""
    if path is None:
        return [-math.inf] * len(plan.temperatures)
    posterior = posterior_of(path, c.table, plan.rank)
    values = []
    for temperature in plan.temperatures:
        tempered = posterior.with_temperature(temperature)
        draws = EllipticalSlice().sample(
            tempered,
            draws=plan.tuning_draws,
            chains=plan.tuning_chains,
            warmup=plan.tuning_draws,
            seed=c.table.seed,
            progress=False,
        )
        values.append(moment_matched(tempered.predict(draws, c.inputs), c.y))
    return values


def try_vi(cases: list[Case], plan: Plan, base: Base, rate: float) -> list[Record]:
    """Validation likelihood of variational inference at every temperature."""
    paths = along(train(cases, plan, [base] * len(cases)), cases, plan, base, rate)
    rows = np.array([_vi_tempered(p, c, plan) for p, c in zip(paths, cases, strict=True)])
    return [
        {"temperature": t} | summary(column)
        for t, column in zip(plan.temperatures, rows.T.tolist(), strict=True)
    ]


def _vi_tempered(path: SwaResult | None, c: Case, plan: Plan) -> list[float]:
    """Validation likelihoods at every temperature."""
    if path is None:
        return [-math.inf] * len(plan.temperatures)
    posterior = posterior_of(path, c.table, plan.rank)
    values = []
    for temperature in plan.temperatures:
        tempered = posterior.with_temperature(temperature)
        draws = fitted(tempered, plan, c.table.seed)
        values.append(moment_matched(tempered.predict(draws, c.inputs), c.y))
    return values


def _kept(
    store: Store,
    say: Say,
    name: str,
    what: str,
    settings: Record,
    tried: Callable[[], list[Record]],
) -> list[Record]:
    """What was tried, from the records or, then on record, anew."""
    key = key_of(f"{name}-{what}", settings)
    if key not in store:
        started = time.process_time()
        store.put(
            key,
            settings
            | {
                "kind": what,
                "tried": tried(),
                "versions": versions(),
                "seconds": round(time.process_time() - started, 1),
            },
        )
        say(f"{name} {what} {settings.get('rate', '')}: best {best(store[key]['tried'])}")
    return store[key]["tried"]


def chosen(
    name: str, X: Array, y: Array, masks: Array, plan: Plan, store: Store, say: Say
) -> Chosen:
    """The choice for a data set; what was tried is on record and not tried again."""
    cases = functools.cache(lambda: tuning_cases(X, y, masks, plan))
    facts = _facts(name, plan)

    def kept(what: str, settings: Record, tried: Callable[[], list[Record]]) -> list[Record]:
        return _kept(store, say, name, what, facts | settings, tried)

    grid = fields_of(plan, "learning_rates", "weight_decays")
    best_at = [
        best(kept("training", grid | {"epochs": e}, lambda e=e: try_training(cases(), plan, e)))
        for e in plan.epochs
    ]
    fixed = fields_of(
        plan,
        "path_epochs",
        "clip_norm",
        "snapshots",
        "rank",
        "swag_draws",
        "temperatures",
        "tuning_chains",
        "tuning_draws",
    )
    few = functools.cache(lambda: cases()[: plan.tuning_splits])
    members = functools.cache(lambda base: train(few(), plan, [base] * len(few())))
    swags, tempered = [], []
    for row in sorted(best_at, key=order, reverse=True)[: plan.bases]:
        base = _base(row)
        here: list[Record] = []
        for rate in plan.path_rates + plan.further_rates:
            if rate in plan.further_rates and best(here)["rate"] < here[-1]["rate"]:
                break
            settings = dataclasses.asdict(base) | fixed | {"rate": rate}
            swag_row, *rows = kept(
                "path",
                settings,
                lambda base=base, rate=rate: try_path(few(), members(base), plan, base, rate),
            )
            here += rows
            swags.append(swag_row | dataclasses.asdict(base))
        tempered += [row | dataclasses.asdict(base) for row in here]
    swag_best, pca_best = best(swags), best(tempered)
    return Chosen(
        sgd=_base(best(best_at)),
        swag=_base(swag_best),
        swag_rate=swag_best["rate"],
        pca=_base(pca_best),
        pca_rate=pca_best["rate"],
        temperature=pca_best["temperature"],
    )


def vi_temperature(
    name: str, X: Array, y: Array, masks: Array, plan: Plan, choice: Chosen, store: Store, say: Say
) -> float:
    """The temperature of variational inference, along the trajectories already chosen."""
    settings = (
        _facts(name, plan)
        | dataclasses.asdict(choice.pca)
        | {"rate": choice.pca_rate}
        | fields_of(plan, *VI_FIXED, "temperatures")
    )
    found = _kept(
        store,
        say,
        name,
        "vi",
        settings,
        lambda: try_vi(
            tuning_cases(X, y, masks, plan)[: plan.tuning_splits], plan, choice.pca, choice.pca_rate
        ),
    )
    return float(best(found)["temperature"])


def _facts(name: str, plan: Plan) -> Record:
    """What every choice depends on."""
    return {"dataset": name, "procedure": PROCEDURE} | fields_of(
        plan, "hidden", "tuning_splits", "validations", "validation"
    )


def _base(row: Record) -> Base:
    return Base(row["learning_rate"], row["weight_decay"], row["epochs"])


# --- the splits -------------------------------------------------------------------------------


def run_dataset(
    name: str, splits: int, data_dir: str | None, folder: str, plan: Plan, say: Say = print
) -> list[Record]:
    """All splits of a data set; those on record are not run again.

    Args:
        name: the data set.
        splits: so many of the usual splits, from the first.
        data_dir: where the data are.
        folder: where the records are.
        plan: what to do.
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
    """`run_dataset` on arrays: X (n, d), y (n,), and test masks (splits, n)."""
    torch.set_num_threads(1)
    store = Store(Path(folder) / f"{name}.json")
    choice = chosen(name, X, y, tuning_masks, plan, store, say)
    settings = {
        "dataset": name,
        "chosen": dataclasses.asdict(choice),
        "plan": fields_of(plan, *FIXED),
        "procedure": PROCEDURE,
    }
    records = _filled(
        store,
        f"{name}-",
        "split",
        settings,
        masks,
        say,
        lambda missing: _runs([case_of(X, y, masks, s) for s in missing], plan, choice),
    )
    temperature = vi_temperature(name, X, y, tuning_masks, plan, choice, store, say)
    settings = {
        "dataset": name,
        "base": dataclasses.asdict(choice.pca),
        "rate": choice.pca_rate,
        "temperature": temperature,
        "plan": fields_of(plan, *VI_FIXED),
        "procedure": PROCEDURE,
    }
    further = _filled(
        store,
        f"{name}-vi-",
        "vi-split",
        settings,
        masks,
        say,
        lambda missing: _vi_runs(
            [case_of(X, y, masks, s) for s in missing], plan, choice, temperature
        ),
    )
    return [
        record | {"methods": record["methods"] | more["methods"], "vi": more["vi"]}
        for record, more in zip(records, further, strict=True)
    ]


def case_of(X: Array, y: Array, masks: Array, split: int) -> Case:
    """Training and test rows of a split."""
    return case(
        X, y, np.flatnonzero(~masks[split]), np.flatnonzero(masks[split]), derive_seed(split)
    )


def _filled(
    store: Store,
    prefix: str,
    kind: str,
    settings: Record,
    masks: Array,
    say: Say,
    runs: Callable[[list[int]], Iterator[Record]],
) -> list[Record]:
    """The records of all splits, those that are missing run together."""
    keys = [
        key_of(f"{prefix}{split:02d}", settings | {"split": split}) for split in range(len(masks))
    ]
    missing = [split for split, key in enumerate(keys) if key not in store]
    if missing:
        for split, record in zip(missing, runs(missing), strict=True):
            store.put(keys[split], settings | {"kind": kind, "split": split} | record)
            said = (
                f"{m} {found['log_likelihood']:.3f}"
                for m, found in record["methods"].items()
                if m in METHODS
            )
            say(f"{settings['dataset']} {split:2d}: " + ", ".join(said))
    return [store[key] for key in keys]


def _runs(cases: list[Case], plan: Plan, choice: Chosen) -> Iterator[Record]:
    """Train all cases together, then sample and score one after the other."""
    started = time.process_time()
    members = {
        base: train(cases, plan, [base] * len(cases))
        for base in {choice.sgd, choice.swag, choice.pca}
    }
    trained = time.process_time()
    paths = {
        (base, rate): along(members[base], cases, plan, base, rate) for base, rate in choice.paths
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
    draws = sampled(posterior, plan, seed)
    drawn = time.process_time()
    methods = {
        "SGD": scores(sgd, c.y),
        "SWA": scores(point_estimate(pca_path).predict(c.inputs), c.y),
        "SWAG": scores(predict_swag(swag_path, plan, c.inputs, seed), c.y),
        "PCA + ESS": scores(posterior.predict(draws, c.inputs), c.y),
    }
    sampling = {
        "rank": posterior.rank,
        "draws": draws.n_draws,
        "rhat": worst_rhat(draws),
        "ess_bulk": float(np.nanmin(draws.ess_bulk())),
        "evaluations_per_draw": float(draws.stats["evaluations"].mean()),
    }
    seconds = seconds | {"sampling": drawn - started, "scoring": time.process_time() - drawn}
    return {
        "methods": methods,
        "sampling": sampling,
        "versions": versions(),
        "threads": 1,
        "seconds": {k: round(v, 2) for k, v in seconds.items()},
    }


def _vi_runs(cases: list[Case], plan: Plan, choice: Chosen, temperature: float) -> Iterator[Record]:
    """Train all cases together along the trajectory chosen, then fit one after the other."""
    started = time.process_time()
    members = train(cases, plan, [choice.pca] * len(cases))
    paths = along(members, cases, plan, choice.pca, choice.pca_rate)
    seconds = {"training": (time.process_time() - started) / len(cases)}
    for path, c in zip(paths, cases, strict=True):
        if path is None:
            raise InputError(_DIVERGED)
        started = time.process_time()
        posterior = posterior_of(path, c.table, plan.rank).with_temperature(temperature)
        draws = fitted(posterior, plan, c.table.seed)
        fit = {name: _number(draws.meta[name]) for name in ("elbo", "elbo_error", "steps")} | {
            name: _number(getattr(draws, name))
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


def _number(value: float) -> float | None:
    """What JSON can hold."""
    return float(value) if math.isfinite(value) else None


# --- the command ------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this experiment."""
    parser.add_argument("--datasets", default=",".join(DATASETS), help="with commas between")
    parser.add_argument("--splits", type=int, default=20, help="of the 20 usual ones")
    parser.add_argument("--workers", type=int, default=1, help="data sets run side by side")
    parser.add_argument(
        "--write",
        default=None,
        metavar="PAGE",
        help="put the tables between the marks of this page of the docs",
    )


def run(options: argparse.Namespace, say: Say) -> Record:
    """Run what is missing; returns a summary of all records asked for."""
    names = asked(options.datasets, DATASETS)
    jobs = [
        (name, options.splits, options.data_dir, options.results, PLANS.get(name, Plan()))
        for name in names
    ]
    if options.workers == 1:
        records = [run_dataset(*job, say=say) for job in jobs]
    else:
        with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
            records = list(pool.map(_quiet, *zip(*jobs, strict=True)))
    found = dict(zip(names, records, strict=True))
    say(uci_small_tables.markdown(found))
    if options.write:
        uci_small_tables.write(options.write, found)
    return summary_of(found)


def _quiet(*job: Any) -> list[Record]:
    return run_dataset(*job, say=lambda *_: None)
