"""Random effects written as smooths, as in mgcv: `s(school, bs="re")`, `s(x, school, bs="re")`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from typing_extensions import override

from subbayes.regression.formula.checks import check_columns, has_numbers, plain_columns
from subbayes.regression.formula.splitting import plain_name
from subbayes.regression.terms.calls import Call, CallTerm
from subbayes.regression.terms.group_effects import GroupTerm
from subbayes.regression.terms.law import Counts, LearnedTerm, WrittenTerm
from subbayes.utils.checks import fail


class RandomIntercept(CallTerm):
    """`re(g)`, another spelling of `(1 | g)`."""

    @classmethod
    @override
    def parse(cls, argument: str, text: str) -> Sequence[WrittenTerm]:
        groups = text[text.index("(") + 1 : -1]
        name = plain_name(groups)
        if name is not None:
            return [GroupTerm("1", (name,), True)]
        remedy = "Write a term of each column, or (1 | a:b) for combinations of columns"
        fail(argument, "re(...) of one column", repr(text), remedy)


def random_effects(argument: str, call: Call) -> list[WrittenTerm]:
    """The random effects of `s(..., bs="re")`."""
    if call.by is not None or len(call.options) > 1:
        expected = "s(g, bs='re') or s(g, x, bs='re')"
        fail(argument, expected, repr(call.text), "Write (1 | g)")
    return [RandomEffectSmooth(call)]


@dataclass(frozen=True)
class RandomEffectSmooth(WrittenTerm):
    """A term `s(..., bs="re")`, which the types of its columns determine, in any order.

    As in mgcv, whose columns are those of `~ a:b - 1`, s(g) has intercepts of groups, (1 | g), s(x,
    g) slopes of a column of numbers among groups, (0 + x | g), and s(g, h) intercepts of the
    combinations of groups, (1 | g:h). A column of whole numbers alone has groups.

    Attributes:
        call: the call, of one or two columns.
    """

    call: Call

    @property
    def name(self) -> str:
        """The term with brackets of a single column, `s(a, b, bs='re')` of two."""
        if len(self.call.columns) == 1:
            return GroupTerm("1", self.call.columns, True).name
        return f"s({', '.join(map(_quoted, self.call.columns))}, bs='re')"

    def effects(self, argument: str, frame: pd.DataFrame) -> GroupTerm:
        """The term with brackets that it stands for, given the types of its columns.

        Args:
            argument: name of the argument, for errors.
            frame: the rows.

        Raises:
            InputError: numbers in both columns, or fractional ones in a single column.
        """
        columns = self.call.columns
        check_columns(columns, frame)
        frame = plain_columns(frame, columns)
        several = len(columns) > 1
        fractions = {name: has_fractions(frame[name]) for name in columns}
        slopes = [n for n in columns if has_numbers(frame[n]) and (several or fractions[n])]
        groups = tuple(name for name in columns if name not in slopes)
        if not groups:
            group, *slope = map(_quoted, sorted(columns, key=fractions.__getitem__))
            remedy = f"Write (0 + {slope[0]} | {group})" if slope else f"Write (1 | {group})"
            expected = "groups: text, categories or, of a single column, whole numbers"
            fail(argument, expected, f"numbers in {self.call.text}", remedy)
        return GroupTerm(f"0 + `{slopes[0]}`" if slopes else "1", groups, True)

    @override
    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        return self.effects(argument, frame).check(argument, frame)

    @override
    def width(self, frame: pd.DataFrame) -> int:
        return self.effects("formula", frame).width(frame)

    @override
    def learn(
        self, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
    ) -> list[LearnedTerm]:
        return self.effects(argument, frame).learn(argument, frame, prefix, weights)


def has_fractions(column: pd.Series) -> bool:
    """Whether a column has numbers that are not whole."""
    if not has_numbers(column):
        return False
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    values = values[np.isfinite(values)]
    return bool((values != np.floor(values)).any())


def _quoted(name: str) -> str:
    return name if name.isidentifier() else f"`{name}`"
