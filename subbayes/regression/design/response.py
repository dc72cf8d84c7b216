"""The response of a formula: a column or an expression, and its classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from subbayes.data.frames import quote
from subbayes.data.levels import check_kinds, check_read_differently, levels_of
from subbayes.likelihoods.families import Family
from subbayes.regression.design.rows import column_numbers
from subbayes.regression.formula.checks import check_columns, formula_errors, plain_columns
from subbayes.regression.formula.expansion import columns_of
from subbayes.regression.formula.grammar import Bar, Constant, Crossing, Node, Sum, parse
from subbayes.regression.terms.evaluation import Evaluation
from subbayes.utils.checks import fail, number_text

_MOST_CLASSES = 50  # of numbers


@dataclass(frozen=True)
class Response:
    """The response: a column or an expression, and its classes.

    Attributes:
        name: the left-hand side of the formula.
        labels: classes in order, for families of classes.
    """

    name: str
    labels: tuple[Any, ...] | None = None

    @classmethod
    def from_rows(cls, name: str, frame: pd.DataFrame, family: Family) -> Response:
        """The response of training rows.

        Raises:
            InputError: a number of classes that the family does not accept, or unordered text for
                a family of ordered classes.
        """
        if family.kind != "classification":
            return cls(name)
        values = frame[name] if name in frame.columns else pd.Series(_evaluate(name, frame))
        check_read_differently(name, values)
        if family.is_ordered:
            _check_ordered(name, values)
        if isinstance(values.dtype, pd.CategoricalDtype):
            labels = values.cat.categories.tolist()
        else:
            labels = levels_of(values)
            _check_classes(name, labels, len(values), family)
        if family.is_binary and len(labels) != 2:
            fail(
                name,
                "2 classes for family 'bernoulli'",
                f"{len(labels)}: " + ", ".join(map(str, labels[:5])),
                "Use family='categorical', or 'ordinal' for ordered classes"
                if len(labels) > 2
                else "",
            )
        if len(labels) < 2:
            fail(name, "at least 2 classes", ", ".join(map(str, labels)))
        return cls(name, tuple(labels))

    def numbers(self, frame: pd.DataFrame) -> np.ndarray:
        """The response as numbers, shape (n,).

        Raises:
            InputError: unknown columns, values that are not numbers, or classes unseen in training.
        """
        frame = plain_columns(frame, self.variables(frame))
        present = self.name in frame.columns
        if self.labels is None:
            if not present:
                return _evaluate(self.name, frame)
            return column_numbers(self.name, frame, "Classes: family='bernoulli' or 'categorical'")
        values = np.asarray(frame[self.name] if present else _evaluate(self.name, frame))
        code = {label: i for i, label in enumerate(self.labels)}
        unseen = [v for v in pd.unique(values) if v not in code]
        if unseen:
            check_kinds(self.name, self.labels, pd.Series(values))
            fail(
                self.name,
                "classes seen in training: " + ", ".join(map(str, self.labels)),
                ", ".join(map(str, unseen)),
            )
        return np.array([code[v] for v in values], dtype=np.float64)

    def facts(self, family: Family) -> dict[str, str]:
        """What a description of the model says about its classes; nothing without classes.

        Example:
            >>> from subbayes.likelihoods.families import Bernoulli
            >>> Response("sick", ("no", "yes")).facts(Bernoulli())
            {'response': "sick: the probability of 'yes', beside 'no'"}
        """
        if self.labels is None:
            return {}
        labels = [quote([v]) if isinstance(v, str) else str(v) for v in self.labels[:10]]
        rest = [f"{len(self.labels) - 10} more"] if len(self.labels) > 10 else []
        return {"response": f"{self.name}: {family.classes_text(labels, rest)}"}

    def variables(self, frame: pd.DataFrame) -> tuple[str, ...]:
        """Columns of the data frame that the response is computed from."""
        if self.name in frame.columns:
            return (self.name,)
        columns = tuple(sorted(columns_of(_expression(self.name))))
        check_columns(columns, frame)
        return columns


def _check_classes(name: str, labels: list[Any], rows: int, family: Family) -> None:
    """Raise for numbers that are measurements rather than classes, each of which is a parameter.

    They are measurements if there are more than 50 of them, or if they are not whole numbers and
    more than half of the rows differ. Two classes are whole numbers.
    """
    if not all(isinstance(v, (int, float)) for v in labels):
        return
    fractions = [value for value in labels if not float(value).is_integer()]
    whole = not fractions
    if family.is_binary:
        if fractions:
            expected = "two classes for family 'bernoulli'"
            got = f"numbers such as {number_text(fractions[0])}"
            remedy = "Write counts: 'successes | trials(n)'; or use family='beta' for proportions"
            fail(name, expected, got, remedy)
        return
    if len(labels) <= _MOST_CLASSES and (whole or 2 * len(labels) <= rows):
        return
    expected = f"classes for family {family.label!r}, at most {_MOST_CLASSES} numbers"
    got = f"{len(labels)} different numbers in {rows} rows, such as {labels[0]:g}"
    remedy = (
        "Use a family of numbers, such as 'normal', group them by pd.cut, or pass pd.Categorical"
    )
    fail(name, expected, got, f"{remedy} if each number is a class")


def _check_ordered(name: str, values: pd.Series) -> None:
    """Raise for text as ordered classes: alphabetical order is rarely intended."""
    category = isinstance(values.dtype, pd.CategoricalDtype)
    if category and values.cat.ordered:
        return
    classes = list(values.cat.categories) if category else sorted(values.unique(), key=str)
    if pd.api.types.is_numeric_dtype(pd.Series(classes).infer_objects()):
        return
    fail(
        name,
        "ordered classes for family 'ordinal'",
        "text without an order; it would be " + " < ".join(map(str, classes)),
        f"Pass pd.Categorical(data[{name!r}], categories="
        "[lowest, ..., highest], ordered=True), or numbers",
    )


def _expression(text: str) -> Node:
    """The tree of a response, which is one factor."""
    tree = parse("response", text)
    if isinstance(tree, (Bar, Constant, Crossing, Sum)):
        remedy = f"Write arithmetic in braces: {{{text}}}"
        fail("response", "one response", repr(text), remedy)
    return tree


def _evaluate(expression: str, frame: pd.DataFrame) -> np.ndarray:
    """The value of an expression such as `np.log(y)`."""
    with formula_errors("response", expression):
        values = np.array(
            Evaluation("response", frame, response=True).factor(_expression(expression))
        )
    undefined = np.flatnonzero(~np.isfinite(values))
    if len(undefined):
        got = f"{len(undefined)} rows without one, the first at position {undefined[0]}"
        fail(expression, "finite numbers", got, "Drop these rows, or transform it another way")
    return values
