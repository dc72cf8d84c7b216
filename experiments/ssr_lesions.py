"""The effect of age beside a network of skin lesions: figures 6, 13, table 2 of Dold et al. (2024).

A smaller stand-in for the paper's 33,058 melanoma images of 128 x 128: HAM10000 at 32 x 32,
melanoma against the other diagnoses, with the patient's age as a linear effect beside a
convolutional network. Six folds; images of one lesion are in one fold. The semi-structured subspace
is sampled by elliptical slice sampling over all training images, in batches; beside it the Laplace
approximation of last layer and effects, and a logistic regression on age alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, UInt8
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments import images
from experiments.store import Record, Store, key_of
from experiments.uci import write_between
from subbayes import Training
from subbayes.diagnostics import metrics
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.laplace import Laplace
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.semistructured import SemiStructuredRegression
from subbayes.semistructured.subspace import SUBSPACES
from subbayes.utils.checks import InputError, check_count, fail

FOLDS = 6
EFFECT = "decades"
"""The effect's name: log odds of melanoma for ten years of age."""

PAPER = {
    "subspace, k = 2": ("0.841 ± 0.003", "−0.072 ± 0.001"),
    "Laplace, last layer": ("0.795 ± 0.004", "−0.076 ± 0.001"),
}
"""AUC and log predictive density of the paper, which are those of other data."""

METHODS: dict[str, dict[str, Any]] = {
    "subspace, k = 2": {"subspace": "curve", "rank": 2},
    "subspace, k = 5": {"subspace": "curve", "rank": 5},
    "Laplace, last layer": {"subspace": "last-layer"},
    "age only": {},
}
USUAL = ("subspace, k = 2", "Laplace, last layer", "age only")


@dataclass(frozen=True)
class Plan:
    """Settings; changed ones are other records.

    Attributes:
        rows: evenly spaced images to use, None for all.
        channels: of the two convolutions.
        hidden: units of the dense layer.
        epochs: passes over the training images; the best of them on held-out ones is taken,
        validation: a share of the training images.
        learning_rate: of Adam.
        weight_decay: of the network's weights.
        batch_size: images a step.
        chains: of elliptical slice sampling,
        draws: draws a chain,
        warmup: draws a chain before them,
        wider: standard deviations of the Gaussian that ellipses are drawn from, over those of the
            Laplace approximation.
        laplace_draws: draws a chain of the Laplace approximation of last layer and effects.
        predicting: draws to predict with.
        age_draws: draws a chain of NUTS, for age alone.
    """

    rows: int | None = None
    channels: tuple[int, int] = (8, 16)
    hidden: int = 32
    epochs: int = 30
    validation: float = 0.2
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    batch_size: int = 64
    chains: int = 4
    draws: int = 75
    warmup: int = 10
    wider: float = 1.5
    laplace_draws: int = 75
    predicting: int = 200
    age_draws: int = 1000

    def training(self) -> Training:
        """How the network is trained."""
        return Training(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            weight_decay=self.weight_decay,
            clip_norm=None,
            validation=self.validation,
            patience=self.epochs,
        )


