"""The simulation study of semi-structured subspace inference: figures 4, 5 and 10 to 12.

(Dold et al. 2024, section 4.2.) Normal and Poisson responses, three structured effects of
x ~ N(0, I) beside a network 16-16 of u ~ N(0, I) in four dimensions: 369 weights, 372 unknowns. The
effects' posteriors in semi-structured subspaces of 2, 4, 8, 12 and 16 directions are compared with
that of NUTS over all 372 unknowns: differences of the first four moments, and coverage of the true
effects by credible intervals. In each run true weights and effects are drawn from the
prior of the reference, which is thus calibrated by construction.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats

from experiments.markdown import add_write_option, markdown_table, number, publish
from experiments.store import Record, Store, key_of
from subbayes import MLP, Training
from subbayes.diagnostics.calibration import wilson_interval
from subbayes.inference.configuration import Sampling
from subbayes.semistructured import (
    AllWeights,
    NetworkSubspace,
    SemiStructuredRegression,
    SemiStructuredSubspace,
)
from subbayes.utils.checks import check_choice, check_count

FAMILIES = ("normal", "poisson")
RANKS = (2, 4, 8, 12, 16)
REFERENCE = "all weights"
METHODS: dict[str, dict[str, Any]] = {
    **{f"k = {k}": {"subspace": "curve", "rank": k} for k in RANKS},
    REFERENCE: {"subspace": "full"},
}
MOMENTS = ("mean", "sd", "skewness", "kurtosis")
LEVELS = tuple(round(0.05 * i, 2) for i in range(1, 20))
EFFECTS = ("x1", "x2", "x3")
INPUTS = ("u1", "u2", "u3", "u4")


@dataclass(frozen=True)
class Plan:
    """Settings; learning rate and weight decay are those of the paper (appendix C.1).

    Attributes:
        rows: rows of a run, all for training; the paper does not give the number.
        weight_scale: standard deviation of true weights, and of their prior.
        effect_scale: standard deviation of true effects, and of their prior.
        epochs: maximum number of epochs.
        learning_rate: learning rate of Adam.
        weight_decay: weight decay of the network's weights.
        validation: fraction of the rows held out to select the epoch.
        patience: epochs without a better validation score after which training stops.
        draws: draws per chain.
        warmup: draws of warm-up per chain.
        chains: number of chains.
    """

    rows: int = 75
    weight_scale: float = 0.4
    effect_scale: float = 0.5
    epochs: int = 1000
    learning_rate: float = 2.5e-3
    weight_decay: float = 1e-3
    validation: float | None = 0.2
    patience: int = 200
    draws: int = 300
    warmup: int = 250
    chains: int = 4

    def training(self) -> Training:
        """Return the settings of the training."""
        return Training(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=None,
            weight_decay=self.weight_decay,
            clip_norm=None,
            validation=self.validation,
            patience=None if self.validation is None else self.patience,
        )


def simulate(family: str, run: int, plan: Plan) -> tuple[pd.DataFrame, np.ndarray]:
    """Return rows and true effects of a run; the families differ in the response only."""
    rng = np.random.default_rng([run, 2024])
    u, x = rng.normal(size=(plan.rows, 4)), rng.normal(size=(plan.rows, 3))
    network = MLP(4, (16, 16), 1, "relu", seed=0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.from_numpy(plan.weight_scale * rng.normal(size=parameter.shape)))
        f = network(torch.from_numpy(u).float()).double().numpy()[:, 0]
    effects = plan.effect_scale * rng.normal(size=3)
    eta = f + x @ effects
    y = rng.normal(eta, 1.0) if family == "normal" else rng.poisson(np.exp(eta))
    frame = pd.DataFrame(np.column_stack([x, u]), columns=[*EFFECTS, *INPUTS])
    return frame.assign(y=y), effects


def fit_method(
    method: str, family: str, run: int, plan: Plan, frame: pd.DataFrame
) -> SemiStructuredRegression:
    """Fit a method to the rows of a run, without intercept and with sigma = 1."""
    right = f"0 + {' + '.join(EFFECTS)} + net({', '.join(INPUTS)})"
    model = SemiStructuredRegression(
        {"mu": f"y ~ {right}", "sigma": "0"} if family == "normal" else f"y ~ {right}",
        family=family,
        orthogonal=False,
        priors=dict.fromkeys(EFFECTS, plan.effect_scale),
        networks={"net": MLP(4, (16, 16), 1, "relu", seed=0)},
    )
    rank = METHODS[method].get("rank")
    subspace: NetworkSubspace = (
        SemiStructuredSubspace(rank) if rank else AllWeights(plan.weight_scale)
    )
    return model.fit(
        frame,
        subspace=subspace,
        training=plan.training(),
        sampling=Sampling(
            draws=plan.draws, chains=plan.chains, warmup=plan.warmup, seed=run, progress=False
        ),
    )


def compute_record(method: str, family: str, run: int, plan: Plan) -> Record:
    """Return the record of a method on a run."""
    frame, truth = simulate(family, run, plan)
    started = time.perf_counter()
    model = fit_method(method, family, run, plan, frame)
    seconds = time.perf_counter() - started
    effects, table = model.effects(), model.summary()
    draws = np.stack([effects[name].reshape(-1) for name in EFFECTS])
    return {
        "method": method,
        "family": family,
        "run": run,
        "seconds": seconds,
        "truth": truth.tolist(),
        "below": (draws < truth[:, None]).mean(1).tolist(),
        "mean": draws.mean(1).tolist(),
        "sd": draws.std(1, ddof=1).tolist(),
        "skewness": stats.skew(draws, axis=1).tolist(),
        "kurtosis": stats.kurtosis(draws, axis=1).tolist(),
        "rhat": float(table.loc[list(EFFECTS), "rhat"].max()),
        "ess": float(table.loc[list(EFFECTS), "ess_bulk"].min()),
        "rhat_all": float(np.nanmax(model.draws.rhat())),
        "epochs": len(model.space.history.get("train_loss", ())),
    }


def coverage(records: Sequence[Record], level: float) -> tuple[float, int]:
    """Return the share of true effects within their central intervals, and their number."""
    inside = [abs(2 * below - 1) <= level for r in records for below in r["below"]]
    return float(np.mean(inside)), len(inside)


def differences(records: Sequence[Record], reference: Sequence[Record], moment: str) -> np.ndarray:
    """Return differences of a moment from the reference, shape (runs, 3); mean and sd in its sd."""
    own, theirs = (np.array([r[moment] for r in some]) for some in (records, reference))
    scale = np.array([r["sd"] for r in reference]) if moment in ("mean", "sd") else 1.0
    return (own - theirs) / scale


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--runs", type=int, default=50, help="number of data sets (default: 50)")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument(
        "--figure", default=None, metavar="PNG", help="write figures 4, 5 and 10 to 12 to this file"
    )
    add_write_option(parser)


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute the missing records, run by run, and print the tables."""
    plan = Plan() if plan is None else plan
    for family in options.families:
        check_choice("families", family, FAMILIES)
    store = Store(options.results)

    runs = range(check_count("runs", options.runs))
    results: dict[str, dict[str, list[Record]]] = {
        family: {method: [] for method in METHODS} for family in options.families
    }
    for i in runs:
        for family, by_method in results.items():
            for method, records in by_method.items():
                record = store.get(
                    key_of(f"{family}, {method}, run {i}", asdict(plan) | METHODS[method]),
                    partial(compute_record, method, family, i, plan),
                    lambda r: say(
                        f"run {r['run']}, {r['family']}, {r['method']}: {r['seconds']:.0f} s, "
                        f"R-hat of the effects {r['rhat']:.3f}"
                    ),
                )
                records.append(record)
    titles = {family: f"{family.capitalize()}, {len(runs)} runs" for family in results}
    text = "\n\n".join(table(records, titles[family]) for family, records in results.items())
    publish(text, "ssr_simulation", options, say)
    if options.figure:
        from experiments.ssr_simulation_page import figure
        from subbayes.plots.style import save

        drawn = figure(*figure_data(results), np.array(LEVELS), REFERENCE)
        say(f"wrote {save(drawn, options.figure)}")
    return {family: summary(by_method) for family, by_method in results.items()}


