"""Parse the terms of this package in a right-hand side, and learn them from training rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from subbayes.regression.formula.checks import check_columns, check_different
from subbayes.regression.formula.grammar import check_formula, check_size, least_columns
from subbayes.regression.formula.splitting import split_terms
from subbayes.regression.terms.calls import Call, parse_call
from subbayes.regression.terms.gaussian_process import GaussianTerm
from subbayes.regression.terms.group_effects import parse_group_term
from subbayes.regression.terms.law import Counts, LearnedTerm, WrittenTerm
from subbayes.regression.terms.monotonic import MonotonicTerm
from subbayes.regression.terms.random_effect_smooths import RandomEffectSmooth
from subbayes.regression.terms.smooths import SmoothTerm
from subbayes.utils.checks import fail

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
    call = parse_call(argument, text)
    if call.options.get("bs") == "re":
        if call.by is not None or len(call.options) > 1:
            fail(argument, "s(g, bs='re') or s(g, x, bs='re')", repr(text), "Write (1 | g)")
        return [RandomEffectSmooth(call)]
    kinds: dict[str, Callable[[Call], WrittenTerm]] = {"mo": MonotonicTerm, "gp": GaussianTerm}
    return [kinds.get(call.function, SmoothTerm)(call)]


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
        needed = term.check(argument, frame)
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
    learned = [part for term in terms for part in term.learn(argument, frame, prefix, weights)]
    check_different(argument, "effects", (label for term in learned for label in term.labels))
    return rest, learned


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
