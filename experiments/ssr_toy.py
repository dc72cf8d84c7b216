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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from experiments.store import Record, Store, key_of
from experiments.toy_regression import FILE
from experiments.uci import write_between
from subbayes import MLP, Training
from subbayes.data.datasets import find_file
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.nuts import NUTS
from subbayes.semistructured import Deep, SemiStructuredRegression
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
    """Settings; of training those of the paper (appendix C.1), where it gives them.

    Attributes:
        rows: points to train on.
        epochs: passes over them.
        learning_rate: of Adam.
        weight_decay: of the network's weights.
        validation: share of the rows that chooses the epoch.
        draws: draws a chain.
        warmup: draws a chain before them.
        chains: number of chains.
        target_acceptance: of NUTS.
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
        """How the network is trained."""
        return Training(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=None,
            weight_decay=self.weight_decay,
            clip_norm=None,
            validation=self.validation,
        )


def tables(seed: int, plan: Plan, data_dir: str | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training and test rows of a seed: points and categories drawn anew."""
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
    """Rows as the model reads them; the network sees (u / 2, (u / 2)^2)."""
    return pd.DataFrame({"u": u, "half": u / 2, "square": (u / 2) ** 2, "category": category})


def fitted(name: str, train: pd.DataFrame, seed: int, plan: Plan) -> SemiStructuredRegression:
    """A method on the training rows."""
    torch.manual_seed(seed)
    model = SemiStructuredRegression(
        "y ~ C(category)",
        orthogonal=False,
        deep={"net": Deep(MLP(2, (16, 16), 1, "relu"), columns=["half", "square"])},
    )
    options = dict(METHODS[name])
    sampled = options.pop("inference", "nuts") == "nuts"
    subspace = SUBSPACES[options.pop("subspace")](**options)
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


def one(name: str, seed: int, plan: Plan, data_dir: str | None) -> Record:
    """The record of a method on a seed."""
    train, test = tables(seed, plan, data_dir)
    started = time.perf_counter()
    model = fitted(name, train, seed, plan)
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
    """Options of this experiment."""
    parser.add_argument("--seeds", type=int, default=2, help="number of samples of 35 points")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--figure",
        default=None,
        metavar="PNG",
        help="write figures 1 and 9 of the first seed to this file",
    )
    parser.add_argument(
        "--write", default=None, metavar="PAGE", help="put the table between the marks of this page"
    )


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute what is missing, method by method, and print the table."""
    plan = Plan() if plan is None else plan
    store = Store(Path(options.results) / "records.json")
    for seed in range(check_count("seeds", options.seeds)):
        for name in options.methods:
            key = key_of(f"{name}, seed {seed}", asdict(plan) | METHODS[name])
            if key not in store:
                store.put(key, one(name, seed, plan, options.data_dir))
                say(
                    f"{name}, seed {seed}: {store[key]['seconds']:.0f} s, log predictive density "
                    f"{store[key]['lppd']:.2f}"
                )
    found = {
        name: [
            store[key_of(f"{name}, seed {s}", asdict(plan) | METHODS[name])]
            for s in range(options.seeds)
        ]
        for name in options.methods
    }
    lines = table(found)
    for line in lines:
        say(line)
    if options.write:
        write_between(options.write, "ssr_toy", "\n".join(lines))
    if options.figure:
        from experiments.ssr_toy_page import figure
        from subbayes.plots.style import save

        train, _ = tables(0, plan, options.data_dir)
        first = {name: records[0] for name, records in found.items()}
        drawn = figure(first, train, GRID, TRUTH, REFERENCE)
        say(f"wrote {save(drawn, options.figure)}")
    keep = ("lppd", "lppd_se", "mean", "sd", "correlation", "rhat", "ess", "seconds")
    return {name: [{k: r[k] for k in keep} for r in records] for name, records in found.items()}


def table(found: dict[str, Sequence[Record]]) -> list[str]:
    """A Markdown table: means over seeds, beside the paper's log predictive density."""
    reference = found.get(REFERENCE)
    lines = [
        "| | log predictive density | by seed | paper | theta 1: mean, sd | theta 2: mean, sd "
        "| sd over that of all weights | R-hat of theta, of all | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, records in found.items():
        each = ", ".join(f"{r['lppd']:.2f}" for r in records)
        mean, sd = (np.mean([r[k] for r in records], 0) for k in ("mean", "sd"))
        share = (
            ""
            if reference is None
            else ", ".join(
                f"{v:.2f}"
                for v in np.mean(
                    [
                        np.array(r["sd"]) / np.array(f["sd"])
                        for r, f in zip(records, reference, strict=True)
                    ],
                    0,
                )
            )
        )
        lines.append(
            f"| {name} | {np.mean([r['lppd'] for r in records]):.2f} | {each} "
            f"| {PAPER.get(name, '')} "
            f"| {mean[0]:.3f}, {sd[0]:.3f} | {mean[1]:.3f}, {sd[1]:.3f} | {share} "
            f"| {max(r['rhat'] for r in records):.3f}, {max(r['rhat_all'] for r in records):.2f} "
            f"| {np.mean([r['seconds'] for r in records]):.0f} |"
        )
    return lines
