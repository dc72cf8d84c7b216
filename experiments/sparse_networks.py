"""Shared code of the experiments of Hubin and Storvik (2024): methods, runs and records.

A record has the accuracy of every mode of prediction, number and accuracy of the labels whose
averaged probability exceeds 0.95, densities, inclusion by layer and as a histogram, and the time.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import sparse_baselines
from experiments.markdown import add_recorded_option, add_write_option, publish
from experiments.store import Record, Store, device_name, key_of, versions
from subbayes import MLP, Predictive, Training, sparse
from subbayes.diagnostics.metrics import accuracy
from subbayes.likelihoods import Bernoulli, Categorical, Likelihood
from subbayes.training.trainer import train
from subbayes.utils.checks import check_count

__all__ = [
    "METHODS",
    "MODES",
    "Plan",
    "Rows",
    "add_options",
    "compute_record",
    "compute_records",
    "plan_of",
    "publish_records",
]

METHODS: dict[str, Record] = {
    "LBBNN-SSP-MF": {"posterior": "mean-field"},
    "LBBNN-SSP-MVN": {"posterior": "mvn"},
    "LBBNN-SSP-LFMVN": {"posterior": "low-rank"},
    "BNN-GP-MF": {"posterior": "all"},
    "BNN-MGP-MF": {"posterior": "all", "mixture": True},
    "BNN-GP-CMF": {"posterior": "dropout"},
    "BNN-HP-MF": {"posterior": "horseshoe"},
    "FNN": {},
}
"""The paper's methods. Baselines use its learning rates and fixed priors; the others the rates of
`sparse.LearningRates`, as the paper's (tables 1 and A1) are for another objective, see there.
"""

_BASELINE = {"weights": 1e-4, "early_inclusion": 1e-4, "inclusion": 1e-4}

MODES: dict[str, tuple[str, str, int]] = {
    "SIM SIM 1": ("sample", "sample", 1),
    "SIM SIM 10": ("sample", "sample", 10),
    "ALL MEA 1": ("all", "mean", 1),
    "MED SIM 1": ("median", "sample", 1),
    "MED SIM 10": ("median", "sample", 10),
    "MED MEA 1": ("median", "mean", 1),
}
"""Structure, weights and number of draws R of each mode."""

# learning rate of baselines with few steps: _PACE / steps, at most _FASTEST
_PACE, _FASTEST = 20.0, 1e-2

_MODES = {"all": tuple(MODES)[:3], "dropout": tuple(MODES)[:3]}
_BINS = 20

PROCEDURE = 1
"""Increase it when a change of the code changes the results of the same settings."""


@dataclass(frozen=True)
class Plan:
    """Settings; those of the paper except for the early epochs (20 there) and learning rates.

    Attributes:
        hidden: widths of the hidden layers.
        epochs: number of epochs.
        early_epochs: epochs in which priors are learned too; not for baselines.
        kl_epochs: epochs in which the weight of the divergence increases; not for baselines.
        paced: use larger learning rates for few steps, see `sparse.LearningRates.for_steps`.
        post: "none", or the kind of post-training, see `sparse.fit`.
        post_epochs: epochs of post-training.
        batch_size: rows per step.
        baseline_rate: learning rate of Adam for the point network, as of other baselines.
        densities: densities of pruned point networks.
        threshold: averaged probability above which a label is given.
        rows: number of training rows to use, from the first; None for all.
        mode: "trace", "compile" or "eager", see `sparse.fit`.
    """

    hidden: tuple[int, ...] = (400, 600)
    epochs: int = 250
    early_epochs: int = 100
    kl_epochs: int = 100
    paced: bool = False
    post: str = "none"
    post_epochs: int = 50
    batch_size: int = 100
    baseline_rate: float = 1e-4
    densities: tuple[float, ...] = (1.0, 0.5, 0.2, 0.1)
    threshold: float = 0.95
    rows: int | None = None
    mode: str = "trace"


@dataclass(frozen=True)
class Rows:
    """Training and test rows: float32 inputs (n, d) and labels (n,)."""

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    y_new: np.ndarray
    classes: int


def compute_record(
    rows: Rows,
    method: str,
    seed: int,
    plan: Plan,
    checkpoint: Path,
    device: str = "cpu",
    before_post: Callable[[Record], object] = lambda _: None,
) -> Record:
    """Return the record of a method.

    Args:
        rows: training and test rows.
        method: name in `METHODS`.
        seed: seed of initialisation, training and prediction.
        plan: settings.
        checkpoint: folder from which training resumes; removed at the end.
        device: device of the networks.
        before_post: called before post-training, with the record until then.
    """
    facts: Record = {"train": len(rows.y[: plan.rows]), "test": len(rows.y_new)}
    facts |= {"versions": versions(), "device": device_name(device)}
    data = torch.from_numpy(rows.x[: plan.rows]), torch.from_numpy(rows.y[: plan.rows]).long()
    likelihood: Likelihood = Bernoulli() if rows.classes == 2 else Categorical(rows.classes)
    outputs = 1 if rows.classes == 2 else rows.classes
    net = MLP(rows.x.shape[1], plan.hidden, outputs, "relu", seed=seed).to(device)
    started = time.perf_counter(), time.process_time()
    found = (
        _point(net, likelihood, data, rows, seed, plan, started)
        if method == "FNN"
        else _sparse(
            net,
            likelihood,
            data,
            rows,
            method,
            seed,
            plan,
            checkpoint,
            started,
            lambda record: before_post(facts | record),
        )
    )
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    return facts | found


def _seconds(started: tuple[float, float]) -> Record:
    return {
        "seconds_in_all": round(time.perf_counter() - started[0], 1),
        "processor_seconds_in_all": round(time.process_time() - started[1], 1),
    }


def _sparse(
    net: MLP,
    likelihood: Likelihood,
    data: Any,
    rows: Rows,
    method: str,
    seed: int,
    plan: Plan,
    checkpoint: Path,
    started: tuple[float, float],
    before_post: Callable[[Record], object],
) -> Record:
    """Train a sparse network and score it in every mode, also before post-training if there is."""
    settings = METHODS[method]
    posterior = settings["posterior"]
    baseline = posterior in sparse_baselines.BASELINES
    early, rising = (
        0 if baseline else min(count, plan.epochs) for count in (plan.early_epochs, plan.kl_epochs)
    )
    prior = sparse.SpikeSlab(sparse_baselines.MixtureSlab()) if "mixture" in settings else None
    ticks = [time.process_time()]

    def describe(network: sparse.SparseNetwork) -> Record:
        scores = _scores_by_mode(network, posterior, rows, seed, plan.threshold)
        return (
            scores | _description(network) | _seconds(started) | {"epoch_seconds": _median(ticks)}
        )

    def after_epoch(epoch: int, network: sparse.SparseNetwork) -> None:
        ticks.append(time.process_time())
        if epoch == plan.epochs and plan.post != "none":
            before_post(describe(network))
            ticks[:] = [time.process_time()]

    result = sparse.fit(
        sparse_baselines.convert(net, posterior, prior, seed=seed),
        likelihood,
        data,
        sparse.SparseTraining(
            epochs=plan.epochs,
            early_epochs=early,
            kl_epochs=rising,
            post=plan.post,
            post_epochs=plan.post_epochs,
            learning_rates=_rates(plan, len(data[1]), baseline),
            batch_size=plan.batch_size,
            mode=plan.mode,
        ),
        seed=seed,
        checkpoint=checkpoint,
        progress=False,
        callback=after_epoch,
    )
    return describe(result)


def _scores_by_mode(
    result: sparse.SparseNetwork, posterior: str, rows: Rows, seed: int, threshold: float
) -> Record:
    x_new = torch.from_numpy(rows.x_new)
    modes: Record = {}
    for name in _MODES.get(posterior, tuple(MODES)):
        structure, weights, draws = MODES[name]
        predictive = result.predict(
            x_new, structure=structure, weights=weights, n_draws=draws, seed=seed
        )
        modes[name] = _scores(predictive, rows.y_new, threshold) | {
            "density": result.density(structure)
        }
    return {"modes": modes}


def _description(result: sparse.SparseNetwork) -> Record:
    """The length of the training, the ELBO and the inclusion of each layer."""
    return {
        "epochs": len(result.history["elbo"]),
        "elbo": result.history["elbo"][-1],
        "kl": result.history["kl"][-1],
        "layers": {name: row.to_dict() for name, row in result.inclusion().iterrows()},
        "histogram": {
            name: np.histogram(layer.probability().cpu().numpy(), _BINS, (0.0, 1.0))[0].tolist()
            for name, layer in result.layers.items()
        },
    }


def _median(ticks: list[float]) -> float | None:
    return float(np.median(np.diff(ticks))) if len(ticks) > 1 else None


def _rates(plan: Plan, rows: int, baseline: bool) -> sparse.LearningRates:
    steps = plan.epochs * -(-rows // plan.batch_size)
    if not baseline:
        return sparse.LearningRates.for_steps(steps) if plan.paced else sparse.LearningRates()
    pace = min(_FASTEST, _PACE / steps) if plan.paced else 0.0
    return sparse.LearningRates(**{name: max(rate, pace) for name, rate in _BASELINE.items()})


def _point(
    net: MLP,
    likelihood: Likelihood,
    data: Any,
    rows: Rows,
    seed: int,
    plan: Plan,
    started: tuple[float, float],
) -> Record:
    """Train a point network and score it pruned to several densities."""
    clock = time.process_time()
    trained = train(
        net,
        likelihood,
        data,
        Training(
            epochs=plan.epochs,
            learning_rate=plan.baseline_rate,
            batch_size=plan.batch_size,
            clip_norm=None,
        ),
        seed=seed,
        progress=False,
    )
    seconds = (time.process_time() - clock) / plan.epochs
    x_new = torch.from_numpy(rows.x_new).to(trained.network.device)
    modes: Record = {}
    for structure in ("weights", "units"):
        for density in plan.densities:
            with torch.no_grad():
                outputs = sparse_baselines.prune(trained.module, density, structure)(x_new)
            modes[f"{structure} {density:g}"] = _scores(
                Predictive(outputs[None], likelihood), rows.y_new, plan.threshold
            ) | {"density": density}
    found = {"modes": modes, "epochs": plan.epochs, "epoch_seconds": seconds}
    return found | _seconds(started)


def _scores(predictive: Predictive, y: np.ndarray, threshold: float) -> Record:
    """Return the accuracy of all labels, and number and accuracy of the labels given."""
    labels = predictive.decide(threshold)
    sure = labels >= 0
    return {
        "accuracy": accuracy(predictive, y),
        "decided": int(sure.sum()),
        "decided_accuracy": float((labels == y)[sure].mean()) if sure.any() else None,
    }


# --- the run --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, methods: tuple[str, ...]) -> None:
    """Add the options that these experiments share."""
    parser.add_argument("--methods", nargs="+", default=list(methods), choices=list(METHODS))
    parser.add_argument(
        "--epochs", type=int, default=None, help="number of epochs (default: 250, as in the paper)"
    )
    parser.add_argument(
        "--early-epochs", type=int, default=None, help="epochs in which priors are learned too"
    )
    parser.add_argument(
        "--post",
        choices=("none", "fixed", "median"),
        default="none",
        help="train further with the structure frozen (tables A8 to A10)",
    )
    parser.add_argument("--device", default="cpu", help="device of the networks")
    parser.add_argument("--mode", choices=("trace", "compile", "eager"), default="trace")
    add_recorded_option(parser)
    add_write_option(parser)


def plan_of(options: argparse.Namespace, plan: Plan) -> Plan:
    """Return the plan with the values of the options."""
    given = {name: getattr(options, name) for name in ("epochs", "early_epochs")}
    counts = {name: check_count(name, n) for name, n in given.items() if n is not None}
    return replace(plan, post=options.post, mode=options.mode, **counts)


def compute_records(
    cases: list[tuple[str, str, int]],
    rows_of: Callable[[str, int], Rows],
    options: argparse.Namespace,
    plan: Plan,
    say: Callable[..., None],
) -> list[Record]:
    """Return the records of all cases, computing those that are missing unless told not to.

    Runs with post-training also give the records without it.

    Args:
        cases: data set, method and seed (or fold) of each record.
        rows_of: returns the rows of a data set and a seed.
        options: options of the command line.
        plan: settings.
        say: prints a line.
    """
    folder = Path(options.results)
    store = Store(folder)
    found = []
    for name, method, seed in cases:
        settings = _settings(name, method, seed, plan)
        key = key_of(f"{name}-{method}-{seed}", settings)
        if options.recorded and key not in store:
            continue

        def compute(key: str = key, settings: Record = settings) -> Record:
            folder.mkdir(parents=True, exist_ok=True)
            name, method, seed = (settings[k] for k in ("dataset", "method", "seed"))
            checkpoint = folder / f"{key}-checkpoint"
            rows = rows_of(name, seed)
            plain = _settings(name, method, seed, replace(plan, post="none"))

            def keep(before: Record) -> None:
                store.put(key_of(f"{name}-{method}-{seed}", plain), plain | before)

            return settings | compute_record(
                rows, method, seed, plan, checkpoint, options.device, keep
            )

        def report(r: Record) -> None:
            best = max(scores["accuracy"] for scores in r["modes"].values())
            case = f"{r['dataset']} {r['method']} {r['seed']}"
            say(f"{case}: accuracy {best:.4f}, {r['seconds_in_all']:.0f} s")

        found.append(store.get(key, compute, report))
    return found


def _settings(name: str, method: str, seed: int, plan: Plan) -> Record:
    """What determines a record."""
    return {
        "dataset": name,
        "method": method,
        "seed": seed,
        "options": METHODS[method],
        "procedure": PROCEDURE,
        "plan": asdict(plan),
    }


def publish_records(
    found: list[Record], name: str, text: str, options: argparse.Namespace, say: Callable[..., None]
) -> Record:
    """Print the tables, write them to a page if one is given, and return the JSON line.

    Tables of runs with post-training have marks of their own, with the suffix `_post`.

    Raises:
        InputError: see `markdown.publish`.
    """
    publish(text, name + "_post" * (options.post != "none"), options, say)
    keep = ("dataset", "method", "seed", "epochs", "seconds_in_all", "modes")
    return {"records": [{k: r[k] for k in keep} for r in found]}
