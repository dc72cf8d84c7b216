"""The grammar of formulas: from text to a tree, and from a tree to text. Nothing is evaluated.

Terms are joined by the operators of Wilkinson and Rogers (1973, "Symbolic description of factorial
models for analysis of variance"), `+ - * / : ^ ** %in%`. What is in a call or in braces is an
expression, with the operators of Python and their precedence. `(effects | groups)` is a term.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn
from unicodedata import category

import numpy as np

from subbayes.utils.checks import fail

SHAPE = "a formula such as 'y ~ age + C(sex) + s(bmi)'"
ALLOWED = "columns, numbers, operators and functions of docs/methods/semi-structured.md"
_LENGTH = 10_000  # characters of a formula
_BRACKETS = 30  # brackets inside each other
_DEEPEST = 100  # operators inside each other
_LARGEST = 1e15  # constants, which remain exact integers in float64

# --- the tree -----------------------------------------------------------------------------------


class Node:
    """A part of a formula."""

    @property
    def children(self) -> list[Node]:
        """The parts of it."""
        values = (v if isinstance(v, tuple) else (v,) for v in vars(self).values())
        return [value for several in values for value in several if isinstance(value, Node)]


@dataclass(frozen=True)
class Name(Node):
    """A column of the data frame."""

    name: str


@dataclass(frozen=True)
class Constant(Node):
    """A number, a text, True, False or None, and how it is written."""

    value: Any = field(compare=False)
    text: str


@dataclass(frozen=True)
class Listing(Node):
    """A list or a tuple, an option of a call."""

    opened: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Operation(Node):
    """An operator of an expression with one or two operands."""

    symbol: str
    operands: tuple[Node, ...]


@dataclass(frozen=True)
class Keyword(Node):
    """An option of a call with its name."""

    name: str
    value: Node


@dataclass(frozen=True)
class FunctionCall(Node):
    """A call in an expression, or as a term.

    Attributes:
        source: how it is written in the formula, with one space between words.
    """

    function: str
    arguments: tuple[Node, ...]
    keywords: tuple[Keyword, ...] = ()
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class Crossing(Node):
    """An operator of terms other than + and -."""

    symbol: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Sum(Node):
    """Terms that are added and subtracted, each with its sign and its text."""

    terms: tuple[Node, ...]
    signs: tuple[str, ...]
    sources: tuple[str, ...] = field(compare=False)


@dataclass(frozen=True)
class Bar(Node):
    """Effects that vary among groups: `(left | groups)`, or `||`; left is None if it is empty."""

    left: Node | None
    symbol: str
    groups: Node
    left_source: str = field(compare=False)
    groups_source: str = field(compare=False)
    source: str = field(compare=False)


def walk(node: Node) -> Iterator[Node]:
    """A node and all that is in it, from left to right."""
    yield node
    for child in node.children:
        yield from walk(child)


# --- from text ----------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<quoted>`[^`]+`)|(?P<text>'[^']*'|"[^"]*")"""
    r"""|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))"""
    r"""|(?P<symbol>%in%|\*\*|//|\|\||[<>=!]=|[-+*/:^|&~%<>=(){}\[\],])"""
    r"""|(?P<word>[^\s`'"+*/:^|&~%<>=(){}\[\],!-]+)|(?P<other>.)"""
)
_CONSTANTS = {"True": True, "False": False, "None": None, "np.pi": np.pi, "np.e": np.e}
_BRACKET = {"(": ")", "[": "]", "{": "}"}
_CROSSINGS = {"*": 1, "/": 1, "%in%": 1, ":": 2, "**": 3, "^": 3}
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_POWERS = {
    **dict.fromkeys(COMPARISONS, 1),
    **{":": 2, "|": 2, "^": 3, "&": 4, "+": 5, "-": 5},
    **dict.fromkeys(("*", "/", "//", "%"), 6),
    "**": 8,
}
"""How tightly operators of expressions bind; those of one operand as 7."""
_UNARY = 7


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def _is_of_words(char: str) -> bool:
    return char.isalnum() or char in "._" or category(char)[0] == "M"


def _tokens(text: str) -> list[_Token]:
    found = _TOKEN.finditer(text)
    return [_Token(str(m.lastgroup), m[0], *m.span()) for m in found if m.lastgroup != "space"]


@lru_cache(maxsize=256)
def parse(argument: str, text: str) -> Node:
    """The tree of one side of a formula.

    Args:
        argument: name of the argument, for errors.
        text: one side of a formula.

    Raises:
        InputError: another syntax, or a formula that is too long or too deep.

    Example:
        >>> parse("formula", "a:b")
        Crossing(symbol=':', left=Name(name='a'), right=Name(name='b'))
        >>> written(parse("formula", "{`body mass`/(a-1)**2}"))
        '`body mass` / (a - 1) ** 2'
    """
    if len(text) > _LENGTH:
        fail(argument, f"at most {_LENGTH:,} characters", f"{len(text):,}")
    parser = _Parser(argument, text)
    try:
        tree = parser.sum()
    except RecursionError:
        parser.fail_at_depth()
    if parser.token.kind != "end":
        parser.refuse()
    level: Sequence[Node] = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in node.children]
    if level:
        parser.fail_at_depth()
    return tree


