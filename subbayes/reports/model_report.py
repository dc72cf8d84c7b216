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
from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.mc_dropout import McDropout
from subbayes.baselines.temperature_scaling import TemperatureScaled
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.models.array_model import NETWORKS
from subbayes.models.description import describe
from subbayes.models.fitted import FittedModel
from subbayes.models.method_comparison import METHODS, Comparison, Predictor, shown
from subbayes.plots.methods import NAMES
from subbayes.posterior import Posterior
from subbayes.predictions.predictive import Predictive
from subbayes.reports import html
from subbayes.reports import sparse as sparse_report
from subbayes.sparse.result import SparseNetwork
from subbayes.utils.checks import check_choice, fail_type
from subbayes.utils.files import atomic_write_text

__all__ = ["WORDS", "describe", "write_report"]

WORDS = {
    "weights": "the parameters of the network that may move, in one long vector.",
    "subspace": "the few directions in which the weights may move, around a trained network, "
    "the shift.",
    "coordinates z": "how far the weights have moved along each direction of the subspace.",
    "posterior": "how plausible each z is, given the prior and the training rows.",
    "temperature T": "the likelihood counts to the power 1/T; T = 1 is the posterior, larger is "
    "wider.",
    "draws": "points z from the posterior; each is one network.",
    "predictive": "the average of the draws' predictions, with its uncertainty.",
    "epistemic": "the part of the uncertainty on which draws disagree; more data would shrink it.",
    "aleatoric": "the part that is noise in the targets; more data would not shrink it.",
    "log-likelihood": "log density of the test targets, in nats a row; higher is better.",
    "RMSE": "root mean squared error of the predicted mean; lower is better.",
    "CRPS": "distance of the whole predictive distribution from the target, in its unit; lower "
    "is better.",
    "coverage": "share of test targets inside the interval; should equal its level.",
    "R-hat": "how far chains disagree; 1 is agreement, above 1.01 they have to run longer.",
    "effective sample size": "how many independent draws the correlated ones are worth.",
}
"""What the words of a report mean, one line each."""

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
_SHOWN_CHAINS = 2
_MOST_DRAWS = 1000


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
    """Write one HTML file with everything in it: no network, no script.

    It says what was fitted, how well it predicts test rows, what the posterior looks like,
    whether the chains can be trusted, how to do it again, and what the words mean.

    Args:
        subject: a fitted model, a sparse network (or a baseline, which has no posterior to show),
            or a comparison; then the report shows its table, and one of its models in detail.
        path: the file.
        data: training data, for the posterior's surface of a model that was loaded without.
        test: rows to predict, with their targets; a comparison has its own, and needs them only
            to draw curves over a single input.
        title: heading.
        name: what is predicted.
        unit: of what is predicted.
        command: how the model was made, to be shown as it is.
        notes: remarks, each a paragraph below the table of scores.
        method: which model of a comparison to show; by default the first that was sampled.
        features: names of the inputs, for those of a sparse network.

    Returns:
        The path.

    Raises:
        InputTypeError: something else than a model or a comparison.
        ArtifactError: the file cannot be written; an earlier one is intact.

    Example:
        >>> x = torch.linspace(-2, 2, 60)[:, None]
        >>> net = subbayes.MLP(1, (10,), 1, seed=0)
        >>> model = subbayes.fit(net, (x, torch.sin(x[:, 0])), rank=2, draws=50, progress=False,
        ...                      training=subbayes.Training(epochs=20, swa_epochs=5))
        >>> write_report(model, "report.html", title="A sine").name
        'report.html'
    """
    story = _story(subject, data, test, name, unit, method)
    title = title or f"Predicting {name}"
    body = [
        html.heading(title),
        html.paragraphs(_lead(story), kind="lead"),
        _verdict(story),
        html.section(
            "What was fitted",
            html.definitions(describe(story.model))
            if story.model
            else html.definitions(sparse_report.facts(story.sparse))
            if story.sparse
            else "",
        ),
        html.section("Scores on test rows", _scores(story), html.paragraphs(*notes)),
        html.section("Predictions and calibration", _predictions(story)),
        html.section(
            "Which weights are in",
            sparse_report.structure(story.sparse, features) if story.sparse else "",
        ),
        html.section("The posterior", _posterior(story)),
        html.section("Did the chains explore it?", _chains(story)),
        html.section("Training", _training(story)),
        html.section("How to reproduce", _reproduce(story, command)),
        html.section("Words", html.definitions(_words(story))),
    ]
    atomic_write_text(path, html.page(title, body))
    return Path(path)


