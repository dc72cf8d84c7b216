"""Tables and figures of `laplace_images`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from experiments.laplace_subspaces_tables import (
    MEASURES,
    Found,
    line_styles,
    mean_measures,
    measure_table,
    measures_figure,
    percent,
    rankings,
    save,
    thousands,
)
from experiments.markdown import markdown_table, number
from experiments.store import Record

WEIGHTS = {"mnist": "12 458", "fashion_mnist": "12 458", "cifar10": "668 234"}
"""Table 4 of the paper."""
TITLES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR-10"}
AUGMENTED = "exact, augmented"
SCORES = ("nll", "accuracy", "ece")
CORRUPTED_RANK = 1
"""Index of the rank of corrupted images in the table by corruption."""


def averages(records: list[Record]) -> Record:
    """Return means over seeds; of each subspace and rank: error, log-trace, NLL, accuracy, ECE."""
    first = records[0]
    plain = ("weights", "train", "curvature", "held_out", "log_trace", "test_accuracy", "seconds")
    kinds = first["corrupted"]
    return {
        **{key: float(np.mean([r[key] for r in records])) for key in plain},
        "approximate_curvature": float(np.mean([_approximate(r) for r in records])),
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


def _approximate(record: Record) -> int:
    """Return the number of images of KFAC and the diagonal, as of Ψ in the first records."""
    return record.get("approximate_curvature", record["curvature"])


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
    """Return all tables; empty without records."""
    if not found:
        return ""
    means = {name: averages(records) for name, records in found.items()}
    ranks = {name: ranks_shown(m) for name, m in means.items()}
    counts = ", ".join(f"{TITLES[name]} {len(records)}" for name, records in found.items())
    parts = [
        f"Seeds: {counts}. Means over seeds.",
        _networks(means),
        measure_table(means, 0, TITLES, ranks, 3),
        measure_table(means, 1, TITLES, ranks, 1),
        measure_table(means, 2, TITLES, ranks, 3, none=True),
        _large(means),
    ]
    for name, m in means.items():
        if m["corrupted"]:
            parts += [_by_corruption(name, m), _over_corruptions(name, m)]
    return "\n\n".join(part for part in [*parts, rankings(means, TITLES)] if part)


def _networks(means: Record) -> str:
    rows = [
        [
            TITLES[name],
            thousands(m["weights"]),
            WEIGHTS[name],
            thousands(m["train"]),
            thousands(m["curvature"]),
            thousands(m["approximate_curvature"]),
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
    head = (
        "data",
        "weights",
        "paper",
        "images learned from",
        "of these behind Ψ",
        "behind KFAC and the diagonal",
        "form",
        "held out",
        "test accuracy",
        "NLL without epistemic variance",
        "of all weights",
        "ECE without epistemic variance",
        "of all weights",
        "seconds a seed",
    )
    return markdown_table(head, rows, "Weights (table 4), and fit of the networks")


def ranks_shown(m: Record) -> list[str]:
    """Return the ranks of the tables: 20 (or the smallest) and the largest."""
    ranks = list(m["bound"])
    return list(dict.fromkeys(["20" if "20" in ranks else ranks[0], ranks[-1]]))


def _large(means: Record) -> str:
    """Return the table of subnetworks beyond the ranks of the other subspaces."""
    rows, head = {}, []
    for name, m in means.items():
        sizes = [rank for rank in m["subspaces"]["magnitude"] if rank not in m["bound"]]
        head += [f"{TITLES[name]}, {thousands(int(size))}" for size in sizes]
        for label, found in m["subspaces"].items():
            if sizes and sizes[0] in found:
                rows.setdefault(label, []).extend(number(found[size][0], 3) for size in sizes)
    return markdown_table(
        ["subnetwork", *head],
        [[label, *cells] for label, cells in rows.items()],
        "Relative error of large subnetworks (figure 5); lower is better",
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
    return markdown_table(
        ["corruption", "accuracy", "log-trace of all weights", "Eckart–Young bound", *labels],
        rows,
        f"{TITLES[name]} under corruptions (figure 3): relative error at s = {rank}",
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
    head = [
        "subspace",
        *(f"relative error, {rank}" for rank in ranks),
        *(f"share of the trace, {rank}" for rank in ranks),
    ]
    return markdown_table(head, rows, f"{TITLES[name]}, means over corruptions")


# --- figures --------------------------------------------------------------------------------------


def figures(found: Found, folder: str | Path) -> None:
    """Save figures 2 and 4 in one file, and figure 3 in another."""
    means = {name: averages(records) for name, records in found.items()}
    path = Path(folder) / "figures2and4.png"
    measures_figure(found, means, TITLES, line_styles(AUGMENTED), path)
    for m in means.values():
        if m["corrupted"]:
            _figure3(m, Path(folder) / "figure3.png")


def _figure3(m: Record, path: Path) -> None:
    """Plot relative error and log-trace by corruption; larger markers are larger ranks."""
    from subbayes.plots.style import INK, grid, label_axes

    kinds = m["corrupted"]
    ranks = list(next(iter(kinds.values()))["bound"])
    axes = grid(2, 1, 9.5, 3.4)
    for label, (color, style) in {**line_styles(AUGMENTED), "least possible": (INK, "-.")}.items():
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
