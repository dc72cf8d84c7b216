"""Tables of `uci_large`: the authors' figures beside ours."""

from __future__ import annotations

import math

import numpy as np

from experiments.markdown import Figure, markdown_table, number, with_deviation
from experiments.uci_tables import METHODS, Found, page, verdict

__all__ = ["AUTHORS", "authors", "markdown"]

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
"""Figures of the notebook sgd_nl_results in the authors' repository, in the order of METHODS:
mean and deviation over splits, log-likelihoods of targets in their own units."""

SPLITS = {"skillcraft": 20, "pol": 20}
"""Number of splits of the authors' figures; 10 for the other data sets."""

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
    """Return the authors' figure, log-likelihoods normalised; None if they give none."""
    figure = AUTHORS[score][name][METHODS.index(method)]
    if figure is None or score != "log_likelihood":
        return figure
    return figure[0] + math.log(DEVIATIONS[name]), figure[1]


def _cells(score: str, name: str, method: str, ours: Figure, n: int) -> tuple[str, str]:
    theirs = authors(score, name, method)
    if theirs is None:
        return "", ""
    compared = verdict(score, theirs, ours, n, SPLITS.get(name, 10)) if n > 1 else ""
    return with_deviation(*theirs), compared


def _settings(found: Found) -> str:
    rows = []
    for name, records in found.items():
        plan, chosen = records[0]["plan"], records[0]["chosen"]
        shapes = [r["vi"]["pareto_k"] for r in records if r["vi"]["pareto_k"] is not None]
        rows.append(
            [
                name,
                f"{plan['epochs']}, {plan['batch_size']}",
                f"{chosen['learning_rate']:g}",
                f"{chosen['temperature']:g}",
                min(r["sampling"]["rank"] for r in records),
                f"{plan['chains']} × {plan['draws']}",
                f"{max(r['sampling']['rhat'] for r in records):.2f}",
                number(max(shapes), 2) if shapes else "",
                ", ".join(
                    f"{np.mean([r['seconds'][part] for r in records]):.0f}"
                    for part in ("training", "sampling", "vi")
                ),
            ]
        )
    head = (
        "data",
        "epochs, batch",
        "learning rate",
        "temperature",
        "rank",
        "chains × draws",
        "R-hat: worst",
        "Pareto k of VI: worst",
        "seconds a split: training, ESS, VI",
    )
    return markdown_table(head, rows, "Settings, and convergence of the inference")


def markdown(found: Found) -> str:
    """Return all tables, from the records of each data set."""
    return page(found, TITLES, ("authors' notebook", "ours is"), _cells, _settings(found))
