"""Shared code of small and large UCI regression: rows of a split, scores and model selection."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from experiments.batched import Table
from experiments.store import Record, Store, key_of, versions
from subbayes import Draws, Posterior, Predictive
from subbayes.diagnostics.metrics import log_likelihood, rmse
from subbayes.training.trainer import SwaResult
from subbayes.utils.checks import InputError, check_count, fail
from subbayes.utils.seeding import derive_seed

Say = Callable[..., None]
Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """Training rows, and inputs and targets of the test rows."""

    table: Table
    inputs: Float[Tensor, "m d"]
    y: Array


def case(X: Array, y: Array, train: Array, test: Array, seed: int) -> Case:
    """Return a case with inputs standardised by the training rows; constant columns become 0.

    Args:
        X: inputs, shape (n, d).
        y: targets, shape (n,).
        train: indices of training rows.
        test: indices of test rows.
        seed: seed of initialisation, shuffling and sampling.
    """
    center, scale = X[train].mean(0), X[train].std(0)
    scale = np.where(scale > 1e-12 * np.maximum(1, np.abs(center)), scale, np.inf)

    def inputs(rows: Array) -> Tensor:
        return torch.tensor((X[rows] - center) / scale, dtype=torch.float32)

    return Case(Table(inputs(train), torch.tensor(y[train]), seed), inputs(test), y[test])


def case_of(X: Array, y: Array, masks: Array, split: int) -> Case:
    """Return training and test rows of a split."""
    test = masks[split]
    return case(X, y, np.flatnonzero(~test), np.flatnonzero(test), derive_seed(split))


def posterior_of(path: SwaResult, table: Table, rank: int) -> Posterior:
    """Return the posterior in the PCA subspace, of lower rank if the trajectory spans less."""
    data = (table.inputs, table.y)
    for r in range(rank, 0, -1):
        try:
            space = path.recorder.pca(r)
        except InputError:
            continue
        return Posterior(path.network, path.likelihood, data, space)
    raise InputError("path: expected a trajectory that moves, got one that does not.")


def worst_rhat(draws: Draws) -> float:
    """Return the largest R-hat of all coordinates."""
    return float(np.nanmax(draws.rhat()))


# --- scores ---------------------------------------------------------------------------------------


def moment_matched(predictive: Predictive, y: Array) -> float:
    """Return the paper's test log-likelihood (E.1.1), by which all settings are selected."""
    return log_likelihood(predictive, y, moment_matched=True)


def scores(predictive: Predictive, y: Array) -> dict[str, float]:
    """Return scores on test rows; coverage is that of the mixture and of the matched Gaussian."""
    below = predictive.cdf(y)  # cheaper than the quantiles of the mixture
    inside = np.abs(y - predictive.mean) <= 1.959963984540054 * predictive.std
    return {
        "log_likelihood": moment_matched(predictive, y),
        "log_likelihood_mixture": log_likelihood(predictive, y),
        "rmse": rmse(predictive, y),
        "coverage": float(inside.mean()),
        "coverage_mixture": float(((below >= 0.025) & (below <= 0.975)).mean()),
    }


# --- selection ------------------------------------------------------------------------------------


def summary(values: list[float]) -> Record:
    """Return mean and standard error over validation cases; None if one of them diverged."""
    if not all(map(math.isfinite, values)):
        return {"score": None, "se": None}
    return {"score": float(np.mean(values)), "se": float(np.std(values) / len(values) ** 0.5)}


def score_or_lowest(trial: Record) -> float:
    """Return the score of a trial, -inf if it diverged."""
    return -math.inf if trial["score"] is None else trial["score"]


def best(trials: list[Record]) -> Record:
    """Return the trial with the highest score."""
    return max(trials, key=score_or_lowest)


def fields_of(plan: Any, *names: str) -> Record:
    """Return some settings of a plan."""
    return {name: getattr(plan, name) for name in names}


def finite_or_none(value: Any) -> float | None:
    """Return a number that JSON can represent."""
    return float(value) if math.isfinite(value) else None


def sampling_record(posterior: Posterior, draws: Draws) -> Record:
    """Return rank, draws and convergence of a run of elliptical slice sampling."""
    return {
        "rank": posterior.rank,
        "draws": draws.n_draws,
        "rhat": worst_rhat(draws),
        "ess_bulk": float(np.nanmin(draws.ess_bulk())),
        "evaluations_per_draw": float(draws.stats["evaluations"].mean()),
    }


def recorded_trials(
    store: Store, name: str, kind: str, settings: Record, run: Callable[[], list[Record]], say: Say
) -> list[Record]:
    """Return the trials on record for these settings; if there are none, run and record them.

    Args:
        store: records of the data set.
        name: data set.
        kind: kind of the record.
        settings: everything that the trials depend on.
        run: returns one record per trial.
        say: prints a line.
    """

    def compute() -> Record:
        started = time.process_time()
        trials = run()
        seconds = round(time.process_time() - started, 1)
        return settings | {
            "kind": kind,
            "tried": trials,
            "versions": versions(),
            "seconds": seconds,
        }

    def report(record: Record) -> None:
        say(f"{name} {kind} {settings.get('rate', '')}: best {best(record['tried'])}")

    return store.get(key_of(f"{name}-{kind}", settings), compute, report)["tried"]


# --- command line ---------------------------------------------------------------------------------


def add_datasets_option(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add `--datasets` to the options of an experiment; by default all."""
    parser.add_argument("--datasets", default=",".join(names), help="names separated by commas")


def numbers_from(first: int, option: str, count: int) -> range:
    """Numbers of seeds or splits, of which an option gives the count, from the first one on.

    Raises:
        InputError: a negative first one, or a count below 1.

    Example:
        >>> list(numbers_from(3, "seeds", 2))
        [3, 4]
    """
    start = check_count("first", first, 0)
    return range(start, start + check_count(option, count))


def split_names(text: str, known: Collection[str], option: str = "datasets") -> tuple[str, ...]:
    """Split a list of names separated by commas.

    Raises:
        InputError: a name that is not known.
    """
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            fail(option, f"some of {', '.join(known)}", f"'{name}'")
    return names
