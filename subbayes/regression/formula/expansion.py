"""Expand the operators of terms: `a*b` is `a + b + a:b`, `a/b` is `a + a:b`.

A term is a product of factors, an element of a set of products; the intercept is the empty one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import TypeGuard

import pandas as pd

from subbayes.data.columns import as_numpy
from subbayes.regression.formula.checks import check_columns, check_no_dates, different_values
from subbayes.regression.formula.functions import KNOWN, fail_as_summand, options_of
from subbayes.regression.formula.grammar import (
    COMPARISONS,
    Bar,
    Constant,
    Crossing,
    FunctionCall,
    Name,
    Node,
    Operation,
    Sum,
    label,
    walk,
)
from subbayes.utils.checks import fail
from subbayes.utils.memory import check_memory
from subbayes.utils.registry import TERMS

_PRODUCTS = 10_000  # terms that a formula expands to, before equal ones are merged
_ORDER = 8  # factors of an interaction
_COLUMNS = 10_000  # columns of the design matrix

Factors = tuple[Node, ...]
Products = dict[frozenset[Node], Factors]


def expand(argument: str, tree: Node) -> tuple[list[Factors], list[Bar | FunctionCall], set[str]]:
    """The factors of each term, those of fewer factors first, and the terms of this package.

    The columns that the factors read come last, also those of terms that are subtracted.

    Raises:
        InputError: a factor with anything but columns, numbers, operators and known functions;
            a term of this package in an interaction; or a formula that is too large.

    Example:
        >>> from subbayes.regression.formula.grammar import parse
        >>> products, others, columns = expand("formula", parse("formula", "a:b + a + s(x)"))
        >>> [":".join(map(label, factors)) for factors in products], len(others)
        (['', 'a', 'a:b'], 1)
    """
    expansion = _Expansion(argument)
    found = expansion.sum({frozenset(): ()}, tree)
    for factors in found.values():
        if any(map(_is_zero, factors)) or (factors and not order(factors)):
            fail(argument, "numbers and columns as terms", label(factors[0]))
    return sorted(found.values(), key=order), expansion.others, expansion.columns


def order(factors: Factors) -> int:
    """The number of factors that are no numbers."""
    return sum(not isinstance(factor, Constant) for factor in factors)


class _Expansion:
    def __init__(self, argument: str) -> None:
        self.argument = argument
        self.others: list[Bar | FunctionCall] = []
        self.columns: set[str] = set()

    def sum(self, found: Products, node: Node) -> Products:
        """Products with those of a sum added and subtracted."""
        tree = node if isinstance(node, Sum) else Sum((node,), ("+",), ("",))
        for term, sign, source in zip(tree.terms, tree.signs, tree.sources, strict=True):
            added = (sign == "+") != _is_zero(term)
            if _is_other(term):
                if not added:
                    fail(self.argument, f"{source!r} added with +", f"- {source}", "Leave it out")
                self.others.append(term)
                continue
            terms = self.products(Constant(1, "1") if _is_zero(term) else term)
            if added:
                found = _joined(found, terms)
            else:
                found = {key: factors for key, factors in found.items() if key not in terms}
        return found

    def products(self, node: Node) -> Products:
        match node:
            case Sum():
                return self.sum({}, node)
            case Crossing(symbol, left, right):
                return self.crossing(symbol, left, right)
            case Constant(value=1):
                return {frozenset(): ()}
        if _is_other(node):
            fail_as_summand(self.argument, node)
        if node == Name("Intercept"):  # a name of the summary
            remedy = "Rename the column, or write 1 for the intercept"
            fail(self.argument, "columns that are not called 'Intercept'", "one", remedy)
        self.columns |= columns_of(node)
        return {frozenset([node]): (node,)}

    def crossing(self, symbol: str, left: Node, right: Node) -> Products:
        first = self.products(left)
        if symbol in ("**", "^"):
            power = right.value if isinstance(right, Constant) else 0
            if power not in range(1, _ORDER + 1):
                fail(self.argument, f"exponents from 1 to {_ORDER}", f"{symbol} ...")
            self.check_count(len(first) ** power)
            found = first
            for _ in range(power - 1):
                found = self.multiplied(found, first)
            return found
        second = self.products(right)
        if symbol == ":":
            return self.multiplied(first, second)
        if symbol == "*":
            return _joined(_joined(first, second), self.multiplied(first, second))
        parents, nested = (second, first) if symbol == "%in%" else (first, second)
        common = tuple(dict.fromkeys(node for factors in parents.values() for node in factors))
        return _joined(parents, self.multiplied({frozenset(common): common}, nested))

    def multiplied(self, first: Products, second: Products) -> Products:
        self.check_count(len(first) * len(second))
        found: Products = {}
        for left in first.values():
            for right in second.values():
                factors = tuple(dict.fromkeys(left + right))
                if len(factors) > _ORDER:
                    fail(self.argument, f"interactions of at most {_ORDER} factors", "more")
                found.setdefault(frozenset(factors), factors)
        return found

    def check_count(self, count: int) -> None:
        if count > _PRODUCTS:
            fail(self.argument, f"at most {_PRODUCTS:,} terms", "more")


def _is_other(node: Node) -> TypeGuard[Bar | FunctionCall]:
    """Whether a node is a term of this package."""
    return isinstance(node, Bar) or (isinstance(node, FunctionCall) and node.function in TERMS)


def _is_zero(node: Node) -> bool:
    return isinstance(node, Constant) and node.text == "0"


def _joined(first: Products, second: Products) -> Products:
    """Products of both; an equal one is that of the first."""
    return first | {key: factors for key, factors in second.items() if key not in first}


# --- checks against a data frame ----------------------------------------------------------------


def columns_of(node: Node, compared: bool = True) -> set[str]:
    """The columns that a factor reads; without `compared` those outside comparisons."""
    match node:
        case Name(name):
            return {name}
        case Operation(symbol) if symbol in COMPARISONS and not compared:
            return set()
        case FunctionCall(function, arguments):
            parts = list(arguments if function.startswith("np.") else arguments[:1])
        case _:
            parts = node.children
    return {name for part in parts for name in columns_of(part, compared)}


def check_terms(
    argument: str,
    text: str,
    products: Sequence[Factors],
    frame: pd.DataFrame,
    others: Set[str] = frozenset(),
) -> tuple[str, ...]:
    """Check terms against a data frame, and return the columns that they read.

    Args:
        argument: name of the argument, for errors.
        text: the formula, likewise.
        products: the factors of each term.
        frame: the data frame.
        others: columns that have to be there too.

    Raises:
        InputError: unknown columns, dates as text, or too many columns of the design matrix.
    """
    factors = dict.fromkeys(factor for factors in products for factor in factors)
    columns = tuple(sorted({*others}.union(*map(columns_of, factors))))
    check_columns(columns, frame)
    for factor in factors:
        if isinstance(factor, Name):
            check_no_dates(factor.name, frame[factor.name])
    widths = {factor: _width(argument, factor, frame) for factor in factors}
    total = sum(math.prod(widths[factor] for factor in factors) for factors in products)
    check_size(argument, text, total, len(frame))
    return columns


def check_size(argument: str, text: str, total: int, rows: int) -> None:
    """Raise `InputError` for a design matrix that is too large.

    Args:
        argument: name of the argument, for errors.
        text: the right-hand side of a formula.
        total: an upper bound of its number of columns.
        rows: number of rows.
    """
    if total > _COLUMNS:
        fail(argument, f"at most {_COLUMNS:,} columns", f"up to {total:,} from {text!r}")
    what = f"a design matrix of {rows} rows and up to {total} columns"
    check_memory(argument, what, 8 * rows * total, "Use fewer splines or levels")


def _width(argument: str, factor: Node, frame: pd.DataFrame) -> int:
    """The largest number of columns that a factor can have."""
    calls = [node for node in walk(factor) if isinstance(node, FunctionCall)]
    has_levels = any(call.function == "C" for call in calls)
    levels = 1
    sizes = [1]
    for name in columns_of(factor, compared=False):
        values = as_numpy(frame[name])
        if has_levels or not pd.api.types.is_numeric_dtype(values.dtype):
            levels *= len(different_values(values.dropna()))
    for call in calls:
        if call.function in KNOWN:
            options = options_of(argument, call).values()
            sizes += [
                len(v) if isinstance(v, list) else v for v in options if type(v) in (int, list)
            ]
    return max(min(levels, len(frame)), *sizes)
