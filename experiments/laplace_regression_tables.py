"""Tables and figure of `laplace_regression`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.laplace_subspaces_tables import (
    Found,
    line_styles,
    mean_measures,
    measure_table,
    measures_figure,
    percent,
    rankings,
    thousands,
)
from experiments.markdown import markdown_table, number
from experiments.store import Record

WEIGHTS = {"energy": "17 922", "wine_red": "18 177", "california": "17 793", "naval": "18 690"}
"""Table 4 of the paper."""
DEAD = {"energy": "93 %"}
"""Table 6 of the paper, whose figures are missing in the text at hand; this one is in section 5."""
TITLES = {
    "energy": "energy (ENB)",
    "wine_red": "red wine",
    "california": "California",
    "naval": "naval",
}


def averages(records: list[Record]) -> Record:
    """Return means over seeds, at the ranks that all records have."""
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
    """Return all tables."""
    means = {name: averages(records) for name, records in found.items()}
    ranks = dict.fromkeys(means, ranks_shown(means))
    counts = ", ".join(f"{TITLES[name]} {len(records)}" for name, records in found.items())
    return "\n\n".join(
        [
            f"Seeds: {counts}. Means over seeds.",
            _networks(means),
            *(measure_table(means, k, TITLES, ranks, digits) for k, digits in enumerate((3, 1, 2))),
            rankings(means, TITLES),
        ]
    )


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
    head = (
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
    )
    title = "Weights (table 4), dead weights (table 6), and fit of the networks"
    return markdown_table(head, rows, title)


def ranks_shown(means: Record) -> list[str]:
    """Return the ranks of the tables: 20 and the largest rank common to all data sets."""
    common = [
        r
        for r in next(iter(means.values()))["bound"]
        if all(r in m["bound"] for m in means.values())
    ]
    return [r for r in common if r == "20" or r == common[-1]]


def figure(found: Found, path: str | Path) -> None:
    """Plot relative error, log-trace and NLL against s."""
    means = {name: averages(records) for name, records in found.items()}
    measures_figure(found, means, TITLES, line_styles("exact, columns drawn"), path)
