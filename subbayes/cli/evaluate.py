"""`subbayes evaluate`: scores of a saved model on rows with known targets."""

from __future__ import annotations

from subbayes.cli.console import Console, lines
from subbayes.cli.models import load_model, read_rows
from subbayes.cli.options import (
    Json,
    Level,
    ManyDraws,
    Model,
    Quiet,
    Separator,
    StructureUsed,
    Table,
    WeightsUsed,
    sparse_mode,
)

NAME = "evaluate"
EXAMPLE = "subbayes evaluate runs/people test.csv --json"


def evaluate(
    model: Model,
    table: Table,
    level: Level = 0.95,
    max_draws: ManyDraws = None,
    structure: StructureUsed = None,
    weights: WeightsUsed = None,
    separator: Separator = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score predictions on a table that has the target column.

    All: log_likelihood (mean over rows, in nats; higher is better). Numbers and counts: rmse,
    crps, coverage and interval_width of the interval. Classes: accuracy, brier, ece, auroc.
    """
    console = Console(as_json, quiet)
    fitted = load_model(model)
    frame = read_rows(fitted, table, separator, scored=True)
    scores = fitted.evaluate(frame, level, max_draws, **sparse_mode(structure, weights))
    facts = {
        "model": str(model),
        "table": str(table),
        "rows": len(frame),
        "level": level,
        "scores": scores,
    }
    console.result(facts, lines({"rows": len(frame)} | {k: f"{v:.4f}" for k, v in scores.items()}))
    console.hint(f"subbayes report {model} {table} --out report.html")
