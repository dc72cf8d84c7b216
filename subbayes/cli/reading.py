"""Tables to learn from, as the options describe them, and results to write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from subbayes.cli.console import reading

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.cli.options import Missing, Unknown
    from subbayes.data.encoder import TabularEncoder

__all__ = ["check_new_file", "make_encoder", "read_training_table"]


def read_training_table(
    path: Path,
    target: str,
    marks: list[str] | None,
    separator: str | None,
    ignore: list[str] | None,
) -> pd.DataFrame:
    """A table without the columns to ignore.

    Raises:
        InputError: a table that cannot be read, or a column to ignore that is not there.
    """
    from subbayes.data.tables import closest, read_table
    from subbayes.utils.checks import fail

    with reading(path):
        frame = read_table(path, target=target, missing_values=marks or [], separator=separator)
    for name in ignore or []:
        if name not in frame or name == target:
            fail(
                "ignore",
                "another column of the table than the target",
                f"'{name}'",
                closest(name, [c for c in frame if c != target]),
            )
    return frame.drop(columns=ignore or [])


def make_encoder(
    unknown: Unknown,
    missing: Missing,
    marks: list[str] | None,
    categorical: list[str] | None,
    max_categories: int,
) -> TabularEncoder:
    """The encoder the options describe, not fitted yet."""
    from subbayes.data.encoder import TabularEncoder

    return TabularEncoder(
        unknown=unknown.value,
        missing=missing.value,
        missing_values=marks or [],
        categorical=categorical or [],
        max_categories=max_categories,
    )


def check_new_file(out: Path | None, overwrite: bool, *suffixes: str) -> None:
    """Refuse a file that is there, or of another kind, before anything long starts.

    Raises:
        InputError: as said.
    """
    from subbayes.utils.checks import fail

    if out is None or out.is_char_device():
        return
    if not out.name.lower().endswith(suffixes):
        fail("out", f"a name that ends in {' or '.join(suffixes)}", f"'{out.name}'", "Rename it")
    if out.is_dir():
        fail("out", "a file", f"a folder: '{out}'", "Choose another path")
    if out.exists() and not overwrite:
        fail(
            "out",
            "a new file",
            f"one that is there: '{out}'",
            "Pass --overwrite to replace it, or choose another path",
        )
