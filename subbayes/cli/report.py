"""`subbayes report`: a self-contained HTML file about a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subbayes.cli.console import print_line
from subbayes.cli.files import (
    check_output_file,
    encode_rows,
    load_table_model,
    naming_out,
    read_rows,
)
from subbayes.cli.options import OUTPUT, Console, Model, Overwrite, TextOptions, option

NAME = "report"
EXAMPLE = "subbayes report runs/people test.csv --train people.csv --out report.html"


def report(
    *,
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
        option(help="The table the model was fitted to, to plot the density of the posterior."),
    ] = None,
    ordered: Annotated[
        bool,
        typer.Option(
            "--ordered",
            help="Rows of TABLE are in the order of time: say whether their coverage has changed.",
        ),
    ] = False,
    title: Annotated[str, option(help="Heading.")] = "",
    unit: Annotated[str, option(help="Unit of the target.")] = "",
    source: TextOptions,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Write a self-contained HTML report of a saved model.

    It describes the model and the convergence of its chains; with TABLE, its predictions and their
    calibration; with --train, the log density of the posterior over its first two coordinates with
    the draws. The page needs no network connection and contains no scripts.
    """
    from subbayes.cli.calibrated_model import CalibratedModel
    from subbayes.cli.regression_model import RegressionModel

    check_output_file(out, overwrite, ".html", ".htm")
    fitted = load_table_model(model)
    notes: list[str] = []
    if isinstance(fitted, CalibratedModel):
        notes.append(fitted.conformal.statement())
        fitted = fitted.base
    if isinstance(fitted, RegressionModel):
        for name, given in {"train": train, "unit": unit, "ordered": ordered}.items():
            if given:
                print_line(f"warning: --{name} makes no difference to a regression")
        rows = None if table is None else read_rows(fitted, table, source, needs_target=True)
        with naming_out():
            fitted.model.report(out, title=title, test=rows, notes=notes)
        console.result({"model": str(model), "out": str(out)}, f"report in {out}")
        return
    test = None if table is None else encode_rows(fitted, table, source)
    data = None if train is None else encode_rows(fitted, train, source, min_rows=2)
    from subbayes.models.fitted import FittedModel
    from subbayes.reports import write_report

    if data is not None and not isinstance(fitted.model, FittedModel):
        print_line(f"warning: --train makes no difference to a {fitted.model.label}")
    with naming_out():
        write_report(
            fitted.model,
            out,
            data=data,
            test=test,
            title=title,
            notes=notes,
            ordered=ordered,
            name=fitted.column,
            unit=unit,
            command=str(fitted.notes.get("command", "")),
            features=fitted.encoder.get_feature_names_out().tolist(),
            overwrite=overwrite,
        )
    console.result({"model": str(model), "out": str(out)}, f"report in {out}")
    console.hint(f"open {out} in a browser")
