"""Detect and convert the contents of table columns: numbers or categories."""

from __future__ import annotations

import numbers as number_types
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float64, Shaped

from subbayes.utils.checks import fail, fail_type
from subbayes.utils.text_table import MOST_LETTERS, MOST_TOGETHER, shortened
from subbayes.utils.warning import warn_user

__all__ = [
    "MANY_ROWS",
    "Kind",
    "as_frame",
    "as_labels",
    "as_numbers",
    "check_width",
    "check_lengths",
    "check_names",
    "check_text",
    "check_total",
    "constant_columns",
    "kind_of",
    "mask_markers",
    "quote",
    "warn_about_decimal_commas",
    "to_cpu",
    "warn_about_row_numbers",
]

MANY_ROWS = 20
"""Text columns with at least this many rows and no repeated value are treated as identifiers."""

_MOST_COLUMNS = 100_000  # of a table that is encoded in seconds
_MOST_CATEGORICAL = 10_000  # of them, each of which takes as long as several numeric ones

Kind: TypeAlias = Literal["numeric", "categorical"]

_NUMERIC = {"integer", "floating", "mixed-integer-float", "decimal", "empty"}
_MIXED = {"string", "mixed", "mixed-integer"}
_DATES = {"date", "datetime", "datetime64", "time", "timedelta", "timedelta64", "period"}
_MOSTLY = 0.5
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+),\d+")
_LOOKED_AT = 1000  # rows


def quote(values: Iterable[Any], most: int = 5) -> str:
    """Quote the first `most` values, of each of which an error shows the start.

    Example:
        >>> quote(["a", "b", "c"], most=2)
        "'a', 'b' and 1 more"
    """
    rest = iter(values)
    names = [f"'{shortened(str(value))}'" for value in islice(rest, most)]
    left = sum(1 for _ in rest)
    return ", ".join(names) + (f" and {left} more" if left else "")


def as_frame(X: Any, argument: str = "X") -> tuple[pd.DataFrame, bool]:
    """Convert a table to a DataFrame, and return whether its columns had names.

    Unnamed columns, of an array or numbered 0, 1, ..., are named x0, x1, ...

    Args:
        X: DataFrame (pandas, or with a `to_pandas` method), 2-D array, tensor or list of rows.
        argument: name of the argument in errors.

    Raises:
        InputTypeError: not a table.
        InputError: not two-dimensional, without rows or columns, or two columns of one name.

    Example:
        >>> frame, named = as_frame([[1, "a"], [2, "b"]])
        >>> list(frame.columns), named
        (['x0', 'x1'], False)
    """
    if isinstance(X, pd.Series):
        fail(
            argument,
            "a table with two axes",
            "a single column",
            "Pass X[['name']] for one column, X.to_frame().T for one row",
        )
    if not isinstance(X, pd.DataFrame):
        X = X.to_pandas() if hasattr(X, "to_pandas") else _from_array(X, argument)
    if 0 in X.shape:
        _fail_empty(X.shape, argument)
    named = list(X.columns) != list(range(X.shape[1]))
    names = [str(name) if named else f"x{name}" for name in X.columns]
    _check_once(names, argument)
    return X.set_axis(names, axis=1).reset_index(drop=True), named


def check_names(table: Any, argument: str = "X") -> None:
    """Check that a data frame has columns of different names; other tables are not checked.

    Raises:
        InputError: no columns, or two columns of one name.

    Example:
        >>> check_names(pd.DataFrame({"a": [1]}))
    """
    if isinstance(table, pd.DataFrame):
        if table.shape[1] == 0:
            _fail_empty(table.shape, argument)
        _check_once([str(name) for name in table.columns], argument)


def _fail_empty(shape: tuple[int, ...], argument: str) -> NoReturn:
    rows, columns = shape
    fail(argument, "a table with rows and columns", f"{rows} rows and {columns} columns")


def check_lengths(names: Iterable[str], argument: str = "X") -> None:
    """Check that names of columns can be shown in messages, tables and figures.

    Raises:
        InputError: a name of more than 1000 characters.

    Example:
        >>> check_lengths(["age"])
    """
    for name in names:
        if len(name) > MOST_LETTERS:
            expected = f"names of columns of at most {MOST_LETTERS} characters"
            got = f"{len(name)} in '{name[:20]}...'"
            fail(argument, expected, got, "Rename it, or check the header and the separator")


def check_text(argument: str, values: Iterable[Any]) -> None:
    """Check that labels, or levels of a column, can be shown in messages, tables and figures.

    Raises:
        InputError: text of more than 1000 characters.

    Example:
        >>> check_text("y", ["no", "yes", 3])
    """
    for value in values:
        if isinstance(value, str) and len(value) > MOST_LETTERS:
            expected = f"labels and levels of at most {MOST_LETTERS} characters"
            got = f"{len(value)} in '{value[:20]}...'"
            fail(argument, expected, got, "Shorten them, or replace them by numbers")


