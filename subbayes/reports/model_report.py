"""A self-contained HTML report of a fitted model, or of a comparison of methods."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import subbayes
from subbayes import plots
from subbayes.artifacts.files import atomic_write_text
from subbayes.comparison.comparison import SCORE_HEADINGS, Comparison, format_score
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.diagnostics.calibration import expected_coverage
from subbayes.diagnostics.function_space import ChainPredictions, chain_predictions
from subbayes.diagnostics.predictor import Predictor
from subbayes.draws import Draws
from subbayes.likelihoods.target_parts import split_targets
from subbayes.models.fitted import FittedModel
from subbayes.predictions.predictive import Predictive
from subbayes.reports import model_figures as figures
from subbayes.reports import sparse as sparse_report
from subbayes.reports.rendering import Picture, Table, picture, render
from subbayes.sparse.result import SparseNetwork
from subbayes.tables.array_model import SPARSE_DRAWS
from subbayes.utils.checks import check_choice, fail, fail_type
from subbayes.utils.warning import warnings_once

WORDS = {
    "weights": "the random parameters of the network, as one vector.",
    "subspace": "the few directions in which the weights vary around a trained network.",
    "coordinates z": "displacement of the weights along each direction of the subspace.",
    "posterior": "the distribution of z given the prior and the training rows.",
    "temperature T": "the likelihood has power 1/T; T = 1 is the posterior, a larger T widens it.",
    "draws": "points z from the posterior; each is one network.",
    "predictive": "the average of the predictive distributions of the draws.",
    "epistemic": "uncertainty from disagreement of the draws; more data would reduce it.",
    "aleatoric": "uncertainty from noise in the targets; more data would not reduce it.",
    "log-likelihood": "log density of the test targets, in nats per row; higher is better.",
    "RMSE": "root mean squared error of the predictive mean; lower is better.",
    "CRPS": "distance of the predictive distribution from the target, in its unit; lower "
    "is better.",
    "coverage": "share of test targets inside the interval; should equal its level, or be higher "
    "for counts.",
    "accuracy": "share of test rows whose most probable class is right; higher is better.",
    "Brier": "squared distance of the probabilities from the observed class; lower is better.",
    "ECE": "gap between the probability of the predicted class and the share of rows in which it "
    "is right; lower is better.",
    "AUROC": "probability that a row of a class has a higher probability of it than another row.",
    "R-hat": "disagreement of the chains; 1 is agreement, above 1.01 run the chains longer.",
    "effective sample size": "number of independent draws that are equivalent to the chains.",
}
"""Definitions of the terms in a report."""

_OF_NUMBERS = {"RMSE", "CRPS", "coverage", "aleatoric"}
_OF_CLASSES = {"accuracy", "Brier", "ECE", "AUROC"}
_OF_CHAINS = {"R-hat", "effective sample size"}


@warnings_once()
def write_report(
    subject: Predictor | Comparison,
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
    ordered: bool = False,
    overwrite: bool = True,
) -> Path:
    """Write a self-contained HTML report, without scripts or external resources.

    It describes the model, its predictions of test rows, the posterior, the convergence of the
    chains, and how to reproduce it, and defines its terms.

    Args:
        subject: a model of arrays, or a comparison, whose report has its table and the details of
            one model.
        path: the file.
        data: training data, to plot the log density of a model that was loaded without them.
        test: test rows with their targets; a comparison has its own test rows and needs these
            only for curves over a single input.
        title: heading.
        name: name of the target.
        unit: unit of the target.
        command: command that reproduces the model.
        notes: remarks, one paragraph each, below the table of scores.
        method: model of a comparison to show; by default the first with a sampled posterior.
        features: names of the inputs of a sparse network.
        ordered: test rows are in the order of time: say whether their coverage has left its band.
        overwrite: replace an existing file.

    Returns:
        The path.

    Raises:
        InputTypeError: `subject` is neither a model nor a comparison.
        ArtifactError: the file exists, if it may not be replaced, or cannot be written; an existing
            file is unchanged.

    Example:
        >>> x = torch.linspace(-2, 2, 60)[:, None]
        >>> net = subbayes.MLP(1, (10,), 1, seed=0)
        >>> model = subbayes.fit(net, (x, torch.sin(x[:, 0])), subspace=subbayes.subspaces.PCA(2),
        ...                      training=subbayes.Training(epochs=20, swa_epochs=5),
        ...                      sampling=subbayes.Sampling(draws=50, progress=False))
        >>> write_report(model, "report.html", title="A sine").name
        'report.html'
    """
    content = _content(subject, data, test, name, unit, method)
    fitted, sparse = content.fitted, content.sparse
    scores, score_pictures = _scores(content)
    agreement = _agreement(content)
    inclusion, inclusion_pictures = sparse_report.inclusion(sparse, features)
    text = render(
        "model.html",
        title=title or f"Predicting {name}",
        lead=_lead(content),
        verdict=_verdict(content, agreement) + (_coverage_in_time(content) if ordered else []),
        facts=content.model.describe() | (sparse_report.facts(sparse) if sparse else {}),
        scores=scores,
        score_pictures=score_pictures,
        notes=notes,
        predictions=_predictions(content),
        inclusion=inclusion,
        inclusion_pictures=inclusion_pictures,
        posterior=figures.posterior(fitted) if fitted else [],
        chains=_chains(fitted),
        agreement="" if agreement is None else figures.sentence(agreement),
        agreement_warnings=_sentences(agreement.warnings()) if agreement else [],
        training=_training(content),
        provenance=_provenance(fitted),
        command=command,
        words=_words(content),
    )
    atomic_write_text(path, text, overwrite)
    return Path(path)


@dataclass(frozen=True)
class _Content:
    """The content of a report."""

    model: Predictor
    method: str
    predictive: Predictive | None
    y: Any
    data: Data | None
    test: Data | None
    name: str
    unit: str
    comparison: Comparison | None = None

    @property
    def fitted(self) -> FittedModel | None:
        return self.model if isinstance(self.model, FittedModel) else None

    @property
    def sparse(self) -> SparseNetwork | None:
        return self.model if isinstance(self.model, SparseNetwork) else None

    @property
    def name_and_unit(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def classifies(self) -> bool:
        return self.model.likelihood.kind == "classification"


def _content(
    subject: Any, data: Any, test: Any, name: str, unit: str, method: str | None
) -> _Content:
    rows = None if data is None else Data.of(data)
    test_rows = None if test is None else Data.of(test, "test")
    predictive = y = comparison = None
    if isinstance(subject, Comparison):
        comparison, models = subject, subject.models
        sampled = [key for key, model in models.items() if isinstance(model, FittedModel)]
        key = method or (sampled or list(models))[0]
        check_choice("method", key, models)
        model, predictive, y = models[key], comparison.predictives[key], comparison.y
        label = str(comparison.table.loc[key, "method"])
    elif isinstance(subject, Predictor):
        model, label = subject, subject.label
        if test_rows is not None:
            predictive, y = _predict(model, test_rows)
    else:
        fail_type("subject", "a fitted model or a Comparison", subject)
    model = _with_posterior(model, rows)
    return _Content(model, label, predictive, y, rows, test_rows, name, unit, comparison)


def _predict(model: Predictor, rows: Data) -> tuple[Predictive, Tensor]:
    """Predictions of test rows, with their noise scales if known, and their targets."""
    parts = split_targets(rows.targets(), rows.has_weights)
    options: dict[str, Any] = {} if parts.noise is None else {"noise": parts.noise}
    options["n_draws"] = min(figures.MAX_DRAWS, max(SPARSE_DRAWS, model.default_draws))
    predictive = model.predict(rows.inputs if rows.in_memory else rows.loader, **options)
    return predictive, parts.values


def _with_posterior(model: Predictor, data: Data | None) -> Predictor:
    """Add the posterior to a model that was loaded without its data, if there are data."""
    if not isinstance(model, FittedModel) or model.posterior is not None or data is None:
        return model
    return model.with_data(data)


# --- text -----------------------------------------------------------------------------------


def _lead(content: _Content) -> str:
    answer = (
        f"the probability of each class of {content.name}"
        if content.classifies
        else f"{content.name}, with an interval that should contain it in 95 % of the rows"
    )
    return f"For each row of inputs the model ({content.method}) predicts {answer}."


def _chains(model: FittedModel | None) -> figures.Chains | None:
    if model is None or model.draws is None:
        return None
    return figures.chains(model.draws, _sentences(model.warnings()))


def _verdict(content: _Content, agreement: ChainPredictions | None) -> list[tuple[str, list[str]]]:
    """Boxes, "good", "tie" or "bad", on the predictions, on the chains, and on other methods."""
    model, boxes = content.fitted, [_quality(content)]
    if model is not None and model.draws is not None:
        boxes.append(_convergence(model, model.draws, agreement))
    elif lines := content.model.warnings():
        boxes.append(("bad", _sentences(lines)))
    if content.comparison is not None:
        for key, lines in content.comparison.warnings().items():
            label = content.comparison.table.loc[key, "method"]
            if label != content.method:
                boxes += [("bad", [f"{label}: {line}."]) for line in lines]
    return boxes


def _quality(content: _Content) -> tuple[str, list[str]]:
    """A box on the predictions of test rows: how good they are, and how far to trust them."""
    predictive = content.predictive
    if predictive is None:
        return "tie", ["Without test rows this page cannot say how good the predictions are."]
    constant = _constant_scores(content)
    rows = f"{len(predictive)} test rows"
    if content.classifies:
        kind, trust = _confidence(predictive, content.y)
        text = (
            f"{100 * metrics.accuracy(predictive, content.y):.1f} % of {rows} are classified "
            f"correctly; the most frequent class has {100 * constant['accuracy']:.1f} % of them."
        )
    else:
        kind, trust = _coverage(predictive, content.y)
        text = (
            f"Predictions of {rows} have a root mean squared error of "
            f"{metrics.rmse(predictive, content.y):.4g}; that of one prediction for all rows, "
            f"their average, is {constant['rmse']:.4g}."
        )
    return kind, [text, trust]


def _constant_scores(content: _Content) -> dict[str, float]:
    """Scores of the best prediction that is the same for all test rows."""
    y = np.asarray(content.y)
    if content.classifies:
        labels = y[y >= 0].astype(int)  # tokens without a label are -100
        shares = np.bincount(labels) / labels.size
        mean = float(np.log(shares[labels]).mean())
        return {"log_likelihood": mean, "accuracy": float(shares.max())}
    return {"rmse": float(np.sqrt(y.var(0).mean()))}


def _confidence(predictive: Predictive, y: Any) -> tuple[str, str]:
    """Whether the probabilities of the predicted classes agree with the share that is right."""
    confidence = predictive.probabilities.max(-1)
    share = metrics.accuracy(predictive, y)
    error = 1.96 * np.sqrt((confidence * (1 - confidence)).mean() / confidence.size)
    text = (
        f"The model gives its answers a probability of {100 * confidence.mean():.1f} % on "
        f"average, and {100 * share:.1f} % of them are right"
    )
    if share < confidence.mean() - error:
        return "bad", f"{text}: it is overconfident."
    if share > confidence.mean() + error:
        return "tie", f"{text}: it is underconfident."
    return "good", f"{text}; the difference may be chance."


def _convergence(
    model: FittedModel, draws: Draws, agreement: ChainPredictions | None
) -> tuple[str, list[str]]:
    """A box on the convergence of the chains."""
    good = not model.warnings()
    if model.has_separate_chains and agreement is not None:
        good = good and not agreement.warnings()
    kind = "good" if good else "bad"
    if draws.independent:
        text = "An approximation with independent draws"
        if not np.isnan(draws.pareto_k):
            text += f". Its Pareto k is {draws.pareto_k:.2f}: " + (
                "importance weights could correct it"
                if good
                else "it misses part of the posterior; see the remedies below"
            )
        return kind, [f"{text}."]
    if model.has_separate_chains:
        return kind, [_verdict_on_predictions(good, agreement)]
    text = (
        "The chains agree"
        if good
        else "The chains have not converged: interpret the results with care, and see the remedies "
        "below"
    )
    if draws.n_draws >= 4:
        text += (
            f". The largest R-hat is {np.nanmax(draws.rhat()):.3f}, the smallest "
            f"effective sample size {np.nanmin(draws.ess_bulk()):.0f}"
        )
    return kind, [f"{text}."]


def _verdict_on_predictions(good: bool, agreement: ChainPredictions | None) -> str:
    """On chains around networks of their own, whose weights differ without meaning."""
    text = "Each chain samples around a network of its own, so that their weights are not compared"
    if agreement is None:
        return f"{text}. Test rows compare their predictions."
    agree = "The chains agree in what they predict" if good else "See the remedies below"
    return (
        f"{text}. {agree}: R-hat of the predictions of test rows is "
        f"{np.nanmedian(agreement.rhat):.2f} in the median and {np.nanmax(agreement.rhat):.2f} at "
        f"most, and {np.nanmedian(agreement.between):.0%} of their variance is between chains."
    )


def _coverage(predictive: Predictive, y: Any) -> tuple[str, str]:
    """Whether the intervals contain as many test rows as they should."""
    share = metrics.coverage(predictive, y)
    expected, error = expected_coverage(predictive)
    low, high = expected - 1.96 * error, min(1.0, expected + 1.96 * error)
    text = (
        f"The 95 % intervals contain {100 * share:.0f} % of the test rows; "
        f"{100 * low:.0f} to {100 * high:.0f} % are expected by chance."
    )
    if share < low:
        return "bad", f"{text} They are too narrow."
    return ("good", text) if share <= high else ("tie", f"{text} They are wider than needed.")


def _coverage_in_time(content: _Content) -> list[tuple[str, list[str]]]:
    """A box on the sequential test of the coverage of intervals."""
    if content.predictive is None:
        fail("ordered", "False without test rows", "True")
    scores = metrics.score(content.predictive, content.y, ordered=True)
    evidence = f"evidence {scores['coverage_evidence']:.1f} nats, alarm at 3.0, false alarms 5 %"
    if math.isnan(scores["coverage_alarm"]):
        return [("good", [f"The coverage stayed in its band in time ({evidence})."])]
    row = f"row {scores['coverage_alarm']:.0f} (from 0)"
    remedy = "Refit or update the model, or use adaptive intervals"
    return [("bad", [f"The coverage has left its band, for sure at {row} ({evidence}). {remedy}."])]


def _agreement(content: _Content) -> ChainPredictions | None:
    """The chains compared by their predictions of the test rows, if there are several."""
    model, predictive = content.fitted, content.predictive
    if model is None or model.draws is None or predictive is None:
        return None
    draws, count = model.draws, predictive.n_draws
    each, rest = divmod(count, draws.n_chains)
    if draws.independent or draws.n_chains < 2 or predictive.kind != "mixture" or rest or each < 4:
        return None
    return chain_predictions(predictive, chains=draws.n_chains)


def _sentences(lines: Sequence[str]) -> list[str]:
    return [f"{line[:1].upper()}{line[1:]}." for line in lines]


def _words(content: _Content) -> dict[str, str]:
    """The terms that this report uses."""
    omitted = _OF_NUMBERS if content.classifies else _OF_CLASSES
    return {
        word: text
        for word, text in WORDS.items()
        if word not in omitted and (content.fitted or word not in _OF_CHAINS)
    }


# --- numbers --------------------------------------------------------------------------------


def _scores(content: _Content) -> tuple[Table | None, list[Picture]]:
    if content.comparison is not None:
        return _compared_scores(content.comparison)
    if content.predictive is None:
        return None, []
    weights = None
    if content.test is not None and content.test.has_weights:
        weights = split_targets(content.test.targets(), weighted=True).counts
    scores = metrics.score(content.predictive, content.y, weights=weights)
    kept = [key for key in SCORE_HEADINGS if key in scores]
    rows = [[content.method, *(format_score(key, scores[key]) for key in kept)]]
    caption = f"{len(content.predictive)} test rows. Log-likelihood in nats per row."
    if weights is None:
        constant = _constant_scores(content)
        cells = (format_score(key, constant[key]) if key in constant else "" for key in kept)
        rows.append(["without inputs", *cells])
        caption += " Without inputs: the same prediction for all rows, from their own targets."
    return Table(
        ["method", *(SCORE_HEADINGS[key].format(level=95) for key in kept)], rows, caption
    ), []


def _compared_scores(comparison: Comparison) -> tuple[Table, list[Picture]]:
    frame, differences, level = comparison.table, comparison.differences(), comparison.level
    head, rows = comparison.cells(list(SCORE_HEADINGS))
    n = len(next(iter(comparison.predictives.values())))
    caption = (
        f"{n} test rows. Log-likelihood in nats per row. Seconds are the cost of a method by "
        "itself, including training; shared training counts for each method."
    )
    errors = dict(zip(differences["method"], differences["se"], strict=True))
    pictures = [
        picture(
            plots.scores(frame, "log_likelihood", errors=errors),
            "Log-likelihood of the test rows. Lines: one standard error of the difference to the "
            "best method; these rows cannot separate methods within two of it.",
        )
    ]
    captions = {
        "coverage": f"Coverage of the {100 * level:g} % interval on the test rows; the dashed "
        "line is the target.",
        "accuracy": "Accuracy on the test rows.",
    }
    pictures += [
        picture(plots.scores(frame, score, level=level), caption)
        for score, caption in captions.items()
        if score in frame.columns
    ]
    return Table(head, rows, caption), pictures


# --- figures --------------------------------------------------------------------------------


def _predictions(content: _Content) -> list[Picture]:
    rows = content.data if content.data is not None else content.test
    fitted, name = content.fitted, content.name_and_unit
    pictures = figures.curve(fitted, rows, name) if fitted else []
    if content.predictive is not None:
        pictures += figures.predictions(content.predictive, content.y, content.method, name)
    return pictures


def _training(content: _Content) -> list[Picture]:
    if content.sparse is not None:
        return sparse_report.training(content.sparse)
    if content.fitted is None:
        return []
    trained = content.comparison.trained if content.comparison else None
    recorder = None if trained is None else trained.swa.recorder
    return figures.training(content.fitted.history, recorder, content.fitted.subspace.rank)


def _provenance(model: FittedModel | None) -> dict[str, str]:
    """Versions, seed and fingerprint of the data."""
    facts = {
        "versions": f"subbayes {subbayes.__version__}, torch {torch.__version__}, NumPy "
        f"{np.__version__}, Python {platform.python_version()}, {platform.machine()}"
    }
    if model is None:
        return facts
    seed = model.settings.get("seed", (model.draws.meta if model.draws else {}).get("seed"))
    facts["seed"] = "" if seed is None else str(seed)
    if model.posterior is not None:
        n, fingerprint = model.posterior.data.n, model.posterior.fingerprint()[:16]
        facts["posterior"] = f"{n} training rows; fingerprint {fingerprint}"
    return facts
