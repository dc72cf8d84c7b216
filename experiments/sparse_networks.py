"""What the experiments of Hubin and Storvik (2024) share: methods, a run, its record.

A record holds accuracies in every mode of prediction, labels given and right where the averaged
probability exceeds 0.95, densities, inclusion by layer and in a histogram, and the time.
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

from experiments.store import Record, Store, key_of, versions
from experiments.uci import write_between
from subbayes import MLP, Predictive, Training, sparse
from subbayes.diagnostics.metrics import accuracy
from subbayes.likelihoods import Bernoulli, Categorical, Likelihood
from subbayes.training.trainer import train
from subbayes.utils.checks import check_count

__all__ = ["METHODS", "MODES", "Plan", "Rows", "add_options", "computed", "one", "plan_of", "said"]

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
"""The paper's methods. Baselines have its rates and fixed priors; the others those of
`sparse.LearningRates`, as the paper's (tables 1 and A1) belong to another objective, see there.
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
"""Structure, weights and draws R."""

_PACE, _FASTEST = (
    20.0,
    1e-2,
)  # of baselines, as of `LearningRates.for_steps`: over the steps, at most

_MODES = {"all": tuple(MODES)[:3], "dropout": tuple(MODES)[:3]}
_BINS = 20

PROCEDURE = 1
"""Raise it when the code below changes what the same settings give."""


