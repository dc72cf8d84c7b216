"""Read and write tables in batches of rows, so that memory does not grow with their number."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import infer_dtype

from subbayes.artifacts.files import as_path, replace_file
from subbayes.data.tables import (
    PARQUET,
    TextFormat,
    check_row_count,
    check_table_file,
    refuse_longer_rows,
    reset_parquet,
    text_options,
    translate_damage,
)
from subbayes.utils.checks import check_count, fail

__all__ = ["TableBatches", "escape_formulas", "text_pieces", "write_batches"]


class TableBatches:
    r"""The rows of a table in a file, in batches; the arguments are those of `read_table`.

    A text file is read once to count its rows and to find the type of each column, so that a batch
    has the types that the whole table has. Parquet files have both in their metadata.

    Args:
        path: the file, CSV, TSV (also gzipped) or Parquet.
        missing_values: additional markers of missing values, such as `"?"`.
        separator: separator of the cells of a text file.
        decimal: decimal mark of the numbers of a text file.
        encoding: encoding of a text file.
        min_rows: smallest number of rows.
        batch_size: number of rows of a batch.
        as_text: columns of a text file whose cells are text even where all of them are numbers.

    Attributes:
        columns: names of the columns.
        n: number of rows.

    Raises:
        InputError: as `read_table`.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "people.csv"
        >>> _ = file.write_text("age,job\n41,smith\n,baker\n30,3\n")
        >>> batches = TableBatches(file, batch_size=2)
        >>> batches.n, batches.columns, [batch["age"].tolist() for batch in batches]
        (3, ['age', 'job'], [[41.0, nan], [30.0]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        missing_values: Iterable[Any] = (),
        separator: str | None = None,
        decimal: str = ".",
        encoding: str = "utf-8",
        min_rows: int = 1,
        batch_size: int = 2**15,
        as_text: Iterable[str] = (),
    ) -> None:
        self.path, self.batch_size = Path(path), check_count("batch_size", batch_size)
        self._suffix, self._marks = check_table_file(self.path), list(missing_values)
        self._only: pd.DataFrame | None = None  # a table of one batch is read once
        self._version = _version(self.path)
        with translate_damage(self.path, self._suffix):
            if self._suffix in PARQUET:
                from pyarrow.parquet import ParquetFile

                with ParquetFile(self.path) as file:
                    self.n = file.metadata.num_rows
                    schema = file.schema_arrow
                self._range = _named_range(schema.pandas_metadata or {})
                names = list(reset_parquet(schema.empty_table().to_pandas(), []).columns)
                self.columns = names if self._range is None else [self._range[0], *names]
            else:
                text = TextFormat(separator, decimal, encoding)
                self._options = text_options(self.path, self._suffix, text, self._marks, as_text)
                self._find_types()
        check_row_count(self.n, self.path, min_rows)
        self._check_version()

    def __repr__(self) -> str:
        return f"TableBatches('{self.path}', n={self.n}, batch_size={self.batch_size})"

    def __iter__(self) -> Iterator[pd.DataFrame]:
        self._check_version()
        with translate_damage(self.path, self._suffix):
            yield from self._parquet() if self._suffix in PARQUET else self._text()
        self._check_version()

    def _check_version(self) -> None:
        """Raise if the file is another one than when its rows were counted."""
        if self._only is None and _version(self.path) != self._version:
            fail(
                "path",
                "a file that does not change while it is read",
                f"another content of '{self.path}'",
                "Read it again when it is complete",
            )

    def _parquet(self) -> Iterator[pd.DataFrame]:
        from pyarrow import Table
        from pyarrow.parquet import ParquetFile

        done = 0
        with ParquetFile(self.path) as file:
            for batch in file.iter_batches(self.batch_size):
                frame = Table.from_batches([batch]).to_pandas()
                if self._range is not None:
                    name, values = self._range
                    frame.index = pd.Index(values[done : done + len(frame)], name=name)
                frame = reset_parquet(frame, self._marks)
                done += len(frame)
                yield frame

    def _text(self) -> Iterator[pd.DataFrame]:
        if self._only is not None:
            yield self._only
            return
        with self._reader() as reader:
            for batch in reader:
                yield batch.reset_index(drop=True)

    def _reader(self) -> Any:
        return pd.read_csv(self.path, low_memory=False, chunksize=self.batch_size, **self._options)

    def _find_types(self) -> None:
        kinds: dict[str, set[str]] = {}
        self.n = 0
        with refuse_longer_rows(self.path), self._reader() as reader:
            for batch in reader:
                self._only = batch if self.n == 0 else None
                self.n += len(batch)
                for name, column in batch.items():
                    kinds.setdefault(str(name), set()).add(_kind(column))
        self.columns = list(kinds)
        types = {name: _common_type(found) for name, found in kinds.items()}
        known = {name: kind for name, kind in types.items() if kind is not None}
        self._options["dtype"] = (self._options["dtype"] or {}) | known or None


def _version(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _named_range(metadata: dict[str, Any]) -> tuple[str, range] | None:
    """The named index of whole numbers that a Parquet file describes without storing it."""
    for index in metadata.get("index_columns", ()):
        if isinstance(index, dict) and index.get("name") is not None:
            return index["name"], range(index["start"], index["stop"], index["step"])
    return None


def _kind(column: pd.Series) -> str:
    if column.isna().all():
        return "missing"
    return str(infer_dtype(column, skipna=True))


def _common_type(kinds: set[str]) -> type | None:
    """The type of a column of batches of these kinds; None leaves it to the reader."""
    if len(kinds) == 1 or kinds <= {"boolean", "missing"}:
        return str if kinds == {"string"} else None
    return float if kinds <= {"integer", "floating", "missing"} else str


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
