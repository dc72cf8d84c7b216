"""Coverage and size of calibrated predictions: ten tables in 20 splits, and bike rentals in time.

Half of the rows of a split (at most 1000) train, a quarter calibrates, a quarter is the test part.
The model is an ensemble of three small networks of a fixed short training, so that it is cheap and
far from calibrated; beside it conformalised quantile regression by gradient boosting, whose scores
are max(lo(x) - y, y - hi(x)) (Romano, Patterson and Candès 2019), with the same rows, and for
classes gradient boosting with the same sets; the level is 0.9, and 0.95 for classes. Bike: the
first 4000 hours train, the next 1000 calibrate, and the other 12,379 come in time, 24 at once.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from experiments.datasets import find_file
from experiments.markdown import (
    add_recorded_option,
    add_write_option,
    markdown_table,
    number,
    publish,
)
from experiments.store import Record, Store, key_of, versions
from experiments.table_defaults import table
from experiments.uci import split_names
from subbayes.diagnostics.conformal import class_scores
from subbayes.models.settings import TableSettings
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.utils.checks import check_count

__all__ = ["DATASETS", "add_options", "run"]

Say = Callable[..., None]

NUMBERS = ("diabetes", "concrete", "energy", "yacht", "boston", "wine_red", "airfoil")
DATASETS = (*NUMBERS, "breast_cancer", "phoneme", "dry_bean")
LEVEL, CLASS_LEVEL = 0.9, 0.95
_MOST, _HOURS = 1000, (4000, 5000)
_SETTINGS = TableSettings(members=3).change(
    {"network.hidden": (32,), "training": {"epochs": 40, "swa_epochs": 2}}
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    parser.add_argument("--datasets", default=",".join((*DATASETS, "bike")))
    parser.add_argument("--splits", type=int, default=20)
    add_recorded_option(parser)
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute or read the records, and print their tables."""
    names = split_names(options.datasets, (*DATASETS, "bike"))
    splits = range(check_count("splits", options.splits))
    store, records, in_time = Store(options.results), [], []
    wanted = [(name, split) for split in splits for name in names if not split or name != "bike"]
    for name, split in wanted:
        key = key_of(f"{name}-{split}", {"levels": [LEVEL, CLASS_LEVEL], "most": _MOST})
        if options.recorded and key not in store:
            continue
        record = store.get(key, partial(_compute, name, split, options))
        say(f"{name} {split}: {record['seconds']:.0f} s")
        (in_time if name == "bike" else records).append(record)
    publish(markdown(records, in_time), "conformal", options, say)
    return {"records": records + in_time, "versions": versions()}


def _fit(frame: pd.DataFrame, task: str) -> DataFrameModel:
    return DataFrameModel.fit(frame, "y", _SETTINGS, task=task, method="ensemble", progress=False)


def _compute(name: str, split: int, options: argparse.Namespace) -> Record:
    return _bike(options) if name == "bike" else _split(name, split, options)