def summands(argument: str, text: str) -> list[tuple[str, str, Node]]:
    """The sign, the text and the tree of each summand of a right-hand side.

    Example:
        >>> [(sign, source) for sign, source, _ in summands("formula", "x - (1 | g)")]
        [('+', 'x'), ('-', '(1 | g)')]
    """
    tree = parse(argument, text)
    if isinstance(tree, Sum):
        return list(zip(tree.signs, tree.sources, tree.terms, strict=True))
    return [("+", " ".join(text.split()), tree)]


class _Parser:
    """A parser by the precedence of operators (Pratt 1973)."""

    def __init__(self, argument: str, text: str) -> None:
        self.argument, self.text = argument, text
        self.tokens = [*_tokens(text), _Token("end", "", len(text), len(text))]
        self.place = depth = 0
        for token in self.tokens:
            depth += (token.text in _BRACKET) - (token.text in _BRACKET.values())
            if depth > _BRACKETS:
                fail(argument, f"at most {_BRACKETS} brackets inside each other", "more")

    @property
    def token(self) -> _Token:
        return self.tokens[self.place]

    @property
    def symbol(self) -> str:
        """The next symbol; "" before names and numbers."""
        return self.token.text if self.token.kind == "symbol" else ""

    def take(self) -> _Token:
        self.place += 1
        return self.tokens[self.place - 1]

    def expect(self, symbol: str) -> None:
        if self.symbol != symbol:
            self.refuse()
        self.place += 1

    def source(self, start: int) -> str:
        """The text from a token to the one before the next, with one space between words."""
        begin, end = self.tokens[start].start, self.tokens[self.place - 1].end
        return " ".join(self.text[begin:end].split())

    def refuse(self) -> NoReturn:
        """Raise for the next token."""
        remedy = "Close all brackets" if self.text.count("(") > self.text.count(")") else ""
        if self.token.kind == "end":
            fail(self.argument, SHAPE, f"{self.text!r}, which ends too early", remedy)
        fail(self.argument, ALLOWED, f"{self.token.text!r} in {self.text!r}", remedy)

    def fail_at_depth(self) -> NoReturn:
        expected = f"at most {_DEEPEST} operators inside each other"
        fail(self.argument, expected, repr(self.text[:80]), "Add a column to the data frame")

    def sum(self) -> Node:
        """Terms with their signs; of several signs in a row, an odd number of - is -."""
        nodes: list[Node] = []
        signs: list[str] = []
        sources: list[str] = []
        while not nodes or self.symbol in ("+", "-"):
            minus = False
            while self.symbol in ("+", "-"):
                minus ^= self.take().text == "-"
            start = self.place
            nodes.append(self.crossing())
            signs.append("-" if minus else "+")
            sources.append(self.source(start))
        return nodes[0] if signs == ["+"] else Sum(tuple(nodes), tuple(signs), tuple(sources))

    def crossing(self, least: int = 0) -> Node:
        left = self.term()
        while (power := _CROSSINGS.get(self.symbol, 0)) > least:
            symbol = self.take().text
            left = Crossing(symbol, left, self.crossing(power - (power == 3)))
        return left

    def term(self) -> Node:
        if self.symbol == "(":
            return self.brackets()
        if self.symbol == "{":
            return self.braces()
        if self.token.kind not in ("number", "quoted", "word"):
            self.refuse()
        return self.atom()

    def brackets(self) -> Node:
        """Terms in brackets, or effects that vary."""
        start = self.place
        self.take()
        left = None if self.symbol in ("|", "||") else self.sum()
        left_source, symbol = self.source(start + 1), self.symbol
        if symbol not in ("|", "||"):
            self.expect(")")
            assert left is not None
            return left
        self.take()
        groups_start = self.place
        groups = self.sum()
        groups_source = self.source(groups_start)
        if self.symbol in ("|", "||"):
            shape = "(effects | groups) or (effects || groups)"
            fail(self.argument, shape, repr(self.text))
        self.expect(")")
        return Bar(left, symbol, groups, left_source, groups_source, self.source(start))

    def braces(self) -> Node:
        self.expect("{")
        node = self.expression()
        self.expect("}")
        return node

    def expression(self, least: int = 0) -> Node:
        signs = []
        while self.symbol in ("+", "-", "~"):
            signs.append(self.take().text)
        left = self.expression(_UNARY) if signs else self.operand()
        for sign in reversed(signs):
            left = Operation(sign, (left,))
        while (power := _POWERS.get(self.symbol, 0)) > least:
            symbol = self.take().text
            left = Operation(symbol, (left, self.expression(power - (symbol == "**"))))
            least = max(least, power == 1)  # a < b < c is refused
        return left

    def operand(self) -> Node:
        if self.symbol not in ("(", "["):
            return self.atom()
        opened = self.take().text
        items, closed = [self.expression()] if self.symbol != "]" else [], _BRACKET[opened]
        is_group = opened == "(" and self.symbol == ")" and len(items) == 1
        while self.symbol == ",":
            self.take()
            if self.symbol != closed:
                items.append(self.expression())
        self.expect(closed)
        return items[0] if is_group else Listing(opened, tuple(items))

    def atom(self) -> Node:
        """A number, a text, a column or a call."""
        start, token = self.place, self.token
        kind, text = token.kind, token.text
        if kind in ("number", "text"):
            self.take()
            whole = text.isdigit()
            if kind == "number" and float(text) > _LARGEST:
                fail(self.argument, ALLOWED, f"a number above {_LARGEST:g} in {self.text!r}")
            value = text[1:-1] if kind == "text" else int(text) if whole else float(text)
            return Constant(value, repr(value))
        if kind == "quoted":
            self.take()
            return Name(text[1:-1])
        if kind != "word" or not all(map(_is_of_words, text)):
            self.refuse()
        self.take()
        if self.symbol != "(":
            is_constant = text in _CONSTANTS or text.startswith("contr.")
            return Constant(_CONSTANTS.get(text), text) if is_constant else Name(text)
        return self.call("C" if text in ("factor", "as.factor") else text, start)

    def call(self, function: str, start: int) -> Node:
        self.expect("(")
        arguments, keywords = [], []
        while self.symbol != ")":
            following = self.tokens[self.place + 1]
            if self.token.kind == "word" and following.text == "=":
                name = self.take().text
                self.take()
                keywords.append(Keyword(name, self.expression()))
            elif keywords:
                self.refuse()
            elif function == "offset" and self.symbol == "{":
                arguments.append(self.braces())
            else:
                arguments.append(self.expression())
            if self.symbol != ")":
                self.expect(",")
        self.take()
        return FunctionCall(function, tuple(arguments), tuple(keywords), self.source(start))


