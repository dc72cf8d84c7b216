"""`subbayes evaluate`: scores of a saved model on rows with known targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from subbayes.cli.console import naming_table, print_line
from subbayes.cli.files import load_table_model, read_rows
from subbayes.cli.options import (
    Console,
    Level,
    Model,
    PredictionOptions,
    Table,
    TextOptions,
    option,
)
from subbayes.utils.text_table import aligned

NAME = "evaluate"
EXAMPLE = "subbayes evaluate runs/people test.csv --json"


def evaluate(
    *,
    model: Model,
    table: Table,
    out_of_distribution: Annotated[
        Path | None,
        option(
            "--out-of-distribution",
            "--ood",
            help="Table of rows unlike the training table, with or without targets: print how well "
            "the uncertainty separates them from the rows of TABLE (AUROC; 0.5 is chance).",
        ),
    ] = None,
    level: Level = 0.95,
    ordered: Annotated[
        bool,
        typer.Option(
            "--ordered",
            help="Rows are in the order of time: test whether the coverage leaves its band "
            "(false alarms: 5 %); coverage_alarm is the row, from 0, from which on that is sure.",
        ),
    ] = False,
    prediction: PredictionOptions,
    source: TextOptions,
    console: Console,
) -> None:
    """Score predictions on a table that has the target column.

    All tasks: log_likelihood (mean over rows, in nats; higher is better). Numbers and counts: rmse,
    crps, coverage and interval_width of the interval. Classes: accuracy, brier, ece, auroc.
    """
    fitted = load_table_model(model)
    others = None
    if out_of_distribution is not None:
        others = read_rows(fitted, out_of_distribution, source, needs_target=False)
    frame = read_rows(fitted, table, source, needs_target=True)
    options = prediction.arguments_of(fitted) | ({"ordered": True} if ordered else {})
    scores = fitted.evaluate(frame, level=level, **options)
    rows = {"rows": len(frame)}
    facts: dict[str, Any] = {"model": str(model), "table": str(table), **rows}
    facts |= {"level": level, "scores": scores}
    lines: dict[str, Any] = rows | {name: f"{score:.4f}" for name, score in scores.items()}
    if others is not None:
        with naming_table(str(out_of_distribution)):
            found = fitted.out_of_distribution(frame, others, **prediction.arguments_of(fitted))
        facts["out_of_distribution"] = {
            "table": str(out_of_distribution),
            "rows": len(others),
            "scores": found,
        }
        lines["rows out of distribution"] = len(others)
        lines |= {f"AUROC of {name}": f"{score['auroc']:.4f}" for name, score in found.items()}
    console.result(facts, aligned(lines))
    if others is not None and max(score["auroc"] for score in found.values()) < 0.5:
        print_line(
            f"note: every AUROC is below 0.5: the rows of {out_of_distribution} are predicted with "
            f"less uncertainty than those of {table}. Are the tables swapped, or alike?"
        )
    console.hint(f"subbayes report {model} {table} --out report.html")
