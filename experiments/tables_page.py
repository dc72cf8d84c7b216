"""Tables of the benchmark of tables, with the figures that bde publishes beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from experiments.datasets import find_file
from experiments.markdown import (
    distinct,
    markdown_table,
    mean_and_deviation,
    select,
    with_deviation,
)
from experiments.store import Record
from experiments.tables_methods import METHODS
from subbayes.utils.checks import InputError

__all__ = ["TARGETS", "markdown", "published", "summary"]

TARGETS = {
    "airfoil": {"rmse": 0.120, "nll": -0.93, "seconds": 240.0},
    "bike": {"rmse": 0.226, "nll": -0.7315, "seconds": 1800.0},
}
"""Upper limits for all weights from an ensemble, of the means over seeds."""

_NUMBERS = {
    "rmse": "RMSE",
    "nll": "NLL, Gaussian",
    "nll_mixture": "NLL, mixture",
    "coverage": "coverage of 90 %",
    "crps": "CRPS",
}
_CLASSES = {"nll": "NLL", "brier": "Brier", "accuracy": "accuracy"}
_PEERS = {
    "bde": "bde, published",
    "tabpfn": "TabPFN, published",
    "xgb": "XGBoost, published",
    "catboost": "CatBoost, published",
    "rf": "random forest, published",
    "de": "deep ensemble, published",
}


def published(name: str, data_dir: str | None) -> list[Record]:
    """Return the scores that bde's benchmark publishes for a data set; none if it has none.

    Its likelihoods are those of Gaussians, `nll_default`; where a method gives no variance that is
    missing, and the score stays empty.
    """
    try:
        frame = pd.read_csv(find_file(f"bde/results_{name}.csv", data_dir))
    except InputError:
        return []
    found = []
    for model, label in _PEERS.items():
        rows = frame[frame["model"] == model]
        if len(rows):
            values = {"rmse": rows["rmse"], "nll": rows["nll_default"]}
            found.append(
                {"label": label, "seconds": float(rows["total_time"].mean())}
                | {k: v.to_numpy() for k, v in values.items() if v.notna().all()}
            )
    return found


def _cells(values: Mapping[str, np.ndarray], head: Sequence[str]) -> list[str]:
    """Mean and deviation of each score; the score alone if there is one seed."""
    cells = []
    for key in head:
        scores = np.asarray(values.get(key, ()))
        mean, deviation = mean_and_deviation(scores) if len(scores) else (np.nan, None)
        text = with_deviation(mean, deviation if len(scores) > 1 else None)
        cells.append(text if len(scores) else "")
    return cells


def _table(name: str, records: Sequence[Record], data_dir: str | None) -> str:
    head = _NUMBERS if "rmse" in records[0] else _CLASSES
    rows = []
    for method in distinct(records, "method"):
        own = select(records, method=method)
        values = {key: np.array([r[key] for r in own]) for key in head if key in own[0]}
        seconds = [_seconds(own, part) for part in ("total", "cpu")]
        rows.append([METHODS[method].label, *_cells(values, list(head)), *seconds, len(own)])
    for peer in published(name, data_dir):
        values = {key: peer[key] for key in head if key in peer}
        rows.append([peer["label"], *_cells(values, list(head)), f"{peer['seconds']:.1f}", "", 5])
    threads = " or ".join(sorted({str(r["threads"]) for r in records}))
    loads = [r["load"] for r in records if "load" in r]
    title = f"{name}, mean ± standard deviation over seeds; threads of ours: {threads}"
    if loads:
        title += f"; load of the two cores {min(loads):.1f} to {max(loads):.1f}"
    columns = ("method", *head.values(), "seconds", "CPU seconds", "seeds")
    return markdown_table(columns, rows, title)


def _seconds(records: Sequence[Record], part: str) -> str:
    """Mean seconds as text, empty if a record of an older run has none."""
    mean = _mean_seconds(records, part)
    return f"{mean:.1f}" if np.isfinite(mean) else ""


def _mean_seconds(records: Sequence[Record], part: str) -> float:
    return float(np.mean([r["seconds"].get(part, np.nan) for r in records]))


def _targets(name: str, records: Sequence[Record]) -> str:
    """Scores of all weights beside their upper limits, with one process and with two."""
    rows, limits = [], TARGETS.get(name, {})
    for method in ("posterior", "processes"):
        own = select(records, method=method)
        if not (limits and own):
            continue
        figures = {
            "RMSE": (np.mean([r["rmse"] for r in own]), limits["rmse"]),
            "NLL, Gaussian": (np.mean([r["nll"] for r in own]), limits["nll"]),
            "seconds": (_mean_seconds(own, "total"), limits["seconds"]),
            "least seconds": (min(r["seconds"]["total"] for r in own), limits["seconds"]),
            "CPU seconds of a core": (
                _mean_seconds(own, "cpu") / own[0].get("processes", 1),
                limits["seconds"],
            ),
        }
        for label, (found, limit) in figures.items():
            if np.isfinite(found):
                holds = "yes" if found <= limit else "no"
                cells = [f"{found:.4g}", f"{limit:.4g}", holds]
                rows.append([METHODS[method].label, label, *cells])
    head = ("all weights", "", "ours", "at most", "holds")
    return markdown_table(head, rows, f"{name}, targets")


def _settings(found: Mapping[str, Sequence[Record]]) -> str:
    rows = []
    for name, records in found.items():
        for method in distinct(records, "method"):
            chosen = select(records, method=method)[0]["settings"]
            text = ", ".join(f"{key} {value:g}" for key, value in chosen.items())
            rows.append([name, METHODS[method].label, text, len(METHODS[method].candidates)])
    return markdown_table(
        ("data", "method", "settings", "candidates"), rows, "Settings selected on validation rows"
    )


def markdown(found: Mapping[str, Sequence[Record]], data_dir: str | None = None) -> str:
    """Return all tables, from the records of each data set."""
    parts = []
    for name, records in found.items():
        parts += [_table(name, records, data_dir), _targets(name, records)]
    return "\n\n".join(part for part in [*parts, _settings(found)] if part)


def summary(found: Mapping[str, Sequence[Record]]) -> Record:
    """Return the means over seeds, by data set and method."""
    means: Record = {}
    for name, records in found.items():
        means[name] = {}
        for method in distinct(records, "method"):
            own = select(records, method=method)
            scores = {**_NUMBERS, **_CLASSES}.keys() & own[0].keys()
            means[name][method] = {key: float(np.mean([r[key] for r in own])) for key in scores} | {
                "seconds": _mean_seconds(own, "total"),
                "seeds": len(own),
            }
    return means
