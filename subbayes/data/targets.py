"""Encode a target column: numbers, classes 0..K-1 or counts; the state is JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64, Shaped

from subbayes.data.arrays import check_finite_targets, check_not_masked
from subbayes.data.columns import as_numbers, kind_of
from subbayes.data.frames import quote, to_cpu
from subbayes.data.levels import check_kinds
from subbayes.data.to_pandas import to_pandas
from subbayes.utils.checks import check_choice, fail, number_text

Label: TypeAlias = str | int | bool

TASKS = ("regression", "classification", "count")
MOST_CLASSES = 20
_SHORT = 100  # characters of labels that are held as text of one length
_WIDE = 2**63  # whole numbers from here on have no 64 bits


@dataclass(frozen=True)
class Target:
    """Encode a target column for a likelihood, and decode its predictions.

    Numbers and counts: unchanged (the likelihood `Standardized` has the units of a regression).
    Classification: the index in `classes`.

    Of several targets of a row, shape (n, T), those that are NaN are missing. Classification then
    has labels that a row has or not, 1 and 0, and no classes.

    Args:
        task: `"regression"`, `"classification"` or `"count"`.
        classes: sorted labels, each a str, an int or a bool.
        columns: number of targets T of a row.

    Example:
        >>> target = Target.infer(["no", "yes", "no"])
        >>> target.task, target.encode(["yes"]), target.decode([0, 1]).tolist()
        ('classification', array([1]), ['no', 'yes'])
        >>> Target.infer([1.0, 2.5, 4.0]).task
        'regression'
    """

    task: Literal["regression", "classification", "count"]
    classes: tuple[Label, ...] = ()
    columns: int = 1

    @classmethod
    def infer(cls, y: Any, task: str | None = None) -> Target:
        """The encoding for targets `y`; by default the values determine the task.

        - Text, booleans and pandas categories are classes.
        - Numbers with a fractional part are a regression.
        - Integral numbers are classes if there are two values, or if their dtype is integer and
          they are all integers from 0 or 1 to at most 20; otherwise they are a regression.
        - Counts require `task="count"`.

        Text whose values are all numbers is treated as numbers.

        Args:
            y: targets (n,) or (n, 1): array, list, Series or tensor; or several, (n, T), which are
                a regression by default.
            task: the task, to override the rules above.

        Raises:
            InputError: fewer than two rows, missing or infinite values; a constant target, a single
                class; fractional labels or labels of several types; text instead of numbers;
                negative or fractional counts.

        Example:
            >>> Target.infer([0, 1, 2, 1]).task, Target.infer([3, 8, 5, 6]).task
            ('classification', 'regression')
        """
        if task is not None:
            check_choice("task", task, TASKS)
        if (several := _several(y)) is not None:
            target = cls(task or "regression", columns=several.shape[1])  # type: ignore[arg-type]
            target.encode(several)
            return target
        column = _column(y)
        if len(column) < 2:
            fail("y", "at least 2 targets to learn from", str(len(column)))
        task = task or _task(column)
        if task == "regression":
            _check_varying(_numbers(column))
            return cls("regression")
        if task == "count":
            _counts(column)
            return cls("count")
        return cls("classification", classes=_classes(column))

    def encode(self, y: Any) -> Float64[np.ndarray, "n *T"] | Int64[np.ndarray, "n"]:
        """Targets for the likelihood: float64 in regression, int64 for classes and counts.

        Several of each row are float64.

        Raises:
            InputError: missing or infinite values, text instead of numbers, unknown labels,
                negative or fractional counts.

        Example:
            >>> Target("classification", classes=(1, 2)).encode([2, 3])
            Traceback (most recent call last):
                ...
            subbayes.InputError: y: expected only the classes '1', '2', got '3' in 1 of 2 \
