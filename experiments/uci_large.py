"""Large UCI regression: tables 5, 6 and 7 of Izmailov et al. (2019).

One run of SGD at a constant rate gives the SGD solution, and its later epochs the trajectory of
SWAG and of the PCA subspace, in which elliptical slice sampling and mean-field variational
inference run. Settings are those of the authors' published script; where a plan has a grid, the
choice is made by likelihood on validation rows of the training part of the first split.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import uci_large_tables
from experiments.batched import Table
from experiments.store import Record, Store, key_of, versions
from experiments.uci import (
    Array,
    Case,
    Say,
    asked,
    best,
    case,
    fields_of,
    posterior_of,
    scores,
    summary,
    summary_of,
    worst_rhat,
)
from subbayes import MLP, Draws, Posterior, Predictive, Training
from subbayes.baselines.map import point_estimate
from subbayes.baselines.swag import swag
from subbayes.data.datasets import load_uci
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.variational.variational import MeanFieldVI
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.training.trainer import SwaResult, TrainingResult, train
from subbayes.utils.checks import InputError, check_count
from subbayes.utils.seeding import derive_seed

DATASETS = ("elevators", "skillcraft", "pol", "protein", "keggdirected", "keggundirected")
METHODS = ("SGD", "SWAG", "PCA + ESS", "PCA + VI")
TRAINING = (
    "hidden",
    "epochs",
    "path_start",
    "batch_size",
    "momentum",
    "weight_decay",
    "bias_lr_factor",
    "snapshots",
    "rank",
)
TUNING = ("validation", "tuning_chains", "tuning_draws")
FINAL = ("chains", "draws", "vi_steps", "vi_samples", "vi_batch_size", "vi_draws", "swag_draws")

PROCEDURE = 1
"""Raise it when the code below changes what the same settings give."""


@dataclass(frozen=True)
class Plan:
    """Settings of a data set; by default those that the authors' script has for most of them.

    Attributes:
        hidden: widths of the hidden layers. The last has two units, in front of the two outputs.
        epochs: passes of SGD.
        path_start: snapshots are taken after each epoch beyond this one.
        batch_size: rows of a step.
        learning_rates: grid of the constant rate; nothing is tried where both grids hold one.
        momentum: of SGD.
        weight_decay: of all weights and biases.
        bias_lr_factor: biases learn at this multiple of the rate.
        snapshots: how many of the last snapshots span the PCA subspace (the paper's M).
        rank: of the PCA subspace.
        temperatures: grid, of both ways of inference.
        validation: fraction of the training part held out to choose from the grids.
        tuning_chains: of elliptical slice sampling while choosing.
        tuning_draws: draws a chain then, after half as many for warm-up.
        chains: of the final sampling.
        draws: draws a chain, all used for prediction, after half as many for warm-up.
        vi_steps: of the variational fit.
        vi_samples: draws of q in each step.
        vi_batch_size: rows of each step.
        vi_draws: draws of q used for prediction.
        swag_draws: weight vectors of SWAG.
    """

    hidden: tuple[int, ...] = (1000, 1000, 500, 50, 2)
    epochs: int = 200
    path_start: int = 80
    batch_size: int = 200
    learning_rates: tuple[float, ...] = (1e-3,)
    momentum: float = 0.9
    weight_decay: float = 1e-4
    bias_lr_factor: float = 2.0
    snapshots: int = 20
    rank: int = 20
    temperatures: tuple[float, ...] = (10000.0,)
    validation: float = 0.1
    tuning_chains: int = 2
    tuning_draws: int = 15
    chains: int = 4
    draws: int = 25
    vi_steps: int = 500
    vi_samples: int = 4
    vi_batch_size: int = 200
    vi_draws: int = 60
    swag_draws: int = 60


PLANS = {
    "elevators": Plan(
        epochs=100,
        path_start=40,
        temperatures=(20000.0,),
        draws=10,
        vi_steps=250,
        vi_draws=30,
        swag_draws=30,
    ),
    "pol": Plan(temperatures=(5000.0,)),
    "keggdirected": Plan(batch_size=400, path_start=160),
    "keggundirected": Plan(batch_size=400, path_start=160),
    "skillcraft": Plan(
        hidden=(1000, 500, 50, 2),
        epochs=100,
        batch_size=400,
        learning_rates=(1e-3, 3e-3, 1e-2),
        temperatures=(30.0, 300.0, 3000.0, 30000.0),
        vi_steps=300,
        vi_batch_size=400,
    ),
}
"""As in the authors' script, but for two: its rate leaves skillcraft unfinished, which has grids;
elevators has half the epochs and short runs, so that a split takes five minutes of one core."""


@dataclass(frozen=True)
class Chosen:
    """What validation chose for a data set."""

    learning_rate: float
    temperature: float


@dataclass(frozen=True)
class Run:
    """One run of SGD: where it ended, and the average of its later epochs."""

    sgd: TrainingResult
    swa: SwaResult


# --- the methods ------------------------------------------------------------------------------


def trained(c: Case, plan: Plan, learning_rate: float, device: str) -> Run:
    """SGD at a constant rate, with a snapshot after each of the later epochs.

    The global variance of the noise is the one SGD ended with.
    """
    recorder = TrajectoryRecorder(plan.snapshots)

    def snapshot(epoch: int, module: torch.nn.Module) -> None:
        if epoch > plan.path_start:
            recorder.update(module)

    table = c.table
    sgd = train(
        initial(table, plan).to(device),
        table.likelihood,
        (table.inputs, table.y),
        Training(
            optimizer="sgd",
            epochs=plan.epochs,
            learning_rate=learning_rate,
            momentum=plan.momentum,
            batch_size=plan.batch_size,
            weight_decay=plan.weight_decay,
            bias_lr_factor=plan.bias_lr_factor,
            clip_norm=None,
        ),
        seed=table.seed,
        callback=snapshot,
        progress=False,
    )
    network = sgd.network.with_weights(recorder.mean.to(sgd.network.weights))
    return Run(sgd, SwaResult(network, sgd.likelihood, recorder, sgd.history))


def initial(table: Table, plan: Plan) -> MLP:
    """The first of a series of seeded networks whose last hidden units are all alive.

    With two rectified units in that layer, half of the initial networks have one that is zero on
    every row, and may never learn anything.
    """
    rows = table.inputs[:2000]
    for i in range(100):
        module = MLP(rows.shape[1], plan.hidden, 2, seed=derive_seed(table.seed, i))
        with torch.no_grad():
            alive = (module.layers[:-1](rows) > 0).double().mean(0)
        if float(alive.min()) >= 0.1:
            return module
    raise InputError(
        "hidden: expected units that are positive somewhere, got none in 100 networks."
    )


def sampled(posterior: Posterior, chains: int, draws: int, seed: int) -> Draws:
    """Elliptical slice sampling, after half as many draws for warm-up."""
    return EllipticalSlice().sample(
        posterior, chains=chains, draws=draws, warmup=draws // 2, seed=seed, progress=False
    )


def fitted(posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Draws of the mean-field Gaussian fitted on minibatches."""
    return MeanFieldVI(
        steps=plan.vi_steps,
        samples=plan.vi_samples,
        batch_size=min(plan.vi_batch_size, posterior.data.n),
    ).sample(posterior, chains=1, draws=plan.vi_draws, seed=seed, progress=False)


def normalised(predictive: Predictive, c: Case) -> dict[str, float]:
    """Scores on test rows, log-likelihoods as for targets of variance 1 (the paper's table 6)."""
    found = scores(predictive, c.y)
    (scale,) = c.table.likelihood.scale
    return {
        name: value + math.log(scale) if name.startswith("log") else value
        for name, value in found.items()
    }


# --- choosing ---------------------------------------------------------------------------------


def tuning_case(X: Array, y: Array, mask: Array, plan: Plan) -> Case:
    """Validation rows cut from the training part of a split.

    Rows outside the range of the remaining inputs have no vote: one of skillcraft's is a thousand
    standard deviations away (a million hours of play), and would decide alone.
    """
    rows = np.random.default_rng(0).permutation(np.flatnonzero(~mask))
    n = round(plan.validation * len(rows))
    low, high = X[rows[n:]].min(0), X[rows[n:]].max(0)
    inside = ((X[rows[:n]] >= low) & (X[rows[:n]] <= high)).all(1)
    return case(X, y, rows[n:], rows[:n][inside], derive_seed(0, 1))


def tried(c: Case, plan: Plan, learning_rate: float, device: str) -> list[Record]:
    """Validation likelihood of SGD, and of the subspace at every temperature."""
    try:
        run = trained(c, plan, learning_rate, device)
    except InputError:
        return [{"method": "SGD"} | summary([-math.inf])]
    rows = [{"method": "SGD"} | _score(point_estimate(run.sgd).predict(c.inputs), c)]
    posterior = posterior_of(run.swa, c.table, plan.rank)
    for temperature in plan.temperatures:
        tempered = posterior.with_temperature(temperature)
        draws = sampled(tempered, plan.tuning_chains, plan.tuning_draws, c.table.seed)
        rows.append(
            {"method": "PCA + ESS", "temperature": temperature}
            | _score(tempered.predict(draws, c.inputs), c)
        )
    return rows


def _score(predictive: Predictive, c: Case) -> Record:
    return summary([normalised(predictive, c)["log_likelihood"]])


def chosen(
    name: str, X: Array, y: Array, mask: Array, plan: Plan, store: Store, device: str, say: Say
) -> Chosen:
    """The rate best for SGD, then the temperature; what was tried is on record."""
    if len(plan.learning_rates) == len(plan.temperatures) == 1:
        return Chosen(plan.learning_rates[0], plan.temperatures[0])
    fixed = {"dataset": name, "procedure": PROCEDURE} | fields_of(
        plan, *TRAINING, *TUNING, "temperatures"
    )
    firsts, found = [], {}
    for rate in plan.learning_rates:
        settings = fixed | {"learning_rate": rate}
        key = key_of(f"{name}-tuning", settings)
        if key not in store:
            started = time.process_time()
            rows = tried(tuning_case(X, y, mask, plan), plan, rate, device)
            store.put(
                key,
                settings
                | {
                    "kind": "tuning",
                    "tried": rows,
                    "versions": versions(),
                    "seconds": round(time.process_time() - started, 1),
                },
            )
            say(f"{name} learning rate {rate:g}: {rows}")
        first, *found[rate] = store[key]["tried"]
        firsts.append(first | {"learning_rate": rate})
    rate = best(firsts)["learning_rate"]
    if not found[rate]:
        raise InputError(
            "learning_rates: expected a rate at which training stays finite, got "
            "none. Lower the grid."
        )
    return Chosen(rate, best(found[rate])["temperature"])


# --- the splits -------------------------------------------------------------------------------


def run_table(
    name: str,
    X: Array,
    y: Array,
    masks: Array,
    splits: int,
    folder: str,
    plan: Plan,
    say: Say,
    device: str = "cpu",
) -> list[Record]:
    """The first splits of a data set; those on record are not run again.

    Args:
        name: the data set.
        X: (n, d).
        y: (n,).
        masks: test masks (S, n).
        splits: how many of them.
        folder: where the records are.
        plan: what to do.
        say: prints a line.
        device: where the networks run.
    """
    if check_count("splits", splits) > len(masks):
        raise InputError(f"splits: expected at most {len(masks)}, got {splits}.")
    torch.set_num_threads(1)
    store = Store(Path(folder) / f"{name}.json")
    choice = chosen(name, X, y, masks[0], plan, store, device, say)
    settings = {
        "dataset": name,
        "chosen": dataclasses.asdict(choice),
        "procedure": PROCEDURE,
        "plan": fields_of(plan, *TRAINING, *FINAL),
    }
    records = []
    for split, mask in enumerate(masks[:splits]):
        key = key_of(f"{name}-{split:02d}", settings | {"split": split})
        if key not in store:
            c = case(X, y, np.flatnonzero(~mask), np.flatnonzero(mask), derive_seed(split))
            record = run_split(c, plan, choice, device)
            store.put(key, settings | {"kind": "split", "split": split} | record)
            found = record["methods"]
            say(
                f"{name} {split}: "
                + ", ".join(f"{m} {found[m]['log_likelihood']:.3f}" for m in METHODS)
            )
        records.append(store[key])
    return records


def run_split(c: Case, plan: Plan, choice: Chosen, device: str = "cpu") -> Record:
    """Train, sample, fit and score."""
    seed, clock = c.table.seed, [time.process_time()]

    def lap() -> float:
        clock.append(time.process_time())
        return round(clock[-1] - clock[-2], 2)

    run, seconds = trained(c, plan, choice.learning_rate, device), {}
    seconds["training"] = lap()
    posterior = posterior_of(run.swa, c.table, plan.rank).with_temperature(choice.temperature)
    draws = sampled(posterior, plan.chains, plan.draws, seed)
    seconds["sampling"] = lap()
    approximate = fitted(posterior, plan, seed)
    seconds["vi"] = lap()
    methods = {
        "SGD": point_estimate(run.sgd).predict(c.inputs),
        "SWA": point_estimate(run.swa).predict(c.inputs),
        "SWAG": swag(run.swa, plan.swag_draws, seed=seed).predict(c.inputs),
        "PCA + ESS": posterior.predict(draws, c.inputs),
        "PCA + VI": posterior.predict(approximate, c.inputs),
    }
    found = {method: normalised(predictive, c) for method, predictive in methods.items()}
    seconds["scoring"] = lap()
    sampling = {
        "rank": posterior.rank,
        "draws": draws.n_draws,
        "rhat": worst_rhat(draws),
        "ess_bulk": float(np.nanmin(draws.ess_bulk())),
        "evaluations_per_draw": float(draws.stats["evaluations"].mean()),
    }
    fit = {
        "elbo": _number(approximate.meta["elbo"]),
        "pareto_k": _number(approximate.pareto_k),
        "steps": _number(approximate.meta["steps"]),
        "converged": _number(approximate.converged),
    }
    return {
        "methods": found,
        "sampling": sampling,
        "vi": fit,
        "versions": versions(),
        "seconds": seconds,
        "device": device,
    }


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


# --- the command ------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this experiment."""
    parser.add_argument("--datasets", default=",".join(DATASETS), help="with commas between")
    parser.add_argument("--splits", type=int, default=10, help="of the 10 usual ones")
    parser.add_argument("--device", default="cpu", help="where the networks run")
    parser.add_argument(
        "--write",
        default=None,
        metavar="PAGE",
        help="put the tables between the marks of this page of the docs",
    )


def run(options: argparse.Namespace, say: Say) -> Record:
    """Run what is missing; returns a summary of all records asked for."""
    found = {}
    for name in asked(options.datasets, DATASETS):
        X, y, masks = load_uci(name, options.data_dir)
        found[name] = run_table(
            name,
            X,
            y,
            masks,
            options.splits,
            options.results,
            PLANS.get(name, Plan()),
            say,
            options.device,
        )
    say(uci_large_tables.markdown(found))
    if options.write:
        uci_large_tables.write(options.write, found)
    return summary_of(found)
