"""`subbayes regress`: a regression from a formula, with a table of effects and a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subbayes.cli.console import COMMAND, naming_table
from subbayes.cli.files import check_model_folder, check_output_file, naming_out
from subbayes.cli.options import (
    DATA,
    MODEL,
    OUTPUT,
    POSTERIOR,
    Console,
    Level,
    Overwrite,
    Table,
    TextOptions,
    option,
)
from subbayes.utils.checks import fail
from subbayes.utils.registry import PRIORS
from subbayes.utils.text_table import aligned

if TYPE_CHECKING:
    from subbayes.inference.configuration import Sampling
    from subbayes.regression.model import Regression

NAME = "regress"
EXAMPLE = 'subbayes regress people.csv "visits ~ age + s(bmi) + re(town)" --family poisson'


@dataclass(frozen=True)
class ModelOptions:
    """What is regressed on what."""

    family: Annotated[
        str,
        typer.Option(
            help="Distribution of the response: normal, student-t, poisson, bernoulli, ordinal, "
            "'mixture(normal, student-t)' and the others of `subbayes.likelihoods.families`, with "
            "options as in 'asymmetric-laplace(quantile=0.9)'.",
            rich_help_panel=MODEL,
        ),
    ] = "normal"
    link: Annotated[
        str | None, option(help="Link of the location; by default that of the family.", panel=MODEL)
    ] = None
    parameter: Annotated[
        list[str] | None,
        option(
            help="Effects of another parameter of the family, such as sigma='age'; may be "
            "repeated.",
            panel=MODEL,
            metavar="NAME=EFFECTS",
        ),
    ] = None
    prior: Annotated[
        list[str] | None,
        option(
            help="Prior of a term: its scale, such as age=0.1, or 'age=student_t(3, 0, 2.5)', one "
            f"of {', '.join(PRIORS)}; a distribution of SciPy is 'age=scipy.laplace(0, 2)'; may "
            "be repeated.",
            panel=MODEL,
            metavar="TERM=PRIOR",
        ),
    ] = None
    weights: Annotated[
        str | None, option(help="Column of weights of the rows.", panel=MODEL, metavar="COLUMN")
    ] = None
    offset: Annotated[
        str | None,
        option(help="Column that is added to the predictor.", panel=MODEL, metavar="COLUMN"),
    ] = None
    exposure: Annotated[
        str | None, option(help="Column whose logarithm is added.", panel=MODEL, metavar="COLUMN")
    ] = None

    def build(self, formula: str) -> Regression:
        """The unfitted model of a formula."""
        from subbayes.likelihoods.families import family_from_name
        from subbayes.regression.model import Regression
        from subbayes.regression.priors.reading import prior_from_text

        family = family_from_name(self.family, self.link)
        others = dict(_pairs("--parameter", self.parameter))
        formulas = {family.formula_names[0]: formula, **{k: f"~ {v}" for k, v in others.items()}}
        return Regression(
            formulas if others else formula,
            family=family,
            priors={
                name: prior_from_text(f"--prior {name}", text)
                for name, text in _pairs("--prior", self.prior)
            },
            weights=self.weights,
            offset=self.offset,
            exposure=self.exposure,
        )


@dataclass(frozen=True)
class PosteriorOptions:
    """How the posterior is sampled."""

    inference: Annotated[
        str | None,
        option(
            help="Engine, such as nuts or laplace; by default independent proposals, or nuts where "
            "few of them would be accepted.",
            panel=POSTERIOR,
        ),
    ] = None
    smooth: Annotated[
        str,
        option(
            help="Smoothing variances: 'bayes' samples them, 'reml' sets them to their maximum of "
            "the restricted likelihood.",
            panel=POSTERIOR,
        ),
    ] = "bayes"
    draws: Annotated[int | None, option(help="Draws per chain. Default: 1000.", min=1)] = None
    chains: Annotated[int | None, option(help="Number of chains. Default: 4.", min=1)] = None
    warmup: Annotated[int | None, option(help="Draws of the warm-up per chain.", min=0)] = None
    seed: Annotated[int | None, option(help="Seed of all steps.", min=0)] = None
    assignments: Annotated[
        list[str] | None,
        option(
            "--set",
            help="One setting by its dotted name, such as sampling.thin=2.",
            panel=POSTERIOR,
            metavar="NAME=VALUE",
        ),
    ] = None

    def sampling(self, progress: bool | None) -> Sampling:
        """Settings of sampling; options take precedence over `--set`."""
        from subbayes.models.configuration import change
        from subbayes.regression.model import SAMPLING

        pairs = dict(_pairs("--set", self.assignments))
        for name in pairs:
            if not name.startswith("sampling."):
                fail("--set", "settings of sampling, such as sampling.thin=2", f"'{name}'")
        found = change(SAMPLING, {k.removeprefix("sampling."): v for k, v in pairs.items()})
        typed = {name: getattr(self, name) for name in ("draws", "chains", "warmup", "seed")}
        given = {name: value for name, value in typed.items() if value is not None}
        return replace(found, progress=progress, **given)


def regress(
    *,
    table: Table,
    formula: Annotated[
        str,
        typer.Argument(
            help="Response and effects: 'y ~ x + C(sex) + s(age) + re(town)'. The response may be "
            "censored, 'time | cens(status) ~ x', truncated, 'y | trunc(lb=0) ~ x', or of trials, "
            "'y | trials(n) ~ x'.",
            show_default=False,
        ),
    ],
    model: ModelOptions,
    posterior: PosteriorOptions,
    out: Annotated[
        Path | None, option(help="Folder to save the fitted model in.", panel=OUTPUT)
    ] = None,
    report: Annotated[
        Path | None, option(help="HTML file for a report with figures.", panel=OUTPUT)
    ] = None,
    level: Level = 0.95,
    missing_values: Annotated[
        list[str] | None,
        option(help="Mark of a missing value, such as '?'; may be repeated.", panel=DATA),
    ] = None,
    source: TextOptions,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Fit a regression with interpretable effects, and print a table of them.

    Effects are those of a formula: columns, factors C(...), smooths s(...), random effects re(...)
    and interactions. Rows with missing values are dropped and counted.
    """
    from subbayes.cli.regression_model import RegressionModel
    from subbayes.data.columns import warn_about_decimal_commas
    from subbayes.data.tables import read_table
    from subbayes.regression.questions.summary import summary_text

    check_output_file(report, overwrite, ".html", ".htm")
    if out is not None:
        check_model_folder(out, overwrite)
    unfitted = model.build(formula)
    sampling = posterior.sampling(console.progress)
    with naming_table(table):
        frame = read_table(table, missing_values=missing_values or [], **source.format)
        for name in frame:
            warn_about_decimal_commas(frame[name], f"column '{name}'")
    fitted = unfitted.fit(
        frame, inference=posterior.inference, smooth=posterior.smooth, sampling=sampling
    )
    summary = fitted.summary(level)
    facts: dict[str, Any] = {
        "formula": formula,
        "family": repr(fitted.state.model.family),
        "rows": len(fitted.state.model.frame),
        "dropped": fitted.state.model.dropped,
        "inference": summary.attrs["inference"],
        "effects": summary.to_dict("index"),
        "warnings": list(fitted.warnings()),
    }
    if censored := fitted.describe().get("censored"):
        facts["censored"] = censored
    with naming_out():
        if out is not None:
            saved = RegressionModel(fitted, tuple(missing_values or ()))
            saved.save(out / "model", overwrite=overwrite)
            facts["model"] = str(out)
        if report is not None:
            fitted.report(report, notes=[COMMAND.get()], level=level)
            facts["report"] = str(report)
    shown: dict[str, Any] = {
        k: facts[k]
        for k in ("formula", "family", "rows", "censored", "inference", "model", "report")
        if k in facts
    }
    console.result(facts, f"{aligned(shown)}\n\n{summary_text(summary)}")
    if out is not None:
        console.hint(f"subbayes predict {out} NEW_ROWS.csv")
        console.hint(
            f"python -c \"import subbayes; print(subbayes.load('{out}/model').summary())\""
        )


def _pairs(flag: str, texts: list[str] | None) -> list[tuple[str, str]]:
    """Names and values of NAME=VALUE."""
    found = []
    for text in texts or []:
        place = _last_equals(text) if flag == "--prior" else text.find("=")
        if place < 0:
            raise typer.BadParameter(f"NAME=VALUE, got '{text}'", param_hint=flag)
        found.append((text[:place].strip(), text[place + 1 :].strip()))
    return found


def _last_equals(text: str) -> int:
    """Position of the last "=" outside brackets, which terms and priors may have; -1 without."""
    depth, place = 0, -1
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "=" and not depth:
            place = i
    return place
