"""`subbayes calibrate`: intervals and sets with a guaranteed coverage, from rows held out."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from subbayes.cli.calibrated_model import CalibratedModel
from subbayes.cli.console import naming_table
from subbayes.cli.files import check_model_folder, load_table_model, naming_out, read_rows
from subbayes.cli.options import (
    OUTPUT,
    Console,
    Level,
    Model,
    Overwrite,
    Table,
    TextOptions,
    option,
)
from subbayes.utils.checks import fail
from subbayes.utils.text_table import aligned

NAME = "calibrate"
EXAMPLE = "subbayes calibrate runs/people held_out.csv --out runs/people-calibrated"

Score = StrEnum("Score", ["aps", "lac"])


def calibrate(
    *,
    model: Model,
    table: Table,
    out: Annotated[Path, option(help="Folder for the calibrated model.", panel=OUTPUT)],
    level: Level = 0.95,
    score: Annotated[
        Score,
        typer.Option(
            help="Sets of classes: those of the largest probabilities (aps), or those with a "
            "probability above a threshold (lac), which are smaller on average."
        ),
    ] = Score.aps,
    penalty: Annotated[
        float, typer.Option(help="Of aps: for each class after the first, for smaller large sets.")
    ] = 0.0,
    source: TextOptions,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Calibrate a model with rows that it was not fitted to.

    `subbayes predict` of the result has intervals, or sets of classes (columns "in[...]" and
    "size"), that contain a new target with a probability of at least --level, for any model and
    data, if the rows of TABLE and new ones are exchangeable. What is printed is for --level; other
    levels need no other calibration.
    """
    from subbayes.cli.regression_model import RegressionModel

    check_model_folder(out, overwrite)
    fitted = load_table_model(model)
    fitted = fitted.base if isinstance(fitted, CalibratedModel) else fitted
    frame = read_rows(fitted, table, source, needs_target=True)
    with naming_table(table):
        if fitted.was_fitted_to(frame):
            fail("path", "rows that the model was not fitted to", "those of its fit")
        if isinstance(fitted, RegressionModel):
            made = fitted.model.conformal(frame, score=score.value, penalty=penalty)
            made = replace(made, models=(fitted,))
        else:
            made = fitted.conformal(frame, score=score.value, penalty=penalty)
    statement = made.statement(level)
    with naming_out():
        made.save(out / "model", overwrite=overwrite)
    facts = {"model": str(model), "out": str(out), "rows": made.n, "statement": statement}
    console.result(facts, aligned({"out": out, "rows": made.n}) + f"\n{statement}")
    console.hint(f"subbayes evaluate {out} test.csv --level {level:g}")
