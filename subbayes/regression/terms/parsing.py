"""Parse the terms of this package in a right-hand side, and learn them from training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import pandas as pd

from subbayes.regression.formula.checks import check_columns, check_different
from subbayes.regression.formula.grammar import (
    check_formula,
    check_length,
    check_size,
    formula_errors,
)
from subbayes.regression.formula.splitting import split_terms
from subbayes.regression.shapes import TermColumns
from subbayes.regression.terms.columns import FormulaColumns
from subbayes.regression.terms.group_effects import parse_group_term
from subbayes.regression.terms.law import Counts, LearnedTerm, WrittenTerm
from subbayes.utils.checks import fail
from subbayes.utils.registry import TERMS

_MOST = 100  # terms of this package in a right-hand side


def written_terms(argument: str, texts: Sequence[str]) -> list[WrittenTerm]:
    """Parse terms, without evaluating them.

    Raises:
        InputError: wrong syntax, unknown options, or a term that occurs twice.
    """
    found = [term for text in texts for term in _parse(argument, text)]
    if len(found) > _MOST:
        fail(argument, f"at most {_MOST} terms in brackets and smooths", len(found))
    check_different(argument, "terms", (term.name for term in found))
    return found


def _parse(argument: str, text: str) -> Sequence[WrittenTerm]:
    if text.startswith("("):
        return parse_group_term(argument, text)
    return cast(
        "Sequence[WrittenTerm]", TERMS[text.partition("(")[0].strip()].parse(argument, text)
    )


@dataclass(frozen=True)
class RightSide:
    """A right-hand side of a formula, parsed and not evaluated.

    Attributes:
        argument: name of the argument, for errors.
        text: the right-hand side.
        rest: the part of columns and factors.
        terms: the other terms.
    """

    argument: str
    text: str
    rest: str
    terms: tuple[WrittenTerm, ...]

    @classmethod
    def of(cls, argument: str, text: str) -> RightSide:
        """Parse a right-hand side.

        Raises:
            InputError: wrong syntax, unknown options, or a term that occurs twice.

        Example:
            >>> RightSide.of("formula", "x + s(x, df=12) + (1 | g)").rest
            'x'
        """
        check_length(argument, text)
        with formula_errors(argument, text):
            rest, own = split_terms(argument, text)
            return cls(argument, text, rest, tuple(written_terms(argument, own)))

    def check(self, frame: pd.DataFrame) -> tuple[str, ...]:
        """Check it against a data frame, without evaluating it, and return the columns it reads.

        Raises:
            InputError: as `check_formula`.
        """
        argument = self.argument
        with formula_errors(argument, self.text):
            columns = list(check_formula(argument, self.rest, frame))
            width = 0
            for term in self.terms:
                needed = term.check(argument, frame)
                needed = tuple(name for name in needed if name not in term.expressions)
                for text in term.expressions:
                    needed += check_formula(argument, text, frame)
                check_columns(needed, frame)
                columns += needed
                width += term.width(frame)
            check_size(argument, self.text, width, len(frame))
        return tuple(dict.fromkeys(columns))

    def learn(
        self, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
    ) -> list[LearnedTerm]:
        """The terms that are not columns and factors, learned from rows.

        Args:
            frame: the rows, against which it was checked.
            prefix: of the names of effects.
            weights: how many times each row counts; by default once.
        """
        with formula_errors(self.argument, self.text):
            parts = (_learn(t, self.argument, frame, prefix, weights) for t in self.terms)
            return [term for part in parts for term in part]


def _learn(
    term: WrittenTerm, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None
) -> list[LearnedTerm]:
    """Learn a term, of expressions from their values."""
    if not term.expressions:
        return term.learn(argument, frame, prefix, weights)
    values = {
        text: FormulaColumns.learn(argument, f"0 + {text}", frame) for text in term.expressions
    }
    parts = term.learn(argument, _with_values(frame, values), prefix, weights)
    read = {name for columns in values.values() for name in columns.read}
    return [
        OfExpressions(
            **{f.name: getattr(part, f.name) for f in fields(LearnedTerm)}
            | {"variables": tuple(sorted({*part.variables} - {*values} | read))},
            term=part,
            values=values,
        )
        for part in parts
    ]


@dataclass(frozen=True)
class OfExpressions(LearnedTerm):
    """A term that reads expressions, by their text."""

    term: LearnedTerm
    values: Mapping[str, FormulaColumns]

    def columns(self, frame: pd.DataFrame) -> TermColumns:
        """The columns of the term."""
        return self.term.columns(_with_values(frame, self.values))


def _with_values(frame: pd.DataFrame, values: Mapping[str, FormulaColumns]) -> pd.DataFrame:
    return frame.assign(**{text: columns.evaluate(frame)[:, 0] for text, columns in values.items()})