@dataclass(frozen=True)
class _Story:
    """What a report is about."""

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
        """What is predicted, with its unit."""
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
            METHODS[key],
            subject.predictives[key],
            subject.y,
            subject,
            rows,
            held,
            name,
            unit,
        )
    if not isinstance(
        subject, (FittedModel, WeightSamples, McDropout, TemperatureScaled, SparseNetwork)
    ):
        fail_type("subject", "a fitted model or a Comparison", subject)
    predictive, y = (None, None) if held is None else _predicted(subject, held)
    fitted = subject if isinstance(subject, FittedModel) else None
    sparse = subject if isinstance(subject, SparseNetwork) else None
    label = (
        _method(subject)
        if isinstance(subject, FittedModel)
        else "sparse network"
        if isinstance(subject, SparseNetwork)
        else subject.name
    )
    return _Story(
        _with_posterior(fitted, rows), label, predictive, y, None, rows, held, name, unit, sparse
    )


def _predicted(model: Any, rows: Data) -> tuple[Predictive, Tensor]:
    """Predictions of test rows, with their noise where it is known, and their targets."""
    y = rows.targets()
    options: dict[str, Any] = {} if isinstance(y, Tensor) else {"noise": y[1]}
    if isinstance(model, FittedModel):
        options["n_draws"] = _MOST_DRAWS
    if isinstance(model, SparseNetwork):
        options["draws"] = NETWORKS
    predictive = model.predict(rows.inputs if rows.in_memory else rows.loader, **options)
    return predictive, y if isinstance(y, Tensor) else y[0]


def _with_posterior(model: FittedModel | None, data: Data | None) -> FittedModel | None:
    """The model with its density, if there are data to have one from."""
    if model is None or model.posterior is not None or data is None:
        return model
    return replace(
        model,
        posterior=Posterior(
            model.network, model.likelihood, data, model.subspace, model.prior, model.temperature
        ),
    )


_ENGINES = {
    "nuts": "NUTS",
    "hmc": "HMC",
    "smc": "SMC",
    "laplace": "Laplace",
    "laplace-linearised": "linearised Laplace",
    "vi": "VI",
    "full-rank-vi": "full-rank VI",
    "realnvp": "RealNVP",
}


def _method(model: FittedModel) -> str:
    """What tables call a model."""
    method = METHODS.get(str(model.settings.get("subspace")), "posterior")
    engine = str(model.settings.get("inference", "elliptical-slice"))
    if engine == "elliptical-slice":
        return method
    return f"{method.removesuffix(' + ESS')} + {_ENGINES.get(engine, engine)}"


# --- in words --------------------------------------------------------------------------------


def _lead(story: _Story) -> str:
    model = story.model
    if model is None or model.draws is None:
        return f"Predictions of {story.name}."
    n = model.draws.n_chains * model.draws.n_draws
    return (
        f"Predictions of {story.name} that say how sure they are: {n} draws from the posterior "
        f"over {model.subspace.rank} directions of a network with {model.network.size} "
        f"weights."
    )


