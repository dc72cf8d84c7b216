"""Tables of the experiment with adapters: scores, and paired differences over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.adapters_methods import METHODS
from experiments.markdown import distinct, markdown_table, select, with_deviation
from experiments.store import Record

__all__ = ["best_subspace", "differences", "further_seconds", "goals", "markdown", "summary"]

_SCORES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "auroc": "AUROC, out of scope",
}
LEAST_WINS = 4
SELECTING_SEED = 0
"""Seed in whose process the settings are selected, which makes trainings that methods share."""


def best_subspace(records: Sequence[Record]) -> str | None:
    """The subspace with the best mean NLL of the validation rows, over the seeds that all have."""
    found = {
        method: {r["seed"]: r["validation_nll"] for r in select(records, method=method)}
        for method in distinct(records, "method")
        if METHODS[method].is_subspace
    }
    every = sorted(set.intersection(*map(set, found.values()))) if found else []
    means = {method: sum(one[seed] for seed in every) for method, one in found.items() if every}
    return min(means, key=lambda method: means[method], default=None)


def differences(
    records: Sequence[Record], method: str, other: str, score: str
) -> tuple[float, float, int]:
    """Mean of the differences "other minus method" over the seeds of both, its error, and seeds.

    The error is NaN for a single seed.
    """
    first, second = (
        {r["seed"]: r[score] for r in select(records, method=name)} for name in (method, other)
    )
    both = sorted(first.keys() & second.keys())
    values = np.array([second[seed] - first[seed] for seed in both])
    if not len(values):
        return np.nan, np.nan, 0
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error), len(values)


def further_seconds(records: Sequence[Record]) -> float | None:
    """Median CPU seconds of a method after the trainings that the methods before it have made.

    Of all seeds but the one of the selection, which has made them before. The median is not that of
    a seed that was resumed, in which a method makes them once more.

    Args:
        records: of one method.

    Returns:
        None if there are no such seeds, or if any of them ran on another device than a CPU.
    """
    own = [r for r in records if r["seed"] != SELECTING_SEED]
    if not own or any(r.get("device", "cpu") != "cpu" for r in own):
        return None
    return float(np.median([r["seconds"]["fit_cpu"] + r["seconds"]["prediction_cpu"] for r in own]))


def _scores_table(name: str, records: Sequence[Record]) -> str:
    rows = []
    for method in distinct(records, "method"):
        own = select(records, method=method)
        values = {key: np.array([r[key] for r in own]) for key in _SCORES}
        cells = [
            with_deviation(v.mean(), v.std(ddof=1) / np.sqrt(len(v)) if len(v) > 1 else None)
            for v in values.values()
        ]
        seconds = further_seconds(own)
        shown = "–" if seconds is None else f"{seconds:.0f}"
        rows.append([METHODS[method].label, *cells, shown, len(own)])
    head = ("method", *_SCORES.values(), "further CPU seconds", "seeds")
    title = f"{name}, mean ± standard error over seeds"
    bases = {r["base"] for r in records if "base" in r}
    if len(bases) > 1:
        title += f"; with {len(bases)} base models"
    return markdown_table(head, rows, title)


def _differences_table(name: str, records: Sequence[Record], method: str) -> str:
    rows = []
    for other in distinct(records, "method"):
        if other == method:
            continue
        cells = []
        for score in ("nll", "brier", "ece", "auroc"):
            mean, error, seeds = differences(records, method, other, score)
            cells.append(with_deviation(mean, None if np.isnan(error) else error))
        rows.append([METHODS[other].label, *cells, seeds])
    title = f"{name}, difference to {METHODS[method].label}, paired by seed, ± standard error"
    return markdown_table(("method", "NLL", "Brier", "ECE", "AUROC", "seeds"), rows, title)


def goals(records: Sequence[Record], method: str) -> Record:
    """Whether a posterior in a subspace has what was aimed at.

    Returns:
        Numbers of baselines whose NLL is higher by two standard errors ("wins") and lower by two
        ("losses"), those with a lower mean ("ahead", their names), and the difference of the AUROC
        from the one of the ensemble.
    """
    others = [m for m in distinct(records, "method") if not METHODS[m].is_subspace]
    found = {other: differences(records, method, other, "nll") for other in others}
    gain, error, _ = differences(records, method, "ensemble", "auroc")
    return {
        "baselines": len(others),
        "wins": sum(mean > 2 * error for mean, error, _ in found.values()),
        "losses": sum(mean < -2 * error for mean, error, _ in found.values()),
        "ahead": [other for other, (mean, _, _) in found.items() if mean < 0],
        "auroc_gain": -gain,
        "auroc_gain_error": error,
    }


def _goals_text(name: str, records: Sequence[Record], method: str) -> str:
    found = goals(records, method)
    ahead = ", ".join(METHODS[other].label for other in found["ahead"]) or "none"
    rows = [
        ["NLL no worse than that of any baseline", f"lower mean: {ahead}",
         "no" if found["ahead"] else "yes"],
        [f"NLL better by two standard errors than at least {LEAST_WINS} baselines",
         f"{found['wins']} of {found['baselines']}; worse than {found['losses']}",
         "yes" if found["wins"] >= LEAST_WINS else "no"],
        ["AUROC above that of the ensemble",
         with_deviation(found["auroc_gain"], found["auroc_gain_error"]),
         "yes" if found["auroc_gain"] > 0 else "no"],
    ]  # fmt: skip
    title = f"{name}, aims for {METHODS[method].label}"
    return markdown_table(("aim", "found", "holds"), rows, title)


def _settings_table(found: Mapping[str, Sequence[Record]]) -> str:
    rows = []
    for name, records in found.items():
        for method in distinct(records, "method"):
            chosen = select(records, method=method)[0]["settings"]
            text = ", ".join(f"{key} {value:g}" for key, value in chosen.items())
            if text:
                rows.append([name, METHODS[method].label, text, len(METHODS[method].candidates)])
    title = "Settings selected on the validation rows of seed 0"
    return markdown_table(("data", "method", "settings", "candidates"), rows, title)


def markdown(found: Mapping[str, Sequence[Record]]) -> str:
    """Return all tables, from the records of each data set."""
    parts = []
    for name, records in found.items():
        parts.append(_scores_table(name, records))
        method = best_subspace(records)
        if method is not None:
            parts.append(_differences_table(name, records, method))
        if method is not None and select(records, method="ensemble"):
            parts.append(_goals_text(name, records, method))
    return "\n\n".join(part for part in [*parts, _settings_table(found)] if part)


def summary(found: Mapping[str, Sequence[Record]]) -> Record:
    """Return the means over seeds, by data set and method."""
    return {
        name: {
            method: {
                key: float(np.mean([r[key] for r in select(records, method=method)]))
                for key in _SCORES
            }
            | {"seeds": len(select(records, method=method))}
            for method in distinct(records, "method")
        }
        for name, records in found.items()
    }
