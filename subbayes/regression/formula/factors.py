"""Factors of a formula: which functions, options and constants each may contain.

A factor is parsed by Python's parser, and never evaluated here. What is checked is returned as it
is evaluated: with the operands of its arithmetic converted to float64. Those of comparisons and of
& | ~ are not converted, nor are options and columns that are levels. ~ is a comparison with 0.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from formulaic.utils.code import sanitize_variable_names

from subbayes.data.columns import as_numpy
from subbayes.regression.formula.checks import check_no_dates, different_values
from subbayes.regression.formula.options import FLAG, Option, list_of, one_of, read_options, whole
from subbayes.utils.checks import InputError, closest, fail
from subbayes.utils.registry import TERMS

SHAPE = "a formula such as 'y ~ age + C(sex) + s(bmi)'"
"""What a formula looks like, for errors."""

CONVERSION = "__double__"
"""Name of `to_double` in evaluated formulas, which no column can have."""

FUNCTIONS = {
    name: getattr(np, name)
    for name in (
        *("abs", "cbrt", "ceil", "exp", "exp2", "expm1", "floor", "sign", "sqrt"),
        *("log", "log10", "log1p", "log2", "square"),
        *("arcsinh", "arctan", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    )
}
"""Functions of one argument, which formulas may call with or without `np.`."""

_LARGEST = 1e15  # constants, which remain exact integers in float64
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)

# --- functions and their options ----------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= _LARGEST


def _is_label(value: Any) -> bool:
    if isinstance(value, str):  # formulaic writes labels into the code that it evaluates
        return not any(char in value for char in '"\\')
    return _is_number(value)


_NUMBER: Option = ("a number", _is_number)
_DEGREE = whole(0, 20)
_EXTRAPOLATION = one_of("raise", "clip", "na", "zero", "extend")
_SPLINE = {"df": whole(1, 1000), "knots": list_of("numbers", _is_number)}
_BOUNDS = {"lower_bound": _NUMBER, "upper_bound": _NUMBER}
_CUBIC = {**_SPLINE, **_BOUNDS, "constraints": one_of("center"), "extrapolation": _EXTRAPOLATION}

_NUMPY = {
    **dict.fromkeys(FUNCTIONS, 1),
    **dict.fromkeys(("arctan2", "maximum", "minimum", "power"), 2),
    **dict.fromkeys(("clip", "where"), 3),
}
"""Functions of NumPy and their numbers of arguments; those of one may be written without `np.`."""
_ELEMENTWISE: dict[str, dict[str, Option]] = {name: {} for name in ("I", *FUNCTIONS)}
_TERMS: dict[str, dict[str, Option]] = {
    "offset": {},
    "C": {
        "contrasts": ("contrasts such as Treatment('a') or contr.sum", lambda v: False),
        "levels": list_of("levels", _is_label),
        "spans_intercept": FLAG,
    },
    "bs": {
        **_SPLINE,
        "degree": _DEGREE,
        "include_intercept": FLAG,
        **_BOUNDS,
        "extrapolation": _EXTRAPOLATION,
    },
    **dict.fromkeys(("cc", "cr", "cs"), _CUBIC),
}
"""Functions that are a factor of their own, with the options that follow their argument."""
_TRANSFORMS: dict[str, dict[str, Option]] = {
    **_ELEMENTWISE,
    "center": {},
    "scale": {"center": FLAG, "scale": FLAG, "ddof": _NUMBER},
    "standardize": {"center": FLAG, "rescale": FLAG, "ddof": _NUMBER},
    "poly": {"degree": whole(1, 50), "raw": FLAG},
}
_OF_NUMBERS = {*_TRANSFORMS, *_TERMS} - {"I", "C"}
_CODINGS: dict[str, dict[str, Option]] = {
    **dict.fromkeys(
        ("Treatment", "contr.treatment", "contr.SAS"),
        {"reference": ("a level", _is_label), "base": ("a level", _is_label)},
    ),
    **dict.fromkeys(("Sum", "contr.sum"), {}),
    **dict.fromkeys(("Poly", "contr.poly"), {"scores": list_of("numbers", _is_number)}),
    **dict.fromkeys(("Helmert", "contr.helmert"), {"reverse": FLAG, "scale": FLAG}),
    **dict.fromkeys(("Diff", "contr.diff"), {"backward": FLAG}),
}
"""Contrasts of `C(...)`."""


def without_quotes(expression: str) -> tuple[str, dict[str, str]]:
    """An expression with identifiers in place of quoted names, and these names by identifier.

    Example:
        >>> without_quotes("I(`body mass`*2)")
        ('I( _column_body_mass *2)', {'_column_body_mass': 'body mass'})
    """
    aliases: dict[str, str] = {}
    taken: dict[str, Any] = dict.fromkeys(re.findall(r"\w+", expression))
    return sanitize_variable_names(expression, taken, aliases, template="_column_{}"), aliases


@contextmanager
def parse_errors(argument: str, factor: str) -> Iterator[None]:
    """Convert errors of Python's parser to `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        fail(argument, SHAPE, f"{factor[:80]!r}, which Python cannot parse")


