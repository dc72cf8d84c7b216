"""What a formula may contain, checked before any of it is evaluated.

formulaic evaluates the factors of a formula as Python, and a formula may come from a file. Only
names of columns, numbers, operators and the functions listed here are therefore passed on to it,
in formulas of limited size. The tokens are those of formulaic's own parser, so that what is checked
is what is evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
from formulaic.errors import FormulaicError
from formulaic.parser import DefaultFormulaParser
from formulaic.parser.algos.sanitize_tokens import sanitize_tokens
from formulaic.parser.algos.tokenize import tokenize
from formulaic.parser.types import ASTNode, Token

from subbayes.regression.formula.checks import check_columns
from subbayes.regression.formula.factors import SHAPE, Factor, parse_errors
from subbayes.utils.checks import InputError, fail
from subbayes.utils.memory import check_memory

_LENGTH = 10_000  # characters of a formula
_FACTOR_LENGTH = 1_000  # characters of a factor
_BRACKETS = 30  # brackets inside each other
_PRODUCTS = 10_000  # terms that a formula expands to, before equal ones are merged
_ORDER = 8  # factors of an interaction
_COLUMNS = 10_000  # columns of the design matrix

_KNOWN_BY_TEXT = ("C(", "offset(")
_OPERATOR = re.compile(r"[-+*/:^]+|in")
_VALUE = re.compile(r"[0-9]{1,15}(\.[0-9]{0,15})?|\.[0-9]{1,15}")

# --- formulas -----------------------------------------------------------------------------------


def check_formula(
    argument: str, text: str, frame: pd.DataFrame, *, response: bool = False
) -> tuple[str, ...]:
    """Check one side of a formula, without evaluating it, and return the columns that it reads.

    Args:
        argument: name of the argument, for errors.
        text: one side of a formula.
        frame: the data frame, of which only the names and dtypes of columns are read.
        response: whether it is the left-hand side, which is a single elementwise expression.

    Raises:
        InputError: a factor with anything but columns, numbers, operators and known functions;
            unknown columns; or a formula that is too large. FormulaicError: other wrong syntax.

    Example:
        >>> frame = pd.DataFrame({"age": [20.0], "sex": ["f"]})
        >>> check_formula("formula", "np.log(age) + C(sex):age", frame)
        ('age', 'sex')
        >>> check_formula("formula", "age + open('notes')", frame)
        Traceback (most recent call last):
        ...
        subbayes.InputError: formula: expected columns, numbers, operators and functions ...
    """
    factors = _factors(argument, text, response)
    columns = tuple(sorted({name for factor in factors for name in factor.columns}))
    check_columns(columns, frame)
    for factor in factors:
        factor.check_with(frame)
    _check_size(argument, text)
    widths = {factor.text: factor.width(frame) for factor in factors}
    terms = DefaultFormulaParser().get_terms(text)
    total = sum(math.prod(widths.get(one.expr, 1) for one in term.factors) for term in terms)
    check_size(argument, text, total, len(frame))
    return columns


def _factors(argument: str, text: str, response: bool) -> list[Factor]:
    """The factors of one side of a formula, each of them checked."""
    check_length(argument, text)
    factors, tokens = [], list(_tokens(argument, text))
    numbers = {"1"} | {token.token for token in tokens if token.kind is Token.Kind.VALUE}
    for token in tokens:
        kind, content = token.kind, token.token
        if kind is Token.Kind.NAME or kind is Token.Kind.PYTHON:
            factor = Factor(argument, content, response)
            if kind is Token.Kind.NAME:
                if content == "Intercept" and not response:  # a name of the summary
                    remedy = "Rename the column, or write 1 for the intercept"
                    fail(argument, "columns that are not called 'Intercept'", repr(text), remedy)
                if content in numbers:  # formulaic knows terms by their text
                    remedy = f"Rename the column, or write I(`{content}`)"
                    fail(argument, "columns whose names are no terms", f"`{content}`", remedy)
                factor.names.append(content)
            else:
                factor.parse()
            factors.append(factor)
        elif kind is Token.Kind.VALUE:
            if not _VALUE.fullmatch(content):
                fail(argument, "numbers and columns as terms", content)
        elif kind is Token.Kind.OPERATOR and not _OPERATOR.fullmatch(content):
            remedy = "Close all brackets" if text.count("(") != text.count(")") else ""
            fail(argument, "the operators + - * / : ** ^ and %in%", repr(content), remedy)
        elif kind is Token.Kind.CONTEXT and content not in "()":
            fail(argument, "round brackets", repr(content))
        if response and (len(factors) != 1 or kind not in (Token.Kind.NAME, Token.Kind.PYTHON)):
            remedy = f"Write arithmetic in braces: {{{text}}}"
            fail(argument, "one response", repr(text), remedy)
    if not response:
        _check_texts(argument, factors)
    return factors


def _check_texts(argument: str, factors: list[Factor]) -> None:
    """Refuse columns whose names are the text of a call, as formulaic knows calls by it."""
    calls = {factor.text for factor in factors if factor.is_python}
    for name in (factor.text for factor in factors if not factor.is_python):
        if name in calls or name.replace(" ", "").startswith(_KNOWN_BY_TEXT):
            expected = "columns whose names are no terms"
            fail(argument, expected, f"`{name}`", "Rename the column")


def check_length(argument: str, text: str) -> None:
    """Raise `InputError` for a formula that is too long, or whose brackets are nested too deep."""
    if len(text) > _LENGTH:
        fail(argument, f"at most {_LENGTH:,} characters", f"{len(text):,}")
    deepest = 0
    for brackets in ("()", "[]", "{}"):
        depth = 0
        for char in text:
            depth = max(0, depth + (char == brackets[0]) - (char == brackets[1]))
            deepest = max(deepest, depth)
    if deepest > _BRACKETS:
        fail(argument, f"at most {_BRACKETS} brackets inside each other", deepest)


@contextmanager
def formula_errors(argument: str, text: str) -> Iterator[None]:
    """Convert errors of formulaic to `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (FormulaicError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        if isinstance(error.__cause__, InputError):  # of a function of this package
            raise error.__cause__ from None
        plain = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
        fail(argument, SHAPE, f"{text!r}: {plain}")


def _tokens(argument: str, text: str) -> list[Token]:
    """The tokens of formulaic's parser."""
    found = []
    for token in tokenize(text):
        if len(token.token) > _FACTOR_LENGTH:
            expected = f"factors of at most {_FACTOR_LENGTH:,} characters"
            fail(argument, expected, f"{len(token.token):,}", "Add a column to the data frame")
        with parse_errors(argument, token.token):
            found += sanitize_tokens([token])
    return found


def _check_size(argument: str, text: str) -> None:
    """Raise `InputError` if the operators expand to many terms, or to terms of many factors."""
    tree = DefaultFormulaParser().get_ast(text)
    nodes, sizes = [tree], {}
    for node in nodes:  # grows: parents before children
        if isinstance(node, ASTNode):
            node.args = list(node.args)
            nodes += node.args
    for node in reversed(nodes):
        if not isinstance(node, ASTNode):
            sizes[id(node)] = 1, 1
            continue
        parts = [sizes[id(arg)] for arg in node.args]
        sizes[id(node)] = terms, order = _expanded(argument, node, parts)
        if terms > _PRODUCTS:
            fail(argument, f"at most {_PRODUCTS:,} terms", f"more, from {text!r}")
        if order > _ORDER:
            fail(argument, f"interactions of at most {_ORDER} factors", f"more, from {text!r}")


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


def _expanded(argument: str, node: ASTNode, parts: list[tuple[int, int]]) -> tuple[int, int]:
    """Upper bounds of the number of terms of an operator, and of the factors of each."""
    symbol = str(node.operator.symbol)
    if len(parts) < 2:
        return parts[0] if parts else (1, 1)
    (left, left_order), (right, right_order) = parts
    match symbol:
        case "**" | "^":
            exponent = node.args[1]
            if not isinstance(exponent, Token) or exponent.token not in map(str, range(1, 9)):
                fail(argument, f"exponents from 1 to {_ORDER}", f"'{symbol} {exponent!r}'")
            power = int(exponent.token)
            return left**power, min(left_order * power, left * left_order)
        case ":":
            return left * right, left_order + right_order
        case "*":
            return left + right + left * right, left_order + right_order
        case "/" | "in":
            parent, nested = (parts[1], parts[0]) if symbol == "in" else parts
            return left + right, parent[0] * parent[1] + nested[1]
    return left + right, max(left_order, right_order)