def _split(name: str, split: int, options: argparse.Namespace) -> Record:
    start = time.process_time()
    x, y = table(name, options.data_dir)
    order = np.random.default_rng(split).permutation(len(y))[:_MOST]
    frame = x.iloc[order].reset_index(drop=True).assign(y=np.asarray(y)[order])
    half, quarter = len(frame) // 2, 3 * len(frame) // 4
    parts = frame[:half], frame[half:quarter], frame[quarter:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compute = _numbers if name in NUMBERS else _classes
        found = {"dataset": name, "split": split, **compute(*parts)}
    return found | {"seconds": time.process_time() - start}


def _numbers(train: pd.DataFrame, held: pd.DataFrame, test: pd.DataFrame) -> dict[str, Any]:
    model, scale = _fit(train, "regression"), float(train["y"].std())
    before = model.evaluate(test, level=LEVEL)
    after = model.conformal(held).evaluate(test, level=LEVEL)
    boosting = [
        HistGradientBoostingRegressor(loss="quantile", quantile=q, random_state=0).fit(
            train.drop(columns="y"), train["y"]
        )
        for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    ]
    ends = [[tree.predict(part.drop(columns="y")) for tree in boosting] for part in (held, test)]
    scores = np.maximum(ends[0][0] - held["y"], held["y"] - ends[0][1])
    mark = np.sort(scores)[int(np.ceil((len(held) + 1) * LEVEL)) - 1]
    lower, upper = ends[1][0] - mark, ends[1][1] + mark
    return {
        "before": before["coverage"],
        "coverage": after["coverage"],
        "size": after["interval_width"] / scale,
        "peer": float(((lower <= test["y"]) & (test["y"] <= upper)).mean()),
        "peer_size": float(np.maximum(upper - lower, 0).mean()) / scale,
    }


def _classes(train: pd.DataFrame, held: pd.DataFrame, test: pd.DataFrame) -> dict[str, Any]:
    model = _fit(train, "classification")
    boosting = HistGradientBoostingClassifier(random_state=0).fit(
        train.drop(columns="y"), train["y"]
    )
    found: dict[str, Any] = {}
    for score in ("aps", "lac"):
        after = model.conformal(held, score=score).evaluate(test, level=CLASS_LEVEL)
        each = []
        for part in (held, test):
            all_scores = class_scores(boosting.predict_proba(part.drop(columns="y")), score)
            codes = np.searchsorted(boosting.classes_, part["y"])
            each.append((all_scores, all_scores[np.arange(len(part)), codes]))
        mark = np.sort(each[0][1])[int(np.ceil((len(held) + 1) * CLASS_LEVEL)) - 1]
        inside = each[1][0] <= mark + 1e-12
        inside[np.arange(len(inside)), each[1][0].argmin(1)] = True
        codes = np.searchsorted(boosting.classes_, test["y"])
        found |= {
            f"{score}": after["coverage"],
            f"{score}_size": after["set_size"],
            f"{score}_peer": float(inside[np.arange(len(inside)), codes].mean()),
            f"{score}_peer_size": float(inside.sum(1).mean()),
        }
    return found | {"accuracy": model.evaluate(test)["accuracy"]}


def _bike(options: argparse.Namespace) -> Record:
    start = time.process_time()
    frame = pd.read_csv(find_file("bde/bike_hourly.csv.gz", options.data_dir))
    frame = frame.drop(columns=["casual", "registered", "instant", "dteday"])
    frame = frame.rename(columns={"cnt": "y"})
    first, second = _HOURS
    train, held, rest = frame[:first], frame[first:second], frame[second:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _fit(train, "regression")
        fixed = model.conformal(held)
        lower, upper = model.predict(rest).interval(LEVEL)
        rows = [_of_stream("not calibrated", rest["y"], lower, upper)]
        rows.append(_of_stream("calibrated once", rest["y"], *fixed.predict_interval(rest, LEVEL)))
        alarm = fixed.evaluate(rest, level=LEVEL, ordered=True)["coverage_alarm"]
        for label, settings in {"ACI, rate 0.005": {"rates": [0.005]}, "DtACI": {}}.items():
            online, ends = fixed.adaptive(LEVEL, **settings), []
            for hour in range(0, len(rest), 24):
                day = rest[hour : hour + 24]
                ends.append(online.predict_interval(day))
                online.update(day)
            lower, upper = map(np.concatenate, zip(*ends, strict=True))
            rows.append(_of_stream(label, rest["y"], lower, upper))
    seconds = time.process_time() - start
    return {"dataset": "bike", "rows": rows, "alarm": alarm, "seconds": seconds}


def _of_stream(label: str, y: pd.Series, lower: np.ndarray, upper: np.ndarray) -> dict[str, Any]:
    """Coverage of all hours and of the worst 500 in a row, and widths."""
    covered = ((lower <= y) & (y <= upper)).to_numpy(float)
    sums = np.convolve(covered, np.full(500, 1 / 500), mode="valid")
    return {
        "label": label,
        "coverage": float(covered.mean()),
        "worst": float(sums.min()),
        "width": float(np.median(upper - lower)),
        "infinite": float(np.isinf(upper - lower).mean()),
    }


def markdown(records: list[Record], in_time: list[Record]) -> str:
    """The tables of the records."""

    def of(name: str, key: str) -> str:
        values = np.array([r[key] for r in records if r["dataset"] == name])
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return f"{number(values.mean())} ± {number(error)}"

    known = list(dict.fromkeys(r["dataset"] for r in records))
    pages = []
    if numbers := [name for name in known if name in NUMBERS]:
        keys = ("before", "coverage", "peer", "size", "peer_size")
        head = ["table", "not calibrated", "calibrated", "CQR, boosting", "width", "its width"]
        pages.append(markdown_table(head, [[n, *(of(n, k) for k in keys)] for n in numbers]))
    if classes := [name for name in known if name not in NUMBERS]:
        head = ["table", "sets", "coverage", "boosting", "size", "its size", "accuracy"]
        rows = [
            [
                n,
                s,
                *(of(n, f"{s}{k}") for k in ("", "_peer", "_size", "_peer_size")),
                of(n, "accuracy"),
            ]
            for n in classes
            for s in ("aps", "lac")
        ]
        pages.append(markdown_table(head, rows))
    for record in in_time:
        head = [
            "bike, hours 5001 to 17,379",
            "coverage",
            "worst 500 hours",
            "median width",
            "infinite",
        ]
        columns = ("coverage", "worst", "width", "infinite")
        rows = [
            [r["label"], *(number(r[k], 0 if k == "width" else 3) for k in columns)]
            for r in record["rows"]
        ]
        alarm = (
            "The test of the coverage raised its alarm for the model that is calibrated once at "
            f"hour {record['alarm']:.0f} of the stream."
        )
        pages += [markdown_table(head, rows), alarm]
    return "\n\n".join(pages)
