"""Write tables in batches of rows, so that memory does not grow with their number."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pandas as pd

from subbayes.artifacts.files import as_path, replace_file
from subbayes.data.tables import PARQUET
from subbayes.utils.checks import fail

__all__ = ["escape_formulas", "text_pieces", "write_batches"]


def write_batches(
    path: str | os.PathLike[str], batches: Iterable[pd.DataFrame], overwrite: bool = True
) -> int:
    r"""Write data frames of the same columns below each other, entirely or not at all.

    The rows go to a temporary file, which is renamed at the end. Numbers have as many digits in
    text files as give the same number when they are read, and whole ones no decimal point. Text
    that a spreadsheet would take for a formula gets an apostrophe in front in text files, see
    `escape_formulas`.

    Args:
        path: the file: Parquet by its suffix (`.parquet`, `.pq`), else CSV, with tabs in `.tsv`.
        batches: the data frames, each of which may be made when it is written, and at least one.
        overwrite: replace an existing file.

    Returns:
        The number of rows.

    Raises:
        InputError: a file that exists or cannot be written, or a Parquet file without pyarrow; an
            earlier file is intact.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "means.csv"
        >>> write_batches(file, (pd.DataFrame({"mean": [i / 3]}) for i in range(2)))
        2
        >>> file.read_text()
        'mean\n0\n0.3333333333333333\n'
    """
    path, rows = as_path(path), 0
    name = path.name.lower()

    def counted() -> Iterator[pd.DataFrame]:
        nonlocal rows
        for batch in batches:
            rows += len(batch)
            yield batch

    if name.endswith(PARQUET):
        replace_file(path, _parquet_pieces(counted()), overwrite)
    else:
        pieces = text_pieces(counted(), "\t" if name.endswith(".tsv") else ",")
        replace_file(path, (piece.encode() for piece in pieces), overwrite)
    return rows


def text_pieces(batches: Iterable[pd.DataFrame], separator: str = ",") -> Iterator[str]:
    """The lines of a text file, for each batch; the first with a header."""
    for i, batch in enumerate(batches):
        found = escape_formulas(batch)
        yield found.to_csv(
            index=False,
            sep=separator,
            float_format=_shortest,
            header=i == 0,
            lineterminator="\n",
            quoting=csv.QUOTE_NONNUMERIC if _has_separators(found) else csv.QUOTE_MINIMAL,
        )


def _has_separators(table: pd.DataFrame) -> bool:
    """Whether text has a semicolon or a tab, at which some spreadsheets split cells of CSV too."""
    columns = (table.iloc[:, place] for place in range(table.shape[1]))
    texts = (column for column in columns if not pd.api.types.is_numeric_dtype(column.dtype))
    cells = chain(table.columns, *texts)
    return any(isinstance(cell, str) and (";" in cell or "\t" in cell) for cell in cells)


def _shortest(number: float) -> str:
    """The fewest digits from which a number can be read back; those of integers for whole ones."""
    return str(number).removesuffix(".0")


_FORMULA = tuple("=+-@＝＋－＠\t\n")  # spreadsheets read full-width signs too


def escape_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose text, in cells and names, is no formula for a spreadsheet.

    Text that begins with =, +, -, @ (or their full-width forms), a tab or a new line, also after a
    byte order mark, gets an apostrophe in front, as OWASP recommends against CSV injection;
    numbers, and text that is a number, do not change. Carriage returns, which would end an unquoted
    cell, become new lines.

    Args:
        table: the table.

    Example:
        >>> escape_formulas(pd.DataFrame({"a": ["=1+1", "-2", "b-c"], "x": -1.5}))
               a    x
        0  '=1+1 -1.5
        1     -2 -1.5
        2    b-c -1.5
    """
    columns = [table.iloc[:, place] for place in range(table.shape[1])]
    is_number = [pd.api.types.is_numeric_dtype(c.dtype) or c.dtype.kind in "mM" for c in columns]
    found = table
    if not all(is_number):
        # put together at once, as setting a column takes time proportional to their number
        escaped = [
            column if number else pd.Series(list(map(_escaped, column)), column.index, dtype=object)
            for column, number in zip(columns, is_number, strict=True)
        ]
        found = pd.concat(escaped, axis=1).set_axis(table.columns, axis=1)
    found = found.rename(columns=_escaped)
    if not pd.api.types.is_numeric_dtype(found.index.dtype):
        found = found.rename(index=_escaped)
    return found


def _escaped(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if "\r" in value:
        value = value.replace("\r\n", "\n").replace("\r", "\n")
    if not value.lstrip("\ufeff").startswith(_FORMULA):  # a byte order mark, which is not shown
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _parquet_pieces(batches: Iterable[pd.DataFrame]) -> Iterator[bytes]:
    """The bytes of a Parquet file, a row group for each batch."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        fail(
            "out",
            "a CSV file, as no Parquet writer is installed",
            "a Parquet file",
            "Install pyarrow: pip install 'subbayes[parquet]'",
        )
    sink, writer, schema = _Sink(), None, None
    for batch in batches:
        table = pa.Table.from_pandas(batch, schema, preserve_index=False)
        if writer is None:  # later batches may have text where the first has missing values alone
            fields = [
                field.with_type(pa.string()) if pa.types.is_null(field.type) else field
                for field in table.schema
            ]
            schema = pa.schema(fields, table.schema.metadata)
            table, writer = table.cast(schema), ParquetWriter(sink, schema)
        writer.write_table(table)
        yield sink.take()
    if writer is not None:
        writer.close()
    yield sink.take()


class _Sink(io.RawIOBase):
    """A file that hands over what has been written since the last time."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._place = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def write(self, piece: Any) -> int:
        self._pieces.append(bytes(piece))
        self._place += len(self._pieces[-1])
        return len(self._pieces[-1])

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
