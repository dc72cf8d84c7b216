"""A self-contained HTML report of a fitted model, or of a comparison of methods."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import subbayes
from subbayes import plots
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.diagnostics.predictor import Predictor
from subbayes.models.array_model import NETWORKS
from subbayes.models.description import describe
from subbayes.models.fitted import FittedModel
from subbayes.models.method_comparison import Comparison, format_score
from subbayes.plots.methods import NAMES
from subbayes.posterior import Posterior
from subbayes.predictions.predictive import Predictive
from subbayes.reports import model_figures as figures
from subbayes.reports import sparse as sparse_report
from subbayes.reports.rendering import Picture, Table, picture, render
from subbayes.sparse.result import SparseNetwork
from subbayes.utils.checks import check_choice, fail_type
from subbayes.utils.files import atomic_write_text

__all__ = ["WORDS", "write_report"]

WORDS = {
    "weights": "the random parameters of the network, as one vector.",
    "subspace": "the few directions in which the weights vary around a trained network, the shift.",
    "coordinates z": "displacement of the weights along each direction of the subspace.",
    "posterior": "the distribution of z given the prior and the training rows.",
    "temperature T": "power 1/T of the likelihood; T = 1 is the posterior, a larger T widens it.",
    "draws": "points z from the posterior; each is one network.",
    "predictive": "the average of the predictive distributions of the draws.",
    "epistemic": "uncertainty from disagreement of the draws; more data would reduce it.",
    "aleatoric": "uncertainty from noise in the targets; more data would not reduce it.",
    "log-likelihood": "log density of the test targets, in nats per row; higher is better.",
    "RMSE": "root mean squared error of the predictive mean; lower is better.",
    "CRPS": "distance of the predictive distribution from the target, in its unit; lower "
    "is better.",
    "coverage": "share of test targets inside the interval; should equal its level.",
    "R-hat": "disagreement of the chains; 1 is agreement, above 1.01 run the chains longer.",
    "effective sample size": "number of independent draws that are equivalent to the chains.",
}
"""Definitions of the terms in a report."""

_SCORES = {
    "log_likelihood": "log-likelihood",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage": "coverage of 95 %",
    "interval_width": "width of 95 %",
    "accuracy": "accuracy",
    "brier": "Brier",
    "ece": "ECE",
    "auroc": "AUROC",
    "seconds": "seconds",
}
_NOT_RANKED = ("seconds", "interval_width")


def write_report(
    subject: Predictor | SparseNetwork | Comparison,
    path: str | Path,
    *,
    data: Any = None,
    test: Any = None,
    title: str = "",
    name: str = "y",
    unit: str = "",
    command: str = "",
    notes: Sequence[str] = (),
    method: str | None = None,
    features: Sequence[str] | None = None,
) -> Path:
    """Write a self-contained HTML report, without scripts or external resources.

    It describes the model, its predictions of test rows, the posterior, the convergence of the
    chains, and how to reproduce it, and defines its terms.

    Args:
        subject: a fitted model, a sparse network, a baseline, or a comparison, whose report has
            its table and the details of one model.
        path: the file.
        data: training data, to plot the log density of a model that was loaded without them.
        test: test rows with their targets; a comparison has its own test rows and needs these
            only for curves over a single input.
        title: heading.
        name: name of the target.
        unit: unit of the target.
        command: command that reproduces the model.
        notes: remarks, one paragraph each, below the table of scores.
        method: model of a comparison to show; by default the first with draws.
        features: names of the inputs of a sparse network.

    Returns:
        The path.

    Raises:
        InputTypeError: `subject` is neither a model nor a comparison.
        ArtifactError: the file cannot be written; an existing file is unchanged.

    Example:
        >>> x = torch.linspace(-2, 2, 60)[:, None]
        >>> net = subbayes.MLP(1, (10,), 1, seed=0)
        >>> model = subbayes.fit(net, (x, torch.sin(x[:, 0])), subspace=subbayes.subspaces.PCA(2),
        ...                      training=subbayes.Training(epochs=20, swa_epochs=5),
        ...                      sampling=subbayes.Sampling(draws=50, progress=False))
        >>> write_report(model, "report.html", title="A sine").name
        'report.html'
    """
    story = _story(subject, data, test, name, unit, method)
    sparse, model = story.sparse, story.model
    facts = describe(model) if model else sparse_report.facts(sparse) if sparse else {}
    scores, score_pictures = _scores(story)
    inclusion, inclusion_pictures = sparse_report.inclusion(sparse, features)
    text = render(
        "model.html",
        title=title or f"Predicting {name}",
        lead=_lead(story),
        verdict=_verdict(story),
        facts=facts,
        scores=scores,
        score_pictures=score_pictures,
        notes=notes,
        predictions=_predictions(story),
        inclusion=inclusion,
        inclusion_pictures=inclusion_pictures,
        posterior=figures.posterior(model) if model else [],
        chains=figures.chains(model.draws) if model and model.draws is not None else None,
        training=_training(story),
        provenance=_provenance(story),
        command=command,
        words=_words(story),
    )
    atomic_write_text(path, text)
    return Path(path)


@dataclass(frozen=True)
class _Story:
    """The content of a report."""

    model: FittedModel | None
    method: str
    predictive: Predictive | None
    y: Any
    comparison: Comparison | None
    data: Data | None
    test: Data | None
    name: str
    unit: str
    sparse: SparseNetwork | None = None

    @property
    def named(self) -> str:
        """Name of the target, with its unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def kind(self) -> str:
        return "" if self.predictive is None else self.predictive.likelihood.kind


