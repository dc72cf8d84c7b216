"""Tables and the figure of the experiment on subspaces for linearised Laplace regression."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.laplace_subspaces_tables import (
    BETTER,
    MEASURES,
    Found,
    curves,
    mean_measures,
    number,
    percent,
    rankings,
    save,
    table,
    thousands,
)
from experiments.store import Record
from experiments.uci import write_between

WEIGHTS = {"energy": "17 922", "wine_red": "18 177", "california": "17 793", "naval": "18 690"}
"""Table 4 of the paper."""
DEAD = {"energy": "93 %"}
"""Table 6 of the paper: the stored text has lost its figures; this one is in section 5."""
TITLES = {
    "energy": "energy (ENB)",
    "wine_red": "red wine",
    "california": "California",
    "naval": "naval",
}


def averages(records: list[Record]) -> Record:
    """Means over seeds: at ranks that all have, of each subspace the three measures."""
    ranks = [rank for rank in records[0]["bound"] if all(rank in r["bound"] for r in records)]
    plain = (
        "weights",
        "columns",
        "train",
        "held_out",
        "rank",
        "held_out_rank",
        "dead",
        "nearly_dead",
        "noise",
        "rmse",
        "log_trace",
        "seconds",
    )
    return {
        **{key: float(np.mean([r[key] for r in records])) for key in plain},
        "nll": {key: float(np.mean([r["nll"][key] for r in records])) for key in records[0]["nll"]},
        "bound": {rank: float(np.mean([r["bound"][rank] for r in records])) for rank in ranks},
        "subspaces": {
            name: {rank: mean_measures(records, name, rank) for rank in ranks}
            for name in records[0]["subspaces"]
        },
    }


# --- tables ---------------------------------------------------------------------------------------


def page(found: Found) -> str:
    """All tables."""
    means = {name: averages(records) for name, records in found.items()}
    counts = ", ".join(f"{TITLES[name]} {len(records)}" for name, records in found.items())
    return "\n\n".join(
        [
            f"Seeds: {counts}. Means over seeds.",
            _networks(means),
            *(_measure(means, k) for k in range(3)),
            rankings(means, TITLES),
        ]
    )


def write(found: Found, path: str | Path) -> None:
    """The tables between the marks of a page."""
    write_between(path, "laplace_regression", page(found))


def _networks(means: Record) -> str:
    rows = [
        [
            TITLES[name],
            thousands(m["weights"]),
            WEIGHTS[name],
            f"{m['train']:.0f}",
            f"{m['held_out']:.0f}",
            f"{m['rank']:.0f}",
            percent(m["dead"]),
            percent(m["nearly_dead"]),
            DEAD.get(name, "lost"),
            f"{m['noise']:.3f}",
            f"{m['rmse']:.3f}",
            number(m["nll"]["none"], 2),
            number(m["nll"]["all weights"], 2),
        ]
        for name, m in means.items()
    ]
    return table(
        "Weights (table 4), dead weights (table 6), and how the networks are",
        [
            "data",
            "weights",
            "paper",
            "training rows",
            "held out",
            "rank of the Jacobian",
            "dead weights",
            "nearly dead",
            "paper",
            "noise",
            "held-out RMSE",
            "NLL without epistemic variance",
            "NLL of all weights",
        ],
        rows,
    )


def shown(means: Record) -> list[str]:
    """Ranks in the tables: of those that all data sets have, 20 and the largest."""
    common = [
        r
        for r in next(iter(means.values()))["bound"]
        if all(r in m["bound"] for m in means.values())
    ]
    return [r for r in common if r == "20" or r == common[-1]]


def _measure(means: Record, k: int) -> str:
    ranks = shown(means)
    names = list(next(iter(means.values()))["subspaces"])
    digits = (3, 1, 2)[k]
    rows = [
        [
            name,
            *(
                number(m["subspaces"][name][rank][k], digits)
                for m in means.values()
                for rank in ranks
            ),
        ]
        for name in names
    ]
    last = {
        0: ("Eckart–Young bound", lambda m, rank: m["bound"][rank]),
        1: ("all weights", lambda m, _: m["log_trace"]),
        2: ("all weights", lambda m, _: m["nll"]["all weights"]),
    }[k]
    rows.append(
        [last[0], *(number(last[1](m, rank), digits) for m in means.values() for rank in ranks)]
    )
    head = [f"{TITLES[name]}, {rank}" for name in means for rank in ranks]
    return table(
        f"{MEASURES[k][0].upper() + MEASURES[k][1:]} by rank s; {BETTER[k]}",
        ["subspace", *head],
        rows,
    )


# --- figure ---------------------------------------------------------------------------------------


def figure(found: Found, path: str | Path) -> None:
    """Relative error, log-trace and NLL against s: low-rank subspaces solid, subnetworks dashed."""
    from subbayes.plots.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, grid

    lines = {
        "exact, inputs to predict": (INK, "-."),
        "exact, columns drawn": (GREEN, "-"),
        "exact, training inputs": (GREY, "-"),
        "KFAC, training inputs": (BLUE, "-"),
        "diagonal, training inputs": (PURPLE, "-"),
        "KFAC, inputs to predict": (SKY, "-"),
        "variance": (PURPLE, "--"),
        "magnitude": (ORANGE, "--"),
        "SWAG variance": (RED, "--"),
        "predictive, inputs to predict": (GREEN, "--"),
    }
    axes = grid(3, len(found), 3.3, 2.6)
    for j, (name, records) in enumerate(found.items()):
        curves([row[j] for row in axes], records, averages(records), lines, first=j == 0)
        axes[0][j].set_title(TITLES[name], fontsize=11)
    save(axes, path)
