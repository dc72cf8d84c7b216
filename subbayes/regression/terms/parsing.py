"""Parse the terms of this package in a right-hand side, and learn them from training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields

import pandas as pd

from subbayes.regression.formula.checks import check_columns, check_different, formula_errors
from subbayes.regression.formula.expansion import (
    Factors,
    check_size,
    check_terms,
    columns_of,
    expand,
)
from subbayes.regression.formula.grammar import Bar, Node, parse
from subbayes.regression.shapes import TermColumns
from subbayes.regression.terms.columns import FormulaColumns
from subbayes.regression.terms.evaluation import Evaluation
from subbayes.regression.terms.group_effects import group_terms
from subbayes.regression.terms.law import Counts, LearnedTerm, WrittenTerm
from subbayes.regression.terms.transforms import Transform
from subbayes.utils.checks import fail
from subbayes.utils.registry import TERMS

_MOST = 100  # terms of this package in a right-hand side


@dataclass(frozen=True)
class RightSide:
    """A right-hand side of a formula, parsed and not evaluated.

    Attributes:
        argument: name of the argument, for errors.
        text: the right-hand side.
        products: the factors of each term of columns and factors.
        terms: the other terms.
        read: columns that the terms of columns and factors read.
    """

    argument: str
    text: str
    products: Sequence[Factors]
    terms: tuple[WrittenTerm, ...]
    read: Set[str]

    @classmethod
    def of(cls, argument: str, text: str) -> RightSide:
        """Parse a right-hand side.

        Raises:
            InputError: wrong syntax, unknown options, or a term that occurs twice.

        Example:
            >>> side = RightSide.of("formula", "x + s(x, df=12) + (1 | g)")
            >>> [term.name for term in side.terms]
            ['s(x, df=12)', '(1 | g)']
        """
        products, nodes, read = expand(argument, parse(argument, text))
        terms: list[WrittenTerm] = []
        for node in nodes:
            if isinstance(node, Bar):
                terms += group_terms(argument, node)
            else:
                terms += TERMS[node.function].parse(argument, node)
        if len(terms) > _MOST:
            fail(argument, f"at most {_MOST} terms in brackets and smooths", len(terms))
        check_different(argument, "terms", (term.name for term in terms))
        return cls(argument, text, products, tuple(terms), read)

    def check(self, frame: pd.DataFrame) -> tuple[str, ...]:
        """Check it against a data frame, without evaluating it, and return the columns it reads.

        Raises:
            InputError: unknown columns, or too many columns of the design matrix.
        """
        argument = self.argument
        with formula_errors(argument, self.text):
            columns = list(check_terms(argument, self.text, self.products, frame, self.read))
            width = 0
            for term in self.terms:
                needed = term.check(argument, frame)
                needed = tuple(name for name in needed if name not in term.expressions)
                for text, node in term.expressions.items():
                    needed += check_terms(argument, text, [(node,)], frame)
                check_columns(needed, frame)
                columns += needed
                width += term.width(frame)
            check_size(argument, self.text, width, len(frame))
        return tuple(dict.fromkeys(columns))

    def columns(self, frame: pd.DataFrame) -> FormulaColumns:
        """The columns of the terms of columns and factors, learned from rows."""
        return FormulaColumns.learn(self.argument, self.text, self.products, frame)

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
    evaluation = Evaluation(argument, frame)
    values = {text: evaluation.factor(node) for text, node in term.expressions.items()}
    parts = term.learn(argument, frame.assign(**values), prefix, weights)
    read = {name for node in term.expressions.values() for name in columns_of(node)}
    return [
        OfExpressions(
            **{f.name: getattr(part, f.name) for f in fields(LearnedTerm)}
            | {"variables": tuple(sorted({*part.variables} - {*values} | read))},
            term=part,
            expressions=term.expressions,
            transforms=evaluation.learned,
        )
        for part in parts
    ]


@dataclass(frozen=True)
class OfExpressions(LearnedTerm):
    """A term that reads expressions, by their text, and what functions in them have learned."""

    term: LearnedTerm
    expressions: Mapping[str, Node]
    transforms: Mapping[Node, Transform]

    def columns(self, frame: pd.DataFrame) -> TermColumns:
        """The columns of the term."""
        evaluation = Evaluation(f"term {self.name!r}", frame, self.transforms)
        values = {text: evaluation.factor(node) for text, node in self.expressions.items()}
        return self.term.columns(frame.assign(**values))
