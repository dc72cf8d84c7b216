"""`subbayes compare TABLE MODEL...`: rank saved posteriors of one table without fitting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from subbayes.cli.console import print_line
from subbayes.cli.files import (
    check_other_file,
    check_output_file,
    encode_rows,
    load_model,
    model_path,
    naming_out,
    read_rows,
)
from subbayes.cli.options import Console, TextOptions
from subbayes.utils.checks import fail

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.draws import Draws
    from subbayes.posterior import Posterior


def rank_models(
    table: Path,
    models: list[Path],
    target: str | None,
    source: TextOptions,
    out: Path | None,
    overwrite: bool,
    console: Console,
) -> None:
    """Rank saved models by leave-one-out scores, and print the table.

    Args:
        table: the rows that the models were fitted to.
        models: their folders.
        target: the column that they predict, if given.
        source: how a text file holds the table.
        out: CSV file for the result, or None.
        overwrite: replace an existing file.
        console: prints the result.

    Raises:
        InputError: folders without models, models of other targets, a table they do not fit.
    """
    from subbayes.artifacts.folder import kind_of
    from subbayes.cli.regression_model import KINDS
    from subbayes.comparison.posteriors import compare_posteriors

    check_output_file(out, overwrite, ".csv")
    check_other_file(out, table)
    if len(set(models)) < len(models):
        fail("models", "each folder once", ", ".join(map(str, models)))
    if any(regressions := [kind_of(model_path(folder)) in KINDS for folder in models]):
        if not all(regressions):
            expected = "models of `subbayes fit`, or of `subbayes regress`"
            fail("models", expected, "some of both", "Score both with `subbayes evaluate`")
        frame, facts, text = _ranked_regressions(table, models, target, source)
    else:
        found = compare_posteriors(
            {str(folder): _posterior_and_draws(folder, table, target, source) for folder in models}
        )
        frame, facts, text = found.to_frame(), found.to_dict(), found.to_text()
    if out is not None:
        from subbayes.artifacts.files import atomic_write_text
        from subbayes.data.table_batches import escape_formulas

        with naming_out():
            atomic_write_text(out, escape_formulas(frame).to_csv(), overwrite)
    console.result({"table": str(table)} | facts, text)
    if not any(regressions):
        console.hint(f"subbayes report {facts['best']} {table} --out report.html")


def _ranked_regressions(
    table: Path, models: list[Path], target: str | None, source: TextOptions
) -> tuple[pd.DataFrame, dict[str, Any], str]:
    """Leave-one-out scores of saved regressions: a data frame, values for JSON, and text."""
    from subbayes.cli.regression_model import RegressionModel

    loaded = [RegressionModel.load(model_path(folder)) for folder in models]
    for folder, one in zip(models, loaded, strict=True):
        if target not in (None, one.column):
            fail("models", f"models that predict '{target}'", f"'{one.column}' in '{folder}'")
        rows = read_rows(one, table, source, needs_target=True, min_rows=2)
        if not one.was_fitted_to(rows):
            _fail_rows(folder, "the rows", "others")
        for warning in one.model.warnings():
            print_line(f"warning: {folder}: {warning}")
    first, *others = [one.model for one in loaded]
    found = first.compare(*others, names=[str(folder) for folder in models])
    scores = found.reset_index().to_dict("records")
    facts = {"n": len(first.state.model.frame), "best": found.index[0], "rows": scores}
    return found, facts, found.rename_axis(None).round(2).to_string()


def _posterior_and_draws(
    folder: Path, table: Path, target: str | None, source: TextOptions
) -> tuple[Posterior, Draws]:
    """The posterior of a saved model over the rows of the table, and its draws."""
    from subbayes.posterior import Posterior
    from subbayes.tables.data_frame_model import describe_row_mismatch

    model = load_model(folder)
    fitted = model.fitted_model
    if target not in (None, model.column):
        fail("models", f"models that predict '{target}'", f"'{model.column}' in '{folder}'")
    if (fitted.settings.get("temperatures") or {}).get("by") == "validation":
        fail(
            "models",
            "models fitted to all rows of the table",
            f"one that held out rows to choose its temperature: '{folder}'",
            "Fit with --temperature loo or a number, or use `subbayes evaluate` on other rows",
        )
    if fitted.draws is None:
        fail("models", "a posterior with draws", f"none in '{model_path(folder)}'")
    for warning in fitted.warnings():
        print_line(f"warning: {folder}: {warning}")
    data = encode_rows(model, table, source, min_rows=2)
    if (mismatch := describe_row_mismatch(model, data[1])) is not None:
        _fail_rows(folder, *mismatch)
    posterior = Posterior(
        fitted.network, fitted.likelihood, data, fitted.subspace, fitted.prior, fitted.temperature
    )
    _check_rows(posterior, fitted.draws, folder)
    return posterior, fitted.draws


def _check_rows(posterior: Posterior, draws: Draws, folder: Path) -> None:
    """Check that the first draws have the log-likelihood that was saved with them.

    Leave-one-out scores are only valid for the rows that the model was fitted to.
    """
    saved = draws.stats.get("log_likelihood")
    if saved is None:
        return
    found = posterior.log_likelihood(draws.z[0, :4])
    if not abs(found - saved[0, :4]).max() <= 1e-3 * (1 + abs(found).max()):  # also of NaN
        _fail_rows(folder, "the rows", "rows of another likelihood")


def _fail_rows(folder: Path, expected: str, got: str) -> NoReturn:
    fail(
        "table",
        f"{expected} that '{folder}' was fitted to, for leave-one-out",
        got,
        "Name the table it was fitted to, or use `subbayes evaluate` on other rows",
    )