def _story(subject: Any, data: Any, test: Any, name: str, unit: str, method: str | None) -> _Story:
    rows = None if data is None else Data.of(data)
    held = None if test is None else Data.of(test, "test")
    if isinstance(subject, Comparison):
        sampled = [key for key, model in subject.models.items() if isinstance(model, FittedModel)]
        key = method or (sampled or list(subject.models))[0]
        check_choice("method", key, subject.models)
        model = subject.models[key]
        fitted = model if isinstance(model, FittedModel) else None
        return _Story(
            _with_posterior(fitted, rows),
            str(subject.table.loc[key, "method"]),
            subject.predictives[key],
            subject.y,
            subject,
            rows,
            held,
            name,
            unit,
        )
    if not isinstance(subject, Predictor):
        fail_type("subject", "a fitted model or a Comparison", subject)
    predictive, y = (None, None) if held is None else _predicted(subject, held)
    fitted = subject if isinstance(subject, FittedModel) else None
    sparse = subject if isinstance(subject, SparseNetwork) else None
    return _Story(
        _with_posterior(fitted, rows),
        subject.label,
        predictive,
        y,
        None,
        rows,
        held,
        name,
        unit,
        sparse,
    )


def _predicted(model: Predictor, rows: Data) -> tuple[Predictive, Tensor]:
    """Predictions of test rows, with known noise scales if there are any, and their targets."""
    y = rows.targets()
    options: dict[str, Any] = {} if isinstance(y, Tensor) else {"noise": y[1]}
    options["n_draws"] = min(figures.MOST_DRAWS, max(NETWORKS, model.default_draws))
    predictive = model.predict(rows.inputs if rows.in_memory else rows.loader, **options)
    return predictive, y if isinstance(y, Tensor) else y[0]


def _with_posterior(model: FittedModel | None, data: Data | None) -> FittedModel | None:
    """The model with its posterior, if data are available."""
    if model is None or model.posterior is not None or data is None:
        return model
    return replace(
        model,
        posterior=Posterior(
            model.network, model.likelihood, data, model.subspace, model.prior, model.temperature
        ),
    )


# --- in words --------------------------------------------------------------------------------


def _lead(story: _Story) -> str:
    model = story.model
    if model is None or model.draws is None:
        return f"Predictions of {story.name}."
    n = model.draws.n_chains * model.draws.n_draws
    return (
        f"Predictions of {story.name} with their uncertainty: {n} draws from the posterior "
        f"over {model.subspace.rank} directions of a network with {model.network.size} "
        f"weights."
    )


def _verdict(story: _Story) -> list[tuple[str, list[str]]]:
    """Boxes of good or bad news: are the chains reliable, and are the intervals calibrated?"""
    model = story.model
    if model is None or model.draws is None:
        return []
    good = not model.warnings()
    kind = "good" if good else "bad"
    if model.draws.independent:
        news = "An approximation, of which all draws are independent"
        if not np.isnan(model.draws.pareto_k):
            news += f". Its Pareto k is {model.draws.pareto_k:.2f}: " + (
                "importance weights could correct it"
                if good
                else "it misses part of the posterior, see below what to do"
            )
        return [(kind, [f"{news}.", _coverage(story)])]
    news = (
        "The chains agree"
        if good
        else "The chains have not converged: interpret the results with care, and see below what "
        "to do"
    )
    if model.draws.n_draws >= 4:
        news += (
            f". The largest R-hat is {np.nanmax(model.draws.rhat()):.3f}, the smallest "
            f"effective sample size {np.nanmin(model.draws.ess_bulk()):.0f}"
        )
    found = story.comparison
    labels = {} if found is None else found.table["method"].to_dict()
    others = {} if found is None else {labels[k]: v for k, v in found.warnings().items()}
    return [
        (kind, [f"{news}.", _coverage(story)]),
        *(
            ("bad", [f"{label}: {line}."])
            for label, lines in others.items()
            for line in lines
            if label != story.method
        ),
    ]


