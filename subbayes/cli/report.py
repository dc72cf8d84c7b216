"""`subbayes report`: one HTML file about a saved model, with everything in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subbayes.cli.console import Console, say
from subbayes.cli.models import load_model, read_rows
from subbayes.cli.options import OUTPUT, Json, Model, Overwrite, Quiet, Separator
from subbayes.cli.reading import check_new_file

if TYPE_CHECKING:
    import numpy as np

    from subbayes.models.data_frame_model import TableModel

NAME = "report"
EXAMPLE = "subbayes report runs/people test.csv --train people.csv --out report.html"


def report(
    model: Model,
    table: Annotated[
        Path | None,
        typer.Argument(
            help="Rows with known targets to score: CSV, TSV or Parquet.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="HTML file to write.", rich_help_panel=OUTPUT)] = Path(
        "report.html"
    ),
    train: Annotated[
        Path | None,
        typer.Option(
            help="The table the model was fitted to, for the surface of the posterior.",
            show_default=False,
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Heading.", show_default=False)] = "",
    unit: Annotated[str, typer.Option(help="Unit of the target.", show_default=False)] = "",
    separator: Separator = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a self-contained HTML report of a saved model.

    It says what was fitted and whether the chains can be trusted; with TABLE, how well it
    predicts: predictive bands and calibration; with --train, the log-density of the posterior over
    its first two coordinates, the draws on it. It needs neither network nor script.
    """
    console = Console(as_json, quiet)
    check_new_file(out, overwrite, ".html", ".htm")
    fitted = load_model(model)
    from subbayes.sparse.result import SparseNetwork

    sparse = isinstance(fitted.model, SparseNetwork)
    subject = fitted.model if sparse else fitted.sampled
    if sparse and train is not None:
        say("warning: --train makes no difference to a sparse network, which has no coordinates")
        train = None
    command = "" if sparse else fitted.notes.get("command", "")
    test = None if table is None else _rows(fitted, table, separator, 1)
    data = None if train is None else _rows(fitted, train, separator, 2)
    from subbayes.reports.model_report import write_report

    write_report(
        subject,
        out,
        data=data,
        test=test,
        title=title,
        name=fitted.column,
        unit=unit,
        command=str(command),
        features=fitted.encoder.get_feature_names_out().tolist(),
    )
    console.result({"model": str(model), "out": str(out)}, f"report in {out}")
    console.hint(f"open {out} in a browser")


def _rows(
    fitted: TableModel, path: Path, separator: str | None, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a table, as the model takes them."""
    from subbayes.data.tables import split_target
    from subbayes.models.data_frame_model import numbers

    frame = read_rows(fitted, path, separator, scored=True, min_rows=least)
    features, values = split_target(frame, fitted.column)
    return fitted.encoder.transform(features), numbers(fitted.target, values)
