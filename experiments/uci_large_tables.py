"""The tables of `uci_large`: the authors' figures beside ours, from the records alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from experiments.store import Record
from experiments.uci import Figure, figure_text, spread, values, verdict, write_between

__all__ = ["AUTHORS", "authors", "markdown", "write"]

METHODS = ("SGD", "SWAG", "PCA + ESS", "PCA + VI")

AUTHORS: dict[str, dict[str, tuple[Figure | None, ...]]] = {
    "rmse": {
        "elevators": ((0.092, 0.003), (0.090, 0.002), (0.090, 0.002), (0.090, 0.002)),
        "skillcraft": ((0.279, 0.013), None, None, None),
        "pol": ((3.051, 0.469), None, None, None),
        "protein": ((0.443, 0.009), (0.447, 0.011), (0.440, 0.007), (0.444, 0.009)),
        "keggdirected": ((0.121, 0.003), (0.134, 0.005), (0.122, 0.003), (0.123, 0.003)),
        "keggundirected": ((0.125, 0.024), (0.125, 0.023), (0.125, 0.023), (0.125, 0.023)),
    },
    "log_likelihood": {
        "elevators": ((0.838, 0.108), (0.981, 0.030), (0.970, 0.041), (0.934, 0.038)),
        "skillcraft": ((-0.172, 0.032), None, None, None),
        "pol": ((-2.447, 0.217), None, None, None),
        "protein": ((-0.604, 0.027), (-0.604, 0.031), (-0.577, 0.021), (-0.591, 0.025)),
        "keggdirected": ((0.667, 0.022), (0.415, 0.013), (0.662, 0.017), (0.666, 0.018)),
        "keggundirected": ((0.719, 0.046), (0.725, 0.038), (0.726, 0.032), (0.720, 0.043)),
    },
    "coverage": {
        "elevators": ((0.857, 0.031), (0.904, 0.012), (0.893, 0.017), (0.878, 0.010)),
        "skillcraft": ((0.977, 0.009), None, None, None),
        "pol": ((0.939, 0.018), None, None, None),
        "protein": ((0.917, 0.007), (0.924, 0.007), (0.928, 0.007), (0.926, 0.007)),
        "keggdirected": ((0.965, 0.002), (0.982, 0.003), (0.966, 0.003), (0.965, 0.003)),
        "keggundirected": ((0.962, 0.012), (0.965, 0.009), (0.965, 0.009), (0.962, 0.012)),
    },
}
"""What the notebook sgd_nl_results of the authors' repository shows, by the order of METHODS:
mean and deviation over splits, log-likelihoods of targets in their own units."""

SPLITS = {"skillcraft": 20, "pol": 20}
"""Splits behind the authors' figures; 10 for the others."""

DEVIATIONS = {
    "elevators": 0.25257,
    "skillcraft": 0.38494,
    "pol": 41.724,
    "protein": 0.77300,
    "keggdirected": 1.37562,
    "keggundirected": 0.98157,
}
"""Standard deviation of the target: its logarithm normalises the authors' log-likelihoods."""

TITLES = {
    "rmse": "Test RMSE (table 5); lower is better",
    "log_likelihood": "Normalised test log-likelihood (table 6); higher is better",
    "coverage": "Coverage of the 95 % interval (table 7); nearer to 0.95 is better",
}


def authors(score: str, name: str, method: str) -> Figure | None:
    """The authors' figure, log-likelihoods normalised; None where they show none."""
    figure = AUTHORS[score][name][METHODS.index(method)]
    if figure is None or score != "log_likelihood":
        return figure
    return figure[0] + math.log(DEVIATIONS[name]), figure[1]


def _row(name: str, records: list[Record], method: str, score: str) -> str:
    ours, theirs = spread(values(records, method, score)), authors(score, name, method)
    cells = [name, method, figure_text(*theirs) if theirs else "", figure_text(*ours)]
    if score == "log_likelihood":
        cells.append(figure_text(*spread(values(records, method, "log_likelihood_mixture"))))
    cells.append(
        verdict(score, theirs, ours, len(records), SPLITS.get(name, 10))
        if theirs and len(records) > 1
        else ""
    )
    return "| " + " | ".join(cells) + " |"


def _table(score: str, found: dict[str, list[Record]]) -> str:
    head = ["data", "method", "authors' notebook", "ours"]
    head += ["ours, mixture"] if score == "log_likelihood" else []
    head += ["ours is"]
    lines = [f"**{TITLES[score]}**", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += [
        _row(name, records, method, score) for name, records in found.items() for method in METHODS
    ]
    return "\n".join(lines)


def _settings(found: dict[str, list[Record]]) -> str:
    head = [
        "data",
        "epochs, batch",
        "learning rate",
        "temperature",
        "rank",
        "chains × draws",
        "R-hat: worst",
        "Pareto k of VI: worst",
        "seconds a split: training, ESS, VI",
    ]
    lines = [
        "**Settings, and how inference went**",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for name, records in found.items():
        plan, chosen = records[0]["plan"], records[0]["chosen"]
        seconds = (
            f"{np.mean([r['seconds'][part] for r in records]):.0f}"
            for part in ("training", "sampling", "vi")
        )
        shapes = [r["vi"]["pareto_k"] for r in records if r["vi"]["pareto_k"] is not None]
        cells = [
            name,
            f"{plan['epochs']}, {plan['batch_size']}",
            f"{chosen['learning_rate']:g}",
            f"{chosen['temperature']:g}",
            min(r["sampling"]["rank"] for r in records),
            f"{plan['chains']} × {plan['draws']}",
            f"{max(r['sampling']['rhat'] for r in records):.2f}",
            figure_text(max(shapes), None, 2) if shapes else "",
            ", ".join(seconds),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def markdown(found: dict[str, list[Record]]) -> str:
    """All tables, from the records of each data set."""
    counts = ", ".join(f"{name} {len(records)}" for name, records in found.items())
    parts = [f"Splits: {counts}. Mean ± standard deviation over splits."]
    return "\n\n".join([*parts, *(_table(score, found) for score in TITLES), _settings(found)])


def write(page: str | Path, found: dict[str, list[Record]]) -> None:
    """Put the tables between the marks of a page.

    Raises:
        InputError: a page without the marks.
    """
    write_between(page, "uci_large", markdown(found))
