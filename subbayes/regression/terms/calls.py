"""Terms that are calls such as `s(x, bs="cr", k=8)`, parsed without evaluating them.

A term is one file of this folder, or of another package: a subclass of `CallTerm` whose name is in
`TERMS`, and what it learns, a `LearnedTerm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import pandas as pd
from typing_extensions import override

from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.formula.grammar import Constant, FunctionCall, Name, Node, label, written
from subbayes.regression.formula.options import Option, read_options
from subbayes.regression.terms.law import WrittenTerm
from subbayes.utils.checks import fail


@dataclass(frozen=True)
class Call:
    """A call: its function, columns, options, and the column of `by=`."""

    text: str
    function: str
    columns: tuple[str, ...]
    options: Mapping[str, Any]
    by: str | None
    expressions: Mapping[str, Node] = field(default_factory=dict)


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
    def parse(cls, argument: str, call: FunctionCall) -> Sequence[WrittenTerm]:
        """The terms of a call.

        Args:
            argument: name of the argument, for errors.
            call: the call in the tree of the formula.

        Raises:
            InputError: another number of columns, or unknown options.

        Example:
            >>> from subbayes.regression.formula.grammar import parse
            >>> from subbayes.utils.registry import TERMS
            >>> call = parse("formula", "te(x, `body mass`, k=5)")
            >>> (term,) = TERMS["te"].parse("formula", call)
            >>> term.call.columns, term.call.options
            (('x', 'body mass'), {'k': 5})
        """
        return [cls(parse_call(argument, call, cls))]

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


def parse_call(argument: str, call: FunctionCall, term: type[CallTerm]) -> Call:
    """Read a call of columns with options that are literals; see `CallTerm.parse`."""
    text, known, (least, most) = call.source, term.options, term.most_columns
    for node in call.arguments:
        if isinstance(node, Constant) or not (term.of_expressions or isinstance(node, Name)):
            _fail_at_column(argument, text, node)
    columns = tuple(map(label, call.arguments))
    if not least <= len(columns) <= most or len(set(columns)) < len(columns):
        count = f"{least}" if least == most else f"{least} to {most}"
        fail(
            argument, f"{call.function}(...) of {count} different columns", repr(text), term.remedy
        )
    if term.varies:
        known = {**known, "by": ("a column", lambda value: isinstance(value, Node))}
    keywords = [word for word in call.keywords if written(word) != "k=-1"]  # the default of mgcv
    options = read_options(argument, text, known, [], keywords)
    by = options.pop("by", None)
    if by is not None:
        if not isinstance(by, Name):
            _fail_at_column(argument, text, by)
        by = by.name
    expressions = {label(node): node for node in call.arguments if not isinstance(node, Name)}
    return Call(text, call.function, columns, options, by, expressions)


def _fail_at_column(argument: str, text: str, node: Node) -> NoReturn:
    remedy = "Add a column to the data frame"
    fail(argument, "columns", f"{written(node)!r} in {text!r}", remedy)
