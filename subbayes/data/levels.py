"""Levels of factors and groups, and labels of classes, which are compared by value and by kind.

Python takes True as equal to 1, so that values of another kind than the levels may pass for them
without a column of their own. `check_kinds` refuses them, before any value is looked up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from subbayes.utils.checks import fail
from subbayes.utils.text_table import shortened

_SHOWN = 20  # names or levels in a message
_CONVERSIONS = {
    ("booleans", "numbers"): ".map({0: False, 1: True})",
    ("booleans", "text"): ".map({'False': False, 'True': True})",
    ("numbers", "booleans"): ".astype(int)",
    ("numbers", "text"): ".astype(float)",
    ("text", "numbers"): ".astype(str)",
    ("text", "booleans"): ".astype(str)",
}
"""How to convert a column, by the kind of the levels in training and that of new values."""


def kind_of_level(value: Any) -> str:
    """The kind of a level: "booleans", "numbers", "text", or the type of another value.

    Example:
        >>> kind_of_level(True), kind_of_level(1.0), kind_of_level("1")
        ('booleans', 'numbers', 'text')
    """
    if isinstance(value, (bool, np.bool_)):
        return "booleans"
    if isinstance(value, (Real, Decimal)):
        return "numbers"
    return "text" if isinstance(value, str) else type(value).__name__


def same_level(a: Any, b: Any) -> bool:
    """Whether two values are the same level.

    Example:
        >>> same_level(1, 1.0), same_level(1, True)
        (True, False)
    """
    return kind_of_level(a) == kind_of_level(b) and bool(a == b)


def check_kinds(name: str, levels: Iterable[Any], values: pd.Series) -> None:
    """Raise `InputError` for values of a kind that no level has.

    Args:
        name: the column.
        levels: its levels in training.
        values: new values.

    Example:
        >>> check_kinds("treated", [False, True], pd.Series([0, 1]))
        Traceback (most recent call last):
        ...
        subbayes.InputError: treated: expected booleans, as in training, got numbers such as 0. ...
    """
    known = list(dict.fromkeys(map(kind_of_level, levels)))
    for kind, value in kinds_of(values).items():
        if kind in known:
            continue
        trained = next((k for k in known if (k, kind) in _CONVERSIONS), known[0])
        remedy = f"Convert it to {trained}"
        if conversion := _CONVERSIONS.get((trained, kind)):
            remedy += f", such as by {conversion}"
        if (trained, kind) == ("text", "numbers"):
            remedy += f", or read the file with dtype={{{name!r}: str}}"
        fail(name, f"{' or '.join(known)}, as in training", f"{kind} such as {value!r}", remedy)


def kinds_of(values: pd.Series) -> dict[str, Any]:
    """The kinds of values, and a value of each.

    Example:
        >>> kinds_of(pd.Series([2, "a", 3]))
        {'numbers': 2, 'text': 'a'}
    """
    if pd.api.types.is_numeric_dtype(values.dtype):  # all of one kind
        values = values.iloc[:1]
    by_type: dict[type, Any] = {}
    for value in values.tolist():
        by_type.setdefault(type(value), value)
    return {kind_of_level(value): value for value in by_type.values()}


def check_levels(name: str, levels: list[Any], values: pd.Series, remedy: str) -> None:
    """Raise `InputError` for values that are not among the levels of a factor."""
    check_kinds(name, levels, values)
    known = set(levels)
    unseen = [value for value in values.unique() if value not in known]
    if unseen:
        expected = "the levels seen in training: " + listed(map(str, levels))
        fail(name, expected, listed(map(str, unseen)), remedy)


def check_read_differently(name: str, values: pd.Series) -> None:
    """Raise `InputError` for levels of training rows that read alike, such as 1 and "1".

    Effects are known by the text of their levels. Booleans beside numbers, which Python takes as
    equal, are refused too.

    Example:
        >>> check_read_differently("g", pd.Series([1, "1", "a"]))
        Traceback (most recent call last):
        ...
        subbayes.InputError: g: expected levels that read differently, got 1 and '1'. Convert ...
    """
    if pd.api.types.is_numeric_dtype(values.dtype):
        return
    remedy = f"Convert the column to one type, such as data[{name!r}].astype(str)"
    kinds = kinds_of(values)
    if {"booleans", "numbers"} <= kinds.keys():
        got = f"{kinds['booleans']!r} and {kinds['numbers']!r}"
        fail(name, "levels that are booleans or numbers, not both", got, remedy)
    by_text = defaultdict(list)
    for value in values.unique():
        by_text[str(value)].append(value)
    for alike in by_text.values():
        if len(alike) > 1:
            got = " and ".join(map(repr, alike))
            fail(name, "levels that read differently", got, remedy)


def levels_of(column: pd.Series) -> list[Any]:
    """The values of a column: categories in their order, numbers by size, others as text.

    Example:
        >>> levels_of(pd.Series(pd.Categorical(["hi", "lo"], ["lo", "mid", "hi"])))
        ['lo', 'hi']
    """
    values = column.drop_duplicates()
    if isinstance(column.dtype, pd.CategoricalDtype):
        present = set(values)
        return [value for value in column.dtype.categories if value in present]
    numbers = pd.api.types.is_numeric_dtype(values.infer_objects())
    return sorted(values.tolist(), key=None if numbers else str)


def listed(names: Iterable[str]) -> str:
    """The first of some names or levels, and the number of the others.

    Example:
        >>> listed(map(str, range(30)))[-18:]
        '18, 19 and 10 more'
    """
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(map(shortened, shown[:_SHOWN])) + more