def check_total(argument: str, labels: Iterable[Any]) -> None:
    """Check that all labels of classes together fit into a row of output.

    Raises:
        InputError: more than a million characters.

    Example:
        >>> check_total("y", ["no", "yes"])
    """
    total = sum(len(label) for label in labels if isinstance(label, str))
    if total > MOST_TOGETHER:
        expected = f"labels of at most {MOST_TOGETHER:,} characters together"
        fail(argument, expected, f"{total:,}", "Shorten them, or replace them by numbers")


def check_width(argument: str, columns: int, categorical: int) -> None:
    """Check that a table has no more columns, and categorical ones, than are encoded in seconds."""
    for count, most, kind in (
        (columns, _MOST_COLUMNS, "columns"),
        (categorical, _MOST_CATEGORICAL, "categorical columns"),
    ):
        if count > most:
            fail(argument, f"at most {most:,} {kind}", f"{count:,}", "Choose or combine columns")


def _check_once(names: list[str], argument: str) -> None:
    check_lengths(names, argument)
    if len(set(names)) < len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        fail(argument, "one column of each name", f"several named {quote(twice)}", "Rename them")


def to_cpu(values: Any) -> Any:
    """Detach a tensor and move it to the CPU; return other values unchanged.

    Example:
        >>> to_cpu([1, 2])
        [1, 2]
    """
    return values.detach().cpu() if hasattr(values, "detach") else values


def _from_array(X: Any, argument: str) -> pd.DataFrame:
    if not (isinstance(X, (list, tuple)) or hasattr(X, "__array__")):
        remedy = "Call its toarray() first" if hasattr(X, "toarray") else ""
        fail_type(argument, "a DataFrame or a 2-D array", X, remedy)
    array = X if isinstance(X, (list, tuple)) else np.asarray(to_cpu(X))
    shape = np.shape(np.asarray(array, dtype=object))
    if len(shape) != 2:
        fail(
            argument,
            "a table with two axes",
            f"shape {shape}",
            "Reshape your data: one row is X[:1], or X[None]; one column is X[:, None]",
        )
    return pd.DataFrame(array if isinstance(array, np.ndarray) else [list(row) for row in array])


def mask_markers(column: pd.Series, markers: Sequence[Any]) -> pd.Series:
    """Replace the values in `markers` by missing ones; text is compared without outer spaces.

    Example:
        >>> mask_markers(pd.Series(["a", " ?"]), ["?"]).isna().tolist()
        [False, True]
    """
    if not len(markers) or pd.api.types.is_bool_dtype(column.dtype):
        return column
    marked = column.isin(list(markers)).to_numpy(dtype=bool)
    if not pd.api.types.is_numeric_dtype(column.dtype):
        codes, values = _factorized(column)
        marks = {mark for mark in markers if isinstance(mark, str)}
        text = [isinstance(value, str) and value.strip() in marks for value in values]
        marked = marked | np.array([*text, False])[codes]
    return column.mask(marked) if marked.any() else column


def kind_of(column: pd.Series, place: str, argument: str = "X") -> Kind:
    """Whether a column is numeric or categorical.

    Booleans and pandas categories are categorical. Text is categorical, unless every value is a
    number.

    Args:
        column: the values; missing ones are ignored.
        place: name of the column in errors, such as `"column 'age'"`.
        argument: name of the table in errors.

    Raises:
        InputError: dates; values that are neither numbers, text nor booleans; text of which at
            least half of the values are numbers.

    Example:
        >>> kind_of(pd.Series(["1", "2.5"]), "column 'a'"), kind_of(pd.Series(["u", "2"]), "'b'")
        Traceback (most recent call last):
            ...
        subbayes.InputError: X: expected numbers in 'b', got 'u' in 1 of 2 rows (first in \
row 0). Correct them, declare them missing with missing_values=['u'], or \
name the column in categorical=[...].
    """
    content = _content(column, place, argument)
    if content != "text":
        return content
    values, bad = column.notna().sum(), _unreadable(column)
    if len(bad) == 0:
        return "numeric"
    if bad.sum() <= _MOSTLY * values:
        _not_numbers(bad, column, place, argument)
    warn_about_decimal_commas(column, place, argument)
    return "categorical"


def warn_about_decimal_commas(column: pd.Series, place: str, argument: str = "X") -> None:
    """Warn of a column of text, most of which are numbers with a decimal comma.

    Args:
        column: the values.
        place: name of the column in the warning.
        argument: name of the table in the warning.
    """
    text = [value for value in column.iloc[:_LOOKED_AT] if isinstance(value, str)]
    commas = [value for value in text if _DECIMAL_COMMA.fullmatch(value.strip())]
    plain = sum(value.strip().lstrip("+-").isdigit() for value in text)
    if commas and len(commas) + plain > _MOSTLY * len(text):
        warn_user(
            f"{argument}: {place} has numbers with a decimal comma, such as {commas[0].strip()!r}, "
            "which are read as categories: read the file with decimal=','"
        )


def _unreadable(column: pd.Series) -> pd.Series:
    """Count the values that are not numbers."""
    counts = column.astype(object).value_counts(sort=False)
    text = pd.Series([str(value) for value in counts.index], dtype=object)
    return counts[pd.to_numeric(text, errors="coerce").isna().to_numpy()]