rows. Correct those labels, or fit with rows of every class.
        """
        if self.columns > 1:
            return self._checked(y)
        column = _column(y)
        if self.task == "regression":
            return _numbers(column)
        return _counts(column) if self.task == "count" else self._codes(column)

    def decode(self, values: Any) -> Shaped[np.ndarray, "n"]:
        """Targets in the original units: numbers, labels or counts.

        Args:
            values: encoded targets (n,); the class -1 (no decision) becomes None.

        Raises:
            InputError: a class index outside 0..K-1.

        Example:
            >>> Target("classification", ("no", "yes")).decode([1, 0]).tolist()
            ['yes', 'no']
        """
        values = np.asarray(values)
        if self.task != "classification":
            return values
        outside = (values < -1) | (values >= len(self.classes))
        if outside.any():
            expected = f"class indices from 0 to {len(self.classes) - 1}, or -1"
            fail("values", expected, values[outside][0])
        if (values == -1).any():
            return np.array([*self.classes, None], dtype=object)[values.astype(int)]
        longest = max((len(name) for name in self.classes if isinstance(name, str)), default=0)
        dtype = object if longest > _SHORT else None  # arrays of text take the longest for each
        return np.array(self.classes, dtype=dtype)[values.astype(int)]

    def _checked(self, y: Any) -> Float64[np.ndarray, "n T"]:
        """Several targets of each row."""
        values = _several(y)
        if values is None or values.shape[1] != self.columns:
            fail("y", f"{self.columns} targets for each row", f"shape {np.shape(y)}")
        check_finite_targets("y", values)
        known = values[~np.isnan(values)]
        if self.task == "classification" and (bad := (known != 0) & (known != 1)).any():
            fail("y", "labels 0 and 1 in several columns", number_text(float(known[bad][0])))
        if self.task == "count" and (bad := (known < 0) | (known % 1 != 0)).any():
            fail("y", "counts: whole numbers of at least 0", number_text(float(known[bad][0])))
        return values

    def _codes(self, column: pd.Series) -> Int64[np.ndarray, "n"]:
        position = {label: code for code, label in enumerate(self.classes)}
        labels = [_label(value) for value in column.tolist()]
        unknown = [label for label in labels if label not in position]
        if unknown:
            check_kinds("y", self.classes, pd.Series(unknown, dtype=object))
            fail(
                "y",
                f"only the classes {quote(self.classes, 10)}",
                f"{quote(dict.fromkeys(unknown))} in {len(unknown)} of {len(labels)} rows",
                "Correct those labels, or fit with rows of every class",
            )
        return np.array([position[label] for label in labels], dtype=np.int64)


def _several(y: Any) -> Float64[np.ndarray, "n T"] | None:
    """Several columns of numbers; None for a vector, or one column."""
    check_not_masked("y", y)
    array = np.asarray(to_cpu(to_pandas("y", y)))
    if array.ndim != 2 or array.shape[1] < 2:
        return None
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError):
        fail("y", "numbers in several columns", f"values of type {array.dtype}")


def _column(y: Any) -> pd.Series:
    """One column without missing values."""
    check_not_masked("y", y)
    y = to_pandas("y", y)
    if not isinstance(y, pd.Series):
        array = y if isinstance(y, pd.DataFrame) else np.asarray(keep_label_types(to_cpu(y)))
        if array.ndim == 2 and array.shape[1] == 1:
            array = y.iloc[:, 0] if isinstance(y, pd.DataFrame) else array.ravel()
        if array.ndim != 1:
            fail(
                "y",
                "one target per row, shape (n,)",
                f"shape {tuple(array.shape)}",
                "Pass one column; fit one model per target",
            )
        y = pd.Series(array)
    column = y.reset_index(drop=True)
    if column.empty:
        fail("y", "targets", "none")
    missing = int(column.isna().sum())
    if missing:
        fail(
            "y",
            "no missing targets",
            f"{missing} of {len(column)} missing",
            "Drop those rows",
            row=int(column.isna().to_numpy().argmax()),
        )
    return column


def keep_label_types(y: Any) -> Any:
    """Convert a list of labels without NumPy's conversion of `['a', 1]` to text."""
    if isinstance(y, (list, tuple)) and all(np.ndim(value) == 0 for value in y):
        array = np.empty(len(y), dtype=object)
        array[:] = y
        return pd.Series(array).infer_objects().to_numpy()
    return y


