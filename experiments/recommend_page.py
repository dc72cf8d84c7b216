"""Tables of what `subbayes.recommend` gains, for the documentation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.markdown import distinct, markdown_table, number, select, with_deviation
from experiments.recommend_data import CLASSES, DATASETS, NUMBERS
from experiments.store import Record

__all__ = ["bars", "markdown"]

_BUDGETS = ("seconds", "minutes", "ensemble")
_SHAPES = {"full": "all validation rows", "300": "300 validation rows"}
_TOLERANCE = {"full": 0.001, "300": 0.002}
_MEAN_BARS = {"seconds": 0.012, "minutes": 0.015, "ensemble": 0.009}
_SET_BARS = {
    ("seconds", "cifar10"): 0.035,
    ("seconds", "dry_bean"): 0.030,
    ("seconds", "bike"): 0.15,
    ("seconds", "protein"): 0.010,
}


def markdown(records: Sequence[Record]) -> str:
    """Return the tables of the records."""
    done = [r for r in records if "gain" in r]
    parts = [
        *(_gains([r for r in done if r["validation"] == shape], shape) for shape in _SHAPES),
        _levels(done),
        markdown_table(["bar", "measured", "fits", ""], bars(records), "Bars"),
        _losses(done),
        _outside(done),
        _shifts(done),
        _times(done),
        _failures(records),
    ]
    text = "\n\n".join(filter(None, parts))
    return f"{text}\n" if text else ""


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _mean_gain(records: Sequence[Record]) -> str:
    """Mean gain of several fits; its standard error is that of test rows."""
    if not records:
        return ""
    errors = np.array([r["error"] for r in records])
    error = float(np.sqrt((errors**2).sum()) / len(errors))
    return with_deviation(_mean([r["gain"] for r in records]), error, 4)


def _gains(records: Sequence[Record], shape: str) -> str:
    rows = []
    for name in DATASETS:
        own = select(records, dataset=name)
        cells = [_mean_gain(select(own, budget=budget)) for budget in _BUDGETS]
        if own:
            rows.append([name, len(distinct(own, "seed")), *cells])
    for label, names in (("mean of classes", CLASSES), ("mean of numbers", NUMBERS)):
        cells = []
        for budget in _BUDGETS:
            own = [r for r in select(records, budget=budget) if r["dataset"] in names]
            cells.append(_mean_gain(own))
        if any(cells):
            rows.append([label, "", *cells])
    worst = []
    for budget in _BUDGETS:
        own = select(records, budget=budget)
        least = min(own, key=lambda r: r["gain"], default=None)
        worst.append(f"{number(least['gain'], 4)} ({least['dataset']})" if least else "")
    if rows:
        rows.append(["worst fit", "", *worst])
    head = ["gain in log score ± standard error of test rows", "seeds", *_BUDGETS]
    return markdown_table(head, rows, f"With {_SHAPES[shape]}")


def _levels(records: Sequence[Record]) -> str:
    """Log scores themselves, with all validation rows."""
    rows = []
    full = select(records, validation="full")
    for name in DATASETS:
        own = select(full, dataset=name)
        quick = select(own, budget="seconds")
        if not own:
            continue
        cells = [_level([r["plain"] for r in quick or own])]
        cells.append(_level([r["reference"] for r in quick]))
        for method in ("sigmoid", "isotonic"):
            found = [r["calibrated"][method] for r in quick if method in r.get("calibrated", {})]
            cells.append(_level(found))
        for budget in ("seconds", "minutes"):
            cells.append(_level([r["score"] for r in select(own, budget=budget)]))
        many = select(own, budget="ensemble")
        cells += [_level([r["reference"] for r in many]), _level([r["score"] for r in many])]
        which = "coverage" if name in NUMBERS else "accuracy"
        shown = [
            f"{_mean([r[key] for r in some]):.3f}"
            for some, key in ((quick, f"reference_{which}"), (quick, which), (many, which))
            if some
        ]
        rows.append([name, *cells, f"{which} {' / '.join(shown)}"])
    head = [
        "log score", "network", "+ temperature or noise", "scikit-learn, sigmoid", "isotonic",
        "seconds", "minutes", "five networks + temperature", "ensemble",
        "reference / seconds / ensemble",
    ]  # fmt: skip
    return markdown_table(head, rows, "Levels, with all validation rows")


def _level(values: Sequence[float]) -> str:
    return number(_mean(values)) if values else ""


# --- bars -----------------------------------------------------------------------------------------


def bars(records: Sequence[Record]) -> list[list[object]]:
    """What is aimed at, what was measured, over how many fits, and whether it holds."""
    done = [r for r in records if "gain" in r]
    full = select(done, validation="full")
    rows: list[list[object]] = []
    for budget in _BUDGETS:
        for shape, tolerance in _TOLERANCE.items():
            own = select(done, budget=budget, validation=shape)
            if own:
                least = min(own, key=lambda r: r["gain"])
                lost = sum(r["gain"] < -tolerance for r in own)
                bar = f"{budget}, {_SHAPES[shape]}: no fit loses more than {tolerance}"
                text = f"worst {number(least['gain'], 4)} ({least['dataset']}); {lost} lose more"
                rows.append([bar, text, len(own), _verdict(lost == 0)])
    for budget, least_mean in _MEAN_BARS.items():
        own = [r for r in select(full, budget=budget) if r["dataset"] in CLASSES]
        rows += _at_least(f"{budget}: mean of classes", own, least_mean)
    for (budget, name), least_mean in _SET_BARS.items():
        rows += _at_least(
            f"{budget}: {name}", select(full, budget=budget, dataset=name), least_mean
        )
    times = [r["cpu"] for r in select(done, budget="seconds")]
    if times:
        text = f"largest {max(times):.1f}, median {np.median(times):.1f}"
        verdict = _verdict(max(times) <= 15)
        rows.append(["seconds: at most 15 CPU seconds", text, len(times), verdict])
    covered = [r["coverage"] for r in done if r["dataset"] in NUMBERS]
    if covered:
        text = f"{min(covered):.3f} to {max(covered):.3f}"
        verdict = _verdict(min(covered) >= 0.93 and max(covered) <= 0.97)
        rows.append(["coverage of 95 % intervals in 0.93 to 0.97", text, len(covered), verdict])
    own = [r for r in full if r["dataset"] in CLASSES]
    if own:
        far = sum(_is_far(r) for r in own)
        bar = "reported gains beyond two combined errors of the test gains: at most 2 of 54"
        rows.append([bar, str(far), len(own), _verdict(far <= 2 * max(len(own), 54) / 54)])
    own = [r for r in own if r.get("unlike") is not None]
    if own:
        mean = _mean([r["unlike"] for r in own])
        behind = max(_better(r) - r["unlike"] for r in own)
        bar = "out-of-distribution score: 0.84 on average"
        rows.append([bar, f"{mean:.3f}", len(own), _verdict(mean >= 0.84)])
        bar = "at most 0.06 below the better of entropy and mutual information"
        rows.append([bar, f"{max(behind, 0.0):.3f}", len(own), _verdict(behind <= 0.06)])
    return rows


def _at_least(label: str, records: Sequence[Record], least: float) -> list[list[object]]:
    if not records:
        return []
    held = _mean([r["gain"] for r in records]) >= least
    return [[f"{label} at least {least}", _mean_gain(records), len(records), _verdict(held)]]


def _verdict(held: bool) -> str:
    return "held" if held else "missed"


def _is_far(record: Record) -> bool:
    """Whether the reported gain is beyond two combined standard errors of the test gain."""
    if not record["ships"]:
        return False
    error = np.hypot(record["reported_error"], record["error"])
    return bool(abs(record["reported"] - record["gain"]) > 2 * error)


def _better(record: Record) -> float:
    """The better area of entropy and mutual information."""
    return max(record["entropy"], record.get("information") or 0.0)


# --- further tables -------------------------------------------------------------------------------


def _losses(records: Sequence[Record]) -> str:
    lost = [r for r in records if r["gain"] < -_TOLERANCE[r["validation"]]]
    rows = [
        [r["dataset"], r["seed"], r["validation"], r["budget"],
         with_deviation(r["gain"], r["error"], 4),
         with_deviation(r["reported"], r["reported_error"], 4), _shipped(r)]
        for r in sorted(lost, key=lambda r: r["gain"])
    ]  # fmt: skip
    head = ["data set", "seed", "validation", "budget", "test gain", "reported gain", "shipped"]
    return markdown_table(head, rows, "Fits that lose more than the bar")


def _shipped(record: Record) -> str:
    """What was shipped, in a few words."""
    if record["ships"]:
        return "stack"
    if record["budget"] != "ensemble" and abs(record["score"] - record["plain"]) < 1e-5:
        return "network without temperature"
    return "reference"


def _outside(records: Sequence[Record]) -> str:
    rows = []
    full = select(records, validation="full")
    for name in CLASSES:
        for budget in _BUDGETS:
            own = [r for r in select(full, dataset=name, budget=budget) if r.get("unlike")]
            if own:
                keys = ("unlike", "entropy", "information", "information_of_ensemble")
                cells = [[r[k] for r in own if r.get(k) is not None] for k in keys]
                rows.append([name, budget, *(f"{_mean(c):.3f}" if c else "" for c in cells)])
    head = ["AUROC, inputs of another kind", "budget", "`unlike`", "entropy of the model",
            "mutual information of the last layer", "of the five networks"]  # fmt: skip
    return markdown_table(head, rows, "Out of distribution, with all validation rows")


def _shifts(records: Sequence[Record]) -> str:
    rows = []
    full = select(records, validation="full")
    for name in DATASETS:
        own = select(full, dataset=name)
        for kind in own[0]["shifted"] if own else ():
            cells = []
            for budget in _BUDGETS:
                some = [r["shifted"][kind] for r in select(own, budget=budget)]
                if some:
                    before, gain = _mean([s[0] for s in some]), _mean([s[1] for s in some])
                    cells.append(f"{number(before)} → {number(before + gain)}")
                else:
                    cells.append("")
            rows.append([name, kind, *cells])
    head = ["data set", "shift", *_BUDGETS]
    title = "Log score of shifted test rows, reference → recommended, with all validation rows"
    return markdown_table(head, rows, title)


def _times(records: Sequence[Record]) -> str:
    rows = []
    for name in DATASETS:
        own = select(records, dataset=name)
        cells = []
        for budget in _BUDGETS:
            times = [r["cpu"] for r in select(own, budget=budget)]
            cells.append(f"{np.median(times):.1f} ({max(times):.1f})" if times else "")
        if own:
            rows.append([name, *cells])
    return markdown_table(["CPU seconds: median (largest)", *_BUDGETS], rows)


def _failures(records: Sequence[Record]) -> str:
    rows = [
        [r["dataset"], r["seed"], r["validation"], r["budget"], r["failure"]]
        for r in records
        if "failure" in r
    ]
    return markdown_table(["data set", "seed", "validation", "budget", "error"], rows, "Failures")
