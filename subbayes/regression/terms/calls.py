"""Terms that are calls such as `s(x, bs="cr", k=8)`, parsed without evaluating them.

A term is one file of this folder, or of another package: a subclass of `CallTerm` whose name is in
`TERMS`, and what it learns, a `LearnedTerm`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unicodedata import is_normalized

import pandas as pd
from typing_extensions import override

from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.formula.factors import parse_errors
from subbayes.regression.formula.options import Option, read_options
from subbayes.regression.terms.law import WrittenTerm
from subbayes.utils.checks import fail

_NAMES = re.compile(r"""'[^']*'|"[^"]*"|`([^`]+)`|[^\W\d]\w*""")


@dataclass(frozen=True)
class Call:
    """A call: its function, columns, options, and the column of `by=`."""

    text: str
    function: str
    columns: tuple[str, ...]
    options: Mapping[str, Any]
    by: str | None
    expressions: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallTerm(WrittenTerm):
    """A term that is a call of columns with options; a subclass implements `learn`.

    Attributes:
        call: the call.
        most_columns: the least and the largest number of columns.
        options: what each option has to be.
        varies: whether the term has `by=`.
        of_expressions: whether its columns may be expressions, such as `log(x)`.
        remedy: for another number of columns.
    """

    call: Call
    most_columns: ClassVar[tuple[int, int]] = (1, 1)
    options: ClassVar[Mapping[str, Option]] = {}
    varies: ClassVar[bool] = False
    of_expressions: ClassVar[bool] = False
    remedy: ClassVar[str] = ""

    @classmethod
    def parse(cls, argument: str, text: str) -> Sequence[WrittenTerm]:
        """The terms of a call.

        Args:
            argument: name of the argument, for errors.
            text: the call.

        Raises:
            InputError: other syntax, another number of columns, or unknown options.

        Example:
            >>> from subbayes.utils.registry import TERMS
            >>> (term,) = TERMS["te"].parse("formula", "te(x, `body mass`, k=5)")
            >>> term.call.columns, term.call.options
            (('x', 'body mass'), {'k': 5})
        """
        return [cls(parse_call(argument, text, cls))]

    @property
    @override
    def name(self) -> str:
        return self.call.text

    @override
    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        for name in self.call.columns:
            if name in frame and not has_numbers(frame[name]):
                got = f"{name!r} of dtype {frame[name].dtype} in {self.call.text!r}"
                expected = f"columns of numbers in {self.call.function}(...)"
                fail(argument, expected, got, "Use C(...) or re(...)")
        return self.call.columns + (() if self.call.by is None else (self.call.by,))

    @override
    def width(self, frame: pd.DataFrame) -> int:
        return 1


def parse_call(argument: str, text: str, term: type[CallTerm]) -> Call:
    """Parse a call of columns with options that are literals; see `CallTerm.parse`."""
    code, aliases = _without_names(text)
    with parse_errors(argument, text):
        node = ast.parse(code, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        fail(argument, "a call such as s(x, k=8)", repr(text))
    function, known, (least, most) = node.func.id, term.options, term.most_columns
    with parse_errors(argument, text):
        columns = [
            _as_written(arg, aliases)
            if term.of_expressions and not isinstance(arg, ast.Constant)
            else _column(argument, text, arg, aliases)
            for arg in node.args
        ]
    if not least <= len(columns) <= most or len(set(columns)) < len(columns):
        count = f"{least}" if least == most else f"{least} to {most}"
        fail(argument, f"{function}(...) of {count} different columns", repr(text), term.remedy)
    if term.varies:
        known = {**known, "by": ("a column", str.isidentifier)}
    options = read_options(argument, text, known, [], node.keywords, _is_read_apart)
    by = None
    for word in node.keywords:
        if word.arg == "by":
            by = _column(argument, text, word.value, aliases)
    shown = " ".join(text.split())
    of = zip(node.args, columns, strict=True)
    expressions = tuple(column for arg, column in of if not isinstance(arg, ast.Name))
    return Call(shown, function, tuple(columns), options, by, expressions)


def _is_read_apart(option: str, node: ast.expr) -> bool:
    """Whether an option is the column of `by=`, read after the others, or k=-1, as by default."""
    return option == "by" or (option == "k" and ast.unparse(node) == "-1")


def _without_names(text: str) -> tuple[str, dict[str, str]]:
    """A call with identifiers in place of quoted names and of those that Python changes."""
    aliases: dict[str, str] = {}

    def alias(found: re.Match[str]) -> str:
        name = found[1] or found[0]
        if found[0][0] in "'\"" or (found[1] is None and is_normalized("NFKC", name)):
            return found[0]
        known = {other: alias for alias, other in aliases.items()}
        found_alias = known.get(name, f"_column{len(aliases)}_")
        aliases[found_alias] = name
        return found_alias

    return _NAMES.sub(alias, text), aliases


def _as_written(node: ast.expr, aliases: Mapping[str, str]) -> str:
    """The name of a column, or an expression with the quoted names of its columns."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    text = ast.unparse(node)
    for alias, name in aliases.items():
        text = text.replace(alias, f"`{name}`")
    return text


def _column(argument: str, text: str, node: ast.expr, aliases: Mapping[str, str]) -> str:
    if not isinstance(node, ast.Name):
        remedy = "Add a column to the data frame"
        fail(argument, "columns", f"{ast.unparse(node)!r} in {text!r}", remedy)
    return aliases.get(node.id, node.id)
