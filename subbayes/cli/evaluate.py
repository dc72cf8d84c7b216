"""`subbayes evaluate`: scores of a saved model on rows with known targets."""

from __future__ import annotations

from subbayes.cli.console import aligned
from subbayes.cli.files import load_model, read_rows
from subbayes.cli.options import Console, Level, Model, PredictionOptions, Separator, Table

NAME = "evaluate"
EXAMPLE = "subbayes evaluate runs/people test.csv --json"


def evaluate(
    *,
    model: Model,
    table: Table,
    level: Level = 0.95,
    prediction: PredictionOptions,
    separator: Separator = None,
    console: Console,
) -> None:
    """Score predictions on a table that has the target column.

    All: log_likelihood (mean over rows, in nats; higher is better). Numbers and counts: rmse,
    crps, coverage and interval_width of the interval. Classes: accuracy, brier, ece, auroc.
    """
    fitted = load_model(model)
    frame = read_rows(fitted, table, separator, needs_target=True)
    scores = fitted.evaluate(frame, level, **prediction.arguments())
    rows = {"rows": len(frame)}
    console.result(
        {"model": str(model), "table": str(table)} | rows | {"level": level, "scores": scores},
        aligned(rows | {name: f"{score:.4f}" for name, score in scores.items()}),
    )
    console.hint(f"subbayes report {model} {table} --out report.html")
