"""Models, tables and output files that commands are given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subbayes.cli.console import naming, naming_table
from subbayes.utils.checks import fail

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from subbayes.cli.options import TextOptions
    from subbayes.cli.regression_model import RegressionModel
    from subbayes.data.table_batches import TableBatches
    from subbayes.tables.data_frame_model import DataFrameModel


def model_path(folder: Path) -> Path:
    """The path of the artifact: the folder that was passed to `fit`, or `model` in it.

    Raises:
        InputError: no model there, or one whose fit was interrupted.
    """
    from subbayes.artifacts.folder import is_artifact

    for path in (folder / "model", folder):
        if is_artifact(path):
            return path
    if (folder / "checkpoint").is_dir():
        fail(
            "model",
            "a finished fit",
            f"one that was interrupted: '{folder}'",
            "Run the same `subbayes fit` command again to resume it",
        )
    got = "a file" if folder.exists() else "no such folder"
    got = "a folder without one" if folder.is_dir() else got
    fail("model", "a folder that `subbayes fit` wrote", f"{got}: '{folder}'", "Check the path")


def load_model(folder: Path) -> DataFrameModel:
    """Load the model in a folder.

    Raises:
        InputError: no model there, a damaged one, or one that does not take a table.
    """
    from subbayes.tables.data_frame_model import DataFrameModel

    return DataFrameModel.load(model_path(folder))


def load_table_model(folder: Path) -> Any:
    """Load the model in a folder, of `subbayes fit`, `subbayes regress` or `subbayes calibrate`.

    Raises:
        InputError: no model there, a damaged one, or one that does not take a table.
    """
    from subbayes.artifacts.folder import kind_of
    from subbayes.cli.calibrated_model import CalibratedModel
    from subbayes.cli.regression_model import KINDS, RegressionModel

    path = model_path(folder)
    if (kind := kind_of(path)) in KINDS:
        return RegressionModel.load(path)
    if kind == "conformal":
        return CalibratedModel.load(path)
    return load_model(folder)


def read_rows(
    model: DataFrameModel | RegressionModel,
    path: Path,
    source: TextOptions,
    *,
    needs_target: bool,
    min_rows: int = 1,
) -> pd.DataFrame:
    """Read rows for a model, with the marks of missing values of its training table.

    Args:
        model: the model.
        path: the table.
        source: how a text file holds it.
        needs_target: whether the target column is required.
        min_rows: minimum number of rows.

    Raises:
        InputError: a table that cannot be read.
    """
    from subbayes.data.tables import read_table

    with naming_table(path):
        frame = read_table(
            path,
            **source.format,
            min_rows=min_rows,
            missing_values=list(model.missing_values),
            as_text=model.text_columns,
        )
        if needs_target and (absent := model.targets(frame)):
            shown = ", ".join(map(repr, absent))
            fail(
                "path",
                f"a column {shown}, which the model predicts, to score against",
                "a table without it",
                "Name another table; `subbayes predict` needs no target",
            )
    return frame


def row_batches(
    model: DataFrameModel | RegressionModel, path: Path, source: TextOptions
) -> TableBatches:
    """Rows for a model in batches, as `read_rows` reads them at once."""
    from subbayes.data.table_batches import TableBatches

    with naming_table(path):
        options: dict[str, Any] = {"missing_values": list(model.missing_values)}
        return TableBatches(path, as_text=model.text_columns, **options, **source.format)


def read_batches(batches: TableBatches, path: Path) -> Iterator[pd.DataFrame]:
    """The batches; errors of reading one name the table."""
    remaining = iter(batches)
    while True:
        with naming(path=str(path)):
            batch = next(remaining, None)
        if batch is None:
            return
        yield batch


def encode_rows(
    model: DataFrameModel, path: Path, source: TextOptions, min_rows: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Read rows with targets, and encode them as inputs and targets of the network."""
    from subbayes.data.tables import split_target

    frame = read_rows(model, path, source, needs_target=True, min_rows=min_rows)
    features, values = split_target(frame, model.column)
    return model.encoder.transform(features), model.target.encode(values)


def naming_out() -> AbstractContextManager[None]:
    """Say --out where an error of writing names the argument `path`."""
    return naming(path="--out")


def check_other_file(out: Path | None, *read: Path | None) -> None:
    """Check that an output file is none of the files that are read, which it would replace.

    Raises:
        InputError: it is one of them, perhaps by another name.
    """
    for path in read:
        if out is None or path is None or not (out.exists() and path.exists()):
            continue
        if out.samefile(path):
            fail("out", "another file than the table", f"'{out}'", "Choose another path")


def check_model_folder(out: Path, overwrite: bool) -> None:
    """Check a folder for a model before a long computation starts.

    Raises:
        InputError: a file, or a folder that has a model already or cannot be written to.
    """
    from subbayes.artifacts.files import check_writable
    from subbayes.artifacts.folder import check_destination, is_artifact

    if out.exists() and not out.is_dir():
        fail("out", "a folder", f"a file: '{out}'", "Choose another path")
    if is_artifact(out / "model") and not overwrite:
        remedy = "Pass --overwrite to replace it, or choose another path"
        fail("out", "a folder without a model", f"one that has a model: '{out}'", remedy)
    with naming_out():
        check_destination(out / "model", overwrite=overwrite)
    check_writable("out", out)


def check_output_file(out: Path | None, overwrite: bool, *suffixes: str) -> None:
    """Check an output file before a long computation starts.

    Raises:
        InputError: the file exists, has another suffix, or cannot be written there.
    """
    from subbayes.artifacts.files import check_writable

    if out is None or out.is_char_device():
        return
    if not out.name.lower().endswith(suffixes):
        fail("out", f"a name that ends in {' or '.join(suffixes)}", f"'{out.name}'", "Rename it")
    if out.is_dir():
        fail("out", "a file", f"a folder: '{out}'", "Choose another path")
    if os.path.lexists(out) and not overwrite:
        fail(
            "out",
            "a new file",
            f"an existing one: '{out}'",
            "Pass --overwrite to replace it, or choose another path",
        )
    check_writable("out", out.parent)