# --- text ---------------------------------------------------------------------------------------


def written(node: Node, least: int = 0) -> str:
    """An expression as Python writes it, with back-quotes around names where they are needed.

    Args:
        node: an expression.
        least: how tightly the operator around it binds.
    """
    match node:
        case Name(name):
            return name if name.isidentifier() else f"`{name}`"
        case Constant(text=text):
            return text
        case Keyword(name, value):
            return f"{name}={written(value)}"
        case Listing(opened, items):
            comma = "," if opened == "(" and len(items) == 1 else ""
            return f"{opened}{', '.join(map(written, items))}{comma}{_BRACKET[opened]}"
        case FunctionCall(function, arguments, keywords):
            return f"{function}({', '.join(map(written, (*arguments, *keywords)))})"
        case Operation(symbol, (operand,)):
            power, text = _UNARY, symbol + written(operand, _UNARY)
        case Operation(symbol, (left, right)):
            power = _POWERS[symbol]
            of_left, of_right = power + (power in (1, 8)), power + (power != 8)
            text = f"{written(left, of_left)} {symbol} {written(right, of_right)}"
        case _:
            raise AssertionError(node)
    return f"({text})" if power < least else text


def label(factor: Node) -> str:
    """What a factor is called in names of terms: a column by its name without back-quotes."""
    return factor.name if isinstance(factor, Name) else written(factor)


def split_at(text: str, symbol: str) -> list[str]:
    """Split text at a symbol outside brackets and quotes.

    Example:
        >>> split_at("y ~ `a~b` + I(~c)", "~")
        ['y ', ' `a~b` + I(~c)']
    """
    depth, starts, ends = 0, [0], []
    for token in _tokens(text):
        depth += (token.text in _BRACKET) - (token.text in _BRACKET.values())
        if token.text == symbol and depth == 0:
            starts.append(token.end)
            ends.append(token.start)
    return [text[a:b] for a, b in zip(starts, [*ends, len(text)], strict=True)]


def with_columns(formula: str | Mapping[str, str], columns: Sequence[str]) -> Any:
    """A formula in which the columns stand for points of right-hand sides, as in `y ~ .` of R.

    Args:
        formula: the formula, or one for each parameter.
        columns: names of columns.

    Example:
        >>> with_columns("y ~ . + s(x) - x", ["x", "body mass"])
        'y ~ (x + `body mass`) + s(x) - x'
        >>> with_columns("y ~ .:g", ["x"])
        'y ~ (x):g'
    """
    if not isinstance(formula, str):
        return {name: with_columns(text, columns) for name, text in formula.items()}
    left, *right = split_at(formula, "~")
    points = [token for token in _tokens(formula) if token.text == "." and token.start > len(left)]
    if len(right) != 1 or not points:
        return formula
    every = " + ".join(written(Name(column)) for column in columns) or "1"
    for point in reversed(points):
        formula = f"{formula[: point.start]}({every}){formula[point.end :]}"
    return formula
