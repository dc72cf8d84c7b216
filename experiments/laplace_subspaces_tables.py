"""Shared tables and figures of the experiments on subspaces of linearised Laplace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from experiments.markdown import markdown_table, number
from experiments.store import Record

Found = dict[str, list[Record]]
MEASURES = ("relative error", "log-trace", "NLL")
BETTER = ("lower is better", "higher is better", "lower is said to be better")
RIVALS = ("variance", "magnitude", "SWAG variance")
"""Subnetworks of the paper."""


def measured(records: list[Record], name: str, rank: str) -> np.ndarray:
    """Return relative error, log-trace and further measures by seed; log 0 is −∞."""
    rows = []
    for record in records:
        error, share, *rest = record["subspaces"][name][rank]
        logarithm = record["log_trace"] + math.log(share) if share > 0 else -math.inf
        rows.append([error, logarithm, *rest])
    return np.array(rows)


def mean_measures(records: list[Record], name: str, rank: str) -> list[float | None]:
    """Return means over seeds, None for infinite ones."""
    means = measured(records, name, rank).mean(0)
    return [float(value) if math.isfinite(value) else None for value in means]


def agreement(m: Record, k: int) -> float:
    """Return the fraction of pairs of subspaces of equal rank ordered as by the relative error.

    Pairs whose relative errors differ by at most 0.001 are not counted.

    Args:
        m: averages of a data set.
        k: index of the measure in `MEASURES`.
    """
    votes = []
    for rank in m["bound"]:
        for a, b in combinations(m["subspaces"].values(), 2):
            gap = a[rank][0] - b[rank][0] if rank in a and rank in b else 0.0
            if abs(gap) > 1e-3:
                one, other = (-math.inf if s[rank][k] is None else s[rank][k] for s in (a, b))
                votes.append((one < other if k == 1 else one > other) == (gap > 0))
    return float(np.mean(votes)) if votes else math.nan


def wins(m: Record, name: str) -> str:
    """Return the ranks at which a subspace has a larger trace than all subnetworks of the paper."""

    def trace(one: str, rank: str) -> float:
        found = m["subspaces"][one][rank][1]
        return -math.inf if found is None else found

    ranks = [rank for rank in m["bound"] if rank in m["subspaces"][name]]
    won = [
        rank for rank in ranks if trace(name, rank) > max(trace(other, rank) for other in RIVALS)
    ]
    return f"{len(won)} of {len(ranks)}" + (f" (s = {', '.join(won)})" if won else "")


def rankings(means: Record, titles: Mapping[str, str]) -> str:
    """Return the table of agreement between measures, and of low-rank subspaces against RIVALS."""
    rows = [
        [
            f"pairs of subspaces of one rank that the {MEASURES[k]} orders as the relative error "
            "does",
            *(percent(agreement(m, k)) for m in means.values()),
        ]
        for k in (1, 2)
    ]
    rows += [
        [
            f"ranks at which the log-trace of '{name}' is above that of variance, magnitude and "
            "SWAG variance",
            *(wins(m, name) for m in means.values()),
        ]
        for name in ("KFAC, training inputs", "diagonal, training inputs")
    ]
    return markdown_table(["", *(titles[name] for name in means)], rows, "Orders")


def measure_table(
    means: Record,
    k: int,
    titles: Mapping[str, str],
    ranks: Mapping[str, list[str]],
    digits: int,
    none: bool = False,
) -> str:
    """Return the table of one measure.

    Args:
        means: averages by data set.
        k: index of the measure in `MEASURES`.
        titles: titles of the data sets.
        ranks: ranks to show, by data set.
        digits: decimals.
        none: add a row of the NLL without epistemic variance.
    """
    cells = [(m, rank) for name, m in means.items() for rank in ranks[name]]
    names = list(next(iter(means.values()))["subspaces"])
    rows = [
        [
            name,
            *(
                measure_text(m["subspaces"][name][rank][k], digits)
                if rank in m["subspaces"][name]
                else ""
                for m, rank in cells
            ),
        ]
        for name in names
    ]
    last = {
        0: ("Eckart–Young bound", lambda m, rank: m["bound"][rank]),
        1: ("all weights", lambda m, _: m["log_trace"]),
        2: ("all weights", lambda m, _: m["nll"]["all weights"]),
    }[k]
    rows.append([last[0], *(number(last[1](m, rank), digits) for m, rank in cells)])
    if none:
        rows.append(["none", *(number(m["nll"]["none"], digits) for m, _ in cells)])
    head = [f"{titles[name]}, {rank}" for name in means for rank in ranks[name]]
    title = f"{MEASURES[k][0].upper() + MEASURES[k][1:]} by rank s; {BETTER[k]}"
    return markdown_table(["subspace", *head], rows, title)


# --- text -----------------------------------------------------------------------------------------


def thousands(value: float) -> str:
    """Format a count."""
    return f"{value:,.0f}".replace(",", " ")


def measure_text(value: float | None, digits: int) -> str:
    """Format a measure; None stands for −∞."""
    return "−∞" if value is None else number(value, digits)


def percent(value: float) -> str:
    """Format a fraction."""
    return f"{100 * value:.0f} %"


# --- figure ---------------------------------------------------------------------------------------


def line_styles(exact: str) -> dict[str, tuple[str, str]]:
    """Return colour and line style by subspace: low-rank ones solid, subnetworks dashed.

    Args:
        exact: name of the subspace of artificial inputs.
    """
    from subbayes.plots.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY

    return {
        "exact, inputs to predict": (INK, "-."),
        exact: (GREEN, "-"),
        "exact, training inputs": (GREY, "-"),
        "KFAC, training inputs": (BLUE, "-"),
        "diagonal, training inputs": (PURPLE, "-"),
        "KFAC, inputs to predict": (SKY, "-"),
        "variance": (PURPLE, "--"),
        "magnitude": (ORANGE, "--"),
        "SWAG variance": (RED, "--"),
        "predictive, inputs to predict": (GREEN, "--"),
    }


def measures_figure(
    found: Found,
    means: Record,
    titles: Mapping[str, str],
    lines: Mapping[str, tuple[str, str]],
    path: str | Path,
) -> None:
    """Plot the measures against s, one column per data set.

    Args:
        found: records by data set.
        means: averages by data set.
        titles: titles of the data sets.
        lines: colour and line style by subspace.
        path: PNG file.
    """
    from subbayes.plots.style import grid

    axes = grid(3, len(found), 3.3, 2.6)
    for j, (name, records) in enumerate(found.items()):
        _plot_column([row[j] for row in axes], records, means[name], lines, first=j == 0)
        axes[0][j].set_title(titles[name], fontsize=11)
    save(axes, path)


def _plot_column(
    column: Sequence[Any],
    records: list[Record],
    means: Record,
    lines: Mapping[str, tuple[str, str]],
    *,
    first: bool,
) -> None:
    """Plot relative error, log-trace and NLL of a data set in three axes."""
    from subbayes.plots.style import INK, label_axes

    lowest = math.inf
    for label, (color, style) in lines.items():
        ranks = [rank for rank in means["bound"] if rank in means["subspaces"][label]]
        s = [int(rank) for rank in ranks]
        every = np.array([measured(records, label, rank)[:, :3] for rank in ranks])
        every = np.where(np.isfinite(every), every, np.nan)  # (ranks, seeds, 3)
        middle, error = every.mean(1), every.std(1) / max(1, len(records) - 1) ** 0.5
        if label != "variance":
            lowest = min(lowest, float(np.nanmin(middle[:, 1])))
        for k, ax in enumerate(column):
            ax.plot(
                s,
                middle[:, k],
                color=color,
                linestyle=style,
                marker="o",
                markersize=3,
                linewidth=1.4,
                label=label if first and k == 0 else None,
            )
            if k < 2:  # the level of the NLL differs between seeds by more than subspaces do
                ax.fill_between(
                    s,
                    middle[:, k] - error[:, k],
                    middle[:, k] + error[:, k],
                    color=color,
                    alpha=0.15,
                    linewidth=0,
                )
    column[1].axhline(
        means["log_trace"], color=INK, linestyle=":", label="all weights" if first else None
    )
    column[2].axhline(means["nll"]["all weights"], color=INK, linestyle=":")
    column[0].set_ylim(-0.03, 1.05)
    column[1].set_ylim(lowest - 0.8, means["log_trace"] + 0.8)
    for k, ax in enumerate(column):
        ax.set_xscale("log")
        label_axes(ax, "s" if k == 2 else "", MEASURES[k] if first else "")


def save(axes: Sequence[Sequence[Any]], path: str | Path) -> None:
    """Save a grid of axes with one legend above."""
    from subbayes.plots import style

    columns = int(axes[0][0].figure.get_figwidth() // 2.2)
    axes[0][0].figure.legend(
        loc="outside upper center", ncols=min(4, columns), frameon=False, fontsize=9
    )
    style.save(axes[0][0].figure, path)
