"""`subbayes calibrate`: intervals and sets with a guaranteed coverage, from rows held out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.diagnostics.conformal import Conformal

NAME = "calibrate"
EXAMPLE = "subbayes calibrate runs/people held_out.csv --out runs/people-calibrated"

Score = StrEnum("Score", ["aps", "lac"])
_OF_BASE = ("column", "text_columns", "missing_values", "targets", "out_of_distribution")


@dataclass(frozen=True)
class CalibratedModel:
    """A calibrated model, as the commands use models of tables.

    Attributes:
        base: the model.
        conformal: its calibration.
    """

    base: Any
    conformal: Conformal

    @classmethod
    def load(cls, path: Path) -> CalibratedModel:
        """Load what `subbayes calibrate` wrote.

        Raises:
            InputError: a damaged model, or a calibrated one that does not take a table.
        """
        from subbayes.artifacts.saving import read, rebuild
        from subbayes.cli.regression_model import KINDS, RegressionModel
        from subbayes.tables.data_frame_model import DataFrameModel

        tensors, facts, kind = read(path)
        conformal = rebuild(kind, tensors, facts, {}, path)
        base, member = conformal.models[0], facts.members[0]
        if member.kind in KINDS:
            base = RegressionModel(base, tuple(member.facts.missing_values))
        elif not isinstance(base, DataFrameModel):
            fail("model", "the model of a table", f"a {member.kind}", "Use subbayes.load")
        return cls(base, conformal)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_BASE:
            return getattr(self.base, name)
        if name.startswith("__"):
            raise AttributeError(name)
        fail("model", "a model that is not calibrated", "a calibrated one", "Calibrate it last")

    def frame(
        self, table: pd.DataFrame, level: float = 0.95, threshold: float = 0.95, **options: Any
    ) -> pd.DataFrame:
        """Predictions with calibrated intervals or sets; see `DataFrameModel.frame`."""
        sets = self.conformal.to_frame(table, level, **options)
        columns = {name: sets[name].to_numpy() for name in sets}
        return self.base.frame(table, level, threshold, **options).assign(**columns)

    def evaluate(self, table: pd.DataFrame, level: float, **options: Any) -> dict[str, float]:
        """Scores on rows with targets, and the coverage and size of the sets."""
        found = self.conformal.evaluate(table, level=level, **options)
        options.pop("ordered", None)
        return self.base.evaluate(table, level, **options) | found


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
    from subbayes.tables.data_frame_model import describe_row_mismatch

    check_model_folder(out, overwrite)
    fitted = load_table_model(model)
    fitted = fitted.base if isinstance(fitted, CalibratedModel) else fitted
    frame = read_rows(fitted, table, source, needs_target=True)
    with naming_table(table):
        if isinstance(fitted, RegressionModel):
            known = fitted.was_fitted_to(frame)
            made = fitted.model.conformal(frame, score=score.value, penalty=penalty)
            made = replace(made, models=(fitted,))
        else:
            y = fitted.rows_and_targets(frame)[1]
            known = fitted.rows is not None and describe_row_mismatch(fitted, y) is None
            made = fitted.conformal(frame, score=score.value, penalty=penalty)
        if known:
            fail("path", "rows that the model was not fitted to", "those of its fit")
    statement = made.statement(level)
    with naming_out():
        made.save(out / "model", overwrite=overwrite)
    facts = {"model": str(model), "out": str(out), "rows": made.n, "statement": statement}
    console.result(facts, aligned({"out": out, "rows": made.n}) + f"\n{statement}")
    console.hint(f"subbayes evaluate {out} test.csv --level {level:g}")
