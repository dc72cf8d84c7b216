"""The toy example of semi-structured subspace inference: figures 1, 3 and 9 of Dold et al. (2024).

35 of the 400 synthetic points of Izmailov et al. (2019), each shifted by one of three categories,
theta* = (-0.5, 1) for the second and third; a network 16-16 of (u/2, (u/2)^2) with 337 weights
beside the categories. Semi-structured subspaces of 2, 4 and 12 directions, the naive subspace of
4, the Laplace approximation of last layer and effects, and NUTS over all weights, which is the
reference. The other 365 points give the log predictive density.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from experiments.datasets import find_file
from experiments.markdown import add_write_option, markdown_table, publish
from experiments.ssr_spaces import NaiveSubspace
from experiments.store import Record, Store, key_of
from experiments.toy_regression_data import FILE
from subbayes import MLP, Training
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.nuts import NUTS
from subbayes.semistructured import SemiStructuredRegression
from subbayes.semistructured.subspace import SUBSPACES
from subbayes.utils.checks import check_count

TRUTH = (-0.5, 1.0)
GRID = np.linspace(-10, 10, 121)
PAPER = {"Laplace": 1.0, "subspace, k = 2": 1.14, "subspace, k = 12": 1.27, "all weights": 1.26}
"""Log predictive density per point in the paper."""

METHODS: dict[str, dict[str, Any]] = {
    "subspace, k = 2": {"subspace": "curve", "rank": 2},
    "subspace, k = 4": {"subspace": "curve", "rank": 4},
    "subspace, k = 12": {"subspace": "curve", "rank": 12},
    "naive, k = 4": {"subspace": "naive", "rank": 4},
    "Laplace": {"subspace": "last-layer", "inference": "laplace"},
    "all weights": {"subspace": "full"},
}
REFERENCE = "all weights"


@dataclass(frozen=True)
class Plan:
    """Settings; those of the training are the paper's (appendix C.1) if it gives them.

    Attributes:
        rows: number of training points.
        epochs: number of epochs.
        learning_rate: learning rate of Adam.
        weight_decay: weight decay of the network's weights.
        validation: fraction of the rows held out to select the epoch.
        draws: draws per chain.
        warmup: draws of warm-up per chain.
        chains: number of chains.
        target_acceptance: target acceptance rate of NUTS.
    """

    rows: int = 35
    epochs: int = 3000
    learning_rate: float = 2.5e-3
    weight_decay: float = 1e-3
    validation: float | None = 0.2
    draws: int = 400
    warmup: int = 600
    chains: int = 10
    target_acceptance: float = 0.9

    def training(self) -> Training:
        """Return the settings of the training."""
        return Training(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=None,
            weight_decay=self.weight_decay,
            clip_norm=None,
            validation=self.validation,
        )


def load_rows(seed: int, plan: Plan, data_dir: str | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return training and test rows, with points and categories drawn by the seed."""
    points = np.load(find_file(FILE, data_dir), allow_pickle=False)
    rng = np.random.default_rng(seed)
    category = rng.integers(0, 3, len(points))
    shift = np.array([0.0, *TRUTH])[category]
    frame = frame_of(points[:, 0], np.array(["a", "b", "c"])[category])
    frame["y"] = points[:, 1] + shift
    order = rng.permutation(len(points))
    return tuple(
        frame.iloc[np.sort(part)].reset_index(drop=True)
        for part in (order[: plan.rows], order[plan.rows :])
    )


def frame_of(u: np.ndarray, category: Any) -> pd.DataFrame:
    """Return a frame of inputs; those of the network are (u / 2, (u / 2)^2)."""
    return pd.DataFrame({"u": u, "half": u / 2, "square": (u / 2) ** 2, "category": category})


def fit_method(name: str, train: pd.DataFrame, seed: int, plan: Plan) -> SemiStructuredRegression:
    """Fit a method to the training rows."""
    torch.manual_seed(seed)
    model = SemiStructuredRegression(
        "y ~ C(category) + net(half, square)",
        orthogonal=False,
        networks={"net": MLP(2, (16, 16), 1, "relu")},
    )
    options = dict(METHODS[name])
    sampled = options.pop("inference", "nuts") == "nuts"
    kinds = SUBSPACES | {"naive": NaiveSubspace}
    subspace = kinds[options.pop("subspace")](**options)
    return model.fit(
        train,
        subspace=subspace,
        inference=NUTS(target_acceptance=plan.target_acceptance) if sampled else "laplace",
        training=plan.training(),
        sampling=Sampling(
            draws=plan.draws,
            chains=plan.chains,
            warmup=plan.warmup if sampled else None,
            seed=seed,
            mode="compile" if sampled else "trace",
            progress=False,
        ),
    )


