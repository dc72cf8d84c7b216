"""Tables and figures of the experiment on subspaces for linearised Laplace classification."""

from __future__ import annotations

import math
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

WEIGHTS = {"mnist": "12 458", "fashion_mnist": "12 458", "cifar10": "668 234"}
"""Table 4 of the paper."""
TITLES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR-10"}
SCORES = ("nll", "accuracy", "ece")
CORRUPTED_RANK = 1
"""Which of the ranks of the corrupted images the long table shows."""


def averages(records: list[Record]) -> Record:
    """Means over seeds, of each subspace by rank: error, log-trace, NLL, accuracy, ECE."""
    first = records[0]
    plain = ("weights", "train", "curvature", "held_out", "log_trace", "test_accuracy", "seconds")
    kinds = first["corrupted"]
    return {
        **{key: float(np.mean([r[key] for r in records])) for key in plain},
        "form": first["form"],
        **{
            score: {
                key: float(np.mean([r["scores"][key][k] for r in records]))
                for key in first["scores"]
            }
            for k, score in enumerate(SCORES)
        },
        "bound": {
            rank: float(np.mean([r["bound"][rank] for r in records])) for rank in first["bound"]
        },
        "subspaces": {
            name: {
                rank: mean_measures(records, name, rank)
                for rank in at
                if all(rank in r["subspaces"][name] for r in records)
            }
            for name, at in first["subspaces"].items()
        },
        "corrupted": {kind: _corrupted([r["corrupted"][kind] for r in records]) for kind in kinds},
    }


def _corrupted(records: list[Record]) -> Record:
    first = records[0]
    return {
        "accuracy": float(np.mean([r["accuracy"] for r in records])),
        "log_trace": float(np.mean([math.log(r["trace"]) for r in records])),
        "bound": {
            rank: float(np.mean([r["bound"][rank] for r in records])) for rank in first["bound"]
        },
        "subspaces": {
            name: {
                rank: np.mean([r["subspaces"][name][rank] for r in records], 0).tolist()
                for rank in at
                if all(rank in r["subspaces"][name] for r in records)
            }
            for name, at in first["subspaces"].items()
        },
    }


# --- tables ---------------------------------------------------------------------------------------


def page(found: Found) -> str:
    """All tables."""
    means = {name: averages(records) for name, records in found.items()}
    counts = ", ".join(f"{TITLES[name]} {len(records)}" for name, records in found.items())
    parts = [
        f"Seeds: {counts}. Means over seeds.",
        _networks(means),
        *(_measure(means, k) for k in range(3)),
        _large(means),
    ]
    for name, m in means.items():
        if m["corrupted"]:
            parts += [_by_corruption(name, m), _over_corruptions(name, m)]
    return "\n\n".join(part for part in [*parts, rankings(means, TITLES)] if part)


def write(found: Found, path: str | Path) -> None:
    """The tables between the marks of a page."""
    write_between(path, "laplace_images", page(found))


def _networks(means: Record) -> str:
    rows = [
        [
            TITLES[name],
            thousands(m["weights"]),
            WEIGHTS[name],
            thousands(m["train"]),
            thousands(m["curvature"]),
            m["form"],
            thousands(m["held_out"]),
            f"{100 * m['test_accuracy']:.1f} %",
            *(
                number(m[score][key], 3)
                for score in ("nll", "ece")
                for key in ("none", "all weights")
            ),
            thousands(m["seconds"]),
        ]
        for name, m in means.items()
    ]
    return table(
        "Weights (table 4), and how the networks are",
        [
            "data",
            "weights",
            "paper",
            "images learned from",
            "of these behind Ψ",
            "form",
            "held out",
            "test accuracy",
            "NLL without epistemic variance",
            "of all weights",
            "ECE without epistemic variance",
            "of all weights",
            "seconds a seed",
        ],
        rows,
    )


def shown(m: Record) -> list[str]:
    """Ranks in the tables: 20 (or the first) and the largest."""
    ranks = list(m["bound"])
    return list(dict.fromkeys(["20" if "20" in ranks else ranks[0], ranks[-1]]))


def _measure(means: Record, k: int) -> str:
    names = list(next(iter(means.values()))["subspaces"])
    cells = [(m, rank) for m in means.values() for rank in shown(m)]
    digits = (3, 1, 3)[k]
    rows = [
        [name, *(_cell(m["subspaces"][name], rank, k, digits) for m, rank in cells)]
        for name in names
    ]
    last = {
        0: ("Eckart–Young bound", lambda m, rank: m["bound"][rank]),
        1: ("all weights", lambda m, _: m["log_trace"]),
        2: ("all weights", lambda m, _: m["nll"]["all weights"]),
    }[k]
    rows.append([last[0], *(number(last[1](m, rank), digits) for m, rank in cells)])
    if k == 2:
        rows.append(["none", *(number(m["nll"]["none"], digits) for m, _ in cells)])
    head = [f"{TITLES[name]}, {rank}" for name, m in means.items() for rank in shown(m)]
    return table(
        f"{MEASURES[k][0].upper() + MEASURES[k][1:]} by rank s; {BETTER[k]}",
        ["subspace", *head],
        rows,
    )


def _cell(found: Record, rank: str, k: int, digits: int) -> str:
    return number(found[rank][k], digits) if rank in found else ""


