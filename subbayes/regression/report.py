"""A self-contained HTML report of a regression: effects, terms, chains, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from subbayes.artifacts.files import atomic_write_text
from subbayes.draws import Draws
from subbayes.plots.chains import ranks, trace
from subbayes.plots.effects import effect, forest
from subbayes.reports.rendering import Picture, Table, picture, render
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warnings_once

if TYPE_CHECKING:
    from subbayes.regression.results import Results


_WORDS = {
    "mean, sd": "mean and standard deviation of the posterior of an effect.",
    "hdi": "highest-density interval: the shortest interval with this posterior probability.",
    "direction": "probability of direction: the posterior probability of the effect's sign, "
    "0.5 to 1.",
    "scale": "of the numbers in a row: a parameter of the distribution, or a function of it.",
    "R-hat": "agreement of the chains; below 1.01 is good. With few draws or many effects a larger "
    "one may be chance, up to 1.05.",
    "ess": "effective sample size: the number of independent draws that estimate means (bulk) or "
    "intervals (tail) as precisely.",
    "cor(...)": "correlation of effects that vary among groups.",
    "Pareto k": "tail of the importance weights of leave-one-out, by row: large where a row has "
    "much influence on the posterior.",
    "sd(...)": "standard deviation of the nonlinear part of a smooth, or of random effects, on "
    "the scale of the predictor.",
}
_MOST_PARTIALS = 40  # figures of terms
_LARGEST_FOREST = 40  # in the figure; the table contains all
_CHAIN_EFFECTS = 4  # with traces and ranks


@warnings_once()
def write_report(
    results: Results,
    path: str | Path,
    *,
    title: str = "",
    baseline: Results,
    test: Any = None,
    level: float = 0.95,
    notes: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a page about a fitted model and a `baseline`, of an intercept alone."""
    effects, summary = results.effects(), results.summary(level)
    shown = _forest_effects(effects)
    chains = _chains(results, effects, summary)
    scores, quality = _scores(results, baseline, test, options or {})
    page = render(
        "regression.html",
        title=title or f"Effects on {results.state.model.response.name}",
        lead=_lead(results),
        verdict=_verdict(results, summary),
        quality=quality,
        coordinates=_coordinate_warnings(results),
        effects=Table(
            ["effect", *map(str, summary.columns), "scale"],
            [
                [str(name), *_numbers(row), summary.attrs["scales"][name]]
                for name, row in summary.iterrows()
            ],
        ),
        forest=picture(forest(shown, level), _forest_caption(effects, shown)),
        partials=_partials(results, level),
        left_out=_left_out(results.undrawn),
        chains=chains,
        chains_title=f"Traces and ranks of the {len(chains) // 2} effects with the largest R-hat",
        scores=scores,
        facts=_facts(results),
        notes=notes,
        words=_WORDS,
    )
    atomic_write_text(path, page)
    return Path(path)


def _lead(results: Results) -> str:
    model, specification = results.state.model, results.state.model.specification
    networks = results.networks
    beside = f" beside {len(networks)} network{'s' * (len(networks) > 1)} ({', '.join(networks)})"
    dropped = f"; {model.dropped} rows with missing values were left out" if model.dropped else ""
    formula = specification.formula
    if not isinstance(formula, str):
        formula = ", ".join(f"{name}: {text}" for name, text in formula.items())
    return (
        f"{formula}{beside if networks else ''}, family {model.family!r}, "
        f"{model.data.n} rows{dropped}."
    )


def _verdict(results: Results, summary: pd.DataFrame) -> tuple[str, list[str]]:
    """The quality of the draws, "good" or "bad", and an explanation."""
    if not results.is_posterior:
        return "bad", [
            f"{results.draws.n_draws} networks trained from different initial weights: their "
            "variation is not a posterior of the effects."
        ]
    worst = summary["rhat"].max()
    least = np.minimum(summary["ess_bulk"], summary["ess_tail"]).min(skipna=False)
    enough = 100 * results.draws.n_chains
    problems = results.warnings()
    agreement = "Read the remedies below" if problems else "The chains agree"
    lines = [
        f"{agreement}: the largest R-hat of an effect is {worst:.3f}, the smallest effective "
        f"sample size {least:.0f}.",
        *(f"{line[0].upper()}{line[1:]}." for line in problems),
    ]
    if not problems and least < enough:
        lines.append(f"For reliable intervals, sample until each effect has {enough} draws.")
    return "bad" if problems or not least >= enough else "good", lines  # NaN is bad


def _coordinate_warnings(results: Results) -> str:
    lines = results.draws.warnings() if results.is_posterior and results.space.rank else []
    return f"Of all coordinates, including the networks': {'; '.join(lines)}." if lines else ""


