"""What `subbayes` gives for a table without options, beside what its user would do otherwise.

Every method has its defaults; nothing is chosen on test rows. The defaults of `TableRegressor` were
chosen on simulated data (Friedman #1 with other seeds) and on rows of bike, California, protein and
pol that are neither training nor test rows here: of tables of more than 6000 rows one half of a
fixed order was for choosing, and the rows here are of the other half. Predictive densities of
methods with a mean alone are Gaussian with the standard deviation of the residuals of rows held
out. Each method runs on the same rows, with the number of threads that is recorded.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from sklearn import datasets
from sklearn.model_selection import KFold, train_test_split

from experiments.datasets import find_file
from experiments.markdown import (
    add_recorded_option,
    add_write_option,
    markdown_table,
    number,
    publish,
)
from experiments.store import Record, Store, key_of, versions
from experiments.uci import split_names
from subbayes.utils.checks import check_count

__all__ = ["DATASETS", "METHODS", "add_options", "rows_of", "run"]

Say = Callable[..., None]
Rows = tuple[Any, np.ndarray, Any, np.ndarray]

_MOST, _SHARE, _HALVED = 3000, 0.2, 6000
_TREES, _PATIENCE = 2000, 50
_GP_ROWS = 2000  # its time grows with the cube of the rows
_LEVEL = 0.95
_LEFT_OUT = ("casual", "registered", "instant", "dteday")  # of the bike rentals
_SIMULATED = {"friedman100": 100, "friedman250": 250, "friedman1000": 1000}
_BUNDLED = {"diabetes": datasets.load_diabetes, "breast_cancer": datasets.load_breast_cancer}
_FRAMES = {
    "airfoil": ("bde/airfoil.csv.gz", "target"),
    "bike": ("bde/bike_hourly.csv.gz", "cnt"),
    "dry_bean": ("dry_bean/dry_bean.csv.gz", "Class"),
    "credit_approval": ("credit_approval/credit_approval.csv.gz", "A16"),
    "adult": ("adult/adult.csv.gz", "income"),
    "bank_marketing": ("bank_marketing/bank_marketing.csv.gz", "y"),
}
_UCI = ("concrete", "energy", "yacht", "boston", "wine_red", "skillcraft", "elevators",
        "california", "protein", "pol")  # fmt: skip
NUMBERS = (*_SIMULATED, "diabetes", "concrete", "energy", "yacht", "boston", "wine_red", "airfoil",
           "skillcraft", "elevators", "bike", "california", "protein", "pol")  # fmt: skip
CLASSES = ("phoneme", "dry_bean", "credit_approval", "adult", "bank_marketing", "breast_cancer")
DATASETS = NUMBERS + CLASSES


def table(name: str, data_dir: str | None) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the columns and the target of a data set."""
    if name in _BUNDLED:
        return _BUNDLED[name](return_X_y=True, as_frame=True)
    if name in _FRAMES:
        file, target = _FRAMES[name]
        frame = pd.read_csv(find_file(file, data_dir), na_values=["?", " ?"])
        frame = frame.drop(columns=[c for c in _LEFT_OUT if c in frame])
        y = frame.pop(target if target in frame else frame.columns[-1])
        return frame, y.to_numpy()
    with np.load(find_file(f"{name}/{name}.npz", data_dir), allow_pickle=False) as file:
        prefix = "gal_" if "gal_X" in file else ""
        return pd.DataFrame(file[f"{prefix}X"]).add_prefix("x"), file[f"{prefix}y"].ravel()


