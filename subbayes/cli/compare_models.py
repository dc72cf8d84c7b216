"""`subbayes compare TABLE MODEL...`: saved posteriors of one table on one scale, nothing fitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from subbayes.cli.console import Console, as_options, say
from subbayes.cli.models import load_model, model_path, read_rows
from subbayes.cli.reading import check_new_file

if TYPE_CHECKING:
    from subbayes.draws import Draws
    from subbayes.posterior import Posterior

__all__ = ["rank_models"]


def rank_models(
    table: Path,
    models: list[Path],
    target: str | None,
    separator: str | None,
    out: Path | None,
    overwrite: bool,
    console: Console,
) -> None:
    """Rank saved models by leave-one-out scores, and print the table.

    Args:
        table: the rows they were fitted to.
        models: their folders.
        target: the column they predict, if it was said.
        separator: between the cells of the table.
        out: CSV file for the result as well.
        overwrite: replace it.
        console: where the result goes.

    Raises:
        InputError: folders without models, models of other targets, a table they do not fit.
    """
    from subbayes.diagnostics.model_comparison import compare_posteriors
    from subbayes.utils.checks import fail

    check_new_file(out, overwrite, ".csv")
    if len(set(models)) < len(models):
        fail("models", "each folder once", ", ".join(map(str, models)))
    found = compare_posteriors(
        {str(folder): _candidate(folder, table, target, separator) for folder in models}
    )
    if out is not None:
        from subbayes.utils.files import atomic_write_text

        atomic_write_text(out, found.to_frame().to_csv())
    console.result({"table": str(table)} | found.to_dict(), found.to_text())
    console.hint(f"subbayes report {found.best} {table} --out report.html")


def _candidate(
    folder: Path, table: Path, target: str | None, separator: str | None
) -> tuple[Posterior, Draws]:
    """The posterior of a saved model over the rows of the table, and its draws."""
    from subbayes.data.tables import split_target
    from subbayes.models.data_frame_model import differing, numbers
    from subbayes.posterior import Posterior
    from subbayes.utils.checks import fail

    model = load_model(folder)
    fitted = model.sampled
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
        say(f"warning: {folder}: {as_options(warning)}")
    features, values = split_target(
        read_rows(model, table, separator, scored=True, min_rows=2), model.column
    )
    y = numbers(model.target, values)
    if (other := differing(model, y)) is not None:
        _fail_rows(folder, *other)
    data = model.encoder.transform(features), y
    posterior = Posterior(
        fitted.network, fitted.likelihood, data, fitted.subspace, fitted.prior, fitted.temperature
    )
    _check_rows(posterior, fitted.draws, folder)
    return posterior, fitted.draws


def _check_rows(posterior: Posterior, draws: Draws, folder: Path) -> None:
    """The table holds the rows the model was fitted to: the first draws are as likely as they were.

    Other rows would give scores that mean nothing, since leaving a row out needs it in.
    """
    noted = draws.stats.get("log_likelihood")
    if noted is None:
        return
    found = posterior.log_likelihood(draws.z[0, :4])
    if abs(found - noted[0, :4]).max() > 1e-3 * (1 + abs(found).max()):
        _fail_rows(folder, "the rows", "rows of another likelihood")


def _fail_rows(folder: Path, expected: str, got: str) -> NoReturn:
    from subbayes.utils.checks import fail

    fail(
        "table",
        f"{expected} that '{folder}' was fitted to, for leave-one-out",
        got,
        "Name the table it was fitted to, or use `subbayes evaluate` on other rows",
    )
