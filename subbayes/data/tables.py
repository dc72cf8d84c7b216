"""Read tables from CSV and Parquet files."""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
from pandas.api.types import infer_dtype

from subbayes.data.columns import mask_markers
from subbayes.data.frames import check_names, quote
from subbayes.data.to_pandas import to_pandas
from subbayes.utils.checks import InputError, check_choice, closest, error_text, fail
from subbayes.utils.warning import filtered_warnings

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq")
"""The file names `read_table` understands."""

PARQUET = (".parquet", ".pq")
"""Those of Parquet files."""

_METADATA = (LookupError, TypeError, AttributeError, RecursionError, NotImplementedError)
_DAMAGE = (pd.errors.ParserError, UnicodeError, OSError, EOFError, ValueError, zlib.error)


def read_table(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    missing_values: str | Sequence[Any] = (),
    separator: str | None = None,
    decimal: str = ".",
    encoding: str = "utf-8",
    min_rows: int = 2,
    as_text: Iterable[str] = (),
) -> pd.DataFrame:
    r"""Read a table with a header row from CSV, TSV (also gzipped) or Parquet, by its suffix.

    Empty cells and the usual markers (NA, NaN, null, None, ...) are missing values.

    Args:
        path: the file, with a suffix of `SUFFIXES`.
        target: name of a required column.
        missing_values: additional markers of missing values, such as `"?"`.
        separator: separator of the cells of a text file; by default a comma, a tab in `.tsv`, and
            a semicolon beside a decimal comma.
        decimal: decimal mark of the numbers of a text file, "." or ",".
        encoding: encoding of a text file, such as "cp1252" or "utf-16".
        min_rows: smallest number of rows: 2 for training, 1 for prediction.
        as_text: columns of a text file whose cells are text even where all of them are numbers,
            as `text_columns` of the training table gives them. The cells of other columns are
            numbers if all are.

    Raises:
        InputError: no such file, an unknown suffix, an empty or unreadable file, too few rows,
            duplicate column names, no column `target`.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "people.csv"
        >>> _ = file.write_text("age,job\n41,smith\n?,baker\n")
        >>> read_table(file, missing_values="?")
            age    job
        0  41.0  smith
        1   NaN  baker
    """
    path = Path(path)
    suffix = check_table_file(path)
    marks = [missing_values] if isinstance(missing_values, str) else list(missing_values)
    with translate_damage(path, suffix):
        if suffix in PARQUET:
            table = reset_parquet(pd.read_parquet(path), marks)
        else:
            text = TextFormat(separator, decimal, encoding)
            options = text_options(path, suffix, text, marks, as_text)
            with refuse_longer_rows(path):
                table = pd.read_csv(path, low_memory=False, **options)
    check_row_count(len(table), path, min_rows)
    if target is not None:
        _check_target(table, target)
    return table


@dataclass(frozen=True)
class TextFormat:
    """How a text file holds a table; see `read_table`.

    Raises:
        InputError: another decimal mark than "." or ",", or an unknown encoding.
    """

    separator: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        check_choice("decimal", self.decimal, (".", ","))
        try:
            known = codecs.lookup(self.encoding)
            "".encode(self.encoding)
        except (LookupError, ValueError, TypeError):
            known = None
        if known is None:
            expected = "an encoding of text, such as 'utf-8', 'cp1252' or 'utf-16'"
            fail("encoding", expected, repr(self.encoding))


def split_target(table: Any, target: str) -> tuple[pd.DataFrame, pd.Series]:
    """Split a data frame, of pandas or another library, into features and target in pandas.

    Raises:
        InputTypeError: not a data frame; or a name that is not text, such as a number or a tuple of
            a MultiIndex.
        InputError: no column of that name, or no other column.

    Example:
        >>> X, y = split_target(pd.DataFrame({"a": [1, 2], "b": [3, 4]}), "b")
        >>> list(X), y.tolist()
        (['a'], [3, 4])
    """
    table = to_pandas("table", table)
    check_names(table)
    _check_target(table, target)
    if table.shape[1] == 1:
        fail("target", "a table with other columns to predict from", f"'{target}' alone")
    return table.drop(columns=target), table[target]


def check_table_file(path: Path) -> str:
    """The suffix of a file with a table.

    Raises:
        InputError: no such file, an empty one, or an unknown suffix.
    """
    suffix = _suffix(path)
    if not path.is_file():
        got = "a folder" if path.is_dir() else "no such file"
        fail("path", "a table in a file", f"{got}: '{path}'", "Check the path")
    if path.stat().st_size == 0:
        fail("path", "a table with a header row", f"an empty file: '{path}'")
    return suffix


