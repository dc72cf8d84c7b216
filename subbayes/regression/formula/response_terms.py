"""Terms of the response as in brms: `y | cens(c)`, `trunc(lb=0)`, `trials(n)`, `weights(w)`.

They stand for a family or an argument of the model, which the formula is rewritten to: what
follows sees a plain response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from subbayes.likelihoods.families import CensoredFamily, Family, TruncatedFamily
from subbayes.regression.formula.grammar import (
    Constant,
    FunctionCall,
    Keyword,
    Name,
    Node,
    Operation,
    Sum,
    parse,
    split_at,
)
from subbayes.utils.checks import fail, number_text

_SHAPE = "y | cens(status), trunc(lb=0, ub=9), trials(n) and weights(w), joined by +"
_ARGUMENTS = {
    "cens": ("status", "upper"),
    "trunc": ("lb", "ub"),
    "trials": ("n",),
    "weights": ("w",),
}
_INNERMOST = ("trials", "trunc", "cens", "weights")
"""Terms in the order in which their families are around each other."""


@dataclass(frozen=True)
class ResponseTerms:
    """A formula with a plain response, and what its terms stand for.

    Attributes:
        formula: the formula without them.
        family: the family, around the given one if it is censored or truncated.
        weights: column of observation weights.
    """

    formula: str | Mapping[str, str]
    family: Family
    weights: str | None


def read_response_terms(
    formula: str | Mapping[str, str], family: Family, weights: str | None = None
) -> ResponseTerms:
    """Read the terms of the response of a formula.

    Args:
        formula: "y | cens(status) ~ x", or one formula for each parameter.
        family: the family of the response without them.
        weights: column of observation weights that is given otherwise.

    Raises:
        InputError: other terms, or terms that the family does not have.

    Example:
        >>> from subbayes.likelihoods.families import WeibullFamily
        >>> found = read_response_terms("time | cens(alive) + weights(w) ~ age", WeibullFamily())
        >>> found.formula, found.weights
        ('time ~ age', 'w')
        >>> found.family
        censored weibull(mu: log, shape: log)
    """
    location = family.formula_names[0]
    text = formula if isinstance(formula, str) else None
    if isinstance(formula, Mapping):
        text = formula.get(location)
    if not isinstance(text, str) or len(sides := split_at(text, "~")) != 2:
        return ResponseTerms(formula, family, weights)  # reported with the formula
    left, right = sides
    response, *after_bars = split_at(left, "|")
    if not after_bars:
        return ResponseTerms(formula, family, weights)
    terms = _terms("|".join(after_bars))
    for name, given in sorted(terms.items(), key=lambda term: _INNERMOST.index(term[0])):
        if name == "weights":
            if weights is not None:
                _fail("one column of weights", f"{weights!r} and {given['w']!r}")
            weights = _column(name, given["w"])
        else:
            family = _around(name, given, family)
    plain = f"{response.strip()} ~{right}"
    found = plain if isinstance(formula, str) else {**formula, location: plain}
    return ResponseTerms(found, family, weights)


def _terms(text: str) -> dict[str, dict[str, Any]]:
    """Arguments of each term, by its name: columns as text, numbers as numbers."""
    tree = parse("formula", text)
    terms = tree.terms if isinstance(tree, Sum) and "-" not in tree.signs else (tree,)
    found: dict[str, dict[str, Any]] = {}
    for term in terms:
        match term:
            case FunctionCall(name) if name in _ARGUMENTS and name not in found:
                found[name] = _arguments(term)
            case _:
                _fail(f"{_SHAPE}, each once", repr(text.strip()))
    return found


def _arguments(term: FunctionCall) -> dict[str, Any]:
    """The arguments of a term by name."""
    allowed = _ARGUMENTS[term.function]
    positional = [Keyword(name, node) for name, node in zip(allowed, term.arguments, strict=False)]
    words = [*positional, *term.keywords]
    names = {word.name for word in words}
    given = len(term.arguments) + len(term.keywords)
    if not names or not names <= {*allowed} or len(names) < given:
        _fail(f"{term.function}({', '.join(allowed)})", f"other arguments of {term.function}(...)")
    return {word.name: _value(term.function, word.value) for word in words}


def _value(term: str, node: Node) -> str | float:
    """A column, or a number."""
    match node:
        case Name(name):
            return name
        case Constant(value=int() | float() as number):
            return float(number)
        case Operation("-", (Constant(value=int() | float() as number),)):
            return -float(number)
    remedy = "Leave out a bound that there is not" if term == "trunc" else "Add a column"
    _fail(f"columns and numbers in {term}(...)", "another expression", remedy)


def _around(name: str, given: Mapping[str, Any], family: Family) -> Family:
    """The family of a term around another one."""
    if name == "cens":
        if "status" not in given:
            _fail("cens(status) with a column of the status", "none")
        upper = _column(name, given["upper"]) if "upper" in given else None
        return CensoredFamily(family=family, status=_column(name, given["status"]), upper=upper)
    if name == "trunc":
        return TruncatedFamily(family=family, lower=given.get("lb"), upper=given.get("ub"))
    trials = given["n"]
    if not isinstance(trials, str):
        if trials != int(trials):
            _fail("a column or a whole number of trials", number_text(trials))
        trials = int(trials)
    return family.with_trials(trials)


def _column(term: str, value: str | float) -> str:
    if not isinstance(value, str):
        _fail(f"a column in {term}(...)", f"{value:g}")
    return value


def _fail(expected: str, got: str, remedy: str = "") -> NoReturn:
    fail("formula", expected, got, remedy)
