"""Figures and tables of the report of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from subbayes import plots
from subbayes.data.data import Data
from subbayes.diagnostics.function_space import ChainPredictions
from subbayes.draws import Draws
from subbayes.models.fitted import FittedModel
from subbayes.predictions.predictive import Predictive
from subbayes.reports.rendering import Picture, Table, picture

MAX_DRAWS = 1000
_SHOWN_COORDINATES = 2
_MAX_ROWS = 30
_MAX_BARS = 40


def predictions(predictive: Predictive, y: Any, label: str, name: str) -> list[Picture]:
    """Predictions of test rows against their targets, and their calibration.

    Args:
        predictive: predictions of the test rows.
        y: their targets.
        label: name of the method.
        name: the predicted quantity.
    """
    if predictive.likelihood.kind == "classification":
        return [
            picture(
                plots.reliability(predictive, y),
                "Reliability: accuracy against confidence. Below the diagonal the model "
                "is overconfident.",
            ),
            picture(
                plots.selective_accuracy(predictive, y),
                "Accuracy among the rows with the most confident predictions.",
            ),
        ]
    name = f"{name}, first target" if predictive.mean.ndim > 1 else name
    spread = " A count is spread over the probabilities between F(y - 1) and F(y)."
    return [
        picture(
            plots.intervals(predictive, y, name=name),
            "Test rows and their 95 % intervals. Dark: epistemic uncertainty; light: epistemic and "
            "aleatoric uncertainty.",
        ),
        picture(
            plots.calibration(predictive, y, label=label),
            "Share of test rows inside intervals of each level. Below the diagonal intervals are "
            "too narrow; deviations inside the grey band may be due to chance."
            + spread
            * (predictive.likelihood.kind == "count"),
        ),
        picture(
            plots.pit(predictive, y),
            "Position of the test rows in their predictive distributions: flat if calibrated, "
            "a valley if the model is overconfident, a hill if it is underconfident.",
        ),
    ]


def curve(model: FittedModel, rows: Data | None, name: str) -> list[Picture]:
    """Bands over the input, for a regression on a single input.

    Args:
        model: the model.
        rows: training or test rows, which give the range of the input.
        name: the predicted quantity.
    """
    if model.draws is None or rows is None or not rows.in_memory:
        return []
    x, y = rows.inputs, rows.targets()
    if not isinstance(x, Tensor) or x.numel() != len(x) or not isinstance(y, Tensor):
        return []  # targets in a tuple have a noise scale per row, unknown between the rows
    if model.likelihood.kind == "classification":
        return []
    low, high = float(x.min()), float(x.max())
    pad = 0.15 * (high - low)
    grid = torch.linspace(low - pad, high + pad, 200, dtype=x.dtype).reshape(-1, *x.shape[1:])
    predictive = model.predict(grid, n_draws=MAX_DRAWS)
    return [
        picture(
            plots.bands(predictive, grid, data=(x, y), names=("input", name)),
            "The predictive curve over the input. Dark: epistemic uncertainty; light: the range of "
            "95 % of observations.",
        )
    ]


def posterior(model: FittedModel) -> list[Picture]:
    """The log density with the draws on it, and the choice of the temperature."""
    pictures = []
    if model.posterior is not None and model.subspace.rank > 1 and model.draws is not None:
        pictures.append(
            picture(
                plots.density(model.posterior, model.draws),
                "Log density over the first two coordinates, with the others at the mean of the "
                "draws, and the draws. Where coordinates are correlated, the draws are wider than "
                "this slice.",
            )
        )
    if model.settings.get("temperatures"):
        pictures.append(
            picture(
                plots.temperature(model.settings["temperatures"]),
                "Choice of the temperature. It hardly matters among temperatures whose scores "
                "differ by less than their standard error.",
            )
        )
    return pictures


@dataclass(frozen=True)
class Chains:
    """Convergence of the chains: warnings, a table of the coordinates, a note and pictures."""

    warnings: list[str] = field(default_factory=list)
    summary: Table | None = None
    note: str = ""
    pictures: list[Picture] = field(default_factory=list)


def chains(draws: Draws, warnings: Sequence[str]) -> Chains:
    """Convergence of the chains, with traces of the coordinates with the largest R-hat.

    Args:
        draws: the draws.
        warnings: sentences of the model.
    """
    if draws.n_draws < 4:
        return Chains(note=f"Too few draws to tell. {' '.join(warnings)}")
    summary = draws.summary()
    order = np.argsort(-summary["rhat"].fillna(np.inf).to_numpy(), kind="stable")
    pictures = []
    if draws.rank <= _MAX_BARS:
        pictures.append(picture(plots.ess(draws), "Effective sample size of each coordinate."))
    pictures.append(picture(plots.autocorrelation(draws), "Autocorrelation of the chains by lag."))
    for i in sorted(int(i) for i in order[:_SHOWN_COORDINATES]):
        pictures += [
            picture(
                plots.trace(draws, i),
                f"Trace of z[{i}]: chains that explored the same posterior look alike.",
            ),
            picture(
                plots.ranks(draws, i),
                f"Ranks of z[{i}] by chain: flat, around the dashed line, if the chains agree.",
            ),
        ]
    if "log_likelihood" in draws.stats:
        pictures.append(
            picture(
                plots.trace(draws, "log_likelihood"),
                "Trace of the log-likelihood of the training rows.",
            )
        )
    note = f"Traces and ranks show the {_SHOWN_COORDINATES} coordinates with the largest R-hat."
    return Chains(
        list(warnings), _summary(summary), note if draws.rank > _SHOWN_COORDINATES else "", pictures
    )


def sentence(found: ChainPredictions) -> str:
    """How the chains agree in their predictions, as a sentence."""
    text = str(found).removeprefix("ChainPredictions(").removesuffix(")")
    return f"{text[:1].upper()}{text[1:]}."


def _summary(summary: pd.DataFrame) -> Table:
    """The table of the coordinates, or of those with the largest R-hat if there are many."""
    many = len(summary) > _MAX_ROWS
    rows = [
        [
            str(name),
            *(f"{row[key]:.3f}" for key in ("mean", "sd", "2.5%", "97.5%")),
            f"{row['ess_bulk']:.0f}",
            f"{row['ess_tail']:.0f}",
            f"{row['rhat']:.4f}",
        ]
        for name, row in (summary.nlargest(_MAX_ROWS, "rhat") if many else summary).iterrows()
    ]
    caption = "R-hat below 1.01 and effective sample sizes above 100 per chain are good."
    if many:
        caption += f" The {_MAX_ROWS} of {len(summary)} coordinates with the largest R-hat."
    return Table(
        ["coordinate", "mean", "sd", "2.5 %", "97.5 %", "ESS, bulk", "ESS, tail", "R-hat"],
        rows,
        caption,
    )


def training(history: Any, recorder: Any, rank: int | None) -> list[Picture]:
    """The loss by epoch, and the spectrum of the recorded trajectory.

    Args:
        history: losses by phase of the training.
        recorder: the recorded trajectory, or None.
        rank: number of directions of the subspace.
    """
    if not any((history.get(phase) or {}).get("train_loss") for phase in ("train", "swa")):
        return []
    pictures = [
        picture(
            plots.training_history(history),
            "Negative log-likelihood of the minibatches during training; lower is better. The "
            "shaded phase has a constant learning rate.",
        )
    ]
    if recorder is not None and recorder.n > 1:
        pictures.append(
            picture(
                plots.spectrum(recorder, rank),
                "Standard deviation of the trajectory in that phase along each of its principal "
                "directions.",
            )
        )
    return pictures