def _content(column: pd.Series, place: str, argument: str) -> Literal[Kind, "text"]:
    """The content of a column; raise for dates and other objects."""
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype) or pd.api.types.is_bool_dtype(dtype):
        return "categorical"
    inferred = pd.api.types.infer_dtype(column, skipna=True)
    if inferred in _DATES or dtype.kind in "mM":
        fail(
            argument,
            f"numbers or categories in {place}",
            f"dates or times ({dtype})",
            "Turn them into numbers, such as days since a fixed date, or drop the column",
        )
    if inferred == "boolean":
        return "categorical"
    if inferred in _NUMERIC or dtype.kind in "iuf":
        return "numeric"
    scalars = (str, bool, np.bool_, number_types.Real)
    odd = [] if inferred == "string" else [v for v in column.dropna() if not isinstance(v, scalars)]
    if inferred not in _MIXED or odd:
        got = f"a {type(odd[0]).__name__}" if odd else f"values of type {inferred}"
        expected = f"numbers, text, booleans or categories in {place}"
        fail(argument, expected, got, "Convert or drop the column")
    return "text"


def as_numbers(column: pd.Series, place: str, argument: str = "X") -> Float64[np.ndarray, "n"]:
    """The column in float64, with NaN for missing values; text is parsed.

    Raises:
        InputError: text that is not a number, dates, infinite values.

    Example:
        >>> as_numbers(pd.Series(["1", None]), "column 'a'")
        array([ 1., nan])
    """
    _content(column, place, argument)
    if pd.api.types.is_numeric_dtype(column.dtype):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        bad = _unreadable(column)
        if len(bad):
            _not_numbers(bad, column, place, argument)
        text = column.astype(object)
        read = pd.to_numeric(text.where(text.isna(), text.map(str)))
        try:
            values = read.to_numpy(dtype=np.float64)
        except OverflowError:
            remedy = "Divide the column by a constant first"
            fail(argument, f"numbers in {place} within the range of float64", "larger ones", remedy)
    infinite = int(np.isinf(values).sum())
    if infinite:
        fail(
            argument,
            f"finite numbers in {place}",
            f"{infinite} infinite value{'s' * (infinite > 1)} (first in row "
            f"{int(np.isinf(values).argmax())})",
            "Correct or drop those rows",
        )
    return values


def _not_numbers(bad: pd.Series, column: pd.Series, place: str, argument: str) -> None:
    """Raise an error for text in a numeric column."""
    values = [str(value) for value in bad.index]
    ways = (
        f"Correct them, declare them missing with missing_values={values[:3]!r}, or name the "
        "column in categorical=[...]"
        if argument == "X"
        else "Correct them, or use task='classification' for labels"
    )
    first = int(column.isin(list(bad.index)).to_numpy().argmax())
    rows = f"{int(bad.sum())} of {len(column)} rows (first in row {first})"
    fail(argument, f"numbers in {place}", f"{quote(values, 3)} in {rows}", ways)


def as_labels(column: pd.Series) -> Shaped[np.ndarray, "n"]:
    """The column as text (dtype object), with NaN for missing values.

    The text of an integer does not depend on its dtype.

    Example:
        >>> as_labels(pd.Series([1.0, None, 2.0])).tolist()
        ['1', nan, '2']
    """
    codes, values = _factorized(column)
    return np.array([*map(_label, values), np.nan], dtype=object)[codes]


def _factorized(column: pd.Series) -> tuple[np.ndarray, list[Any]]:
    """The position of each value, -1 if missing, among the different ones, which are few."""
    column = column.astype(object)
    try:
        codes, values = pd.factorize(column)
    except TypeError:  # values without a hash, such as lists
        codes, values = pd.factorize(column.where(column.isna(), column.map(str)))
    return codes, list(values)


def _label(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, number_types.Real) and float(value).is_integer():
        return str(int(float(value))) if isinstance(value, (float, np.floating)) else str(value)
    return str(value)


def constant_columns(table: pd.DataFrame) -> list[str]:
    """Return the names of the columns with a single value, and warn about them.

    Raises:
        InputError: no column has several values.
    """
    dropped = [str(name) for name in table if table[name].nunique() < 2]
    if len(dropped) == table.shape[1]:
        got = f"a single value in each of {quote(dropped)}"
        fail("X", "a column that varies", got, "Check the table")
    if dropped:
        warn_user(f"X: dropped columns with a single value: {quote(dropped, 20)}.", UserWarning)
    return dropped


def warn_about_row_numbers(table: pd.DataFrame) -> None:
    """Warn about columns that increase by one in each row, which are probably a saved index."""
    if len(table) < MANY_ROWS:
        return
    is_number = [not pd.api.types.is_object_dtype(dtype) for dtype in table.dtypes]
    numbers = table.loc[:, is_number]
    values = numbers.to_numpy(dtype=np.float64)
    maybe = np.flatnonzero(values[1] - values[0] == 1)
    counters = [str(numbers.columns[i]) for i in maybe if (np.diff(values[:, i]) == 1).all()]
    if counters:
        warn_user(
            f"X: {quote(counters, 20)} only number the rows. Drop them unless the order "
            "of the rows is informative.",
            UserWarning,
        )
