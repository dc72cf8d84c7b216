"""How well the intervals of `fit` cover on small data sets, by default and with other settings.

Simulated data sets of three kinds: numbers, counts and three classes, all with the same function of
two inputs. Each is fitted with a network of 30 units by the defaults, and with other settings.
Nothing is selected by the test rows.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import subbayes
from experiments.markdown import add_write_option, markdown_table, number, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import split_names
from subbayes import Sampling, Training
from subbayes.diagnostics import metrics
from subbayes.utils.checks import check_count

__all__ = ["CASES", "CHOICES", "add_options", "data_of", "markdown", "run"]

Say = Callable[..., None]
LEVEL = 0.9
NOISE = 0.4  # standard deviation of numbers around their mean
_TRAIN, _TEST = 100, 500

CASES = {"numbers": ("gaussian", 1), "counts": ("poisson", 1), "classes": ("categorical", 3)}
"""Likelihood and number of outputs, by kind of target."""

CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "fit": ("the defaults", {}),
    "pca": ('`subspace="pca"`, `training=Training()`', {"subspace": "pca", "training": Training()}),
    "pca-stopping": (
        '`subspace="pca"`, `training=Training(validation=0.2, patience=20)`',
        {"subspace": "pca", "training": Training(validation=0.2, patience=20)},
    ),
    "laplace": (
        '`subspace="full"`, `inference="laplace-linearised"`, `prior="evidence"`, '
        "`training=Training()`",
        {
            "subspace": "full",
            "inference": "laplace-linearised",
            "prior": "evidence",
            "training": Training(),
        },
    ),
}
"""Label and arguments of `fit`, by name."""


def data_of(case: str, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, np.ndarray]]:
    """Return inputs and targets for training and for testing.

    Example:
        >>> (x, y), (new, true) = data_of("counts", 0)
        >>> x.shape, new.shape, bool((y >= 0).all())
        (torch.Size([100, 2]), torch.Size([500, 2]), True)
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(_TRAIN + _TEST, 2))
    f = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1]
    if case == "numbers":
        y = f + NOISE * rng.normal(size=len(f))
    elif case == "counts":
        y = rng.poisson(np.exp(0.8 + f)).astype(float)
    else:
        logits = np.stack([np.zeros_like(f), 2 * f, -2 * f], 1)
        y = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    inputs = torch.tensor(x, dtype=torch.float32)
    dtype = torch.int64 if case == "classes" else torch.float32
    targets = torch.tensor(y, dtype=dtype)
    return (inputs[:_TRAIN], targets[:_TRAIN]), (inputs[_TRAIN:], y[_TRAIN:])


def score(case: str, choice: str, seed: int) -> Record:
    """Fit one data set and return the scores of its test rows."""
    data, (new, true) = data_of(case, seed)
    likelihood, outputs = CASES[case]
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, outputs))
    started = time.process_time()
    with warnings.catch_warnings():  # of R-hat, which stands in the diagnostics of a fit
        warnings.simplefilter("ignore")
        model = subbayes.fit(
            module,
            data,
            likelihood=likelihood,
            sampling=Sampling(seed=seed, progress=False),
            **CHOICES[choice][1],
        )
        predictive = model.predict(new)
    found = {
        "log_likelihood": metrics.log_likelihood(predictive, true),
        "cpu_seconds": time.process_time() - started,
    }
    if case == "classes":
        probabilities = predictive.probabilities
        found["coverage"] = float((probabilities.argmax(1) == true).mean())
        found["nominal"] = float(probabilities.max(1).mean())
        return found
    low, high = (np.ravel(end) for end in predictive.interval(LEVEL))
    inside = (true >= low) & (true <= high)
    return found | {
        "coverage": float(inside.mean()),
        "nominal": LEVEL,
        "width": float((high - low).mean()),
        "rmse": float(np.sqrt(np.mean((np.ravel(predictive.mean) - true) ** 2))),
    }


def markdown(records: list[Record]) -> str:
    """Return a table for each kind of target."""
    parts = []
    for case in dict.fromkeys(record["case"] for record in records):
        rows, head = [], ("settings", "covers", "should cover", "log-likelihood", "CPU seconds")
        for choice, (label, _) in CHOICES.items():
            own = [r for r in records if (r["case"], r["choice"]) == (case, choice)]
            if own:
                covers, log_likelihood = (
                    _with_error(own, key) for key in ("coverage", "log_likelihood")
                )
                nominal, seconds = (_mean(own, key) for key in ("nominal", "cpu_seconds"))
                rows.append([label, covers, number(nominal), log_likelihood, f"{seconds:.1f}"])
        count = len({r["seed"] for r in records if r["case"] == case})
        what = "share of correct labels" if case == "classes" else "90 % intervals"
        title = f"{case}, {what}, {count} data sets of {_TRAIN} rows, mean ± standard error"
        parts.append(markdown_table(head, rows, title))
    return "\n\n".join(parts)


def _mean(records: list[Record], key: str) -> float:
    return float(np.mean([record[key] for record in records]))


def _with_error(records: list[Record], key: str) -> str:
    values = np.array([record[key] for record in records])
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{number(values.mean())} ± {number(error)}"


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--only", default=",".join(CASES), help="kinds (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=20, help="number of data sets of each kind")
    parser.add_argument("--threads", type=int, default=1, help="threads")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute the missing records and print the tables; return mean scores."""
    torch.set_num_threads(check_count("threads", options.threads))
    cases, records = split_names(options.only, tuple(CASES)), []
    for case in cases:
        store = Store(options.results, case)
        for seed in range(check_count("seeds", options.seeds)):
            for choice, (label, _) in CHOICES.items():
                facts = {"case": case, "choice": choice, "arguments": label, "seed": seed}
                records.append(
                    store.get(
                        key_of(f"{case}-{choice}-{seed}", facts),
                        lambda facts=facts, which=(case, choice, seed): (
                            facts | score(*which) | {"versions": versions()}
                        ),
                        lambda record, name=f"{case} {choice} {seed}": say(
                            f"{name}: {record['coverage']:.3f} of {record['nominal']:.3f}"
                        ),
                    )
                )
    publish(markdown(records), "defaults", options, say)
    return {
        f"{case} {choice}": {key: _mean(own, key) for key in ("coverage", "log_likelihood")}
        for case in cases
        for choice in CHOICES
        if (own := [r for r in records if (r["case"], r["choice"]) == (case, choice)])
    }