def _verdict(story: _Story) -> str:
    """The news first: is the sampling run sound, and are the intervals honest?"""
    model = story.model
    if model is None or model.draws is None:
        return ""
    good = not model.warnings()
    if model.draws.independent:
        news = "An approximation, of which all draws are independent"
        if "pareto_k" in model.draws.meta:
            news += f". Its Pareto k is {model.draws.meta['pareto_k']:.2f}: " + (
                "importance weights could correct it"
                if good
                else "it misses part of the posterior, see below what to do"
            )
        return html.box("good" if good else "bad", f"{news}.", _coverage(story))
    news = (
        "The chains agree"
        if good
        else ("The chains have not settled: read what follows with care, and see below what to do")
    )
    if model.draws.n_draws >= 4:
        news += (
            f". The largest R-hat is {np.nanmax(model.draws.rhat()):.3f}, the smallest "
            f"effective sample size {np.nanmin(model.draws.ess_bulk()):.0f}"
        )
    others = story.comparison.warnings() if story.comparison else {}
    return html.box("good" if good else "bad", f"{news}.", _coverage(story)) + "".join(
        html.box("bad", f"{METHODS[key]}: {line}.")
        for key, lines in others.items()
        for line in lines
        if METHODS[key] != story.method
    )


def _coverage(story: _Story) -> str:
    if story.predictive is None or story.kind == "classification":
        return ""
    n = len(story.predictive)
    share = metrics.coverage(story.predictive, story.y)
    return (
        f"The 95 % intervals hold {100 * share:.0f} % of {n} test rows; "
        f"{95 - 196 * np.sqrt(0.95 * 0.05 / n):.0f} to "
        f"{min(100.0, 95 + 196 * np.sqrt(0.95 * 0.05 / n)):.0f} % would be no surprise."
    )


def _words(story: _Story) -> dict[str, str]:
    """The words this report uses."""
    classes = {"RMSE", "CRPS", "coverage", "aleatoric"} if story.kind == "classification" else set()
    sampled = story.model is not None
    return {
        word: text
        for word, text in WORDS.items()
        if word not in classes and (sampled or word in _SCORES.values())
    }


# --- numbers --------------------------------------------------------------------------------


def _scores(story: _Story) -> str:
    if story.comparison is not None:
        return _compared(story.comparison)
    if story.predictive is None:
        return ""
    scores = metrics.score(story.predictive, story.y)
    kept = [key for key in _SCORES if key in scores]
    caption = f"{len(story.predictive)} test rows. Log-likelihood in nats a row."
    return html.table(
        ["method", *(_SCORES[key] for key in kept)],
        [[story.method, *(shown(key, scores[key]) for key in kept)]],
        caption,
    )


def _compared(comparison: Comparison) -> str:
    frame, gaps = comparison.table, comparison.differences()
    kept = [key for key in _SCORES if key in frame.columns]
    rows = [
        [str(row["method"]), *(shown(key, row[key]) for key in kept)] for _, row in frame.iterrows()
    ]
    best = [
        (int(i), j + 1)
        for j, key in enumerate(kept)
        if key not in _NOT_RANKED
        for i in np.flatnonzero(_is_best(key, frame[key]))
    ]
    n = len(next(iter(comparison.predictives.values())))
    caption = (
        f"{n} test rows. Log-likelihood in nats a row. Seconds "
        "are what a method costs by itself, training included; what methods share is "
        "counted for each. Bold: the best of a column, by however little."
    )
    errors = dict(zip(gaps["method"], gaps["se"], strict=True))
    main = "log_likelihood"
    drawn = [
        html.figure(
            plots.scores(frame, main, errors=errors),
            "Log-likelihood of the test rows. Lines: one standard error of the difference to the "
            "best method; methods within two of it are not told apart by these rows.",
        )
    ]
    drawn += [
        html.figure(plots.scores(frame, score), caption)
        for score, caption in (
            (
                "coverage",
                "Coverage of the 95 % interval on the test rows; the dashed line is right.",
            ),
            ("accuracy", "Accuracy on the test rows."),
        )
        if score in frame.columns
    ]
    return html.table(["method", *(_SCORES[key] for key in kept)], rows, caption, best) + (
        html.figures(*drawn)
    )


