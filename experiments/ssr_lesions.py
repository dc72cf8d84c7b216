"""The effect of age beside a network of skin lesions: figures 6, 13, table 2 of Dold et al. (2024).

Instead of the paper's 33,058 melanoma images of 128 x 128, HAM10000 at 32 x 32 is used: melanoma
against the other diagnoses, with the patient's age as a linear effect beside a convolutional
network. There are six folds, with all images of a lesion in the same fold. The semi-structured
subspace is sampled by elliptical slice sampling over all training images, in batches, and compared
with the Laplace approximation of last layer and effects, and a logistic regression on age only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, UInt8
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments import images
from experiments.markdown import add_write_option, markdown_table, number, publish, with_deviation
from experiments.store import Record, Store, key_of
from subbayes import Training
from subbayes.diagnostics import metrics
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.laplace import Laplace
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.regression import Regression
from subbayes.semistructured import SemiStructuredRegression
from subbayes.semistructured.subspace import SUBSPACES
from subbayes.utils.checks import InputError, check_count, fail

FOLDS = 6
EFFECT = "decades"
"""Name of the effect: log odds of melanoma per ten years of age."""

PAPER = {
    "subspace, k = 2": ("0.841 ± 0.003", "−0.072 ± 0.001"),
    "Laplace, last layer": ("0.795 ± 0.004", "−0.076 ± 0.001"),
}
"""AUC and log predictive density of the paper, on other data."""

METHODS: dict[str, dict[str, Any]] = {
    "subspace, k = 2": {"subspace": "curve", "rank": 2},
    "subspace, k = 5": {"subspace": "curve", "rank": 5},
    "Laplace, last layer": {"subspace": "last-layer"},
    "age only": {},
}
DEFAULT_METHODS = ("subspace, k = 2", "Laplace, last layer", "age only")


@dataclass(frozen=True)
class Plan:
    """Settings, which are part of the keys of the records.

    Attributes:
        rows: number of evenly spaced images to use, None for all.
        channels: channels of the two convolutions.
        hidden: units of the dense layer.
        epochs: epochs of training; the epoch with the best validation score is kept.
        validation: fraction of the training images held out for validation.
        learning_rate: learning rate of Adam.
        weight_decay: weight decay of the network's weights.
        batch_size: images per step.
        chains: chains of elliptical slice sampling.
        draws: draws per chain.
        warmup: draws of warm-up per chain.
        wider: scale of the Gaussian of the ellipses relative to the Laplace approximation.
        laplace_draws: draws per chain of the Laplace approximation of last layer and effects.
        predicting: number of draws for prediction.
        age_draws: draws per chain of NUTS in the model with age only.
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
        """Return the settings of the training."""
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
    """Images standardised by channel, with their labels.

    Args:
        images: pixels from 0 to 255, shape (n, 32, 32, 3).
        labels: 0 or 1, shape (n,).
        mean: mean of each channel, of pixels scaled to [0, 1].
        scale: standard deviation of each channel.
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
    """Rows and images of training and test set."""

    train: pd.DataFrame
    test: pd.DataFrame
    x_train: Pictures
    x_test: Pictures


def fold_of(number: int, plan: Plan, data_dir: str | None) -> Fold:
    """Return a fold, stratified by diagnosis and grouped by lesion, of images with known age."""
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
    """Return a smaller version of the network of the paper's listing 1."""
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
    """Run elliptical slice sampling with ellipses from a Laplace approximation scaled by `wider`.

    Chains start at draws of this Gaussian. If there is no Laplace approximation because the
    curvature at the mode is not positive definite, ellipses are drawn from the prior.
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


def fit_method(name: str, fold: Fold, seed: int, plan: Plan) -> SemiStructuredRegression:
    """Fit a method to the training rows of a fold."""
    if name == "age only":
        return Regression(f"melanoma ~ {EFFECT}", family="bernoulli").fit(
            fold.train,
            sampling=Sampling(draws=plan.age_draws, chains=plan.chains, seed=seed, progress=False),
        )
    torch.manual_seed(seed)
    model = SemiStructuredRegression(
        f"melanoma ~ {EFFECT} + cnn(image)", family="bernoulli", networks={"cnn": network_of(plan)}
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


def compute_record(name: str, number: int, plan: Plan, data_dir: str | None) -> Record:
    """Return the record of a method on a fold."""
    fold = fold_of(number, plan, data_dir)
    started = time.process_time()  # CPU time: the core may be shared
    model = fit_method(name, fold, number, plan)
    seconds = time.process_time() - started
    plain = name == "age only"
    options = {} if plain else {"inputs": {"image": fold.x_test}}
    most = min(plan.predicting, len(model.draws.flat()))
    found = model.predict(fold.test, n_draws=most, **options)
    y = fold.test["melanoma"].to_numpy(dtype=np.float64)
    theta = model.effects()[EFFECT].reshape(-1)
    summary, draws, history = model.summary(), model.draws, {} if plain else model.space.history
    k = draws.pareto_k
    held_out = history.get("validation_log_likelihood", [])
    return {
        "method": name,
        "fold": number,
        "seconds": seconds,
        "train": len(fold.train),
        "test": len(fold.test),
        "weights": 0 if plain else model.state.model.deep.n_weights,
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
    """Add the options of this experiment."""
    parser.add_argument("--folds", type=int, default=FOLDS, help="number of folds, of six")
    parser.add_argument(
        "--methods", nargs="+", default=list(DEFAULT_METHODS), choices=list(METHODS)
    )
    parser.add_argument(
        "--figure", default=None, metavar="PNG", help="write figures 6 and 13 to this file"
    )
    add_write_option(parser)


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute the missing records, fold by fold, and print the tables."""
    plan = Plan() if plan is None else plan
    if check_count("folds", options.folds) > FOLDS:
        fail("folds", f"at most {FOLDS}", options.folds)
    store = Store(options.results)
    found: dict[str, list[Record]] = {name: [] for name in options.methods}
    for fold in range(options.folds):
        for name in options.methods:
            record = store.get(
                key_of(f"{name}, fold {fold + 1}", asdict(plan) | METHODS[name]),
                partial(compute_record, name, fold, plan, options.data_dir),
                lambda r: say(
                    f"{r['method']}, fold {r['fold'] + 1}: {r['seconds']:.0f} s, "
                    f"AUC {r['auc']:.3f}, log predictive density {r['lppd']:.4f}"
                ),
            )
            found[name].append(record)
    publish(page(found), "ssr_lesions", options, say)
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