class Factor:
    """A factor of a formula, and the names that it reads.

    Attributes:
        names: names outside comparisons, in order.
        compared: names in comparisons.
        numeric: names that have to be columns of numbers, because arithmetic with Python objects
            takes unlimited time.
        has_levels: whether it calls C(...).
        splines: the largest number of splines or powers that its options ask for.
        is_python: whether it is more than a name, and read by Python's parser.
        code: what is evaluated in its place.

    Example:
        >>> factor = Factor("formula", "I(`body mass` * 2)", response=False)
        >>> factor.parse()
        >>> factor.columns, factor.code
        ({'body mass'}, 'I(__double__(__double__(`body mass`) * __double__(2)))')
    """

    def __init__(self, argument: str, text: str, response: bool) -> None:
        self.argument, self.text, self.response = argument, text, response
        self.names: list[str] = []
        self.compared: set[str] = set()
        self.numeric: set[str] = set()
        self.splines = 1
        self.aliases: dict[str, str] = {}
        self.is_python = self.has_levels = self._in_levels = False
        self.code = text

    @property
    def columns(self) -> set[str]:
        """Columns that the factor reads."""
        return self.compared | set(self.names)

    def parse(self) -> None:
        """Check the factor as Python code."""
        self.is_python = True
        code, self.aliases = without_quotes(self.text)
        with parse_errors(self.argument, self.text):
            body = self._expression(ast.parse(code, mode="eval").body, whole=True)
            self.code = ast.unparse(body if isinstance(body, ast.Call) else self._double(body))

    def check_with(self, frame: pd.DataFrame) -> None:
        """Check the factor against the columns that it reads."""
        for name in sorted(self.numeric):
            if not pd.api.types.is_numeric_dtype(frame[name].dtype):
                got = f"{name!r} of dtype {frame[name].dtype} in {self.text!r}"
                fail(self.argument, "columns of numbers in arithmetic", got, "Convert the column")
        if not self.is_python and not self.response:
            for name in self.names:
                check_no_dates(name, frame[name])

    def width(self, frame: pd.DataFrame) -> int:
        """The largest number of columns that it can have."""
        levels = [1]
        for name in self.names:
            values = as_numpy(frame[name])
            if isinstance(values.dtype, pd.CategoricalDtype):
                levels.append(len(values.dtype.categories))
            elif self.has_levels or not pd.api.types.is_numeric_dtype(values.dtype):
                levels.append(len(different_values(values.dropna())))
        return max(min(math.prod(levels), max(len(frame), *levels)), self.splines)

    def _refuse(self, got: str) -> NoReturn:
        known = [*(_ELEMENTWISE if self.response else _TERMS | _TRANSFORMS)]
        if not self.response:
            known += TERMS
        known += [f"np.{name}" for name in _NUMPY if name not in FUNCTIONS]
        expected = "columns, numbers, operators and functions of docs/methods/semi-structured.md"
        remedy = closest(got.strip("'\"").partition("(")[0], known)
        if self.response and "cbind(" in self.text:
            remedy = "Write 'successes | trials(n)' in the place of cbind(successes, n - successes)"
        if self.response and "Surv(" in self.text:
            remedy = "Write 'time | cens(alive)', where alive is true if the event was not seen"
        fail(self.argument, expected, f"{got} in {self.text!r}", remedy)

    def _expression(self, node: ast.expr, *, whole: bool = False) -> ast.expr:
        """Check an expression, and return it as it is evaluated."""
        match node:
            case ast.Name(id=name):
                self.names.append(self.aliases.get(name, name))
                return ast.Name(f"`{self.aliases[name]}`") if name in self.aliases else node
            case ast.Constant(value=int() | float() as number) if _is_number(number):
                return node
            case ast.Attribute(value=ast.Name(id="np"), attr="pi" | "e"):
                return node
            case ast.UnaryOp(op=ast.Invert(), operand=operand):  # ~ of whole numbers is -1 - number
                return ast.Compare(self._number(operand), [ast.Eq()], [ast.Constant(0)])
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                return ast.UnaryOp(node.op, self._double(self._number(operand)))
            case ast.BinOp(op=ast.BitXor()):
                remedy = f"Write {self.text.replace(' ', '').replace('^', '**')}"
                fail(self.argument, "powers with **", repr(self.text), remedy)
            case ast.BinOp(left=left, right=right, op=ast.BitAnd() | ast.BitOr()):
                return ast.BinOp(self._number(left), node.op, self._number(right))
            case ast.BinOp(left=left, right=right, op=op) if isinstance(op, _OPERATORS):
                sides = [self._double(self._number(side)) for side in (left, right)]
                return ast.BinOp(sides[0], op, sides[1])
            case ast.Compare(left=left, ops=[op], comparators=[right]) if not isinstance(
                op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)
            ):
                start = len(self.names)
                sides = [self._side(side) for side in (left, right)]
                self.compared |= set(self.names[start:])
                del self.names[start:]
                return ast.Compare(sides[0], [op], sides[1:])
            case ast.Call():
                return self._call(node, whole)
        self._refuse(repr(ast.unparse(node)))

    def _side(self, node: ast.expr) -> ast.expr:
        """A side of a comparison, which may be text."""
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            return self._expression(node)
        return node if _is_label(node.value) else self._refuse(repr(ast.unparse(node)))

    def _number(self, node: ast.expr) -> ast.expr:
        """An expression whose columns have to be numbers."""
        start = len(self.names)
        found = self._expression(node)
        self.numeric |= set(self.names[start:])
        return found

    def _double(self, node: ast.expr) -> ast.expr:
        """A checked expression, converted to float64, or to whole numbers where it has levels."""
        levels: list[ast.expr] = [ast.Constant(True)] if self._in_levels else []
        return ast.Call(ast.Name(CONVERSION), [node, *levels], [])

    def _call(self, node: ast.Call, whole: bool) -> ast.expr:
        """Check the call of a function."""
        function, call = ast.unparse(node.func), ast.unparse(node)
        if any(isinstance(arg, ast.Starred) for arg in node.args):
            self._refuse(repr(call))
        self.has_levels = self.has_levels or function == "C"
        if isinstance(node.func, ast.Attribute) and function.removeprefix("np.") in _NUMPY:
            count = _NUMPY[node.func.attr]
            if function != f"np.{node.func.attr}" or node.keywords or len(node.args) != count:
                self._refuse(repr(call))
            return ast.Call(node.func, [self._double(self._number(arg)) for arg in node.args], [])
        if function in TERMS:
            remedy = "Add it with +: it cannot be in an interaction, another call or (... | g)"
            fail(self.argument, f"{function}(...) as a summand", repr(self.text), remedy)
        known = _ELEMENTWISE if self.response else _TRANSFORMS | (_TERMS if whole else {})
        if not isinstance(node.func, ast.Name) or function not in known or not node.args:
            if self.response and function in _TERMS | _TRANSFORMS:
                remedy = "Transform the column before fitting"
                fail(self.argument, "an elementwise response", repr(self.text), remedy)
            self._refuse(repr(call))
        first, *others = node.args
        if function == "offset" and isinstance(first, ast.Set):  # braces, as elsewhere
            first, *more = first.elts
            others = [*more, *others]
        self._in_levels, outside = self._in_levels or function == "C", self._in_levels
        checked = (self._number if function in _OF_NUMBERS else self._expression)(first)
        argument = checked if function == "C" else self._double(checked)
        self._in_levels = outside
        known_options, keywords = known[function], node.keywords
        options = read_options(
            self.argument, call, known_options, others, keywords, self._is_coding
        )
        for value in options.values():
            size = len(value) if isinstance(value, (list, tuple)) else value
            if isinstance(size, int):
                self.splines = max(self.splines, size)
        return ast.Call(node.func, [argument, *others], node.keywords)

    def _is_coding(self, option: str, node: ast.expr) -> bool:
        """Whether an option is contrasts, such as `Treatment('a')`, which are checked, or None."""
        if isinstance(node, ast.Constant) and node.value is None:
            return True
        if option != "contrasts":
            return False
        function = node.func if isinstance(node, ast.Call) else node
        name = ast.unparse(function)
        if name not in _CODINGS:
            return False
        if isinstance(node, ast.Call):
            call, known = ast.unparse(node), _CODINGS[name]
            read_options(self.argument, call, known, node.args, node.keywords, self._is_coding)
        return True