def rows_of(name: str, seed: int, data_dir: str | None) -> Rows:
    """Return training inputs and targets, and those for testing.

    Example:
        >>> x, y, new, true = rows_of("friedman100", 0, None)
        >>> x.shape, new.shape
        ((100, 10), (2000, 10))
    """
    if name in _SIMULATED:
        n = _SIMULATED[name]
        x, y = datasets.make_friedman1(n + 2000, noise=1.0, random_state=seed)
        frame = pd.DataFrame(x).add_prefix("x")
        return frame[:n], y[:n], frame[n:], y[n:]
    x, y = table(name, data_dir)
    y = np.asarray(y)
    y = y.astype(np.float64) if name in NUMBERS else np.unique(y, return_inverse=True)[1]
    order = np.random.default_rng(78777).permutation(len(y))
    if len(y) > _HALVED:
        order = order[len(y) // 2 :]
    order = order[np.random.default_rng(seed).permutation(len(order))]
    train = min(_MOST, round((1 - _SHARE) * len(order)))
    kept, new = order[:train], order[train : train + _MOST]
    return x.iloc[kept], y[kept], x.iloc[new], y[new]


# --- scores ---------------------------------------------------------------------------------------


def _gaussian(mean: np.ndarray, sd: np.ndarray, y: np.ndarray) -> Record:
    z = (y - mean) / sd
    return {
        "score": float(norm.logpdf(y, mean, sd).mean()),
        "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
        "coverage": float((np.abs(z) <= norm.ppf(0.5 + _LEVEL / 2)).mean()),
    }


def _classes(probabilities: np.ndarray, y: np.ndarray) -> Record:
    chosen = np.clip(probabilities[np.arange(len(y)), y], 1e-12, None)
    return {
        "score": float(np.log(chosen).mean()),
        "accuracy": float((probabilities.argmax(1) == y).mean()),
    }


def _plain(x: pd.DataFrame, new: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Columns as numbers for other methods: one-hot categories, medians for missing values."""
    both = pd.get_dummies(pd.concat([x, new]), dummy_na=False).astype(np.float64)
    both = both.fillna(both.iloc[: len(x)].median())
    matrix = both.to_numpy()
    return matrix[: len(x)], matrix[len(x) :]


# --- methods --------------------------------------------------------------------------------------


def _ours(effort: str, rows: Rows, seed: int, classes: bool) -> Record:
    from subbayes import TableClassifier, TableRegressor

    x, y, new, true = rows
    kind = TableClassifier if classes else TableRegressor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(effort=effort, random_state=seed).fit(x, y)
    facts = {"record": model.model_.record, "warnings": model.model_.warnings()}
    if classes:
        return _classes(model.predict_proba(new), true) | facts
    predictive = model.predict_dist(new)
    below = predictive.cdf(true)
    return facts | {
        "score": float(predictive.log_prob(true).mean()),
        "rmse": float(np.sqrt(np.mean((predictive.mean - true) ** 2))),
        "coverage": float((np.abs(below - 0.5) <= _LEVEL / 2).mean()),
    }


def _gaussian_process(rows: Rows, seed: int, classes: bool) -> Record:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    x, y, new, true = rows
    x, new = _plain(x, new)
    mean, scale = x.mean(0), x.std(0)
    scale[scale == 0] = 1.0
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
    model = GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=1, random_state=seed
    ).fit((x - mean) / scale, y)
    found, sd = model.predict((new - mean) / scale, return_std=True)
    return _gaussian(found, sd, true)


def _parts(x: np.ndarray, y: np.ndarray, seed: int) -> list[np.ndarray]:
    return train_test_split(x, y, test_size=0.1, random_state=seed)


def _boosted(
    make: Callable[..., Any], fit: Callable[..., int], rows: Rows, seed: int, classes: bool
) -> Record:
    """Trees whose number is that of the best score of rows held out, fitted again to all rows."""
    x, y, new, true = rows
    x, new = _plain(x, new)
    part, held, known, target = _parts(x, y, seed)
    early = make(_TREES)
    count = fit(early, part, known, held, target)
    model = make(count).fit(x, y)
    if classes:
        return _classes(model.predict_proba(new), true)
    sd = np.sqrt(np.mean((early.predict(held) - target) ** 2))
    return _gaussian(model.predict(new), np.full(len(true), sd), true)


def _lightgbm(rows: Rows, seed: int, classes: bool) -> Record:
    import lightgbm

    kind = lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor

    def make(trees: int) -> Any:
        return kind(n_estimators=trees, random_state=seed, verbose=-1, n_jobs=1)

    def fit(model: Any, x: Any, y: Any, held: Any, known: Any) -> int:
        stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
        model.fit(x, y, eval_set=[(held, known)], callbacks=[stop])
        return max(1, int(model.best_iteration_))

    return _boosted(make, fit, rows, seed, classes)


def _xgboost(rows: Rows, seed: int, classes: bool) -> Record:
    import xgboost

    kind = xgboost.XGBClassifier if classes else xgboost.XGBRegressor

    def make(trees: int) -> Any:
        return kind(n_estimators=trees, random_state=seed, n_jobs=1)

    def fit(model: Any, x: Any, y: Any, held: Any, known: Any) -> int:
        model.set_params(early_stopping_rounds=_PATIENCE)
        model.fit(x, y, eval_set=[(held, known)], verbose=False)
        return int(model.best_iteration) + 1

    return _boosted(make, fit, rows, seed, classes)


def _catboost(rows: Rows, seed: int, classes: bool, loss: str = "RMSE") -> Record:
    import catboost

    kind = catboost.CatBoostClassifier if classes else catboost.CatBoostRegressor
    options = {"random_seed": seed, "verbose": False, "allow_writing_files": False}
    options |= {"thread_count": 1} | ({} if classes else {"loss_function": loss})

    def make(trees: int) -> Any:
        return kind(iterations=trees, **options)

    def fit(model: Any, x: Any, y: Any, held: Any, known: Any) -> int:
        model.fit(x, y, eval_set=(held, known), early_stopping_rounds=_PATIENCE)
        return max(1, int(model.tree_count_))

    if classes or loss == "RMSE":
        return _boosted(make, fit, rows, seed, classes)
    x, y, new, true = rows
    x, new = _plain(x, new)
    part, held, known, target = _parts(x, y, seed)
    model = make(fit(make(_TREES), part, known, held, target)).fit(x, y)
    mean, variance = model.predict(new).T
    return _gaussian(mean, np.sqrt(np.maximum(variance, 1e-12 * y.var())), true)


def _catboost_uncertainty(rows: Rows, seed: int, classes: bool) -> Record:
    return _catboost(rows, seed, classes, "RMSEWithUncertainty")


def _ngboost(rows: Rows, seed: int, classes: bool) -> Record:
    import ngboost
    from ngboost.distns import k_categorical

    x, y, new, true = rows
    x, new = _plain(x, new)
    part, held, known, target = _parts(x, y, seed)
    options = {"n_estimators": _TREES, "random_state": seed, "verbose": False}
    stop = {"X_val": held, "Y_val": target, "early_stopping_rounds": _PATIENCE}
    if classes:
        model = ngboost.NGBClassifier(Dist=k_categorical(int(y.max()) + 1), **options)
        return _classes(model.fit(part, known, **stop).predict_proba(new), true)
    found = ngboost.NGBRegressor(**options).fit(part, known, **stop).pred_dist(new)
    return _gaussian(found.loc, found.scale, true)


def _forest(rows: Rows, seed: int, classes: bool) -> Record:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    x, y, new, true = rows
    x, new = _plain(x, new)
    options: dict[str, Any] = {"n_estimators": 500, "random_state": seed, "n_jobs": 1}
    if classes:
        return _classes(RandomForestClassifier(**options).fit(x, y).predict_proba(new), true)
    model = RandomForestRegressor(**options, oob_score=True).fit(x, y)
    sd = np.sqrt(np.mean((model.oob_prediction_ - y) ** 2))
    return _gaussian(model.predict(new), np.full(len(true), sd), true)


def _realmlp(rows: Rows, seed: int, classes: bool) -> Record:
    """Five inner splits, whose networks are averaged; noise of the rows that each left out."""
    from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor

    x, y, new, true = rows
    x, new = _plain(x, new)
    kind = RealMLP_TD_Classifier if classes else RealMLP_TD_Regressor
    found, residuals = [], []
    for part, held in KFold(5, shuffle=True, random_state=seed).split(x):
        model = kind(random_state=seed, n_cv=1, n_threads=1, verbosity=0, device="cpu")
        model.fit(x[part], y[part], X_val=x[held], y_val=y[held])
        if classes:
            found.append(model.predict_proba(new))
        else:
            found.append(model.predict(new).ravel())
            residuals.append(model.predict(x[held]).ravel() - y[held])
    if classes:
        return _classes(np.mean(found, 0), true)
    sd = np.sqrt(np.mean(np.concatenate(residuals) ** 2))
    return _gaussian(np.mean(found, 0), np.full(len(true), sd), true)


METHODS: dict[str, tuple[str, Callable[..., Record]]] = {
    "standard": ("TableRegressor, TableClassifier", lambda *a: _ours("standard", *a)),
    "quick": ('the same, effort="quick"', lambda *a: _ours("quick", *a)),
    "gp": ("Gaussian process", _gaussian_process),
    "catboost": ("CatBoost", _catboost),
    "catboost-uncertainty": ("CatBoost, with uncertainty", _catboost_uncertainty),
    "lightgbm": ("LightGBM", _lightgbm),
    "xgboost": ("XGBoost", _xgboost),
    "ngboost": ("NGBoost", _ngboost),
    "forest": ("random forest", _forest),
    "realmlp": ("RealMLP", _realmlp),
}
"""Label and function of each method."""


def _applies(method: str, name: str, rows: Rows) -> bool:
    regression = name in NUMBERS
    if method == "gp":
        return regression and len(rows[1]) <= _GP_ROWS
    return regression or method != "catboost-uncertainty"


# --- tables ---------------------------------------------------------------------------------------


def _differences(
    records: Sequence[Record], names: Sequence[str], field: str, ratio: bool
) -> list[list[str]]:
    """Ours less another method, or its ratio to ours, over the data sets that both have."""
    by = {(r["dataset"], r["seed"], r["method"]): r for r in records}
    found = []
    for method, (label, _) in METHODS.items():
        each: dict[str, list[float]] = {}
        for (name, seed, other), record in by.items():
            own = by.get((name, seed, "standard"))
            if other == method != "standard" and own and name in names and field in record:
                value = own[field] / record[field] if ratio else own[field] - record[field]
                each.setdefault(name, []).append(value)
        if each:
            means = np.array([np.mean(values) for values in each.values()])
            error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else float("nan")
            lost = [n for n, m in zip(each, means, strict=True) if (m > 1 if ratio else m < 0)]
            found.append(
                [label, len(means), f"{number(means.mean())} ± {error:.3f}", ", ".join(lost)]
            )
    return found


def markdown(records: Sequence[Record]) -> str:
    """Return the tables of the records."""
    parts = []
    for title, names in (("Numbers", NUMBERS), ("Classes", CLASSES)):
        rows = []
        for name in names:
            own = [r for r in records if r["dataset"] == name]
            cells = []
            for method in METHODS:
                each = [r["score"] for r in own if r["method"] == method]
                cells.append(number(float(np.mean(each))) if each else "")
            if own:
                rows.append([name, len({r["seed"] for r in own}), *cells])
        head = ["log score", "seeds", *(label for label, _ in METHODS.values())]
        parts.append(markdown_table(head, rows, title))
        head = ["beside", "sets", "log score gained (mean ± its standard error over sets)", "lost"]
        parts.append(markdown_table(head, _differences(records, names, "score", False)))
        if names is NUMBERS:
            head = ["beside", "sets", "RMSE, as a multiple of theirs", "larger on"]
            parts.append(markdown_table(head, _differences(records, names, "rmse", True)))
    seconds = []
    for method, (label, _) in METHODS.items():
        own = [r for r in records if r["method"] == method]
        if own:
            coverage = [r["coverage"] for r in own if "coverage" in r]
            times = [r["cpu"] for r in own]
            held = f"{min(coverage):.3f} to {max(coverage):.3f}" if coverage else ""
            seconds.append([label, f"{np.median(times):.0f}", f"{max(times):.0f}", held])
    head = ["method", "CPU seconds (median)", "(largest)", "coverage of 95 % intervals"]
    return "\n\n".join([*filter(None, parts), markdown_table(head, seconds)]) + "\n"


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--only", default=",".join(DATASETS), help="data sets (default: all)")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--threads", type=int, default=1, help="threads of each method")
    add_recorded_option(parser)
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute the missing records and print the tables; return the number of records."""
    torch.set_num_threads(check_count("threads", options.threads))
    store = Store(options.results)
    for seed in range(options.first, options.first + check_count("seeds", options.seeds)):
        for name in () if options.recorded else split_names(options.only, DATASETS):
            rows = rows_of(name, seed, options.data_dir)
            for method in split_names(options.methods, tuple(METHODS)):
                if not _applies(method, name, rows):
                    continue
                facts = {"dataset": name, "method": method, "seed": seed}
                key = key_of(f"{name}-{method}-{seed}", facts)
                store.get(
                    key,
                    lambda facts=facts, rows=rows: _timed(facts, rows),
                    lambda record: say(_line(record)),
                )
    records = list(store.records.values())
    publish(markdown(records), "table_defaults", options, say)
    return {"records": len(records)}


def _timed(facts: Record, rows: Rows) -> Record:
    started, cpu = time.perf_counter(), sum(os.times()[:4])
    found = METHODS[facts["method"]][1](rows, facts["seed"], facts["dataset"] in CLASSES)
    return facts | found | {
        "rows": len(rows[1]),
        "seconds": time.perf_counter() - started,
        "cpu": sum(os.times()[:4]) - cpu,
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }  # fmt: skip


def _line(record: Record) -> str:
    scores = ("score", "rmse", "coverage", "accuracy", "cpu")
    shown = ", ".join(f"{key} {record[key]:.4g}" for key in scores if key in record)
    return f"{record['dataset']} {record['method']} {record['seed']}: {shown}"
