"""Updates by new rows: ten chunks and one fit, permuted digits, and bike sharing week by week.

- *chunks*: a network is trained on half of the training rows of UCI tables, and its posterior
  updated by the other half in ten chunks; "one fit" has all rows at once in the same subspace,
  "first half" no others, and "refit" a network that is trained on all rows.
- *digits*: five tasks, each the 8 x 8 digits of scikit-learn with their pixels permuted, one after
  the other; accuracy over all tasks at the end. Linearised Laplace of all weights is updated around
  the first network, or linearised again at the mode of each task (online Laplace; Ritter et al.
  2018); EWC (Kirkpatrick et al. 2017) has the diagonals of the Fisher information of all tasks.
- *bike*: demand by the hour. Each week is predicted, and then learned from, after 26 weeks.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

import subbayes
from experiments.datasets import data_dir, load_uci
from experiments.markdown import add_write_option, markdown_table, number, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import case_of
from subbayes import Sampling, Training
from subbayes.curvature.diagonal import squared_column_norms
from subbayes.curvature.precision_factory import root
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.models.fitted import FittedModel
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace
from subbayes.subspaces.random import Random

__all__ = ["add_options", "markdown", "run"]

Say = Callable[..., None]
Rows = tuple[Tensor, Tensor]
SETS = ("yacht", "energy", "concrete", "airfoil")
KINDS = {
    "linearised": {"subspace": "full", "inference": LinearisedLaplace(gauss_newton_step=True)},
    "draws": {"subspace": Random(rank=10), "inference": "elliptical-slice"},
}
CHUNKS = 10
TASKS, TASK_ROWS, STEPS = 5, 400, 150
EWC = (1.0, 100.0)
WEEK, FIRST_WEEKS, REFIT = 7 * 24, 26, 4
LAPLACE = LinearisedLaplace(gauss_newton_step=True)


def _mlp(rows: Rows, hidden: int, outputs: int = 1, seed: int = 0) -> torch.nn.Module:
    return subbayes.MLP(rows[0].shape[1], (hidden,), outputs, "tanh", seed=seed).double()


def _standardised(x: np.ndarray, y: np.ndarray, first: int) -> Rows:
    """Columns and targets standardised by the first rows."""
    scale = np.where(x[:first].std(0) > 0, x[:first].std(0), 1.0)
    x, y = (x - x[:first].mean(0)) / scale, (y - y[:first].mean()) / y[:first].std()
    return torch.tensor(x), torch.tensor(y)


def _fit(rows: Rows, seed: int, **options: Any) -> FittedModel:
    training = Training(epochs=200, learning_rate=0.01, prior_scale=0.5, swa_epochs=0)
    sampling = Sampling(draws=125, chains=8, seed=seed, progress=False)
    options = {"training": training, "sampling": sampling, "prior": 0.5} | options
    module = options.pop("module", None) or _mlp(rows, 20, seed=seed)
    return subbayes.fit(module, rows, **options)


def _again(model: FittedModel, rows: Rows, **options: Any) -> FittedModel:
    """The posterior of other rows with the network, noise and subspace of a model."""
    settings = {"likelihood": model.likelihood, "subspace": model.subspace, "prior": model.prior}
    module = model.network.module_with()
    training = Training(epochs=0, swa_epochs=0)
    return _fit(rows, 1, module=module, **settings, training=training, **options)


def _density(model: FittedModel, test: Rows) -> float:
    return model.evaluate(*test)["log_likelihood"]


# --- chunks ---------------------------------------------------------------------------------------


def _chunks(name: str, split: int, kind: str, folder: str | None) -> Record:
    case = case_of(*load_uci(name, folder), split)
    first = len(case.table.y)
    x = np.concatenate([case.table.inputs.numpy(), case.inputs.numpy()]).astype(float)
    y = np.concatenate([case.table.y.numpy(), case.y])
    rng = np.random.default_rng(split)
    order = np.concatenate([rng.permutation(first), np.arange(first, len(y))])
    rows, targets = _standardised(x[order], y[order], first)
    train, test = (rows[:first], targets[:first]), (rows[first:], targets[first:])
    options, half = KINDS[kind], first // 2
    frozen = _fit((rows[:half], targets[:half]), split, **options)
    started, model = time.process_time(), frozen
    for i, chunk in enumerate(np.array_split(np.arange(half, first), CHUNKS)):
        model = model.update((rows[chunk], targets[chunk]), seed=i)
    seconds = time.process_time() - started
    inference = {"inference": options["inference"]}
    one = _again(frozen, train, **inference)
    models = {"frozen": frozen, "updated": model, "one": one}
    scores = {name: _density(each, test) for name, each in models.items()}
    scores["refit"] = _density(_fit(train, split, **options), test)
    methods = [update.method for update in model.updates]
    return {"set": name, "kind": kind, "scores": scores, "seconds": seconds, "methods": methods}


# --- permuted digits ------------------------------------------------------------------------------


def _tasks(seed: int) -> list[tuple[Rows, Rows]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    rng, found = np.random.default_rng(seed), []
    for task in range(TASKS):
        pixels = np.arange(64) if task == 0 else rng.permutation(64)
        rows = rng.permutation(len(x))
        inputs, labels = torch.tensor(x[rows][:, pixels] / 16), torch.tensor(y[rows])
        half = slice(TASK_ROWS), slice(TASK_ROWS, 2 * TASK_ROWS)
        found.append(tuple((inputs[part], labels[part]) for part in half))
    return found


def _train(
    network: subbayes.Network, start: Tensor, rows: Rows, penalty: Callable[[Tensor], Tensor]
) -> Tensor:
    """Weights after Adam on the negative log-likelihood of a task and a penalty."""
    w = start.clone().requires_grad_()
    adam = torch.optim.Adam([w], 0.01)
    for _ in range(STEPS):
        adam.zero_grad()
        loss = F.cross_entropy(network(w, rows[0]), rows[1], reduction="sum") + penalty(w)
        loss.backward()
        adam.step()
    return w.detach()


def _accuracy(logits: Callable[[Tensor], Tensor], tasks: Sequence[tuple[Rows, Rows]]) -> float:
    each = [(logits(test[0]).argmax(1) == test[1]).double().mean() for _, test in tasks]
    return float(torch.stack(each).mean())


def _moved(model: FittedModel, weights: Tensor) -> FittedModel:
    """The same posterior in coordinates around other weights, where it is linearised."""
    z = (weights - model.subspace.shift).numpy()
    moments = model.draws.moments
    draws = replace(
        model.draws, z=model.draws.z - z, moments=replace(moments, mean=moments.mean - z)
    )
    prior = Normal(model.prior.scale, mean=model.prior.mean - z)
    network = model.network.with_weights(weights)
    return replace(model, network=network, subspace=FullSubspace(weights), prior=prior, draws=draws)


def _digits(seed: int) -> Record:
    tasks = _tasks(seed)
    first = tasks[0][0]
    network = subbayes.Network(_mlp(first, 10, 10, seed))
    prior = Normal(1.0)
    start = _train(network, network.weights, first, lambda w: 0.5 * w.square().sum())
    scores: dict[str, float] = {}

    def of_weights(w: Tensor) -> float:
        return _accuracy(lambda x: network(w, x), tasks)

    w = start
    for rows, _ in tasks[1:]:
        w = _train(network, w, rows, lambda _: torch.zeros(()))
    scores["fine-tuning"] = of_weights(w)
    joint = tuple(torch.cat(parts) for parts in zip(*(rows for rows, _ in tasks), strict=True))
    scores["all tasks at once"] = of_weights(
        _train(network, start, joint, lambda w: 0.5 * w.square().sum())
    )
    for factor in EWC:
        w, fisher = start, torch.zeros_like(start)
        for task, (rows, _) in enumerate(tasks):
            if task:
                centre = w
                w = _train(
                    network,
                    w,
                    rows,
                    lambda v, c=centre, f=factor * fisher: 0.5 * (v - c).square() @ f,
                )
            fisher = fisher + squared_column_norms(
                root(network.with_weights(w), "categorical", rows)
            )
        scores[f"EWC, {factor:g}"] = of_weights(w)
    few = Sampling(draws=25, chains=4, progress=False)
    space = FullSubspace(start)
    module = network.module_with(start)
    options = {"likelihood": "categorical", "subspace": space, "prior": prior, "sampling": few}
    training = Training(epochs=0, swa_epochs=0)
    model = subbayes.fit(module, first, **options, inference=LAPLACE, training=training)
    fixed = again = model
    for rows, _ in tasks[1:]:
        fixed = fixed.update(rows)
        mean = again.subspace.shift + torch.tensor(again.draws.moments.mean)
        A = torch.linalg.inv(torch.tensor(again.draws.moments.covariance))
        w = _train(network, mean, rows, lambda v, m=mean, A=A: 0.5 * (v - m) @ A @ (v - m))
        again = _moved(again, w).update(rows)
    for name, each in {"one linearisation": fixed, "linearised again": again}.items():
        scores[name] = float(np.mean([each.evaluate(*test)["accuracy"] for _, test in tasks]))
    scores["online Laplace, network"] = of_weights(
        again.subspace.shift + torch.tensor(again.draws.moments.mean)
    )
    return {"seed": seed, "scores": scores}


# --- bike sharing ---------------------------------------------------------------------------------


def _bike(folder: str | None) -> tuple[Tensor, Tensor]:
    table = pd.read_csv(data_dir(folder) / "bde" / "bike_hourly.csv.gz")
    hour, month = 2 * np.pi * table["hr"] / 24, 2 * np.pi * table["mnth"] / 12
    waves = [f(k * hour) for k in (1, 2, 3) for f in (np.sin, np.cos)]
    waves += [np.sin(month), np.cos(month)]
    columns = ["holiday", "workingday", "weathersit", "temp", "hum", "windspeed"]
    x = np.column_stack([*waves, table[columns]])
    return _standardised(x, np.log(table["cnt"].to_numpy(float)), FIRST_WEEKS * WEEK)


def _weeks(weeks: int, folder: str | None) -> Record:
    x, y = _bike(folder)

    def rows(first: int, last: int) -> Rows:
        return x[first * WEEK : last * WEEK], y[first * WEEK : last * WEEK]

    training = Training(epochs=60, learning_rate=0.01, prior_scale=0.5, swa_epochs=0)
    options = {"subspace": "full", "inference": LAPLACE, "training": training}
    frozen = _fit(rows(0, FIRST_WEEKS), 0, **options)
    models = dict.fromkeys(("frozen", "updated", "forgetting 0.9", "refitted"), frozen)
    scores: dict[str, list[float]] = {name: [] for name in models}
    seconds, surprising = dict.fromkeys(models, 0.0), 0
    for week in range(FIRST_WEEKS, FIRST_WEEKS + weeks):
        new = rows(week, week + 1)
        for name, model in models.items():
            scores[name].append(_density(model, new))
            started = time.process_time()
            if name in ("updated", "forgetting 0.9"):
                forgetting = 0.9 if name == "forgetting 0.9" else 1.0
                models[name] = model.update(new, forgetting=forgetting)
            elif name == "refitted" and (week - FIRST_WEEKS + 1) % REFIT == 0:
                models[name] = _fit(rows(0, week + 1), 0, **options)
            seconds[name] += time.process_time() - started
        surprising += models["updated"].updates[-1].z < -3
    means = {name: float(np.mean(each)) for name, each in scores.items()}
    return {"weeks": weeks, "scores": means, "seconds": seconds, "surprising": surprising}


# --- command --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    parser.add_argument("--splits", type=int, default=3, help="splits of each UCI table")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of permuted digits")
    parser.add_argument("--weeks", type=int, default=52, help="weeks of bike sharing")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Run or resume the experiment."""
    store = Store(options.results)
    folder = options.data_dir

    def recorded(name: str, settings: Record, compute: Callable[[], Record]) -> Record:
        def with_versions() -> Record:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return compute() | {"versions": versions()}

        return store.get(key_of(name, settings), with_versions, lambda r: say(name, r["scores"]))

    chunks = [
        recorded(
            f"chunks-{name}-{kind}-{split}",
            {"draws": 125, "chunks": CHUNKS},
            lambda n=name, s=split, k=kind: _chunks(n, s, k, folder),
        )
        for name in SETS
        for kind in KINDS
        for split in range(options.splits)
    ]
    bike = recorded("bike", {"weeks": options.weeks}, lambda: _weeks(options.weeks, folder))
    digits = [
        recorded(
            f"digits-{seed}",
            {"rows": TASK_ROWS, "steps": STEPS, "ewc": EWC},
            lambda s=seed: _digits(s),
        )
        for seed in range(options.seeds)
    ]
    page = markdown(chunks, digits, bike)
    publish(page, "update", options, say)
    gaps = [abs(r["scores"]["updated"] - r["scores"]["one"]) for r in chunks]
    return {"largest_gap": max(gaps), "bike": bike["scores"], "digits": len(digits)}