def _forest_effects(effects: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Effects of a forest plot: random effects last, intercepts only if there are no others."""
    others = sorted(
        (name for name in effects if not _is_intercept(name)),
        key=lambda name: " | " in name and name.endswith("]"),
    )
    return {name: effects[name] for name in (others or list(effects))[:_LARGEST_FOREST]}


def _is_intercept(name: str) -> bool:
    return name.rpartition(".")[2] == "Intercept"


def _forest_caption(effects: dict[str, np.ndarray], shown: dict[str, np.ndarray]) -> str:
    intercepts = [name for name in effects if _is_intercept(name) and name not in shown]
    rest = len(effects) - len(shown) - len(intercepts)
    return (
        "Effects on the scale of the predictor"
        + (f"; {', '.join(intercepts)} left out" if intercepts else "")
        + (f"; {rest} more are in the table" if rest else "")
        + "."
    )


def _partials(results: Results, level: float) -> list[Picture]:
    """A figure for each of the first terms and columns of networks."""
    relative = {
        "factor": "relative to its reference level",
        "random": "by level",
        "monotonic": "relative to its lowest value",
        "network": "a network's contribution relative to its mean, averaged over the rows",
    }
    pictures = []
    partials = results.partials(level, most=_MOST_PARTIALS + 1)
    for partial in partials[:_MOST_PARTIALS]:
        term = partial.term
        along = f" along {partial.variable}" if term.kind == "network" else ""
        caption = (
            f"{term.name}{along}, {relative.get(term.kind, 'relative to the average row')}, "
            f"with {100 * level:g} % intervals."
        )
        if partial.x.ndim == 2:
            caption = (
                f"{term.name}, relative to the average row: posterior mean and standard deviation "
                f"on the scale {partial.scale}. Dots are rows; places far from all rows are blank."
            )
        pictures.append(picture(effect(partial), caption))
    if len(partials) > _MOST_PARTIALS:
        pictures[-1] = replace(
            pictures[-1], caption=f"{pictures[-1].caption} Further terms are in the table alone."
        )
    return pictures


def _left_out(undrawn: Sequence[str]) -> str:
    """A remark about the terms without a figure."""
    if not undrawn:
        return ""
    names = ", ".join(undrawn[:_MOST_PARTIALS]) + (", ..." if len(undrawn) > _MOST_PARTIALS else "")
    return (
        f"Without a figure of their own: {names}, whose effects depend on several columns. "
        "model.conditional_effect(column, by=other) has predictions along these."
    )


def _chains(
    results: Results, effects: dict[str, np.ndarray], summary: pd.DataFrame
) -> list[Picture]:
    """Traces and ranks of the effects with the largest R-hat."""
    if not results.is_posterior or results.draws.independent or results.draws.n_draws < 4:
        return []
    names = summary["rhat"].sort_values(ascending=False, kind="stable").index[:_CHAIN_EFFECTS]
    draws = Draws(np.stack([effects[name] for name in names], -1))
    pictures = []
    for i, name in enumerate(names):
        path, order = trace(draws, i), ranks(draws, i)
        path.set_ylabel(name)
        order.set_xlabel(f"rank of {name} among all draws")
        pictures += [
            picture(path, f"Draws of {name}, a line for each chain."),
            picture(order, f"Ranks of {name}: flat if the chains agree."),
        ]
    return pictures


def _scores(
    results: Results, baseline: Results, test: Any, options: Mapping[str, Any]
) -> tuple[Table, str]:
    """Log predictive densities beside those of the baseline, and a sentence on the difference."""
    rows, caption, quality = [], "", ""
    if results.is_posterior and results.draws.temperature == 1.0:
        loo, of_baseline = results.loo(quiet=True), baseline.loo(quiet=True)
        n, label = loo.n_observations, "leave-one-out (PSIS), mean per row"
        difference, se = loo.difference(of_baseline)
        rows.append(_score_row(label, loo.elpd / n, loo.se / n, difference / n, se / n))
        caption = f"Leave-one-out: {loo.reliability()}"
        quality = _quality("rows left out of the fit in turn", difference / n, se / n)
    if test is not None:
        values, weights = results.score_samples(test, **options), results._row_weights(test)
        gains = values - baseline.score_samples(test)
        shares = np.ones(len(values)) if weights is None else weights
        shares = shares / shares.sum()
        (mean, se), (gain, gain_se) = (_mean(numbers, shares) for numbers in (values, gains))
        rows.append(_score_row(f"{len(values)} test rows, mean per row", mean, se, gain, gain_se))
        quality = _quality(f"{len(values)} test rows", gain, gain_se)
    header = ["log predictive density", "value", "standard error"]
    header += ["over an intercept alone", "standard error"]
    return Table(header, rows, caption), quality


def _mean(values: RowNumbers, shares: RowNumbers) -> tuple[float, float]:
    """The weighted mean of rows and its standard error, which is NaN of one row."""
    mean = shares @ values
    return float(mean), float(pd.Series(shares * (values - mean)).std() * len(values) ** 0.5)


def _score_row(label: str, *values: float) -> list[str]:
    return [label, *(f"{value:.3f}" for value in values)]


def _quality(rows: str, gain: float, se: float) -> str:
    """How much better predictions are than those that are the same for all rows."""
    text = (
        f"Predictions of {rows}: the log density of a response is {gain:+.3f} ± {se:.3f} nats on "
        "average beside the same family with an intercept alone, which predicts all rows alike"
    )
    if gain > 2 * se:
        return f"{text}: the terms improve predictions."
    if gain < -2 * se:
        return f"{text}: the terms make predictions worse."
    return f"{text}: no improvement beyond chance."


def _facts(results: Results) -> dict[str, str]:
    priors = "; ".join(f"{name}: {prior!r}" for name, prior in results.priors.items())
    return {**results.describe(), "seed": str(results.state.joint.seed), "priors": priors}


def _numbers(row: pd.Series) -> list[str]:
    digits = {"ess_bulk": ".0f", "ess_tail": ".0f", "rhat": ".3f", "direction": ".3f"}
    return [format(value, digits.get(str(name), ".4g")) for name, value in row.items()]
