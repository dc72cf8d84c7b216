"""`subbayes predict`: predictions of a saved model, with intervals or class probabilities."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subbayes.cli.console import ROWS_BEFORE, print_json_batches
from subbayes.cli.files import (
    check_other_file,
    check_output_file,
    load_table_model,
    naming_out,
    read_batches,
    row_batches,
)
from subbayes.cli.options import (
    OUTPUT,
    Console,
    Level,
    Model,
    Overwrite,
    PredictionOptions,
    Table,
    TextOptions,
    option,
)
from subbayes.utils.checks import closest, fail

if TYPE_CHECKING:
    import pandas as pd

NAME = "predict"
EXAMPLE = "subbayes predict runs/people new.csv --keep name --out predictions.csv"


def predict(
    *,
    model: Model,
    table: Table,
    out: Annotated[
        Path | None,
        option(help="CSV, TSV or Parquet file; by default CSV to standard output.", panel=OUTPUT),
    ] = None,
    level: Level = 0.95,
    threshold: Annotated[
        float, typer.Option(help="A row is in doubt unless one class is more probable than this.")
    ] = 0.95,
    keep: Annotated[
        list[str] | None,
        option(
            help="Column of the table to copy in front of its predictions; may be repeated.",
            panel=OUTPUT,
        ),
    ] = None,
    prediction: PredictionOptions,
    source: TextOptions,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Predict each row of a table.

    Numbers and counts: mean, std (of a new observation) with its parts epistemic_std (which more
    data would reduce) and aleatoric_std (which they would not), lower and upper ends of the
    interval.
    Classes: the most probable label, whether it is in doubt, the probability of each class, entropy
    and mutual_information in nats.
    Rows are read, predicted and written in batches, so that any number of them fits into memory.
    Numbers have as many digits as it takes to read the same ones, and columns to copy do not
    change. In text files, text that a spreadsheet would take for a formula begins with an
    apostrophe.
    """
    from subbayes.data.table_batches import text_pieces, write_batches
    from subbayes.utils.progress import progress_bar
    from subbayes.utils.text_table import printable

    check_output_file(out, overwrite, ".csv", ".tsv", ".parquet", ".pq")
    check_other_file(out, table)
    fitted = load_table_model(model)
    batches = row_batches(fitted, table, source)
    _check_kept(batches.columns, keep or [])
    columns: list[str] = []

    def predictions() -> Iterator[pd.DataFrame]:
        with progress_bar(batches.n, "Predicting", console.progress, "rows") as steps:
            rows = 0
            for batch in read_batches(batches, table):
                ROWS_BEFORE.set(rows)
                rows += len(batch)
                arguments = prediction.arguments_of(fitted)
                if keep and not columns:
                    first = fitted.frame(batch.head(1), level, threshold, **arguments)
                    _check_other_names(keep, list(first.columns))
                frame = fitted.frame(batch, level, threshold, **arguments)
                for place, name in enumerate(keep or []):
                    frame.insert(place, name, batch[name].to_numpy())
                columns[:] = frame.columns
                yield frame
                steps.update(len(frame))

    if out is not None:
        with naming_out():
            rows = write_batches(out, predictions(), overwrite)
        interval = f", with {100 * level:g} % intervals" if "lower" in columns else ""
        facts = {"rows": rows, "out": str(out), "columns": columns, "level": level}
        console.result(facts, f"{rows} predictions in {out}{interval}")
        if fitted.column in batches.columns:
            console.hint(f"subbayes evaluate {model} {table}")
    elif console.json:
        print_json_batches("predictions", (frame.to_dict("records") for frame in predictions()))
    else:
        for piece in text_pieces(predictions()):
            print(printable(piece) if _is_terminal() else piece, end="")


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _check_kept(columns: list[str], names: list[str]) -> None:
    for name in names:
        if name not in columns:
            fail("keep", "columns of the table", f"'{name}'", closest(name, columns))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        fail("keep", "each column once", f"'{twice}' several times")


def _check_other_names(kept: list[str], predicted: list[str]) -> None:
    """Check that no column to keep has the name of a column of predictions."""
    for name in kept:
        if name in predicted:
            expected = "columns with other names than those of the predictions"
            remedy = f"Rename the column '{name}' of the table, or leave it out"
            fail("keep", expected, f"'{name}'", remedy)
