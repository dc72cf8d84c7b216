"""Models in folders that `subbayes fit` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from subbayes.cli.console import reading

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.models.data_frame_model import TableModel

__all__ = ["load_model", "model_path", "read_rows"]


def model_path(folder: Path) -> Path:
    """The path of the artifact: the folder that was passed to `fit`, or `model` in it.

    Raises:
        InputError: no model there, or one whose fit was interrupted.
    """
    from subbayes.utils import artifact
    from subbayes.utils.checks import fail

    for path in (folder / "model", folder):
        if artifact.is_artifact(path):
            return path
    if (folder / "checkpoint").is_dir():
        fail(
            "model",
            "a finished fit",
            f"one that was interrupted: '{folder}'",
            "Run the same `subbayes fit` command again: it goes on from there",
        )
    got = (
        "a folder without one"
        if folder.is_dir()
        else ("a file" if folder.exists() else "no such folder")
    )
    fail("model", "a folder that `subbayes fit` wrote", f"{got}: '{folder}'", "Check the path")


def load_model(folder: Path) -> TableModel:
    """The model in a folder.

    Raises:
        InputError: no model there, a damaged one, or one that does not take a table.
    """
    from subbayes.models.data_frame_model import TableModel

    return TableModel.load(model_path(folder))


def read_rows(
    fitted: TableModel, path: Path, separator: str | None, *, scored: bool, min_rows: int = 1
) -> pd.DataFrame:
    """Rows for a model, read with the missing values of its training table.

    Args:
        fitted: the model.
        path: the table.
        separator: between cells.
        scored: whether the target has to be there.
        min_rows: the fewest rows allowed.

    Raises:
        InputError: a table that cannot be read.
    """
    from subbayes.data.tables import read_table
    from subbayes.utils.checks import fail

    with reading(path):
        frame = read_table(
            path,
            separator=separator,
            min_rows=min_rows,
            missing_values=list(fitted.encoder.missing_values),
        )
        if scored and fitted.column not in frame:
            fail(
                "path",
                f"a column '{fitted.column}', which the model predicts, to score against",
                "a table without it",
                "Name another table; `subbayes predict` needs no target",
            )
    return frame