def _is_best(score: str, values: pd.Series) -> np.ndarray:
    """Which are the best as they are printed; none if all are."""
    array = values.to_numpy(dtype=float)
    distance = (
        np.abs(array - 0.95)
        if score == "coverage"
        else (-array if NAMES[score][1].startswith("higher") else array)
    )
    printed = np.array([shown(score, value) for value in array])
    same = printed == printed[np.nanargmin(distance)]
    return same & ~same.all()


# --- figures --------------------------------------------------------------------------------


def _predictions(story: _Story) -> str:
    predictive, y = story.predictive, story.y
    curve = _curve(story)
    if predictive is None:
        return html.figures(curve)
    if story.kind == "classification":
        return html.figures(
            html.figure(
                plots.reliability(predictive, y),
                "Reliability: accuracy against confidence. Below the diagonal the model "
                "is surer than it should be.",
            ),
            html.figure(
                plots.doubt(predictive, y), "Accuracy among the rows the model is surest of."
            ),
        )
    several = predictive.mean.ndim > 1
    named = f"{story.named}, first target" if several else story.named
    return html.figures(
        curve,
        html.figure(
            plots.intervals(predictive, y, name=named),
            "Test rows against their 95 % intervals. Dark: how far the draws' means "
            "disagree (epistemic); light: that and the noise (aleatoric) together.",
        ),
        html.figure(
            plots.calibration(predictive, y, label=story.method),
            "Share of test rows inside intervals of each level. Below the diagonal "
            "intervals are too narrow; inside the grey band it may be chance.",
        ),
        html.figure(
            plots.pit(predictive, y),
            "Where test rows fall in their predictive distributions: flat if calibrated, "
            "a valley if the model is too sure, a hill if it is not sure enough.",
        ),
    )


def _curve(story: _Story) -> str:
    """Bands over the input, if there is but one."""
    rows = story.data if story.data is not None else story.test
    model = story.model
    if model is None or model.draws is None or rows is None or not rows.in_memory:
        return ""
    x = rows.inputs
    if (
        not isinstance(x, Tensor)
        or x.numel() != len(x)
        or model.likelihood.kind == ("classification")
    ):
        return ""
    low, high = float(x.min()), float(x.max())
    pad = 0.15 * (high - low)
    grid = torch.linspace(low - pad, high + pad, 200, dtype=x.dtype).reshape(-1, *x.shape[1:])
    targets = rows.targets()
    if not isinstance(targets, Tensor):  # noise that is known row by row has no curve
        return ""
    return html.figure(
        plots.bands(
            model.predict(grid, n_draws=_MOST_DRAWS),
            grid,
            data=(x, targets),
            names=("input", story.named),
        ),
        "The predictive curve over the input. Dark: how far the draws' curves disagree "
        "(epistemic); light: where 95 % of observations are expected.",
    )


def _posterior(story: _Story) -> str:
    model = story.model
    if model is None:
        return ""
    drawn = []
    if model.posterior is not None and model.subspace.rank > 1 and model.draws is not None:
        drawn.append(
            html.figure(
                plots.density(model.posterior, model.draws),
                "Log density over the first two coordinates, the others at the mean of the draws, "
                "with draws on it. They spread wider than the slice where coordinates depend on "
                "each other.",
            )
        )
    if model.settings.get("temperatures"):
        drawn.append(
            html.figure(
                plots.temperature(model.settings["temperatures"]),
                "How the temperature was chosen. Where the scores differ by less than their error, "
                "the choice hardly matters.",
            )
        )
    return html.figures(*drawn)