def _coverage(story: _Story) -> str:
    if story.predictive is None or story.kind == "classification":
        return ""
    n = len(story.predictive)
    share = metrics.coverage(story.predictive, story.y)
    return (
        f"The 95 % intervals hold {100 * share:.0f} % of {n} test rows; "
        f"{95 - 196 * np.sqrt(0.95 * 0.05 / n):.0f} to "
        f"{min(100.0, 95 + 196 * np.sqrt(0.95 * 0.05 / n)):.0f} % are expected by chance."
    )


def _words(story: _Story) -> dict[str, str]:
    """The terms that this report uses."""
    classes = {"RMSE", "CRPS", "coverage", "aleatoric"} if story.kind == "classification" else set()
    sampled = story.model is not None
    return {
        word: text
        for word, text in WORDS.items()
        if word not in classes and (sampled or word in _SCORES.values())
    }


# --- numbers --------------------------------------------------------------------------------


def _scores(story: _Story) -> tuple[Table | None, list[Picture]]:
    if story.comparison is not None:
        return _compared(story.comparison)
    if story.predictive is None:
        return None, []
    scores = metrics.score(story.predictive, story.y)
    kept = [key for key in _SCORES if key in scores]
    caption = f"{len(story.predictive)} test rows. Log-likelihood in nats per row."
    return Table(
        ["method", *(_SCORES[key] for key in kept)],
        [[story.method, *(format_score(key, scores[key]) for key in kept)]],
        caption,
    ), []


def _compared(comparison: Comparison) -> tuple[Table, list[Picture]]:
    frame, gaps = comparison.table, comparison.differences()
    kept = [key for key in _SCORES if key in frame.columns]
    rows = [
        [str(row["method"]), *(format_score(key, row[key]) for key in kept)]
        for _, row in frame.iterrows()
    ]
    best = [
        (int(i), j + 1)
        for j, key in enumerate(kept)
        if key not in _NOT_RANKED
        for i in np.flatnonzero(_is_best(key, frame[key]))
    ]
    n = len(next(iter(comparison.predictives.values())))
    caption = (
        f"{n} test rows. Log-likelihood in nats per row. Seconds are the cost of a method on its "
        "own, training included; shared steps count for each method. Bold: the best of a column, "
        "however small the difference."
    )
    errors = dict(zip(gaps["method"], gaps["se"], strict=True))
    main = "log_likelihood"
    pictures = [
        picture(
            plots.scores(frame, main, errors=errors),
            "Log-likelihood of the test rows. Lines: one standard error of the difference to the "
            "best method; these rows cannot separate methods within two of it.",
        )
    ]
    pictures += [
        picture(plots.scores(frame, score), text)
        for score, text in (
            (
                "coverage",
                "Coverage of the 95 % interval on the test rows; the dashed line is the target.",
            ),
            ("accuracy", "Accuracy on the test rows."),
        )
        if score in frame.columns
    ]
    return Table(["method", *(_SCORES[key] for key in kept)], rows, caption, best), pictures


def _is_best(score: str, values: pd.Series) -> np.ndarray:
    """The best values as printed; none if all are equal."""
    array = values.to_numpy(dtype=float)
    distance = (
        np.abs(array - 0.95)
        if score == "coverage"
        else (-array if NAMES[score][1].startswith("higher") else array)
    )
    printed = np.array([format_score(score, value) for value in array])
    same = printed == printed[np.nanargmin(distance)]
    return same & ~same.all()


# --- figures --------------------------------------------------------------------------------


def _predictions(story: _Story) -> list[Picture]:
    rows = story.data if story.data is not None else story.test
    pictures = figures.curve(story.model, rows, story.named) if story.model else []
    if story.predictive is None:
        return pictures
    return pictures + figures.predictions(story.predictive, story.y, story.method, story.named)


def _training(story: _Story) -> list[Picture]:
    if story.sparse is not None:
        return sparse_report.training(story.sparse)
    if story.model is None:
        return []
    trained = story.comparison.trained if story.comparison else None
    recorder = None if trained is None else trained.swa.recorder
    return figures.training(story.model.history, recorder, story.model.subspace.rank)


def _provenance(story: _Story) -> dict[str, str]:
    """Versions, seed and fingerprint of the data."""
    versions = (
        f"subbayes {subbayes.__version__}, torch {torch.__version__}, NumPy "
        f"{np.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    facts = {"versions": versions}
    model = story.model
    if model is not None:
        seed = model.settings.get("seed", (model.draws.meta if model.draws else {}).get("seed"))
        facts["seed"] = "" if seed is None else str(seed)
        if model.posterior is not None:
            facts["posterior"] = (
                f"{model.posterior.data.n} training rows; fingerprint "
                f"{model.posterior.fingerprint()[:16]}"
            )
    return facts
