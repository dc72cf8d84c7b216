"""What tables and figures of the experiments on subspaces of linearised Laplace share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from experiments.store import Record

Found = dict[str, list[Record]]
MEASURES = ("relative error", "log-trace", "NLL")
BETTER = ("lower is better", "higher is better", "lower is said to be better")
RIVALS = ("variance", "magnitude", "SWAG variance")
"""The subnetworks of the paper."""


def measured(records: list[Record], name: str, rank: str) -> np.ndarray:
    """Relative error, log-trace and what else there is by seed; no trace has log −∞."""
    rows = []
    for record in records:
        error, share, *rest = record["subspaces"][name][rank]
        logarithm = record["log_trace"] + math.log(share) if share > 0 else -math.inf
        rows.append([error, logarithm, *rest])
    return np.array(rows)


def mean_measures(records: list[Record], name: str, rank: str) -> list[float | None]:
    """Means over seeds; None where one is infinite."""
    means = measured(records, name, rank).mean(0)
    return [float(value) if math.isfinite(value) else None for value in means]


def agreement(m: Record, k: int) -> float:
    """The share of pairs of subspaces of one rank that a measure ranks as the relative error does.

    Pairs whose relative errors are within 0.001 of each other have no vote.
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
    """At how many ranks a subspace has a larger trace than all subnetworks of the paper."""

    def trace(one: str, rank: str) -> float:
        found = m["subspaces"][one][rank][1]
        return -math.inf if found is None else found

    ranks = [rank for rank in m["bound"] if rank in m["subspaces"][name]]
    won = [
        rank for rank in ranks if trace(name, rank) > max(trace(other, rank) for other in RIVALS)
    ]
    return f"{len(won)} of {len(ranks)}" + (f" (s = {', '.join(won)})" if won else "")


def rankings(means: Record, titles: Mapping[str, str]) -> str:
    """Whether measures agree on an order, and low-rank subspaces against subnetworks."""
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
    return table("Orders", ["", *(titles[name] for name in means)], rows)


# --- text -----------------------------------------------------------------------------------------


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    """A table of a page, under its title."""
    lines = [head, ["---"] * len(head), *rows]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def thousands(value: float) -> str:
    """A count."""
    return f"{value:,.0f}".replace(",", " ")


def number(value: float | None, digits: int) -> str:
    """A number, or −∞ for None."""
    if value is None:
        return "−∞"
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.0f} %"


# --- figure ---------------------------------------------------------------------------------------


def curves(
    column: Sequence[Any],
    records: list[Record],
    means: Record,
    lines: Mapping[str, tuple[str, str]],
    *,
    first: bool,
) -> None:
    """Measures against s in the axes of one data set, one below another.

    Args:
        column: axes of relative error, log-trace and NLL.
        records: of the data set.
        means: their averages.
        lines: colour and line style by subspace.
        first: labels go to the first data set.
    """
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
    """A grid of axes with one legend above."""
    from subbayes.plots import style

    columns = int(axes[0][0].figure.get_figwidth() // 2.2)
    axes[0][0].figure.legend(
        loc="outside upper center", ncols=min(4, columns), frameon=False, fontsize=9
    )
    style.save(axes[0][0].figure, path)
