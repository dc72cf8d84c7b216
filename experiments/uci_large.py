"""Large UCI regression: tables 5, 6 and 7 of Izmailov et al. (2019).

One run of SGD at a constant rate gives the SGD solution, and its later epochs the trajectory of
SWAG and of the PCA subspace, in which elliptical slice sampling and mean-field variational
inference run. Settings are those of the authors' published script; values of a grid are selected by
the likelihood of validation rows within the training part of the first split.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from experiments import uci_large_tables
from experiments.batched import Table
from experiments.datasets import load_uci
from experiments.markdown import add_write_option, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import (
    Array,
    Case,
    Say,
    add_datasets_option,
    best,
    case,
    fields_of,
    finite_or_none,
    numbers_from,
    posterior_of,
    recorded_trials,
    sampling_record,
    scores,
    split_names,
    summary,
)
from experiments.uci_tables import METHODS, summary_of
from subbayes import MLP, Draws, Posterior, Predictive, Training
from subbayes.baselines.map import point_estimate
from subbayes.baselines.swag import swag
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.variational.variational import MeanFieldVI
from subbayes.training.trainer import SwaResult, TrainingResult, train
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.utils.checks import InputError
from subbayes.utils.seeding import derive_seed

DATASETS = ("elevators", "skillcraft", "pol", "protein", "keggdirected", "keggundirected")
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

_CHECKED_EPOCHS = 10
_MOST_RESTARTS = 5
PROCEDURE = 1
"""Increase it when a change of the code changes the results of the same settings."""


@dataclass(frozen=True)
class Plan:
    """Settings of a data set; the defaults are those of the authors' script for most of them.

    Attributes:
        hidden: widths of the hidden layers. The last has two units, before the two outputs.
        epochs: epochs of SGD.
        path_start: epoch after which a snapshot is taken at the end of each epoch.
        batch_size: rows per step.
        learning_rates: grid of the constant rate; no selection if both grids have one value.
        momentum: momentum of SGD.
        weight_decay: weight decay of all weights and biases.
        bias_lr_factor: factor of the learning rate of biases.
        snapshots: number of the last snapshots that span the PCA subspace (the paper's M).
        rank: rank of the PCA subspace.
        temperatures: grid of the temperature of both inference methods.
        validation: fraction of the training rows held out for model selection.
        tuning_chains: chains of elliptical slice sampling during model selection.
        tuning_draws: draws per chain during model selection, after half as many of warm-up.
        chains: chains of the final sampling.
        draws: draws per chain, all used for prediction, after half as many of warm-up.
        vi_steps: steps of the variational fit.
        vi_samples: draws of q per step.
        vi_batch_size: rows per step of the variational fit.
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
    "elevators": Plan(temperatures=(20000.0,)),
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
"""As in the authors' script, but skillcraft has grids, as it does not converge at the script's
learning rate."""


@dataclass(frozen=True)
class Chosen:
    """Settings selected for a data set."""

    learning_rate: float
    temperature: float


@dataclass(frozen=True)
class Run:
    """One run of SGD: its end, the average of its later epochs, and how many networks died."""

    sgd: TrainingResult
    swa: SwaResult
    restarts: int = 0


class DeadNetworkError(Exception):
    """All units of the last hidden layer are zero on every row: the network is a constant."""


# --- methods ----------------------------------------------------------------------------------


def train_with_snapshots(c: Case, plan: Plan, learning_rate: float, device: str) -> Run:
    """Run SGD at a constant rate, with a snapshot after each of the later epochs.

    The global noise variance is the final one. Where SGD ends at a network whose last hidden layer
    is zero on every training row, which has no gradient and remains a constant, it starts again
    from the next network of the series.
    """
    for restarts in range(_MOST_RESTARTS):
        try:
            return _one_run(c, plan, learning_rate, device, restarts)
        except DeadNetworkError:
            continue
    raise InputError(f"learning_rates: expected a network that learns, got {_MOST_RESTARTS} dead.")


def _one_run(c: Case, plan: Plan, learning_rate: float, device: str, restarts: int) -> Run:
    recorder, table = TrajectoryRecorder(plan.snapshots), c.table

    def snapshot(epoch: int, module: Any) -> None:
        if epoch > plan.path_start:
            recorder.update(module)
        if epoch % _CHECKED_EPOCHS == 0 or epoch == plan.epochs:
            with torch.no_grad():
                if not bool((module.layers[:-1](table.inputs.to(device)) > 0).any()):
                    raise DeadNetworkError

    sgd = train(
        initial_network(table, plan, restarts).to(device),
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
    return Run(sgd, SwaResult(network, sgd.likelihood, recorder, sgd.history), restarts)


def initial_network(table: Table, plan: Plan, skip: int = 0) -> MLP:
    """Return the first of a series of seeded networks without dead units in the last hidden layer.

    `skip` leaves out as many of them.

    With two ReLU units in that layer, half of the initial networks have a unit that is zero on
    every row and may never learn.
    """
    rows = table.inputs[:2000]
    for i in range(100):
        module = MLP(rows.shape[1], plan.hidden, 2, seed=derive_seed(table.seed, i))
        with torch.no_grad():
            alive = (module.layers[:-1](rows) > 0).double().mean(0)
        if float(alive.min()) >= 0.1:
            if not skip:
                return module
            skip -= 1
    raise InputError(
        "hidden: expected units that are positive somewhere, got none in 100 networks."
    )


def sample_ess(posterior: Posterior, chains: int, draws: int, seed: int) -> Draws:
    """Run elliptical slice sampling, with half as many draws of warm-up."""
    return EllipticalSlice().sample(
        posterior, chains=chains, draws=draws, warmup=draws // 2, seed=seed, progress=False
    )


def sample_vi(posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Draw from a mean-field Gaussian fitted on minibatches."""
    return MeanFieldVI(
        steps=plan.vi_steps,
        samples=plan.vi_samples,
        batch_size=min(plan.vi_batch_size, posterior.data.n),
    ).sample(posterior, chains=1, draws=plan.vi_draws, seed=seed, progress=False)


def normalised_scores(predictive: Predictive, c: Case) -> dict[str, float]:
    """Return scores on test rows; log-likelihoods are for targets of variance 1 (table 6)."""
    found = scores(predictive, c.y)
    (scale,) = c.table.likelihood.scale
    return {
        name: value + math.log(scale) if name.startswith("log") else value
        for name, value in found.items()
    }


# --- selection --------------------------------------------------------------------------------


def tuning_case(X: Array, y: Array, mask: Array, plan: Plan) -> Case:
    """Return a case whose validation rows are taken from the training rows of a split.

    Validation rows outside the range of the remaining inputs are dropped: one row of skillcraft is
    a thousand standard deviations away (a million hours of play) and would dominate the score.
    """
    rows = np.random.default_rng(0).permutation(np.flatnonzero(~mask))
    n = round(plan.validation * len(rows))
    low, high = X[rows[n:]].min(0), X[rows[n:]].max(0)
    inside = ((X[rows[:n]] >= low) & (X[rows[:n]] <= high)).all(1)
    return case(X, y, rows[n:], rows[:n][inside], derive_seed(0, 1))


def try_rate(c: Case, plan: Plan, learning_rate: float, device: str) -> list[Record]:
    """Return the validation likelihood of SGD, and of the subspace at every temperature."""
    try:
        run = train_with_snapshots(c, plan, learning_rate, device)
    except InputError:
        return [{"method": "SGD"} | summary([-math.inf])]
    rows = [{"method": "SGD"} | _score(point_estimate(run.sgd).predict(c.inputs), c)]
    posterior = posterior_of(run.swa, c.table, plan.rank)
    for temperature in plan.temperatures:
        tempered = posterior.with_temperature(temperature)
        draws = sample_ess(tempered, plan.tuning_chains, plan.tuning_draws, c.table.seed)
        rows.append(
            {"method": "PCA + ESS", "temperature": temperature}
            | _score(tempered.predict(draws, c.inputs), c)
        )
    return rows


def _score(predictive: Predictive, c: Case) -> Record:
    return summary([normalised_scores(predictive, c)["log_likelihood"]])


def select_settings(
    name: str, X: Array, y: Array, mask: Array, plan: Plan, store: Store, device: str, say: Say
) -> Chosen:
    """Select the best learning rate of SGD, then the temperature; trials are recorded."""
    if len(plan.learning_rates) == len(plan.temperatures) == 1:
        return Chosen(plan.learning_rates[0], plan.temperatures[0])
    fixed = {"dataset": name, "procedure": PROCEDURE} | fields_of(
        plan, *TRAINING, *TUNING, "temperatures"
    )
    firsts, found = [], {}
    for rate in plan.learning_rates:
        first, *found[rate] = recorded_trials(
            store,
            name,
            "tuning",
            fixed | {"learning_rate": rate},
            lambda rate=rate: try_rate(tuning_case(X, y, mask, plan), plan, rate, device),
            say,
        )
        firsts.append(first | {"learning_rate": rate})
    rate = best(firsts)["learning_rate"]
    if not found[rate]:
        raise InputError(
            "learning_rates: expected a rate at which training stays finite, got "
            "none. Lower the grid."
        )
    return Chosen(rate, best(found[rate])["temperature"])


# --- splits ------------------------------------------------------------------------------------


def run_table(
    name: str,
    X: Array,
    y: Array,
    masks: Array,
    splits: range,
    folder: str,
    plan: Plan,
    say: Say,
    device: str = "cpu",
) -> list[Record]:
    """Return the records of some splits of a data set, computing those that are missing.

    Args:
        name: data set.
        X: inputs, shape (n, d).
        y: targets, shape (n,).
        masks: test masks, shape (S, n).
        splits: numbers of the splits.
        folder: folder of the records.
        plan: settings.
        say: prints a line.
        device: device of the networks.
    """
    if splits.stop > len(masks):
        raise InputError(f"splits: expected at most {len(masks)}, got {splits.stop}.")
    torch.set_num_threads(1)
    store = Store(folder, name)
    choice = select_settings(name, X, y, masks[0], plan, store, device, say)
    settings = {
        "dataset": name,
        "chosen": dataclasses.asdict(choice),
        "procedure": PROCEDURE,
        "plan": fields_of(plan, *TRAINING, *FINAL),
    }
    records = []
    for split in splits:
        mask = masks[split]
        key = key_of(f"{name}-{split:02d}", settings | {"split": split})

        def compute(split: int = split, mask: Array = mask) -> Record:
            c = case(X, y, np.flatnonzero(~mask), np.flatnonzero(mask), derive_seed(split))
            record = run_split(c, plan, choice, device)
            return settings | {"kind": "split", "split": split} | record

        def report(record: Record) -> None:
            found = record["methods"]
            text = ", ".join(f"{m} {found[m]['log_likelihood']:.3f}" for m in METHODS)
            say(f"{name} {record['split']}: {text}")

        records.append(store.get(key, compute, report))
    return records


def run_split(c: Case, plan: Plan, choice: Chosen, device: str = "cpu") -> Record:
    """Train, sample, fit and score."""
    seed, clock = c.table.seed, [time.process_time()]

    def lap() -> float:
        clock.append(time.process_time())
        return round(clock[-1] - clock[-2], 2)

    run, seconds = train_with_snapshots(c, plan, choice.learning_rate, device), {}
    seconds["training"] = lap()
    posterior = posterior_of(run.swa, c.table, plan.rank).with_temperature(choice.temperature)
    draws = sample_ess(posterior, plan.chains, plan.draws, seed)
    seconds["sampling"] = lap()
    approximate = sample_vi(posterior, plan, seed)
    seconds["vi"] = lap()
    methods = {
        "SGD": point_estimate(run.sgd).predict(c.inputs),
        "SWA": point_estimate(run.swa).predict(c.inputs),
        "SWAG": swag(run.swa, plan.swag_draws, seed=seed).predict(c.inputs),
        "PCA + ESS": posterior.predict(draws, c.inputs),
        "PCA + VI": posterior.predict(approximate, c.inputs),
    }
    found = {method: normalised_scores(predictive, c) for method, predictive in methods.items()}
    seconds["scoring"] = lap()
    fit = {
        "elbo": finite_or_none(approximate.meta["elbo"]),
        "pareto_k": finite_or_none(approximate.pareto_k),
        "steps": finite_or_none(approximate.meta["steps"]),
        "converged": finite_or_none(approximate.converged),
    }
    return {
        "methods": found,
        "sampling": sampling_record(posterior, draws),
        "vi": fit,
        "versions": versions(),
        "seconds": seconds,
        "device": device,
        "restarts": run.restarts,
    }


# --- command line -----------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_datasets_option(parser, DATASETS)
    parser.add_argument("--splits", type=int, default=10, help="number of the 10 usual splits")
    parser.add_argument("--first", type=int, default=0, help="number of the first split")
    parser.add_argument("--device", default="cpu", help="device of the networks")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute the missing records and print the tables; return a summary."""
    splits = numbers_from(options.first, "splits", options.splits)
    found = {}
    for name in split_names(options.datasets, DATASETS):
        X, y, masks = load_uci(name, options.data_dir, centred=True)
        found[name] = run_table(
            name, X, y, masks, splits, options.results, PLANS.get(name, Plan()), say, options.device
        )
    publish(uci_large_tables.markdown(found), "uci_large", options, say)
    return summary_of(found)
