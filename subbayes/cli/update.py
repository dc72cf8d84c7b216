"""`subbayes update`: a saved model after new rows, without a refit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subbayes.cli.console import naming_table
from subbayes.cli.files import check_model_folder, load_table_model, naming_out, read_rows
from subbayes.cli.options import OUTPUT, Console, Model, Overwrite, Table, TextOptions, option
from subbayes.utils.text_table import aligned

NAME = "update"
EXAMPLE = "subbayes update runs/people week2.csv --out runs/people-2"


def update(
    *,
    model: Model,
    table: Table,
    out: Annotated[Path, option(help="Folder for the updated model.", panel=OUTPUT)],
    forgetting: Annotated[
        float, typer.Option(help="Power of the likelihood of all earlier rows, at most 1.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of resampling and draws.")] = 0,
    source: TextOptions,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Update a model by new rows with targets, for which its posterior is the prior.

    The rows that it was fitted to are not needed. Columns are encoded as those of the fit; labels
    and levels have to be those of the fit. The result is how many nats the new rows were worth,
    what the model expected, and the method. A warning says if the rows do not fit: then refit.
    """
    from dataclasses import asdict

    check_model_folder(out, overwrite)
    fitted = load_table_model(model)
    frame = read_rows(fitted, table, source, needs_target=True)
    with naming_table(table):
        updated = fitted.update(frame, forgetting=forgetting, seed=seed)
    with naming_out():
        updated.save(out / "model", overwrite=overwrite)
    updates = updated.model.updates
    facts = {"out": str(out), **asdict(updates[-1]), "updates": len(updates)}
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in facts.items()}
    console.result(facts, aligned(shown))
    console.hint(f"subbayes predict {out} {table}")