def _chains(story: _Story) -> str:
    if story.model is None or story.model.draws is None:
        return ""
    draws = story.model.draws
    if draws.n_draws < 4:
        return html.paragraphs(f"Too few draws to tell: {'; '.join(draws.warnings())}.")
    summary = draws.summary()
    order = np.argsort(-summary["rhat"].fillna(np.inf).to_numpy(), kind="stable")
    worst = [int(i) for i in order[:_SHOWN_CHAINS]]
    drawn = [
        html.figure(plots.ess(draws), "Effective sample size of each coordinate.")
        if draws.rank <= 40
        else "",
        html.figure(plots.autocorrelation(draws), "How long a chain remembers."),
    ]
    for i in sorted(worst):
        drawn += [
            html.figure(
                plots.trace(draws, i),
                f"Trace of z[{i}]: chains that explored the same posterior look like one another.",
            ),
            html.figure(
                plots.ranks(draws, i),
                f"Ranks of z[{i}] by chain: flat, around the dashed line, if the chains agree.",
            ),
        ]
    if "log_likelihood" in draws.stats:
        drawn.append(
            html.figure(
                plots.trace(draws, "log_likelihood"),
                "Trace of the log-likelihood of the training rows.",
            )
        )
    said = (
        html.box("bad", *(f"{line[:1].upper()}{line[1:]}." for line in draws.warnings()))
        if draws.warnings()
        else ""
    )
    return (
        said
        + _summary(summary)
        + html.paragraphs(
            f"Traces and ranks are of the {_SHOWN_CHAINS} coordinates with the largest R-hat."
            if draws.rank > _SHOWN_CHAINS
            else ""
        )
        + html.figures(*drawn)
    )


def _summary(summary: pd.DataFrame, most: int = 30) -> str:
    """The table of the coordinates; of very many, those with the largest R-hat."""
    shown = summary if len(summary) <= most else summary.nlargest(most, "rhat")
    rows = [
        [
            str(name),
            *(f"{row[key]:.3f}" for key in ("mean", "sd", "2.5%", "97.5%")),
            f"{row['ess_bulk']:.0f}",
            f"{row['ess_tail']:.0f}",
            f"{row['rhat']:.4f}",
        ]
        for name, row in shown.iterrows()
    ]
    caption = "R-hat below 1.01 and effective sample sizes above 100 a chain are good." + (
        f" The {most} of {len(summary)} coordinates with the largest R-hat."
        if len(summary) > most
        else ""
    )
    return html.table(
        ["coordinate", "mean", "sd", "2.5 %", "97.5 %", "ESS, bulk", "ESS, tail", "R-hat"],
        rows,
        caption,
    )


def _training(story: _Story) -> str:
    if story.sparse is not None:
        return sparse_report.training(story.sparse)
    history = story.model.history if story.model else {}
    if not any(history.get(phase) for phase in ("train", "swa")):
        return ""
    drawn = [
        html.figure(
            plots.curves(history),
            "Negative log-likelihood of the minibatches as they passed; lower "
            "is better. In the shaded part a constant rate explores around the solution.",
        )
    ]
    trained = story.comparison.trained if story.comparison else None
    if trained is not None and trained.swa.recorder.n > 1:
        rank = story.model.subspace.rank if story.model else None
        drawn.append(
            html.figure(
                plots.spectrum(trained.swa.recorder, rank),
                "How far the trajectory of that part went along each of its principal directions.",
            )
        )
    return html.figures(*drawn)


def _reproduce(story: _Story, command: str) -> str:
    versions = (
        f"subbayes {subbayes.__version__}, torch {torch.__version__}, NumPy "
        f"{np.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    facts = {"versions": versions}
    if story.model is not None:
        seed = story.model.settings.get(
            "seed", (story.model.draws.meta if story.model.draws else {}).get("seed")
        )
        facts["seed"] = "" if seed is None else str(seed)
        if story.model.posterior is not None:
            facts["posterior"] = (
                f"{story.model.posterior.data.n} training rows; fingerprint "
                f"{story.model.posterior.fingerprint()[:16]}"
            )
    return html.definitions(facts) + html.preformatted(command)