def figure_data(
    results: Mapping[str, Mapping[str, Sequence[Record]]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return differences of moments, and coverage, as the figure takes them."""
    away: dict[str, Any] = {}
    shares: dict[str, Any] = {}
    for family, by_method in results.items():
        away[family] = {
            moment: {
                method: differences(records, by_method[REFERENCE], moment).reshape(-1)
                for method, records in by_method.items()
                if method != REFERENCE
            }
            for moment in MOMENTS
        }
        shares[family] = {
            method: (
                np.array([coverage(records, level)[0] for level in LEVELS]),
                coverage(records, LEVELS[0])[1],
            )
            for method, records in by_method.items()
        }
    return away, shares


def summary(by_method: Mapping[str, Sequence[Record]]) -> Record:
    """Return quartiles of the differences, and coverage with its interval, by method."""
    found: Record = {}
    for method, records in by_method.items():
        share, count = coverage(records, 0.9)
        low, high = wilson_interval(share, count)
        found[method] = {
            "coverage of 90 %": [share, float(low), float(high)],
            "seconds": float(np.median([r["seconds"] for r in records])),
            "rhat": float(max(r["rhat"] for r in records)),
            "rhat of all": float(max(r["rhat_all"] for r in records)),
        }
        for moment in MOMENTS:
            away = differences(records, by_method[REFERENCE], moment)
            found[method][moment] = np.quantile(away, [0.25, 0.5, 0.75]).tolist()
    return found


def table(by_method: Mapping[str, Sequence[Record]], title: str = "") -> str:
    """Return differences from the reference (median and quartiles) and coverage, in Markdown.

    The two figures of R-hat are the largest over the runs: that of the effects, and that of all
    coordinates, which are those of the network too.
    """
    rows = []
    for method, records in by_method.items():
        moments = []
        for moment in MOMENTS:
            low, middle, high = np.quantile(
                differences(records, by_method[REFERENCE], moment), [0.25, 0.5, 0.75]
            )
            moments.append(
                "" if method == REFERENCE else f"{middle:+.2f} ({low:+.2f}, {high:+.2f})"
            )
        shares = []
        for level in (0.5, 0.9):
            share, count = coverage(records, level)
            low, high = wilson_interval(share, count)
            shares.append(f"{share:.2f} ({low:.2f}, {high:.2f})")
        worst = [number(max(r[key] for r in records), 2) for key in ("rhat", "rhat_all")]
        seconds = f"{np.median([r['seconds'] for r in records]):.0f}"
        rows.append([method, *moments, *shares, *worst, seconds])
    head = (
        "",
        "mean",
        "sd",
        "skewness",
        "excess kurtosis",
        "coverage of 50 %",
        "of 90 %",
        "largest R-hat of effects",
        "of all",
        "seconds",
    )
    return markdown_table(head, rows, title)