@dataclass(frozen=True)
class Plan:
    """Settings, those of the paper but for the first epochs, of which it has 20, and rates.

    Attributes:
        hidden: widths of the hidden layers.
        epochs: passes over the data.
        early_epochs: passes in which priors are learned too; not for baselines.
        kl_epochs: passes in which the weight of the divergence rises; not for baselines.
        paced: whether rates are larger where steps are few, see `sparse.LearningRates.for_steps`.
        post: "none", or what is trained on for `post_epochs`, see `sparse.fit`.
        post_epochs: passes of that.
        batch_size: rows a step.
        baseline_rate: of Adam for the point network; that of other baselines is as large.
        densities: of pruned point networks.
        threshold: of the averaged probability, for a label to be given.
        rows: training rows taken, the first ones; None takes all.
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
    """Rows to learn from, float32 inputs (n, d) and labels, and rows to score on."""

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    y_new: np.ndarray
    classes: int


def one(rows: Rows, method: str, seed: int, plan: Plan, checkpoint: Path) -> Record:
    """The record of a method on some rows.

    Args:
        rows: see `Rows`.
        method: of `METHODS`.
        seed: of everything random about it.
        plan: settings.
        checkpoint: a folder for training to resume from; removed at the end.
    """
    data = torch.from_numpy(rows.x[: plan.rows]), torch.from_numpy(rows.y[: plan.rows]).long()
    likelihood: Likelihood = Bernoulli() if rows.classes == 2 else Categorical(rows.classes)
    net = MLP(
        rows.x.shape[1], plan.hidden, 1 if rows.classes == 2 else rows.classes, "relu", seed=seed
    )
    begun, clock = time.perf_counter(), time.process_time()
    found = (_point if method == "FNN" else _sparse)(
        net, likelihood, data, rows, method, seed, plan, checkpoint
    )
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    return {
        "train": len(data[1]),
        "test": len(rows.y_new),
        "versions": versions(),
        "seconds_in_all": round(time.perf_counter() - begun, 1),
        "processor_seconds_in_all": round(time.process_time() - clock, 1),
        **found,
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
) -> Record:
    """Train, and score in every mode."""
    settings = METHODS[method]
    posterior = settings["posterior"]
    baseline = posterior in sparse.BASELINE_FAMILIES
    early, rising = (
        0 if baseline else min(count, plan.epochs) for count in (plan.early_epochs, plan.kl_epochs)
    )
    prior = sparse.SpikeSlab(sparse.MixtureSlab()) if "mixture" in settings else None
    ticks = [time.process_time()]
    result = sparse.fit(
        sparse.convert(net, posterior, prior=prior, seed=seed),
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
        callback=lambda *_: ticks.append(time.process_time()),
    )
    x_new = torch.from_numpy(rows.x_new)
    modes: Record = {}
    for name in _MODES.get(posterior, tuple(MODES)):
        structure, weights, draws = MODES[name]
        predictive = result.predict(
            x_new, structure=structure, weights=weights, n_draws=draws, seed=seed
        )
        modes[name] = _scores(predictive, rows.y_new, plan.threshold) | {
            "density": result.density(structure)
        }
    table = result.inclusion()
    epochs = np.diff(ticks)
    return {
        "modes": modes,
        "epochs": len(result.history["elbo"]),
        "epoch_seconds": float(np.median(epochs)) if len(epochs) else None,
        "elbo": result.history["elbo"][-1],
        "kl": result.history["kl"][-1],
        "layers": {name: row.to_dict() for name, row in table.iterrows()},
        "histogram": {
            name: np.histogram(layer.probability().cpu().numpy(), _BINS, (0.0, 1.0))[0].tolist()
            for name, layer in result.layers.items()
        },
    }


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
    method: str,
    seed: int,
    plan: Plan,
    checkpoint: Path,
) -> Record:
    """Train a point network, and score it pruned to several densities."""
    del method, checkpoint
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
    x_new = torch.from_numpy(rows.x_new)
    modes: Record = {}
    for structure in ("weights", "units"):
        for density in plan.densities:
            with torch.no_grad():
                outputs = sparse.prune(trained.module, density, structure)(x_new)
            modes[f"{structure} {density:g}"] = _scores(
                Predictive(outputs[None], likelihood), rows.y_new, plan.threshold
            ) | {"density": density}
    return {"modes": modes, "epochs": plan.epochs, "epoch_seconds": seconds}


def _scores(predictive: Predictive, y: np.ndarray, threshold: float) -> Record:
    """Accuracy of all labels, and number and accuracy of those that are decided."""
    labels = predictive.decide(threshold)
    sure = labels >= 0
    return {
        "accuracy": accuracy(predictive, y),
        "decided": int(sure.sum()),
        "decided_accuracy": float((labels == y)[sure].mean()) if sure.any() else None,
    }


# --- the run --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, methods: tuple[str, ...]) -> None:
    """Options of all these experiments."""
    parser.add_argument("--methods", nargs="+", default=list(methods), choices=list(METHODS))
    parser.add_argument("--epochs", type=int, default=None, help="fewer than the paper's 250")
    parser.add_argument(
        "--post",
        choices=("none", "fixed", "median"),
        default="none",
        help="train on with the structure as it is (tables A8 to A10)",
    )
    parser.add_argument("--mode", choices=("trace", "compile", "eager"), default="trace")
    parser.add_argument(
        "--write",
        default=None,
        metavar="PAGE",
        help="put the tables between the marks of this page of the docs",
    )


def plan_of(options: argparse.Namespace, plan: Plan) -> Plan:
    """The plan with what the options change."""
    epochs = plan.epochs if options.epochs is None else check_count("epochs", options.epochs)
    return replace(plan, epochs=epochs, post=options.post, mode=options.mode)


def computed(
    cases: list[tuple[str, str, int]],
    rows_of: Callable[[str, int], Rows],
    options: argparse.Namespace,
    plan: Plan,
    say: Callable[..., None],
) -> list[Record]:
    """Compute the records that are missing, in the order given; all of them.

    Args:
        cases: data set, method and seed (or fold) of each.
        rows_of: the rows of a data set and a seed.
        options: of the command line.
        plan: settings.
        say: where a line for each new record goes.
    """
    folder = Path(options.results)
    store = Store(folder / "records.json")
    found = []
    for name, method, seed in cases:
        settings = {
            "dataset": name,
            "method": method,
            "seed": seed,
            "options": METHODS[method],
            "procedure": PROCEDURE,
            "plan": asdict(plan),
        }
        key = key_of(f"{name}-{method}-{seed}", settings)
        if key not in store:
            folder.mkdir(parents=True, exist_ok=True)
            record = one(rows_of(name, seed), method, seed, plan, folder / f"{key}-checkpoint")
            store.put(key, settings | record)
            best = max(v["accuracy"] for v in record["modes"].values())
            say(f"{name} {method} {seed}: accuracy {best:.4f}, {record['seconds_in_all']:.0f} s")
        found.append(store[key])
    return found


def said(
    found: list[Record], name: str, text: str, page: str | None, say: Callable[..., None]
) -> Record:
    """Print the tables, put them between the marks of a page if there is one; the JSON line.

    Those of runs with post-training have marks of their own, with `_post` behind the name.
    """
    say(text)
    if page:
        after = any(r["plan"]["post"] != "none" for r in found)
        write_between(page, name + "_post" * after, text)
    keep = ("dataset", "method", "seed", "epochs", "seconds_in_all", "modes")
    return {"records": [{k: r[k] for k in keep} for r in found]}
