"""A model that learns from new rows without a refit, and predicts with torch alone."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

import subbayes
from examples.demo.section import (
    Effort,
    Finding,
    Gain,
    Section,
    coverage_finding,
    mean_with_error,
    with_error,
)
from examples.demo.table import Rows
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.models.fitted import FittedModel
from subbayes.networks.mlp import MLP
from subbayes.reports.rendering import Table
from subbayes.training.configuration import Training

FIRST, CHUNKS, LEVEL = 100, 5, 0.95
FROZEN, UPDATED, ONE, REFIT = "first rows alone", "updated", "one fit of all rows", "trained again"
TOLERANCE = 1e-4  # of the standardised target, above rounding in float32

Pair = tuple[torch.Tensor, torch.Tensor]


def _fit(rows: Pair, seed: int, epochs: int) -> FittedModel:
    return subbayes.fit(
        MLP(rows[0].shape[1], (30,), 1, activation="tanh", seed=seed),
        rows,
        subspace="full",
        inference=LinearisedLaplace(gauss_newton_step=True),
        prior=0.5,
        training=Training(epochs=epochs, learning_rate=1e-2, prior_scale=0.5, swa_epochs=0),
        sampling=Sampling(draws=50, seed=seed, progress=False),
    )


def _one_fit(model: FittedModel, rows: Pair) -> FittedModel:
    """The posterior of all rows, linearised where the model was, with its noise."""
    return subbayes.fit(
        model.network.module_with(),
        rows,
        likelihood=model.likelihood,
        subspace=model.subspace,
        inference=LinearisedLaplace(gauss_newton_step=True),
        prior=model.prior,
        training=Training(epochs=0, swa_epochs=0),
        sampling=Sampling(draws=50, progress=False),
    )


def update_and_export(seed: int, effort: Effort, folder: Path) -> Section:
    """Update a model by five groups of rows, and write it to `updated.pt2`."""
    drawn = Rows.simulate("Friedman #3", seed)
    shift, scale = drawn.x[:FIRST].mean(0), drawn.x[:FIRST].std(0)
    centre, spread = drawn.y[:FIRST].mean(), drawn.y[:FIRST].std()
    x, x_test = (torch.tensor((part - shift) / scale).float() for part in (drawn.x, drawn.x_test))
    y, y_test = (torch.tensor((p - centre) / spread).float() for p in (drawn.y, drawn.y_test))
    seconds = {}
    models = {}

    def timed(name: str, model: FittedModel, started: float) -> None:
        seconds[name], models[name] = time.perf_counter() - started, model

    started = time.perf_counter()
    model = _fit((x[:FIRST], y[:FIRST]), seed, effort.update_epochs)
    timed(FROZEN, model, started)
    started = time.perf_counter()
    for rows in torch.arange(FIRST, len(y)).chunk(CHUNKS):
        model = model.update((x[rows], y[rows]))
    timed(UPDATED, model, started)
    started = time.perf_counter()
    timed(ONE, _one_fit(models[FROZEN], (x, y)), started)
    started = time.perf_counter()
    timed(REFIT, _fit((x, y), seed, effort.update_epochs), started)

    found = {name: each.predict(x_test) for name, each in models.items()}
    scores = {name: each.log_prob(y_test.numpy()) for name, each in found.items()}
    difference = max(
        float(np.abs(getattr(found[UPDATED], part) - getattr(found[ONE], part)).max())
        for part in ("mean", "std")
    )
    low, high = found[UPDATED].interval(LEVEL)
    covered = (low <= y_test.numpy()) & (y_test.numpy() <= high)
    file = model.export(folder / "updated.pt2", overwrite=True)
    with torch.no_grad():
        exported = torch.export.load(file).module()(x_test)["mean"].numpy().ravel()
    gap = float(np.abs(exported - found[UPDATED].mean.ravel()).max())
    same = difference < TOLERANCE
    agrees = gap < TOLERANCE
    return Section(
        "update",
        "New rows, and another program",
        (
            f"The first table again. A network is trained on its first {FIRST} rows, and its "
            f"linearised posterior is updated by the other {len(y) - FIRST}, {CHUNKS} groups one "
            "after the other, without looking at earlier rows. What the network sees in its "
            "inputs, and the noise, stay those of the first rows.",
            "The updated model is written to updated.pt2, which torch.export.load reads without "
            "this library; model.export('model.onnx') writes ONNX where the extra is installed.",
        ),
        (
            Table(
                ["model", "log score", "gain of updating", "seconds"],
                [
                    [
                        name,
                        with_error(*mean_with_error(scores[name]), 3),
                        ""
                        if name == UPDATED
                        else Gain.of("", "", scores[UPDATED], scores[name]).to_text(unit=False),
                        f"{seconds[name]:.1f}",
                    ]
                    for name in models
                ],
                "± one standard error over test rows. The seconds of updating are those of all "
                "groups.",
            ),
        ),
        tuple(
            Gain.of("the updated model", other, scores[UPDATED], scores[name])
            for name, other in (
                (FROZEN, "that of the first rows"),
                (REFIT, "a network trained again"),
            )
        ),
        (
            Finding(
                "good" if same else "bad",
                f"Means and standard deviations differ by at most {difference:.0e} from one fit of "
                f"all rows at the same linearisation: {'the same' if same else 'not the same'}.",
            ),
            Finding(
                "good" if agrees else "bad",
                f"The file updated.pt2 ({file.stat().st_size / 1e6:.1f} MB) predicts the same "
                f"means within {gap:.0e}.",
            ),
            coverage_finding("95 % intervals after the update", covered, LEVEL),
        ),
        facts={
            name: {"log_score": mean_with_error(scores[name]), "seconds": seconds[name]}
            for name in models
        }
        | {"difference": difference, "exported_difference": gap},
    )