@contextmanager
def translate_damage(path: Path, suffix: str) -> Iterator[None]:
    """Turn errors of readers into an `InputError` that names the file and a remedy."""
    try:
        yield
    except ImportError:
        fail(
            "path",
            "a CSV file, as no Parquet reader is installed",
            f"'{path}'",
            "Install pyarrow: pip install 'subbayes[parquet]'",
        )
    except InputError:
        raise
    except (MemoryError, *_DAMAGE, *_METADATA) as error:
        if isinstance(error, MemoryError) or "out of memory" in str(error):  # as pandas says it
            fail(
                "path",
                "a table that fits into memory",
                f"too little of it for '{path}' of {path.stat().st_size / 2**20:,.0f} MiB",
                "Keep fewer columns or rows, or use a machine with more memory",
            )
        if isinstance(error, _METADATA) and suffix not in PARQUET:
            raise
        if isinstance(error, UnicodeError):
            _fail_encoding(path, error)
        compressed = isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error))
        reason = f"damaged compression ({error})" if compressed else error_text(error)
        fail(
            "path",
            f"a {suffix} file that can be read",
            f"'{path}': {reason}",
            "Check its format and separator",
        )


def _fail_encoding(path: Path, error: UnicodeError) -> NoReturn:
    """Say which bytes are not text."""
    used, got = getattr(error, "encoding", "its encoding"), error_text(error)
    if isinstance(error, UnicodeDecodeError):
        got = f"byte 0x{error.object[error.start]:02x}"
    with path.open("rb") as file:
        wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    other = "utf-16" if wide else "cp1252"
    remedy = f"Pass the encoding that it was written in, such as encoding='{other}'"
    fail("encoding", f"text in {used} in '{path}'", got, remedy)


def _suffix(path: Path) -> str:
    name = path.name.lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return suffix
    fail(
        "path",
        f"a name that ends in {', '.join(SUFFIXES)}",
        f"'{path.name}'",
        "Convert the table, or rename the file if its format is one of these",
    )


def text_columns(table: pd.DataFrame) -> list[str]:
    """The columns of text alone, for `as_text` of `read_table`.

    Example:
        >>> text_columns(pd.DataFrame({"code": ["01", "A"], "x": [1, 2]}))
        ['code']
    """
    found = (name for name in table if infer_dtype(table[name].astype(object)) == "string")
    return [name for name in found if isinstance(name, str)]


def text_options(
    path: Path, suffix: str, text: TextFormat, marks: list[Any], as_text: Iterable[str] = ()
) -> dict[str, Any]:
    """Arguments of `pandas.read_csv` for a text file, whose header is checked."""
    plain = ";" if text.decimal == "," else ","
    separator = text.separator or ("\t" if "tsv" in suffix else plain)
    if separator == text.decimal:
        fail("decimal", "another mark than between cells", repr(text.decimal),
             "Pass the separator of the file, such as separator=';'")  # fmt: skip
    utf8 = text.encoding.lower().replace("_", "-") in ("utf-8", "utf8")
    options: dict[str, Any] = {
        "sep": separator,
        "decimal": text.decimal,
        "encoding": "utf-8-sig" if utf8 else text.encoding,
        "skipinitialspace": True,
        "index_col": False,
    }
    _check_header(path, options)
    # None and not an empty dict, which pandas looks into for each column
    return options | {"na_values": marks, "dtype": dict.fromkeys(as_text, str) or None}


@contextmanager
def refuse_longer_rows(path: Path) -> Iterator[None]:
    """Raise where `pandas.read_csv` would drop cells of rows that are longer than the header."""
    try:
        with filtered_warnings("error", pd.errors.ParserWarning):
            yield
    except pd.errors.ParserWarning as error:
        fail(
            "path",
            f"as many cells in every row as in the header of '{path}'",
            "rows with more",
            "Check the separator, and quote cells that contain it",
            cause=error,
        )


def _check_header(path: Path, options: dict[str, Any]) -> None:
    """Raise for duplicate names in the first row and a separator that does not occur."""
    first = pd.read_csv(path, header=None, nrows=1, dtype=object, keep_default_na=False, **options)
    names = [str(name) for name in first.iloc[0]]
    twice = sorted(name for name, count in Counter(names).items() if name and count > 1)
    if twice:
        fail(
            "path",
            "one column of each name",
            f"several named {quote(twice)} in '{path}'",
            "Rename them",
        )
    others = [mark for mark in (";", "\t", ",", "|") if mark in names[0]]
    if len(names) == 1 and others:
        fail(
            "separator",
            f"the character between the cells of '{path}'",
            f"{options['sep']!r}, which its header does not contain",
            f"Try separator={others[0]!r}",
        )


def reset_parquet(table: pd.DataFrame, marks: list[Any]) -> pd.DataFrame:
    """A table from a Parquet file with named indices as columns, and missing values masked."""
    named = any(name is not None for name in table.index.names)
    table = table.reset_index(drop=not named)
    return table.apply(lambda column: mask_markers(column, marks)) if marks else table


def check_row_count(n: int, path: Path, min_rows: int) -> None:
    """Raise for fewer than `min_rows` rows."""
    if n < min_rows:
        got = {0: "no rows below the header", 1: "one row"}.get(n, f"{n} rows")
        fail("path", f"at least {min_rows} row{'s' * (min_rows > 1)} in '{path}'", got)


def _check_target(table: pd.DataFrame, target: str) -> None:
    if target not in table.columns:
        fail(
            "target",
            f"one of the columns {quote(table.columns, 20)}",
            f"'{target}'",
            closest(target, list(table.columns)) or "Name the column to predict",
        )