# --- images and folds -----------------------------------------------------------------------------


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images of bytes as a network reads them, standardised by channel, with their labels.

    Args:
        images: shape (n, 32, 32, 3).
        labels: 0 or 1, shape (n,).
        mean: of the channels, in [0, 1],
        scale: and their standard deviations.
    """

    def __init__(
        self,
        images: UInt8[np.ndarray, "n h w c"],
        labels: np.ndarray,
        mean: Float[np.ndarray, " c"],
        scale: Float[np.ndarray, " c"],
    ) -> None:
        self.images, self.labels, self.mean, self.scale = images, labels, mean, scale

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        pixels = (self.images[i] / 255 - self.mean) / self.scale
        return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32)), int(self.labels[i])


@dataclass(frozen=True)
class Fold:
    """Rows and images to learn from, and held out."""

    train: pd.DataFrame
    test: pd.DataFrame
    x_train: Pictures
    x_test: Pictures


def fold_of(number: int, plan: Plan, data_dir: str | None) -> Fold:
    """A fold: shares of melanomas alike, images of a lesion together, ages known."""
    frame, pixels = images.lesions(data_dir)
    known = np.flatnonzero(frame["age"].notna())
    if plan.rows is not None:
        known = known[np.linspace(0, len(known) - 1, plan.rows).astype(int)]
    frame = frame.iloc[known].reset_index(drop=True)
    frame = frame.assign(melanoma=(frame["dx"] == "mel").astype(int), **{EFFECT: frame["age"] / 10})
    pixels = pixels[known]
    splits = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=0).split(
        frame, frame["melanoma"], frame["lesion_id"]
    )
    train, test = list(splits)[number]
    some = pixels[train] / 255
    mean, scale = some.mean((0, 1, 2)), some.std((0, 1, 2))
    parts = [(frame.iloc[rows].reset_index(drop=True), rows) for rows in (train, test)]
    return Fold(
        *(part for part, _ in parts),
        *(Pictures(pixels[rows], part["melanoma"].to_numpy(), mean, scale) for part, rows in parts),
    )


def network_of(plan: Plan) -> nn.Sequential:
    """Listing 1 of the paper made smaller: strided convolution, tanh, maximum; another; dense."""
    first, second = plan.channels
    return nn.Sequential(
        nn.Conv2d(3, first, 3, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * second, plan.hidden),
        nn.Tanh(),
        nn.Linear(plan.hidden, 1),
    )


# --- sampling -------------------------------------------------------------------------------------


def about_laplace(posterior: Posterior, sampling: Sampling, wider: float) -> Draws:
    """Elliptical slice sampling about the Laplace approximation, `wider` times as wide.

    Chains start at draws of this Gaussian. Where there is none, for want of curvature at the mode,
    ellipses are drawn from the prior.
    """
    sampling = replace(sampling, initial="prior")
    try:
        found = Laplace(starts=2).sample(
            posterior, draws=50, chains=1, seed=sampling.seed, progress=sampling.progress
        )
    except InputError:
        return EllipticalSlice().run(posterior, sampling)
    moments = found.moments
    assert moments is not None
    assert moments.covariance is not None
    near = Normal(mean=moments.mean, covariance=wider**2 * moments.covariance)
    drawn = EllipticalSlice(reference=near).run(posterior, sampling)
    return replace(drawn, independent=True, pareto_k=found.pareto_k)


# --- one fold -------------------------------------------------------------------------------------


def fitted(name: str, fold: Fold, seed: int, plan: Plan) -> SemiStructuredRegression:
    """A method on the training rows of a fold."""
    if name == "age only":
        return SemiStructuredRegression(f"melanoma ~ {EFFECT}", family="bernoulli").fit(
            fold.train,
            sampling=Sampling(draws=plan.age_draws, chains=plan.chains, seed=seed, progress=False),
        )
    torch.manual_seed(seed)
    model = SemiStructuredRegression(
        f"melanoma ~ {EFFECT}", family="bernoulli", deep={"image": network_of(plan)}
    )
    settings = dict(METHODS[name])
    kind = settings.pop("subspace")
    curve = kind == "curve"
    return model.fit(
        fold.train,
        inputs={"image": fold.x_train},
        subspace=SUBSPACES[kind](**settings),
        inference=partial(about_laplace, wider=plan.wider) if curve else Laplace(starts=1),
        training=plan.training(),
        sampling=Sampling(
            draws=plan.draws if curve else plan.laplace_draws,
            chains=plan.chains,
            warmup=plan.warmup if curve else None,
            seed=seed,
            progress=False,
        ),
    )


def one(name: str, number: int, plan: Plan, data_dir: str | None) -> Record:
    """The record of a method on a fold."""
    fold = fold_of(number, plan, data_dir)
    started = time.process_time()  # others may share the core
    model = fitted(name, fold, number, plan)
    seconds = time.process_time() - started
    inputs = None if name == "age only" else {"image": fold.x_test}
    found = model.predict(fold.test, inputs, n_draws=min(plan.predicting, len(model.draws.flat())))
    y = fold.test["melanoma"].to_numpy(dtype=np.float64)
    theta = model.effects()[EFFECT].reshape(-1)
    summary, draws, history = model.summary(), model.draws, model.space.history
    k = draws.pareto_k
    held_out = history.get("validation_log_likelihood", [])
    return {
        "method": name,
        "fold": number,
        "seconds": seconds,
        "train": len(fold.train),
        "test": len(fold.test),
        "weights": model.state.model.n_weights,
        "auc": metrics.auroc(found, y.astype(int)),
        "lppd": float(found.log_prob(y).mean()),
        "mean": float(theta.mean()),
        "sd": float(theta.std(ddof=1)),
        "rhat": float(summary.loc[EFFECT, "rhat"]),
        "rhat_all": float(np.nanmax(draws.rhat())),
        "ess": float(summary.loc[EFFECT, "ess_bulk"]),
        "evaluations": float(np.mean(draws.stats.get("evaluations", 0))),
        "pareto_k": k if np.isfinite(k) else None,
        "epoch": 1 + int(np.argmax(held_out)) if len(held_out) else 0,
        "held_out": [round(float(v), 4) for v in held_out],
        "theta": theta[:: max(1, len(theta) // 1000)].round(4).tolist(),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this experiment."""
    parser.add_argument("--folds", type=int, default=FOLDS, help="run the first so many of six")
    parser.add_argument("--methods", nargs="+", default=list(USUAL), choices=list(METHODS))
    parser.add_argument(
        "--figure", default=None, metavar="PNG", help="write figures 6 and 13 to this file"
    )
    parser.add_argument(
        "--write",
        default=None,
        metavar="PAGE",
        help="put the tables between the marks of this page",
    )


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute what is missing, fold by fold, and print the table."""
    plan = Plan() if plan is None else plan
    if check_count("folds", options.folds) > FOLDS:
        fail("folds", f"at most {FOLDS}", options.folds)
    store = Store(Path(options.results) / "records.json")
    found: dict[str, list[Record]] = {name: [] for name in options.methods}
    for fold in range(options.folds):
        for name in options.methods:
            key = key_of(f"{name}, fold {fold + 1}", asdict(plan) | METHODS[name])
            if key not in store:
                store.put(key, one(name, fold, plan, options.data_dir))
                say(
                    f"{name}, fold {fold + 1}: {store[key]['seconds']:.0f} s, "
                    f"AUC {store[key]['auc']:.3f}, log predictive density {store[key]['lppd']:.4f}"
                )
            found[name].append(store[key])
    lines = [*table(found), "", *by_fold(found)]
    for line in lines:
        say(line)
    if options.write:
        write_between(options.write, "ssr_lesions", "\n".join(lines))
    if options.figure:
        from experiments.ssr_lesions_page import figure
        from subbayes.plots.style import save

        say(f"wrote {save(figure(found), options.figure)}")
    keep = (
        "auc",
        "lppd",
        "mean",
        "sd",
        "rhat",
        "rhat_all",
        "ess",
        "evaluations",
        "epoch",
        "seconds",
    )
    return {name: [{k: r[k] for k in keep} for r in records] for name, records in found.items()}


def table(found: Mapping[str, Sequence[Record]]) -> list[str]:
    """A Markdown table: means and standard errors over folds, beside those of the paper."""
    lines = [
        "| | AUC | paper | log predictive density | paper "
        "| age effect: mean, sd | means of folds | R-hat: age, all | ESS of age | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, records in found.items():
        auc, lppd = PAPER.get(name, ("", ""))
        means = [r["mean"] for r in records]
        lines.append(
            f"| {name} | {_average([r['auc'] for r in records])} | {auc} "
            f"| {_average([r['lppd'] for r in records])} | {lppd} "
            f"| {np.mean(means):.3f}, {np.mean([r['sd'] for r in records]):.3f} "
            f"| {min(means):.3f} to {max(means):.3f} "
            f"| {max(r['rhat'] for r in records):.3f}, {max(r['rhat_all'] for r in records):.3f} "
            f"| {min(r['ess'] for r in records):.0f} "
            f"| {np.mean([r['seconds'] for r in records]):.0f} |"
        )
    return lines


def by_fold(found: Mapping[str, Sequence[Record]]) -> list[str]:
    """A Markdown table: AUC, log predictive density and the effect's mean and sd, by fold.

    The last row is the mean difference from the first method in AUC and log predictive density,
    with the standard error of differences on the same folds.
    """
    lines = [f"| fold | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for fold in range(min(len(records) for records in found.values())):
        cells = [
            f"{r['auc']:.3f}, {r['lppd']:.3f}; {r['mean']:.3f}, {r['sd']:.3f}"
            for r in (records[fold] for records in found.values())
        ]
        lines.append(f"| {fold + 1} | {' | '.join(cells)} |".replace("-", "−"))
    first, *others = found.values()
    gaps = [
        "",
        *(
            ", ".join(
                _average([r[k] - f[k] for r, f in zip(records, first, strict=True)])
                for k in ("auc", "lppd")
            )
            for records in others
        ),
    ]
    return [*lines, f"| difference | {' | '.join(gaps)} |"]


def _average(values: Sequence[float]) -> str:
    """Mean ± standard error."""
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{error}".replace("-", "−")
