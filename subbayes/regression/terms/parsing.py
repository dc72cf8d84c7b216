"""Parse the terms of this package in a right-hand side, and learn them from training rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import numpy as np
import pandas as pd
from formulaic import ModelSpec
from jaxtyping import Float

from subbayes.regression.formula.checks import check_columns, check_different
from subbayes.regression.formula.grammar import check_formula, check_size, least_columns
from subbayes.regression.formula.splitting import split_terms
from subbayes.regression.terms import columns as formula_columns
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
    names = [term.name for term in found]
    for name in names:
        if names.count(name) > 1:
            fail(argument, "terms that differ", f"{name} twice", "Leave one out")
    return found


def _parse(argument: str, text: str) -> Sequence[WrittenTerm]:
    if text.startswith("("):
        return parse_group_term(argument, text)
    return cast(
        "Sequence[WrittenTerm]", TERMS[text.partition("(")[0].strip()].parse(argument, text)
    )


def check_right_side(
    argument: str, text: str, frame: pd.DataFrame
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Check a right-hand side, without evaluating it.

    Returns:
        The columns that it reads, and those that the part for formulaic reads.

    Raises:
        InputError: as `check_formula`.
    """
    rest, own = split_terms(argument, text)
    terms = written_terms(argument, own)
    read = check_formula(argument, rest, frame)
    columns = list(read)
    width = 0
    for term in terms:
        written = [name for name in term.check(argument, frame) if name not in term.expressions]
        of_expressions = (check_formula(argument, text, frame) for text in term.expressions)
        needed = [*written, *itertools.chain.from_iterable(of_expressions)]
        check_columns(needed, frame)
        columns += needed
        width += term.width(frame)
    check_size(argument, text, width, len(frame))
    return tuple(dict.fromkeys(columns)), read


def learn_terms(
    argument: str, text: str, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
) -> tuple[str, list[LearnedTerm]]:
    """The part of a right-hand side for formulaic, and the other terms learned from rows.

    Args:
        argument: name of the argument, for errors.
        text: the right-hand side, which `check_right_side` has checked.
        frame: the rows.
        prefix: of the names of effects.
        weights: how many times each row counts; by default once.

    Raises:
        InputError: effects with the same name.
    """
    rest, own = split_terms(argument, text)
    terms = written_terms(argument, own)
    learned = [part for term in terms for part in _learn(term, argument, frame, prefix, weights)]
    check_different(argument, "effects", (label for term in learned for label in term.labels))
    return rest, learned


def _learn(
    term: WrittenTerm, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None
) -> list[LearnedTerm]:
    """Learn a term, of expressions from their values."""
    if not term.expressions:
        return term.learn(argument, frame, prefix, weights)
    values = {}
    for text in term.expressions:
        read = check_formula(argument, text, frame)
        values[text] = formula_columns.learn(argument, f"0 + {text}", frame, read), read
    parts = term.learn(argument, _with_values(frame, values), prefix, weights)
    read = tuple(sorted({name for _, read in values.values() for name in read}))
    return [
        OfExpressions(
            **{f.name: getattr(part, f.name) for f in fields(LearnedTerm)}
            | {"variables": tuple(sorted({*part.variables} - {*values} | {*read}))},
            term=part,
            values=values,
        )
        for part in parts
    ]


@dataclass(frozen=True)
class OfExpressions(LearnedTerm):
    """A term that reads expressions, each with its specification and the columns it reads."""

    term: LearnedTerm
    values: Mapping[str, tuple[ModelSpec, tuple[str, ...]]]

    def columns(self, frame: pd.DataFrame) -> Float[np.ndarray, "n c"]:
        """The columns of the term."""
        return self.term.columns(_with_values(frame, self.values))


def _with_values(
    frame: pd.DataFrame, values: Mapping[str, tuple[ModelSpec, tuple[str, ...]]]
) -> pd.DataFrame:
    return frame.assign(
        **{
            text: formula_columns.evaluate(spec, frame, read)[:, 0]
            for text, (spec, read) in values.items()
        }
    )


def least_effects(argument: str, text: str) -> int:
    """The fewest effects that a right-hand side can give, without evaluating it.

    Args:
        argument: name of the argument, for errors.
        text: the right-hand side.

    Raises:
        InputError: as `check_right_side`, which says what else is wrong with columns.

    Example:
        >>> least_effects("formula", "s(x, df=12) + (1 | g)")
        12
    """
    rest, own = split_terms(argument, text)
    terms = written_terms(argument, own)
    return least_columns(argument, rest) + sum(term.least for term in terms)