def page(found: Mapping[str, Sequence[Record]]) -> str:
    """Return the table of methods and the table of folds."""
    return f"{table(found)}\n\n{by_fold(found)}"


def table(found: Mapping[str, Sequence[Record]]) -> str:
    """Return means and standard errors over folds, beside those of the paper."""
    rows = []
    for name, records in found.items():
        auc, lppd = PAPER.get(name, ("", ""))
        means = [r["mean"] for r in records]
        rows.append(
            [
                name,
                _mean_and_error([r["auc"] for r in records]),
                auc,
                _mean_and_error([r["lppd"] for r in records]),
                lppd,
                f"{np.mean(means):.3f}, {np.mean([r['sd'] for r in records]):.3f}",
                f"{min(means):.3f} to {max(means):.3f}",
                f"{max(r['rhat'] for r in records):.3f}, {max(r['rhat_all'] for r in records):.3f}",
                f"{min(r['ess'] for r in records):.0f}",
                f"{np.mean([r['seconds'] for r in records]):.0f}",
            ]
        )
    head = (
        "",
        "AUC",
        "paper",
        "log predictive density",
        "paper",
        "age effect: mean, sd",
        "means of folds",
        "R-hat: age, all",
        "ESS of age",
        "seconds",
    )
    return markdown_table(head, rows)


def by_fold(found: Mapping[str, Sequence[Record]]) -> str:
    """Return AUC, log predictive density and the effect's mean and sd, by fold.

    The last row is the mean difference from the first method in AUC and log predictive density,
    with the standard error of paired differences.
    """
    rows = [
        [
            fold + 1,
            *(
                f"{number(r['auc'])}, {number(r['lppd'])}; {number(r['mean'])}, {r['sd']:.3f}"
                for r in (records[fold] for records in found.values())
            ),
        ]
        for fold in range(min(len(records) for records in found.values()))
    ]
    first, *others = found.values()
    gaps = [
        ", ".join(
            _mean_and_error([r[k] - f[k] for r, f in zip(records, first, strict=True)])
            for k in ("auc", "lppd")
        )
        for records in others
    ]
    return markdown_table(["fold", *found], [*rows, ["difference", "", *gaps]])


def _mean_and_error(values: Sequence[float]) -> str:
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
    return with_deviation(float(np.mean(values)), error)
