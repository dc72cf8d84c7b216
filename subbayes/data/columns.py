"""Detect and convert the contents of table columns: numbers or categories."""

from __future__ import annotations

import math
import numbers as number_types
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float64, Shaped

from subbayes.data.frames import quote
from subbayes.utils.checks import fail
from subbayes.utils.warning import warn_user

MANY_ROWS = 20
"""Text columns with at least this many rows and no repeated value are treated as identifiers."""

Kind: TypeAlias = Literal["numeric", "categorical"]

_NUMERIC = {"integer", "floating", "mixed-integer-float", "decimal", "empty"}
_MIXED = {"string", "mixed", "mixed-integer"}
_DATES = {"date", "datetime", "datetime64", "time", "timedelta", "timedelta64", "period"}
_MOSTLY = 0.5
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+),\d+")
_LOOKED_AT = 1000  # rows
_DIGITS = 300  # of numbers in float64
_FRACTION = re.compile("[^-+0-9]")  # of numbers that are not written as whole ones


def mask_markers(column: pd.Series, markers: Sequence[Any]) -> pd.Series:
    """Replace the values in `markers` by missing ones; text is compared without outer spaces.

    As in text files, the marker "-9" stands for the number as well, and -9 for its text.

    Example:
        >>> mask_markers(pd.Series(["a", " ?"]), ["?"]).isna().tolist()
        [False, True]
        >>> mask_markers(pd.Series([1, -9]), ["-9"]).isna().tolist()
        [False, True]
    """
    if not len(markers) or pd.api.types.is_bool_dtype(column.dtype):
        return column
    parsed = [_number_of_text(mark) if isinstance(mark, str) else mark for mark in markers]
    numbers = [v for v in parsed if isinstance(v, number_types.Real) and not _is_bool(v)]
    if pd.api.types.is_numeric_dtype(column.dtype):
        marked = column.isin(numbers).to_numpy(dtype=bool)
    else:
        labels = [_label(value) for value in numbers]
        decimals = [f"{label}.0" for label in labels if label.lstrip("-").isdigit()]
        codes, values = _factorized(column)
        marks = {_as_text(mark) for mark in [*markers, *numbers, *labels, *decimals]}
        marked = [
            not marks.isdisjoint({value, value.strip() if isinstance(value, str) else value})
            for value in map(_as_text, values)
        ]
        marked = np.array([*marked, False])[codes]
    return column.mask(marked) if marked.any() else column


def _as_text(value: Any) -> Any:
    """A boolean as text, since Python takes it as equal to 1 or 0; other values unchanged."""
    return str(bool(value)) if _is_bool(value) else value


def _is_bool(value: Any) -> bool:
    """Whether a value is a boolean, which Python takes as equal to 1 or 0."""
    return isinstance(value, (bool, np.bool_))


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
    if inferred == "unknown-array" and column.isna().all():  # of the type null of pyarrow
        return "numeric"
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
            f"{infinite} infinite value{'s' * (infinite > 1)}",
            "Correct or drop those rows",
            row=int(np.isinf(values).argmax()),
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
    rows = f"{int(bad.sum())} of {len(column)} rows"
    fail(argument, f"numbers in {place}", f"{quote(values, 3)} in {rows}", ways, row=first)


def as_numpy(values: pd.Series) -> pd.Series:
    """Columns of pyarrow, sparse ones, and numbers of other formats as NumPy has them.

    Numbers have at most 64 bits in the byte order of the machine, text is in objects, and
    dictionaries of pyarrow are categories. Other columns are returned as they are.

    Example:
        >>> as_numpy(pd.Series([1.0, 2.0], dtype=">f4")).dtype
        dtype('float32')
    """
    dtype = values.dtype
    if isinstance(dtype, pd.SparseDtype):
        return as_numpy(values.sparse.to_dense())
    if isinstance(dtype, np.dtype) and dtype.kind in "iuf":
        native = np.dtype(np.float64) if dtype.itemsize > 8 else dtype.newbyteorder("=")
        return values if native == dtype and dtype.isnative else values.astype(native)
    if not isinstance(dtype, pd.ArrowDtype):
        return values
    if dtype.kind == "b":
        return values.astype("boolean" if values.hasnans else bool)
    if dtype.kind in "iuf" or dtype.type is Decimal:
        plain = np.float64 if values.hasnans or dtype.type is Decimal else dtype.numpy_dtype
        numbers = values.to_numpy(dtype=plain, na_value=np.nan)
        return pd.Series(numbers, index=values.index, name=values.name)
    if dtype.type is str:
        return values.astype(object).where(values.notna(), None)
    is_dictionary = str(dtype).startswith("dictionary")
    return values.astype(object).astype("category") if is_dictionary else values


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
    if pd.api.types.infer_dtype(column, skipna=True).startswith("mixed"):
        column = column.map(_as_text)
    try:
        codes, values = pd.factorize(column)
    except TypeError:  # values without a hash, such as lists
        codes, values = pd.factorize(column.where(column.isna(), column.map(str)))
    return codes, list(values)


