"""Tables as data frames whose columns have names, and limits of names, labels and columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import pandas as pd

from subbayes.data.to_pandas import to_pandas
from subbayes.utils.checks import error_text, fail, fail_type
from subbayes.utils.text_table import shortened

LEAST_SCALE = 1e-150
"""Excluded lower limit of standard deviations of columns; the upper one is its inverse."""

Labels: TypeAlias = Literal["none", "numbers", "names"]


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


def read_frame(argument: str, data: Any) -> pd.DataFrame:
    """Rows with names of columns: a data frame of any library, or a dict of columns.

    Args:
        argument: name of the argument in errors.
        data: the rows, which are not changed.

    Raises:
        InputTypeError: something else.
        InputError: see `to_pandas`.

    Example:
        >>> read_frame("data", {"x": [1, 2]})["x"].tolist()
        [1, 2]
    """
    frame = to_pandas(argument, data)
    if isinstance(frame, pd.DataFrame):
        return frame
    expected = "a data frame, or a dict of columns of one length"
    if isinstance(frame, str) or not isinstance(frame, Iterable):
        fail_type(argument, expected, data)
    try:
        return pd.DataFrame(frame)
    except (TypeError, ValueError) as error:
        fail(argument, expected, error_text(error))


def row_index(table: Any, n: int) -> pd.Index:
    """The index of a data frame of pandas; the n rows of other tables are numbered.

    Example:
        >>> row_index(pd.DataFrame({"x": [1]}, index=["a"]), 1).tolist(), row_index([[1.0]], 1)
        (['a'], RangeIndex(start=0, stop=1, step=1))
    """
    return table.index if isinstance(table, pd.DataFrame) else pd.RangeIndex(n)


def as_frame(X: Any, argument: str = "X") -> tuple[pd.DataFrame, Labels]:
    """Convert a table to a DataFrame, and return what labels its columns had.

    Columns of an array, which has no labels ("none"), and of a frame that numbers them 0, 1, ...
    ("numbers") are named x0, x1, ...; those of other frames ("names") have their labels as text.

    Args:
        X: data frame of any library, 2-D array, tensor or list of rows.
        argument: name of the argument in errors.

    Raises:
        InputTypeError: not a table.
        InputError: not two-dimensional, without rows or columns, or two columns of one name.

    Example:
        >>> frame, labels = as_frame([[1, "a"], [2, "b"]])
        >>> list(frame.columns), labels
        (['x0', 'x1'], 'none')
    """
    X = to_pandas(argument, X)
    if isinstance(X, pd.Series):
        fail(
            argument,
            "a table with two axes",
            "a single column",
            "Pass X[['name']] for one column, X.to_frame().T for one row",
        )
    is_array = not isinstance(X, pd.DataFrame)
    if is_array:
        X = _from_array(X, argument)
    if 0 in X.shape:
        _fail_empty(X.shape, argument)
    counted = list(X.columns) == list(range(X.shape[1]))
    names = [f"x{name}" if counted else str(name) for name in X.columns]
    _check_once(names, argument)
    labels: Labels = "none" if is_array else "numbers" if counted else "names"
    return X.set_axis(names, axis=1).reset_index(drop=True), labels


def by_label(
    frame: pd.DataFrame, labels: Labels, columns: Sequence[str], named: bool
) -> pd.DataFrame | None:
    """The frame with its columns named as in fitting, or None if they have to be taken by position.

    Columns that were fitted without names are found by their numbers, where the frame has numbers.

    Args:
        frame: the table, from `as_frame`.
        labels: what labels its columns had, from `as_frame`.
        columns: names of the columns in fitting.
        named: whether these had been labels of a frame other than 0, 1, ...

    Example:
        >>> frame, labels = as_frame(pd.DataFrame({1: ["b"], 0: ["a"]}))
        >>> list(by_label(frame, labels, ["x0", "x1"], named=False))
        ['x1', 'x0']
    """
    if labels == "none":
        return None
    if named:
        if labels == "names":
            return frame
        numbers = [str(number) for number in range(frame.shape[1])]
        return frame.set_axis(numbers, axis=1) if set(numbers) & set(columns) else None
    numbered = frame.rename(columns=lambda name: f"x{name}" if name.isdecimal() else name)
    some = any(name.isdecimal() for name in frame) or set(columns) <= set(frame)
    if labels == "names" and not some:
        return None
    return frame if set(columns) <= set(frame) else numbered


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


def _check_once(names: list[str], argument: str) -> None:
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