def markdown(chunks: Sequence[Record], digits: Sequence[Record], bike: Record) -> str:
    """The tables of the experiment."""
    names = ("frozen", "updated", "one", "refit")
    rows = []
    for name in dict.fromkeys(r["set"] for r in chunks):
        for kind in KINDS:
            found = [r for r in chunks if (r["set"], r["kind"]) == (name, kind)]
            scores = [[r["scores"][n] for n in names] for r in found]
            gap = max(abs(r["scores"]["updated"] - r["scores"]["one"]) for r in found)
            methods = sum((r["methods"] for r in found), [])
            share = sum(m == "importance weights" for m in methods) / len(methods)
            weights = f"{share:.0%}" if kind == "draws" else ""
            rows.append([name, kind, *map(number, np.mean(scores, 0)), number(gap), weights])
    head = ["table", "posterior", "first half", "ten chunks", "one fit", "refit", "largest gap"]
    tables = [markdown_table([*head, "by weights"], rows)]
    if digits:
        means = {k: np.array([r["scores"][k] for r in digits]) for k in digits[0]["scores"]}
        cells = [[k, f"{v.mean():.3f} ± {v.std():.3f}"] for k, v in means.items()]
        tables.append(markdown_table(["method", "accuracy over 5 tasks"], cells))
    cells = [[k, number(v), f"{bike['seconds'][k]:.0f}"] for k, v in bike["scores"].items()]
    tables.append(markdown_table(["model", "log density of next week", "CPU seconds"], cells))
    return "\n\n".join(tables)
