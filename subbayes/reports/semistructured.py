"""One HTML page about a semi-structured model: effects, pictures, fit, chains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from subbayes.draws import Draws
from subbayes.plots.chains import ranks, trace
from subbayes.plots.effects import effect, forest
from subbayes.reports import html
from subbayes.utils.files import atomic_write_bytes

if TYPE_CHECKING:
    from subbayes.semistructured.results import Results

__all__ = ["write_report"]

_WORDS = {
    "mean, sd": "mean and standard deviation of the posterior of an effect.",
    "hdi": "highest-density interval: the shortest that holds so much of the posterior.",
    "direction": "probability of direction: how sure the sign of the effect is, 0.5 to 1.",
    "R-hat": "whether the chains agree; below 1.01 is good.",
    "ess": "how many independent draws the correlated ones are worth, for means (bulk) and "
    "intervals (tail).",
    "sd(...)": "standard deviation of a smooth's wiggles or of random effects, on the scale of "
    "the predictor.",
}


def write_report(
    results: Results,
    path: str | Path,
    *,
    title: str = "",
    test: pd.DataFrame | None = None,
    test_inputs: Any = None,
    level: float = 0.95,
    notes: Sequence[str] = (),
) -> Path:
    """Write a page about a fitted model; see `SemiStructuredRegression.report`."""
    effects = results.effects()
    title = title or f"Effects on {results.state.model.response.name}"
    shown = _shown(effects)
    summary = results.summary(level)
    body = [
        html.heading(title),
        html.paragraphs(_lead(results), kind="lead"),
        *_verdict(results, summary),
        html.section(
            "Effects",
            html.table(
                ["effect", *map(str, summary.columns)],
                [[str(name), *_numbers(row)] for name, row in summary.iterrows()],
            ),
            html.figure(forest(shown, level), _below_forest(effects, shown)),
        ),
        html.section("Each term", html.figures(*_pictures(results, level))),
        html.section("Chains", _chains(results, summary)),
        html.section("Predictions", _scores(results, test, test_inputs)),
        html.section("What was fitted", html.definitions(_described(results))),
        html.section("Notes", html.paragraphs(*notes)) if notes else "",
        html.section("Words", html.definitions(_WORDS)),
    ]
    atomic_write_bytes(path, html.page(title, body).encode())
    return Path(path)


def _lead(results: Results) -> str:
    model, specification = results.state.model, results.state.model.specification
    networks = list(specification.deep)
    beside = f" beside {len(networks)} network{'s' * (len(networks) > 1)} ({', '.join(networks)})"
    dropped = f"; {model.dropped} rows with missing values were left out" if model.dropped else ""
    formula = specification.formula
    if not isinstance(formula, str):
        formula = ", ".join(f"{name}: {text}" for name, text in formula.items())
    return (
        f"{formula}{beside if networks else ''}, family {model.family!r}, "
        f"{model.data.n} rows{dropped}."
    )


def _verdict(results: Results, summary: pd.DataFrame) -> list[str]:
    if not results.is_posterior:
        return [
            html.box(
                "bad",
                f"{results.draws.n_draws} networks trained anew: their spread is no "
                "posterior of the effects.",
            )
        ]
    worst, least = summary["rhat"].max(), summary["ess_bulk"].min()
    good = worst < 1.01 and least >= 100 * results.draws.n_chains
    said = [f"Largest R-hat of an effect {worst:.3f}, smallest effective sample size {least:.0f}."]
    if worst >= 1.01:
        said.append("The chains do not agree well enough on the effects: sample longer.")
    elif not good:
        said.append(
            f"The chains agree; for intervals that can be trusted, sample until each "
            f"effect has {100 * results.draws.n_chains} effective draws."
        )
    pieces = [html.box("good" if good else "bad", *said)]
    if results.space.rank and results.draws.warnings():
        pieces.append(
            html.paragraphs(
                "Of all coordinates, the networks' included: "
                + "; ".join(results.draws.warnings())
                + "."
            )
        )
    return pieces


def _shown(effects: dict[str, np.ndarray], most: int = 40) -> dict[str, np.ndarray]:
    """The effects of a forest: levels of random effects last, an intercept only on its own."""
    others = sorted(
        (name for name in effects if not _is_intercept(name)),
        key=lambda name: name.startswith("re("),
    )
    return {name: effects[name] for name in (others or list(effects))[:most]}


def _is_intercept(name: str) -> bool:
    return name.rpartition(".")[2] == "Intercept"


def _below_forest(effects: dict[str, np.ndarray], shown: dict[str, np.ndarray]) -> str:
    away = [name for name in effects if _is_intercept(name) and name not in shown]
    rest = len(effects) - len(shown) - len(away)
    return (
        "Effects on the scale of the predictor"
        + (f"; {', '.join(away)} left out" if away else "")
        + (f"; {rest} more are in the table" if rest else "")
        + "."
    )


def _pictures(results: Results, level: float) -> list[str]:
    what = {
        "factor": "relative to its reference level",
        "random": "by level",
        "network": "a network's contribution relative to its mean, averaged over the rows",
    }
    found = []
    for partial in results.partials(level):
        term = partial.term
        along = f" along {partial.variable}" if term.kind == "network" else ""
        found.append(
            html.figure(
                effect(partial),
                (
                    f"{term.name}{along}, {what.get(term.kind, 'relative to the average row')}, "
                    f"with {100 * level:g} % intervals."
                ),
            )
        )
    return found


def _chains(results: Results, summary: pd.DataFrame, most: int = 4) -> str:
    """Traces and ranks of the effects that mixed least."""
    if not results.is_posterior or results.draws.independent or results.draws.n_draws < 4:
        return ""
    names = list(summary["rhat"].sort_values(ascending=False, kind="stable").index[:most])
    effects = results.effects()
    draws = Draws(np.stack([effects[name] for name in names], -1))
    pictures = []
    for i, name in enumerate(names):
        path, order = trace(draws, i), ranks(draws, i)
        path.set_ylabel(name)
        order.set_xlabel(f"rank of {name} among all draws")
        pictures += [
            html.figure(path, f"Draws of {name}, a line for each chain."),
            html.figure(order, f"Ranks of {name}: flat where the chains agree."),
        ]
    return html.folded(
        f"Traces and ranks of the {len(names)} effects of largest R-hat", html.figures(*pictures)
    )


def _scores(results: Results, test: pd.DataFrame | None, test_inputs: Any) -> str:
    rows = []
    if results.is_posterior and results.temperature == 1.0:
        loo, n = results.loo(quiet=True), results.state.model.data.n
        rows.append(
            ["leave-one-out (PSIS), mean per row", f"{loo.elpd / n:.3f}", f"{loo.se / n:.3f}"]
        )
    if test is not None:
        values = results.score_samples(test, test_inputs)
        rows.append(
            [
                f"{len(values)} test rows, mean per row",
                f"{values.mean():.3f}",
                f"{values.std(ddof=1) / len(values) ** 0.5:.3f}",
            ]
        )
    if not rows:
        return html.paragraphs(
            "Leave-one-out needs draws at temperature 1; pass test= to score held-out rows."
        )
    return html.table(["log predictive density", "value", "standard error"], rows)


def _described(results: Results) -> dict[str, str]:
    model = results.state.model
    found = {"formula": _lead(results).partition(", family")[0], "family": repr(model.family)}
    for name, part in model.specification.deep.items():
        reads = f"columns {', '.join(part.columns)}" if part.columns else "a tensor"
        size = sum(p.numel() for p in part.module.parameters())
        found[f"network {name}"] = f"{size} weights, reads {reads}"
    if results.space.rank:
        found["networks' space"] = f"{results.space.rank} directions of {results.space.kind}"
        found["networks orthogonal to"] = {
            "effects": "the columns of the formula",
            "nothing": "nothing",
            "intercept": "the intercept alone: centred. A network of columns that go with an "
            "effect takes a part of it",
        }[results.orthogonal_to]
    found["sampling"] = (
        f"{results.draws.engine}, {results.draws.n_chains} chains "
        f"of {results.draws.n_draws} draws, seed {results.state.joint.seed}"
    )
    temperature = results.temperature
    if temperature != 1.0:
        found["temperature"] = f"{temperature:g} of the networks; the effects given them at 1"
    found["priors"] = "; ".join(f"{name}: {prior!r}" for name, prior in results.priors.items())
    return found


def _numbers(row: pd.Series) -> list[str]:
    shown = []
    for name, value in row.items():
        if name in ("ess_bulk", "ess_tail"):
            shown.append(f"{value:.0f}")
        elif name in ("rhat", "direction"):
            shown.append(f"{value:.3f}")
        else:
            shown.append(f"{value:.4g}")
    return shown
