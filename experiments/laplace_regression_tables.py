"""Tables and the figure of the experiment on subspaces for linearised Laplace regression."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import numpy as np

from experiments.store import Record
from experiments.uci import write_between

Found = dict[str, list[Record]]
WEIGHTS = {"energy": "17 922", "wine_red": "18 177", "california": "17 793", "naval": "18 690"}
"""Table 4 of the paper."""
DEAD = {"energy": "93 %"}
"""Table 6 of the paper: the stored text has lost its figures; this one is in section 5."""
MEASURES = ("relative error", "log-trace", "NLL")
TITLES = {"energy": "energy (ENB)", "wine_red": "red wine", "california": "California",
          "naval": "naval"}


def averages(records: list[Record]) -> Record:
    """Means over seeds: at ranks that all have, of each subspace the three measures."""
    ranks = [rank for rank in records[0]["bound"] if all(rank in r["bound"] for r in records)]
    plain = ("weights", "columns", "train", "held_out", "rank", "held_out_rank", "dead",
             "nearly_dead", "noise", "rmse", "log_trace", "seconds")
    return {
        **{key: float(np.mean([r[key] for r in records])) for key in plain},
        "nll": {key: float(np.mean([r["nll"][key] for r in records])) for key in records[0]["nll"]},
        "bound": {rank: float(np.mean([r["bound"][rank] for r in records])) for rank in ranks},
        "subspaces": {name: {rank: _finite(measured(records, name, rank).mean(0))
                             for rank in ranks} for name in records[0]["subspaces"]}}


def measured(records: list[Record], name: str, rank: str) -> np.ndarray:
    """Relative error, log-trace and NLL by seed, shape (seeds, 3); no trace has log −∞."""
    rows = []
    for record in records:
        error, share, nll = record["subspaces"][name][rank]
        logarithm = record["log_trace"] + math.log(share) if share > 0 else -math.inf
        rows.append([error, logarithm, nll])
    return np.array(rows)


def _finite(values: np.ndarray) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]


# --- tables ---------------------------------------------------------------------------------------


def page(found: Found) -> str:
    """All tables."""
    means = {name: averages(records) for name, records in found.items()}
    counts = ", ".join(f"{TITLES[name]} {len(records)}" for name, records in found.items())
    return "\n\n".join([f"Seeds: {counts}. Means over seeds.", _networks(means),
                        *(_measure(means, k) for k in range(3)), _rankings(means)])


def write(found: Found, path: str | Path) -> None:
    """The tables between the marks of a page."""
    write_between(path, "laplace_regression", page(found))


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _networks(means: Record) -> str:
    rows = [[TITLES[name], _thousands(m["weights"]), WEIGHTS[name], f"{m['train']:.0f}",
             f"{m['held_out']:.0f}", f"{m['rank']:.0f}", f"{100 * m['dead']:.0f} %",
             f"{100 * m['nearly_dead']:.0f} %", DEAD.get(name, "lost"), f"{m['noise']:.3f}",
             f"{m['rmse']:.3f}", _number(m["nll"]["none"], 2), _number(m["nll"]["all weights"], 2)]
            for name, m in means.items()]
    return _table("Weights (table 4), dead weights (table 6), and how the networks are", [
        "data", "weights", "paper", "training rows", "held out", "rank of the Jacobian",
        "dead weights", "nearly dead", "paper", "noise", "held-out RMSE", "NLL without epistemic "
        "variance", "NLL of all weights"], rows)


def _thousands(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def shown(means: Record) -> list[str]:
    """Ranks in the tables: of those that all data sets have, 20 and the largest."""
    common = [r for r in next(iter(means.values()))["bound"]
              if all(r in m["bound"] for m in means.values())]
    return [r for r in common if r == "20" or r == common[-1]]


def _measure(means: Record, k: int) -> str:
    ranks = shown(means)
    names = list(next(iter(means.values()))["subspaces"])
    digits = (3, 1, 2)[k]
    rows = [[name, *(_number(m["subspaces"][name][rank][k], digits)
                     for m in means.values() for rank in ranks)] for name in names]
    last = {0: ("Eckart–Young bound", lambda m, rank: m["bound"][rank]),
            1: ("all weights", lambda m, _: m["log_trace"]),
            2: ("all weights", lambda m, _: m["nll"]["all weights"])}[k]
    rows.append([last[0], *(_number(last[1](m, rank), digits)
                            for m in means.values() for rank in ranks)])
    better = ("lower is better", "higher is better", "lower is said to be better")[k]
    head = [f"{TITLES[name]}, {rank}" for name in means for rank in ranks]
    return _table(f"{MEASURES[k][0].upper() + MEASURES[k][1:]} by rank s; {better}",
                  ["subspace", *head], rows)


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "−∞"
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def agreement(m: Record, k: int) -> float:
    """The share of pairs of subspaces of one rank that a measure ranks as the relative error does.

    Pairs whose relative errors are within 0.001 of each other have no vote.
    """
    votes = []
    for rank in m["bound"]:
        for a, b in combinations(m["subspaces"].values(), 2):
            gap = a[rank][0] - b[rank][0]
            if abs(gap) > 1e-3:
                one, other = (-math.inf if s[rank][k] is None else s[rank][k] for s in (a, b))
                votes.append((one < other if k == 1 else one > other) == (gap > 0))
    return float(np.mean(votes)) if votes else math.nan


def _rankings(means: Record) -> str:
    rows = [[f"pairs of subspaces of one rank that the {MEASURES[k]} orders as the relative error "
             "does", *(f"{100 * agreement(m, k):.0f} %" for m in means.values())] for k in (1, 2)]
    rows += [[f"ranks at which the log-trace of '{name}' is above that of variance, magnitude and "
              "SWAG variance", *(_wins(m, name) for m in means.values())]
             for name in ("KFAC, training inputs", "diagonal, training inputs")]
    return _table("Orders", ["", *(TITLES[name] for name in means)], rows)


def _wins(m: Record, name: str) -> str:
    def trace(one: str, rank: str) -> float:
        found = m["subspaces"][one][rank][1]
        return -math.inf if found is None else found

    others = ("variance", "magnitude", "SWAG variance")
    won = [rank for rank in m["bound"]
           if trace(name, rank) > max(trace(other, rank) for other in others)]
    return f"{len(won)} of {len(m['bound'])}" + (f" (s = {', '.join(won)})" if won else "")


# --- figure ---------------------------------------------------------------------------------------


def figure(found: Found, path: str | Path) -> None:
    """Relative error, log-trace and NLL against s: low-rank subspaces solid, subnetworks dashed."""
    from subbayes.plots.style import (
        BLUE,
        GREEN,
        GREY,
        INK,
        ORANGE,
        PURPLE,
        RED,
        SKY,
        grid,
        labelled,
        save,
    )

    lines = {
        "exact, inputs to predict": (INK, "-."), "exact, columns drawn": (GREEN, "-"),
        "exact, training inputs": (GREY, "-"), "KFAC, training inputs": (BLUE, "-"),
        "diagonal, training inputs": (PURPLE, "-"), "KFAC, inputs to predict": (SKY, "-"),
        "variance": (PURPLE, "--"), "magnitude": (ORANGE, "--"), "SWAG variance": (RED, "--"),
        "predictive, inputs to predict": (GREEN, "--")}
    axes, lowest = grid(3, len(found), 3.3, 2.6), [math.inf] * len(found)
    for j, (name, records) in enumerate(found.items()):
        means = averages(records)
        ranks = list(means["bound"])
        s = [int(rank) for rank in ranks]
        for label, (color, style) in lines.items():
            all_ = np.array([measured(records, label, rank) for rank in ranks])  # (ranks, seeds, 3)
            all_ = np.where(np.isfinite(all_), all_, np.nan)
            middle, error = all_.mean(1), all_.std(1) / max(1, len(records) - 1) ** 0.5
            if label != "variance":
                lowest[j] = min(lowest[j], float(np.nanmin(middle[:, 1])))
            for k in range(3):
                ax = axes[k][j]
                ax.plot(s, middle[:, k], color=color, linestyle=style, marker="o", markersize=3,
                        linewidth=1.4, label=label if j == k == 0 else None)
                if k < 2:  # the level of the NLL differs between seeds by more than subspaces do
                    ax.fill_between(s, middle[:, k] - error[:, k], middle[:, k] + error[:, k],
                                    color=color, alpha=0.15, linewidth=0)
        axes[1][j].axhline(means["log_trace"], color=INK, linestyle=":",
                           label="all weights" if j == 0 else None)
        axes[2][j].axhline(means["nll"]["all weights"], color=INK, linestyle=":")
        axes[0][j].set_title(TITLES[name], fontsize=11)
        axes[0][j].set_ylim(-0.03, 1.05)
        axes[1][j].set_ylim(lowest[j] - 0.8, means["log_trace"] + 0.8)
        for k in range(3):
            axes[k][j].set_xscale("log")
            labelled(axes[k][j], "s" if k == 2 else "", MEASURES[k] if j == 0 else "")
    axes[0][0].figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    save(axes[0][0].figure, path)
