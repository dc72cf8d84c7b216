"""Checks of formulas, and of the data frames that they read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

import numpy as np
import pandas as pd

from subbayes.data.columns import as_numpy
from subbayes.data.levels import listed
from subbayes.regression.formula.grammar import SHAPE
from subbayes.utils.checks import InputError, closest, fail

Missing = Literal["drop", "error"]

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}($|[ T]\d{2}:\d{2})")


@contextmanager
def formula_errors(argument: str, text: str) -> Iterator[None]:
    """Convert errors of an evaluation to `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        fail(argument, SHAPE, f"{text!r}: {' '.join(str(error).split())}")


def check_different(argument: str, what: str, names: Iterable[str]) -> None:
    """Raise `InputError` for effects or terms that have the same name.

    Args:
        argument: name of the argument, for errors.
        what: "effects" or "terms".
        names: their names.

    Example:
        >>> check_different("formula", "effects", ["x:z", "x:z"])
        Traceback (most recent call last):
        ...
        subbayes.InputError: formula: expected effects with different names, got 'x:z' twice. ...
    """
    if (most := Counter(names).most_common(1)) and most[0][1] > 1:
        remedy = "Leave a term out, or rename columns or levels that read alike"
        fail(argument, f"{what} with different names", f"{most[0][0]!r} twice", remedy)


# --- data frames --------------------------------------------------------------------------------


def check_columns(needed: Iterable[str], frame: pd.DataFrame) -> None:
    """Raise `InputError` for columns that the data frame lacks, with the closest name it has.

    Also for needed columns whose name another column has.
    """
    needed = list(needed)
    absent = [name for name in needed if name not in frame.columns]
    if absent:
        present = list(map(str, frame.columns))
        fail(
            "data",
            "columns " + listed(needed),
            "none called " + listed(absent),
            closest(absent[0], present) or "It has " + (listed(present) or "no columns"),
        )
    repeated = set(frame.columns[frame.columns.duplicated()])
    for name in needed:
        if name in repeated:
            count = int((frame.columns == name).sum())
            fail("data", "columns with different names", f"{count} called {name}", "Rename them")


def plain_columns(
    frame: pd.DataFrame, needed: Iterable[str], training: bool = False
) -> pd.DataFrame:
    """A data frame whose needed columns are numbers, booleans, text or categories.

    Numbers in columns of objects, of pyarrow, in sparse columns, of another byte order or with more
    than 64 bits become columns of numbers of NumPy, dictionaries of pyarrow categories, and text of
    any dtype of pandas objects. Other columns are not changed.

    Args:
        frame: the data frame, which is not changed.
        needed: names of its columns.
        training: leave out categories that no row has.

    Raises:
        InputError: unknown columns, dates, times, intervals, complex numbers, or cells with
            several values, by column.

    Example:
        >>> frame = pd.DataFrame({"age": [20, 30]}, dtype=object)
        >>> plain_columns(frame, ["age"]).dtypes["age"].name
        'int64'
    """
    needed = list(dict.fromkeys(needed))
    check_columns(needed, frame)
    changed = {}
    for name in needed:
        column = frame[name]
        values = as_numpy(column)
        if values is not column:
            changed[name] = values
        dtype = values.dtype
        if isinstance(dtype, pd.StringDtype) and dtype.na_value is pd.NA:
            changed[name] = values.astype(object).where(values.notna(), None)
        elif _holds_objects(dtype):
            values = values.infer_objects()
            present = values.dropna()
            if _holds_objects(values.dtype) and len(present) and present.map(_is_real).all():
                values = values.astype(np.float64)  # decimals, or numbers of several types
            dtype = values.dtype
            if not _holds_objects(dtype) and not isinstance(dtype, pd.StringDtype):
                changed[name] = values
        elif training and isinstance(dtype, pd.CategoricalDtype):
            values = values.cat.remove_unused_categories()
            if np.isinf([v for v in values.cat.categories if isinstance(v, float)]).any():
                fail(name, "categories that are text or finite numbers", "an infinite one")
            changed[name] = values
        kind = getattr(dtype, "kind", "O")
        if kind in "mMc" or isinstance(dtype, (pd.PeriodDtype, pd.IntervalDtype)):
            remedy = f"Convert it: data[{name!r}].astype(str) has levels"
            if kind == "M":
                remedy += f", (data[{name!r}] - data[{name!r}].min()).dt.days has numbers"
            elif kind == "m":
                remedy += f", data[{name!r}].dt.total_seconds() has numbers"
            elif kind == "c":
                remedy = "Use its real and imaginary parts as two columns"
            fail(name, "numbers, booleans, text or categories", f"dtype {dtype}", remedy)
    return frame.assign(**changed) if changed else frame


def with_used_categories(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """A data frame whose columns of these names have only the categories of its rows.

    Example:
        >>> frame = pd.DataFrame({"g": pd.Categorical(["a", "b"])})
        >>> with_used_categories(frame.head(1), ["g"])["g"].cat.categories.tolist()
        ['a']
    """
    used = {
        name: frame[name].cat.remove_unused_categories()
        for name in dict.fromkeys(names)
        if isinstance(frame[name].dtype, pd.CategoricalDtype)
    }
    return frame.assign(**used) if used else frame


def different_values(values: pd.Series) -> Any:
    """The different values of a column of objects.

    Raises:
        InputError: cells with several values.

    Example:
        >>> different_values(pd.Series(["a", "b", "a"])).tolist()
        ['a', 'b']
    """
    try:
        return values.unique()
    except TypeError:
        several = (v for v in values if isinstance(v, tuple) or not isinstance(v, Hashable))
        odd = next(several, values.iloc[0])
        remedy = f"Write each value of data[{values.name!r}] as a text or a number"
        fail(
            str(values.name),
            "numbers, booleans, text or categories",
            f"a {type(odd).__name__}",
            remedy,
        )


def _holds_objects(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind == "O"


def _is_real(value: Any) -> bool:
    return isinstance(value, (Real, Decimal)) and not isinstance(value, (bool, np.bool_))


def check_complete(needed: Iterable[str], frame: pd.DataFrame) -> None:
    """Raise `InputError` for the first column with missing values, with their number."""
    for name in needed:
        missing = int(frame[name].isna().sum())
        if missing:
            got = f"{missing} of {len(frame)} rows without one"
            fail(name, "no missing values", got, "Drop or impute these rows")


def check_no_dates(name: str, values: pd.Series) -> None:
    """Raise `InputError` for dates as text, each of which would be a level of a factor.

    Example:
        >>> check_no_dates("seen", pd.Series(["2024-01-05", "2024-02-05"]))
        Traceback (most recent call last):
        ...
        subbayes.InputError: seen: expected numbers, booleans, text or categories, got dates as ...
    """
    if pd.api.types.is_numeric_dtype(values) or isinstance(values.dtype, pd.CategoricalDtype):
        return
    found = different_values(values.dropna())
    if len(found) and all(isinstance(v, str) and _DATE.match(v) for v in found):
        first = min(found)
        days = f"(pandas.to_datetime(data[{name!r}]) - pandas.Timestamp({first!r})).dt.days"
        remedy = f"Convert it to numbers such as {days}, or write C({name}) for a factor"
        got = f"dates as text, such as {first!r}"
        fail(name, "numbers, booleans, text or categories", got, remedy)


def has_numbers(column: pd.Series) -> bool:
    """Whether the values of a column are numbers, which booleans of any kind are not.

    Example:
        >>> has_numbers(pd.Series([1, 2])), has_numbers(pd.Series([True, None], dtype="boolean"))
        (True, False)
    """
    dtype = column.dtype
    return pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype)


def complete_rows(
    frame: pd.DataFrame, columns: Iterable[str], missing: Missing
) -> tuple[np.ndarray, dict[str, int]]:
    """Find the complete rows, and count the missing values of each column.

    Raises:
        InputError: unknown columns; no complete row; or missing values with missing="error".
    """
    columns = list(dict.fromkeys(columns))
    check_columns(columns, frame)
    counts = {name: int(frame[name].isna().sum()) for name in columns}
    counts = {name: n for name, n in counts.items() if n}
    if counts and missing == "error":
        shown = ", ".join(f"{n} in {name}" for name, n in counts.items())
        fail("data", "no missing values", shown, "Pass missing='drop' to drop these rows")
    complete = ~frame[columns].isna().any(axis=1).to_numpy()
    if not complete.any():
        fail("data", "rows without missing values", "none")
    return complete, counts
