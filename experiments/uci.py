"""What small and large UCI regression share: rows of a split, scores, and choices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from experiments.batched import Table
from experiments.store import Record
from subbayes import Draws, Posterior, Predictive
from subbayes.diagnostics.metrics import log_likelihood, rmse
from subbayes.training.trainer import SwaResult
from subbayes.utils.checks import InputError, fail
from subbayes.utils.files import atomic_write_text

Say = Callable[..., None]
Array = np.ndarray
Figure = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """Rows to learn from, and inputs and targets of the rows to score on."""

    table: Table
    inputs: Float[Tensor, "m d"]
    y: Array


def case(X: Array, y: Array, train: Array, test: Array, seed: int) -> Case:
    """Inputs standardised by the training rows alone; constant columns become zero.

    Args:
        X: (n, d).
        y: (n,).
        train: indices of training rows.
        test: indices of the rows to score on.
        seed: of everything random about it.
    """
    center, scale = X[train].mean(0), X[train].std(0)
    scale = np.where(scale > 1e-12 * np.maximum(1, np.abs(center)), scale, np.inf)

    def inputs(rows: Array) -> Tensor:
        return torch.tensor((X[rows] - center) / scale, dtype=torch.float32)

    return Case(Table(inputs(train), torch.tensor(y[train]), seed), inputs(test), y[test])


def posterior_of(path: SwaResult, table: Table, rank: int) -> Posterior:
    """The posterior in the PCA subspace; of lower rank where the trajectory spans less."""
    data = (table.inputs, table.y)
    for r in range(rank, 0, -1):
        try:
            space = path.recorder.pca(r)
        except InputError:
            continue
        return Posterior(path.network, path.likelihood, data, space)
    raise InputError("path: expected a trajectory that moves, got one that does not.")


def worst_rhat(draws: Draws) -> float:
    """The largest R-hat of all coordinates."""
    return float(np.nanmax(draws.rhat()))


# --- scores ---------------------------------------------------------------------------------------


def moment_matched(predictive: Predictive, y: Array) -> float:
    """The paper's test log-likelihood (E.1.1), the criterion of every choice here."""
    return log_likelihood(predictive, y, moment_matched=True)


def scores(predictive: Predictive, y: Array) -> dict[str, float]:
    """Scores on test rows; coverages of the mixture and of the Gaussian with its moments."""
    below = predictive.cdf(y)  # inside the central interval of the mixture: cheaper than its ends
    inside = np.abs(y - predictive.mean) <= 1.959963984540054 * predictive.std
    return {
        "log_likelihood": moment_matched(predictive, y),
        "log_likelihood_mixture": log_likelihood(predictive, y),
        "rmse": rmse(predictive, y),
        "coverage": float(inside.mean()),
        "coverage_mixture": float(((below >= 0.025) & (below <= 0.975)).mean()),
    }


# --- choices --------------------------------------------------------------------------------------


def summary(values: list[float]) -> Record:
    """Mean and standard error over validation cases; null where one diverged."""
    if not all(map(math.isfinite, values)):
        return {"score": None, "se": None}
    return {"score": float(np.mean(values)), "se": float(np.std(values) / len(values) ** 0.5)}


def order(tried: Record) -> float:
    """The score; what diverged comes last."""
    return -math.inf if tried["score"] is None else tried["score"]


def best(tried: list[Record]) -> Record:
    """The setting with the best score."""
    return max(tried, key=order)


def fields_of(plan: Any, *names: str) -> Record:
    """Some settings of a plan."""
    return {name: getattr(plan, name) for name in names}


def asked(names: str, known: tuple[str, ...]) -> list[str]:
    """The data sets named, with commas between.

    Raises:
        InputError: one that is not known.
    """
    found = names.split(",")
    for name in found:
        if name not in known:
            fail("datasets", f"some of {', '.join(known)}", f"'{name}'")
    return found


# --- pages ----------------------------------------------------------------------------------------


def values(records: list[Record], method: str, score: str) -> np.ndarray:
    """One score of one method on all splits."""
    return np.array([r["methods"][method][score] for r in records])


def verdict(score: str, paper: Figure, ours: Figure, n: int, n_paper: int | None = None) -> str:
    """Ours against the paper's, in standard errors of the difference of means.

    Args:
        score: "log_likelihood", "rmse" or "coverage".
        paper: mean and deviation over splits.
        ours: the same.
        n: splits behind ours,
        n_paper: and behind the paper's, by default as many.
    """
    badness = [
        abs(m - 0.95) if score == "coverage" else m if score == "rmse" else -m
        for m, _ in (paper, ours)
    ]
    error = (paper[1] ** 2 / (n_paper or n) + ours[1] ** 2 / n) ** 0.5
    gap = badness[1] - badness[0]
    if abs(gap) <= 2 * error:
        return "within error"
    return "worse" if gap > 0 else "better"


def figure_text(mean: float, deviation: float | None, digits: int = 3) -> str:
    """Mean and deviation as the pages print them."""
    text = f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")
    return text.replace("-", "−")


def spread(found: np.ndarray) -> Figure:
    """Mean and standard deviation."""
    return float(found.mean()), float(found.std(ddof=min(1, len(found) - 1)))


def summary_of(found: dict[str, list[Record]]) -> Record:
    """Means and deviations by data set, method and score, for the JSON line."""
    return {
        name: {
            "splits": len(records),
            "chosen": records[0]["chosen"],
            "plan": records[0]["plan"],
            "rhat": max(r["sampling"]["rhat"] for r in records),
            "seconds": round(sum(sum(r["seconds"].values()) for r in records), 1),
            "methods": {
                method: {
                    score: dict(
                        zip(("mean", "sd"), spread(values(records, method, score)), strict=True)
                    )
                    for score in records[0]["methods"][method]
                }
                for method in records[0]["methods"]
            },
        }
        for name, records in found.items()
    }


def write_between(page: str | Path, name: str, text: str) -> None:
    """Put text between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page.

    Raises:
        InputError: a page without the marks.
    """
    path, marks = Path(page), (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    before = path.read_text()
    if any(mark not in before for mark in marks):
        fail("page", f"the marks {' and '.join(marks)} in '{path}'", "a page without them")
    begin, end = map(re.escape, marks)
    block = f"{marks[0]}\n\n{text}\n\n{marks[1]}"
    atomic_write_text(path, re.sub(f"{begin}.*{end}", lambda _: block, before, flags=re.DOTALL))