def _large(means: Record) -> str:
    """Subnetworks beyond the ranks of the others."""
    rows, head = {}, []
    for name, m in means.items():
        sizes = [rank for rank in m["subspaces"]["magnitude"] if rank not in m["bound"]]
        head += [f"{TITLES[name]}, {thousands(int(size))}" for size in sizes]
        for label, found in m["subspaces"].items():
            if sizes and sizes[0] in found:
                rows.setdefault(label, []).extend(number(found[size][0], 3) for size in sizes)
    return (
        table(
            "Relative error of large subnetworks (figure 5); lower is better",
            ["subnetwork", *head],
            [[label, *cells] for label, cells in rows.items()],
        )
        if rows
        else ""
    )


def _by_corruption(name: str, m: Record) -> str:
    kinds = m["corrupted"]
    some = next(iter(kinds.values()))
    rank = list(some["bound"])[min(CORRUPTED_RANK, len(some["bound"]) - 1)]
    labels = [label for label, found in some["subspaces"].items() if rank in found]
    rows = [
        [
            kind,
            percent(c["accuracy"]),
            number(c["log_trace"], 1),
            number(c["bound"][rank], 2),
            *(number(c["subspaces"][label][rank][0], 2) for label in labels),
        ]
        for kind, c in kinds.items()
    ]
    return table(
        f"{TITLES[name]} under corruptions (figure 3): relative error at s = {rank}",
        ["corruption", "accuracy", "log-trace of all weights", "Eckart–Young bound", *labels],
        rows,
    )


def _over_corruptions(name: str, m: Record) -> str:
    kinds = list(m["corrupted"].values())
    ranks = list(kinds[0]["bound"])
    rows = []
    for label, found in kinds[0]["subspaces"].items():
        rows.append(
            [
                label,
                *(
                    number(float(np.mean([c["subspaces"][label][rank][k] for c in kinds])), 3)
                    if rank in found
                    else ""
                    for k in (0, 1)
                    for rank in ranks
                ),
            ]
        )
    bounds = [float(np.mean([c["bound"][rank] for c in kinds])) for rank in ranks]
    rows.append(["Eckart–Young bound", *(number(v, 3) for v in bounds), *[""] * len(ranks)])
    return table(
        f"{TITLES[name]}, means over corruptions",
        [
            "subspace",
            *(f"relative error, {rank}" for rank in ranks),
            *(f"share of the trace, {rank}" for rank in ranks),
        ],
        rows,
    )


# --- figures --------------------------------------------------------------------------------------


def figures(found: Found, folder: str | Path) -> None:
    """Figures 2 and 4 in one picture, figure 3 in another."""
    from subbayes.plots.style import grid

    axes = grid(3, len(found), 3.3, 2.6)
    for j, (name, records) in enumerate(found.items()):
        curves([row[j] for row in axes], records, averages(records), _lines(), first=j == 0)
        axes[0][j].set_title(TITLES[name], fontsize=11)
    save(axes, Path(folder) / "figures2and4.png")
    for records in found.values():
        if records[0]["corrupted"]:
            _figure3(averages(records), Path(folder) / "figure3.png")


def _lines() -> dict[str, tuple[str, str]]:
    """Colours and styles: low-rank subspaces solid, subnetworks dashed, as in the paper."""
    from subbayes.plots.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY

    return {
        "exact, inputs to predict": (INK, "-."),
        "exact, augmented": (GREEN, "-"),
        "exact, training inputs": (GREY, "-"),
        "KFAC, training inputs": (BLUE, "-"),
        "diagonal, training inputs": (PURPLE, "-"),
        "KFAC, inputs to predict": (SKY, "-"),
        "variance": (PURPLE, "--"),
        "magnitude": (ORANGE, "--"),
        "SWAG variance": (RED, "--"),
        "predictive, inputs to predict": (GREEN, "--"),
    }


def _figure3(m: Record, path: Path) -> None:
    """Relative error and log-trace by corruption; larger markers are larger ranks."""
    from subbayes.plots.style import INK, grid, label_axes

    kinds = m["corrupted"]
    ranks = list(next(iter(kinds.values()))["bound"])
    axes = grid(2, 1, 9.5, 3.4)
    for label, (color, style) in {**_lines(), "least possible": (INK, "-.")}.items():
        for size, rank in zip((16, 40, 80), ranks, strict=False):
            points = [_point(c, label, rank) for c in kinds.values()]
            for k in range(2):
                y = [point[k] for point in points]
                if any(math.isfinite(value) for value in y):
                    axes[k][0].scatter(
                        range(len(y)),
                        y,
                        s=size,
                        c=color,
                        alpha=0.75,
                        marker="s" if style == "--" else "o",
                        linewidths=0,
                        label=label if rank == ranks[-1] and k == 0 else None,
                    )
    axes[0][0].set_ylim(-0.03, 1.05)
    for k in range(2):
        axes[k][0].set_xticks(
            range(len(kinds)), list(kinds) if k else [""] * len(kinds), rotation=40, ha="right"
        )
        label_axes(axes[k][0], "", MEASURES[k])
    axes[1][0].scatter(
        range(len(kinds)),
        [c["log_trace"] for c in kinds.values()],
        marker="_",
        s=150,
        c=INK,
        label="all weights",
    )
    save(axes, path)


def _point(c: Record, label: str, rank: str) -> tuple[float, float]:
    if label == "least possible":
        return c["bound"][rank], math.nan
    found = c["subspaces"].get(label, {}).get(rank)
    if found is None:
        return math.nan, math.nan
    return found[0], c["log_trace"] + math.log(found[1]) if found[1] > 1e-6 else math.nan