def _label(value: Any) -> str:
    if _is_bool(value):
        return str(bool(value))
    if isinstance(value, number_types.Real) and float(value).is_integer():
        return str(int(float(value))) if isinstance(value, (float, np.floating)) else str(value)
    return str(value)


def kind_of_labels(labels: Sequence[str]) -> Literal["numbers", "booleans", "text"]:
    """Whether labels of `as_labels` are those of a column of numbers, of booleans or of text.

    Example:
        >>> kind_of_labels(["1", "2.5"]), kind_of_labels(["True"]), kind_of_labels(["01", "2"])
        ('numbers', 'booleans', 'text')
    """
    booleans = [label in ("False", "True") for label in labels]
    if all(booleans):
        return "booleans"
    plain = [_label_of_text(label) == label for label in labels]
    return "numbers" if all(plain) and not any(booleans) else "text"


def _label_of_text(text: str) -> str | None:
    """The label of a cell of text as a number or a boolean, if it is one."""
    plain = text.strip()
    if plain.lower() in ("false", "true"):
        return plain.capitalize()
    value = _number_of_text(plain)
    return None if value is None else _label(value)


def _number_of_text(text: str) -> int | float | None:
    """The number that a cell of text is, if it is one and finite."""
    if "_" in text or len(text) > _DIGITS:
        return None
    try:
        value = float(text) if _FRACTION.search(text) else int(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def labels_as_fitted(
    labels: Shaped[np.ndarray, "n"], levels: Sequence[str], column: pd.Series, place: str
) -> Shaped[np.ndarray, "n"]:
    """Labels of new rows, whatever the type that other cells gave their column.

    Text "1.0" is the level "1" of a column that was fitted with numbers. A warning says if numbers
    come where text was fitted that looks like numbers, whose zeros may be lost.

    Args:
        labels: of `as_labels`.
        levels: labels in fitting.
        column: the new column.
        place: its name in the warning.

    Raises:
        InputError: numbers where booleans were fitted, or the reverse: none is a new category.

    Example:
        >>> new = pd.Series(["1.0", "x"])
        >>> labels_as_fitted(as_labels(new), ["1", "2"], new, "column 'a'")
        array(['1', 'x'], dtype=object)
    """
    new = {label for label in labels if isinstance(label, str)}.difference(levels)
    if not new and not pd.api.types.is_numeric_dtype(column.dtype):
        return labels
    kind = kind_of_labels(levels)
    if kind == "text":
        like = next((one for one in levels if _label_of_text(one) not in (None, one)), None)
        if like is not None and pd.api.types.is_numeric_dtype(column.dtype):
            warn_user(
                f"X: {place} was fitted with text such as {like!r} and has numbers or booleans "
                "now, which may have lost zeros: read the file with this column as text (dtype=str)"
            )
        return labels
    read = {label: text for label in new if (text := _label_of_text(label)) is not None}
    other = "numbers" if kind == "booleans" else "booleans"
    odd = [text for text in read.values() if kind_of_labels([text]) == other]
    if odd:
        got = f"{other} such as {min(odd)} in {place}"
        fail("X", f"{kind}, as in fitting", got, f"Convert the column to {kind}")
    read = {label: level for label, level in read.items() if level in levels}
    return np.array([read.get(label, label) for label in labels], dtype=object) if read else labels


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