def compute_record(name: str, seed: int, plan: Plan, data_dir: str | None) -> Record:
    """Return the record of a method for a seed."""
    train, test = load_rows(seed, plan, data_dir)
    started = time.perf_counter()
    model = fit_method(name, train, seed, plan)
    seconds = time.perf_counter() - started
    summary, effects = model.summary(), model.effects()
    names = [f"C(category)[T.{c}]" for c in "bc"]
    theta = np.stack([effects[n].reshape(-1) for n in names])
    scores = model.score_samples(test)
    curve = model.predict(frame_of(GRID, "a"))
    low, high = curve.interval(0.95)
    return {
        "method": name,
        "seed": seed,
        "seconds": seconds,
        "lppd": float(scores.mean()),
        "lppd_se": float(scores.std(ddof=1) / len(scores) ** 0.5),
        "mean": theta.mean(1).tolist(),
        "sd": theta.std(1, ddof=1).tolist(),
        "correlation": float(np.corrcoef(theta)[0, 1]),
        "rhat": float(summary.loc[names, "rhat"].max()),
        "rhat_all": float(np.nanmax(model.draws.rhat())),
        "ess": float(summary.loc[names, "ess_bulk"].min()),
        "sigma": float(summary.loc["sigma", "mean"]),
        "theta": theta[:, :: max(1, theta.shape[1] // 1000)].round(4).tolist(),
        "curve": [np.round(v, 4).tolist() for v in (curve.mean, low, high)],
        "epistemic": np.sqrt(curve.epistemic).round(4).tolist(),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--seeds", type=int, default=2, help="number of samples of 35 points")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--figure",
        default=None,
        metavar="PNG",
        help="write figures 1 and 9 of the first seed to this file",
    )
    add_write_option(parser)


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute the missing records, seed by seed, and print the table."""
    plan = Plan() if plan is None else plan
    store = Store(options.results)
    found: dict[str, list[Record]] = {name: [] for name in options.methods}
    for seed in range(check_count("seeds", options.seeds)):
        for name, records in found.items():
            record = store.get(
                key_of(f"{name}, seed {seed}", asdict(plan) | METHODS[name]),
                partial(compute_record, name, seed, plan, options.data_dir),
                lambda r: say(
                    f"{r['method']}, seed {r['seed']}: {r['seconds']:.0f} s, "
                    f"log predictive density {r['lppd']:.2f}"
                ),
            )
            records.append(record)
    publish(table(found), "ssr_toy", options, say)
    if options.figure:
        from experiments.ssr_toy_page import figure
        from subbayes.plots.style import save

        train, _ = load_rows(0, plan, options.data_dir)
        first = {name: records[0] for name, records in found.items()}
        drawn = figure(first, train, GRID, TRUTH, REFERENCE)
        say(f"wrote {save(drawn, options.figure)}")
    keep = ("lppd", "lppd_se", "mean", "sd", "correlation", "rhat", "ess", "seconds")
    return {name: [{k: r[k] for k in keep} for r in records] for name, records in found.items()}


def table(found: dict[str, list[Record]]) -> str:
    """Return means over seeds, beside the paper's log predictive density, in Markdown."""
    reference = found.get(REFERENCE)
    rows = []
    for name, records in found.items():
        mean, sd = (np.mean([r[k] for r in records], 0) for k in ("mean", "sd"))
        ratio = (
            []
            if reference is None
            else np.mean(
                [np.divide(r["sd"], f["sd"]) for r, f in zip(records, reference, strict=True)], 0
            )
        )
        rows.append(
            [
                name,
                f"{np.mean([r['lppd'] for r in records]):.2f}",
                ", ".join(f"{r['lppd']:.2f}" for r in records),
                PAPER.get(name, ""),
                f"{mean[0]:.3f}, {sd[0]:.3f}",
                f"{mean[1]:.3f}, {sd[1]:.3f}",
                ", ".join(f"{v:.2f}" for v in ratio),
                f"{max(r['rhat'] for r in records):.3f}, {max(r['rhat_all'] for r in records):.2f}",
                f"{np.mean([r['seconds'] for r in records]):.0f}",
            ]
        )
    head = (
        "",
        "log predictive density",
        "by seed",
        "paper",
        "theta 1: mean, sd",
        "theta 2: mean, sd",
        "sd over that of all weights",
        "R-hat of theta, of all",
        "seconds",
    )
    return markdown_table(head, rows)
