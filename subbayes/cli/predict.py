"""`subbayes predict`: predictions of a saved model, with intervals or class probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subbayes.cli.files import check_output_file, load_model, read_rows
from subbayes.cli.options import (
    OUTPUT,
    Console,
    Level,
    Model,
    Overwrite,
    PredictionOptions,
    Separator,
    Table,
    option,
)

if TYPE_CHECKING:
    import pandas as pd

NAME = "predict"
_DIGITS = "%.7g"  # the precision of float32
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
    separator: Separator = None,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Predict each row of a table.

    Numbers and counts: mean, std (of a new observation) with its parts epistemic_std (which more
    data would reduce) and aleatoric_std (which they would not), lower and upper ends of the
    interval.
    Classes: the most probable label, whether it is in doubt, the probability of each class, entropy
    and mutual_information in nats.
    """
    check_output_file(out, overwrite, ".csv", ".tsv", ".parquet", ".pq")
    fitted = load_model(model)
    frame = read_rows(fitted, table, separator, needs_target=False)
    kept = _kept(frame, keep or [])
    predictions = fitted.frame(frame, level, threshold, **prediction.arguments())
    for place, (name, values) in enumerate(kept.items()):
        predictions.insert(place, str(name), values.to_numpy(), allow_duplicates=True)
    if out is None:
        facts = {"rows": len(predictions), "predictions": predictions.to_dict("records")}
        console.result(facts, predictions.to_csv(index=False, float_format=_DIGITS).rstrip("\n"))
        return
    _write(predictions, out)
    interval = f", with {100 * level:g} % intervals" if "lower" in predictions else ""
    console.result(
        {
            "rows": len(predictions),
            "out": str(out),
            "columns": list(predictions.columns),
            "level": level,
        },
        f"{len(predictions)} predictions in {out}{interval}",
    )
    if fitted.column in frame:
        console.hint(f"subbayes evaluate {model} {table}")


def _kept(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    from subbayes.utils.checks import closest, fail

    for name in names:
        if name not in frame:
            fail("keep", "columns of the table", f"'{name}'", closest(name, list(frame.columns)))
    return frame[names]


def _write(predictions: pd.DataFrame, out: Path) -> None:
    from subbayes.utils.files import atomic_write_bytes, atomic_write_text

    if out.name.lower().endswith((".parquet", ".pq")):
        atomic_write_bytes(out, predictions.to_parquet(index=False))
    else:
        separator = "\t" if out.name.lower().endswith(".tsv") else ","
        atomic_write_text(out, predictions.to_csv(index=False, sep=separator, float_format=_DIGITS))