def _task(column: pd.Series) -> str:
    """The task by the rules of `Target.infer`."""
    if kind_of(column, "the target", "y") == "categorical":
        return "classification"
    values = _numbers(column)
    distinct = np.unique(values)
    if (distinct != np.round(distinct)).any():
        return "regression"
    if len(distinct) == 2:
        return "classification"
    run = distinct[0] in (0, 1) and len(distinct) == distinct[-1] - distinct[0] + 1
    integer = pd.api.types.is_integer_dtype(column.dtype)
    few = 1 < len(distinct) <= MOST_CLASSES and distinct[-1] <= MOST_CLASSES
    return "classification" if integer and run and few else "regression"


def _numbers(column: pd.Series) -> Float64[np.ndarray, "n"]:
    return as_numbers(column, "the target", "y")


def _check_varying(values: Float64[np.ndarray, "n"]) -> None:
    """Raise for constant targets, and for those whose scale overflows or vanishes."""
    if values.min() == values.max() or not 0 < float(values.std()) < np.inf:
        fail(
            "y",
            "targets that vary, of a scale float64 holds",
            f"values from {values.min():g} to {values.max():g}",
            "Check the target column",
        )


def _counts(column: pd.Series) -> Int64[np.ndarray, "n"]:
    values = _numbers(column)
    bad = (values < 0) | (values != np.round(values)) | (values > 2**53)
    if bad.any():
        fail(
            "y",
            "counts: whole numbers of at least 0",
            number_text(float(values[bad][0])),
            "Correct the column, or use task='regression'",
            row=int(bad.argmax()),
        )
    return values.astype(np.int64)


def _classes(column: pd.Series) -> tuple[Label, ...]:
    """The sorted labels, of one type."""
    labels = list(dict.fromkeys(_label(value) for value in column.tolist()))
    check_label_types(labels)
    if len(labels) < 2:
        fail("y", "at least 2 classes", f"{quote(labels)} alone", "Fit with rows of every class")
    if len(labels) > MOST_CLASSES and 2 * len(labels) > len(column):
        got = f"{len(labels)} labels in {len(column)} rows"
        if len(labels) == len(column):
            got = f"a different label in each of the {len(column)} rows"
        fail(
            "y",
            "classes that recur",
            got,
            "Name another target column, or use task='regression' for numbers",
        )
    return tuple(sorted(labels))


def check_label_types(labels: Iterable[Any]) -> None:
    """Check that labels have one type, so that they can be sorted.

    Raises:
        InputError: labels of several types.

    Example:
        >>> check_label_types(["a", "b"])
    """
    labels = list(labels)
    types = {type(label).__name__ for label in labels}
    if len(types) > 1:
        got = f"{' and '.join(sorted(types))}: {quote(labels)}"
        fail("y", "labels of one type", got, "Convert them all to text")


def _label(value: Any) -> Label:
    """A label as str, int or bool; integral floats become int."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    expected = "labels that are text, whole numbers or booleans"
    if isinstance(value, (float, np.floating, int, np.integer)):
        if not np.isfinite(value) or value != round(value):
            remedy = "Use task='regression' for numbers with a fraction"
            fail("y", expected, number_text(float(value)), remedy)
        if not -_WIDE <= value < _WIDE:
            fail("y", "labels of at most 64 bits", f"{value:.4g}", "Convert them to text")
        return int(value)
    if not isinstance(value, str):
        fail("y", expected, f"a {type(value).__name__}", "Convert them to text")
    return str(value)
