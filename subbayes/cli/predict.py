"""`subbayes predict`: predictions of a saved model, with intervals or probabilities and doubt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subbayes.cli.console import Console
from subbayes.cli.models import load_model, read_rows
from subbayes.cli.options import (
    OUTPUT,
    Json,
    Level,
    ManyDraws,
    Model,
    Overwrite,
    Quiet,
    Separator,
    StructureUsed,
    Table,
    Threshold,
    WeightsUsed,
    sparse_mode,
)
from subbayes.cli.reading import check_new_file

if TYPE_CHECKING:
    import pandas as pd

NAME = "predict"
_DIGITS = "%.7g"  # what float32 holds
EXAMPLE = "subbayes predict runs/people new.csv --keep name --out predictions.csv"


def predict(
    model: Model,
    table: Table,
    out: Annotated[
        Path | None,
        typer.Option(
            help="CSV, TSV or Parquet file to write; by default CSV to standard output.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    level: Level = 0.95,
    threshold: Threshold = 0.95,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of the table to copy in front of its predictions; may be repeated.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    max_draws: ManyDraws = None,
    structure: StructureUsed = None,
    weights: WeightsUsed = None,
    separator: Separator = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict each row of a table.

    Numbers and counts: mean, std (of a new observation) with its parts epistemic_std (what more
    data would shrink) and aleatoric_std (what they would not), lower and upper end of the interval.
    Classes: the most probable label, whether it is in doubt, the probability of each class, entropy
    and mutual_information in nats.
    """
    console = Console(as_json, quiet)
    check_new_file(out, overwrite, ".csv", ".tsv", ".parquet", ".pq")
    fitted = load_model(model)
    frame = read_rows(fitted, table, separator, scored=False)
    kept = _kept(frame, keep or [])
    predictions = fitted.frame(
        frame, level, threshold, max_draws, **sparse_mode(structure, weights)
    )
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
    from subbayes.data.tables import closest
    from subbayes.utils.checks import fail

    for name in names:
        if name not in frame:
            fail("keep", "columns of the table", f"'{name}'", closest(name, list(frame.columns)))
    return frame[names]


def _write(predictions: pd.DataFrame, out: Path) -> None:
    """Completely or not at all."""
    from subbayes.utils.files import atomic_write_bytes, atomic_write_text

    if out.name.lower().endswith((".parquet", ".pq")):
        atomic_write_bytes(out, predictions.to_parquet(index=False))
    else:
        separator = "\t" if out.name.lower().endswith(".tsv") else ","
        atomic_write_text(out, predictions.to_csv(index=False, sep=separator, float_format=_DIGITS))
