"""Shared tables of small and large UCI regression: scores of ours beside published ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from experiments.markdown import Figure, markdown_table, mean_and_deviation, with_deviation
from experiments.store import Record

METHODS = ("SGD", "SWAG", "PCA + ESS", "PCA + VI")
Found = dict[str, list[Record]]
"""Records of the splits by data set."""


def values(records: list[Record], method: str, score: str) -> np.ndarray:
    """Return one score of one method on all splits."""
    return np.array([r["methods"][method][score] for r in records])


def verdict(score: str, paper: Figure, ours: Figure, n: int, n_paper: int | None = None) -> str:
    """Compare our mean with the paper's, in standard errors of their difference.

    Args:
        score: "log_likelihood", "rmse" or "coverage".
        paper: mean and standard deviation over splits.
        ours: the same.
        n: number of our splits.
        n_paper: number of the paper's splits, by default n.
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


def page(
    found: Found,
    titles: dict[str, str],
    head: tuple[str, ...],
    cells: Callable[[str, str, str, Figure, int], tuple[str, ...]],
    settings: str,
    digits: Callable[[str, str], int] = lambda score, name: 3,
    methods: tuple[str, ...] = METHODS,
) -> str:
    """Return all tables: one per score, then the settings.

    Args:
        found: records.
        titles: title by score.
        head: names of the columns of published figures and of the verdict; the first is before our
            figures, the others after them.
        cells: returns these columns from score, data set, method, our figure and number of splits.
        settings: the last table.
        digits: decimals of our figures, from score and data set.
        methods: rows of each data set, where there are records.
    """
    counts = ", ".join(f"{name} {len(records)}" for name, records in found.items())
    parts = [f"Splits: {counts}. Mean ± standard deviation over splits."]
    for score, title in titles.items():
        mixture = score == "log_likelihood"
        rows = []
        for name, records in found.items():
            for method in (m for m in methods if m in records[0]["methods"]):
                ours = mean_and_deviation(values(records, method, score))
                paper, *further = cells(score, name, method, ours, len(records))
                row = [name, method, paper, with_deviation(*ours, digits(score, name))]
                if mixture:
                    density = values(records, method, "log_likelihood_mixture")
                    row.append(with_deviation(*mean_and_deviation(density)))
                rows.append([*row, *further])
        columns = ["data", "method", head[0], "ours", *["ours, mixture"] * mixture, *head[1:]]
        parts.append(markdown_table(columns, rows, title))
    return "\n\n".join([*parts, settings])


def summary_of(found: Found) -> Record:
    """Return means and deviations by data set, method and score, for the JSON line."""
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
                        zip(
                            ("mean", "sd"),
                            mean_and_deviation(values(records, method, score)),
                            strict=True,
                        )
                    )
                    for score in records[0]["methods"][method]
                }
                for method in records[0]["methods"]
            },
        }
        for name, records in found.items()
    }
