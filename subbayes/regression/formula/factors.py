"""Factors of a formula: which functions, options and constants each may contain.

A factor is parsed as formulaic does, by Python's parser, and never evaluated here.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pandas as pd

from subbayes.data.columns import as_numpy
from subbayes.regression.formula.checks import check_no_dates, different_values
from subbayes.regression.formula.numbers import CONVERSION, FUNCTIONS, without_quotes
from subbayes.regression.formula.options import FLAG, Option, list_of, one_of, read_options, whole
from subbayes.utils.checks import InputError, closest, fail
from subbayes.utils.registry import TERMS

SHAPE = "a formula such as 'y ~ age + C(sex) + s(bmi)'"
"""What a formula looks like, for errors."""

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
        functions: functions that it calls, without their module.
        splines: the largest number of splines or powers that its options ask for.
        is_python: whether it is more than a name, and read by Python's parser.
    """

    def __init__(self, argument: str, text: str, response: bool) -> None:
        self.argument, self.text, self.response = argument, text, response
        self.names: list[str] = []
        self.compared: set[str] = set()
        self.numeric: set[str] = set()
        self.functions = {CONVERSION}  # which evaluation adds
        self.splines = 1
        self.aliases: dict[str, str] = {}
        self.is_python = False

    @property
    def columns(self) -> set[str]:
        """Columns that the factor reads."""
        return self.compared | set(self.names)

    def parse(self) -> None:
        """Check the factor as Python code; it is parsed as formulaic does, and not evaluated."""
        self.is_python = True
        code, self.aliases = without_quotes(self.text)
        with parse_errors(self.argument, self.text):
            self._expression(ast.parse(code, mode="eval").body, whole=True)

    def check_with(self, columns: tuple[str, ...], frame: pd.DataFrame) -> None:
        """Check the factor against the columns that its formula reads."""
        hidden = sorted(self.functions & set(columns))
        if hidden:
            got = f"a column {hidden[0]!r} beside {self.text!r}"
            expected = "columns with other names than the functions"
            fail(self.argument, expected, got, "Rename the column")
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
            elif "C" in self.functions or not pd.api.types.is_numeric_dtype(values.dtype):
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
        fail(self.argument, expected, f"{got} in {self.text!r}", remedy)

    def _expression(self, node: ast.expr, *, whole: bool = False) -> None:
        """Check an expression."""
        match node:
            case ast.Name(id=name):
                self.names.append(self.aliases.get(name, name))
            case ast.Constant(value=int() | float() as number) if _is_number(number):
                pass
            case ast.Attribute(value=ast.Name(id="np"), attr="pi" | "e"):
                self.functions.add("np")
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Invert(), operand=operand):
                self._number(operand)
            case ast.BinOp(op=ast.BitXor()):
                remedy = f"Write {self.text.replace(' ', '').replace('^', '**')}"
                fail(self.argument, "powers with **", repr(self.text), remedy)
            case ast.BinOp(left=left, right=right, op=op) if isinstance(
                op, (*_OPERATORS, ast.BitAnd, ast.BitOr)
            ):
                self._number(left)
                self._number(right)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if not isinstance(
                op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)
            ):
                start = len(self.names)
                for side in (left, right):
                    if not isinstance(side, ast.Constant) or not isinstance(side.value, str):
                        self._expression(side)
                    elif not _is_label(side.value):
                        self._refuse(repr(ast.unparse(side)))
                self.compared |= set(self.names[start:])
                del self.names[start:]
            case ast.Call():
                self._call(node, whole)
            case _:
                self._refuse(repr(ast.unparse(node)))

    def _number(self, node: ast.expr) -> None:
        """Check an expression whose columns have to be numbers."""
        start = len(self.names)
        self._expression(node)
        self.numeric |= set(self.names[start:])

    def _call(self, node: ast.Call, whole: bool) -> None:
        """Check the call of a function."""
        function = ast.unparse(node.func)
        if any(isinstance(arg, ast.Starred) for arg in node.args):
            self._refuse(repr(ast.unparse(node)))
        self.functions.add(function.split(".")[0])
        if isinstance(node.func, ast.Attribute) and function.removeprefix("np.") in _NUMPY:
            count = _NUMPY[node.func.attr]
            if function != f"np.{node.func.attr}" or node.keywords or len(node.args) != count:
                self._refuse(repr(ast.unparse(node)))
            for arg in node.args:
                self._number(arg)
            return
        if function in TERMS:
            remedy = "Add it with +: it cannot be in an interaction, another call or (... | g)"
            fail(self.argument, f"{function}(...) as a summand", repr(self.text), remedy)
        known = _ELEMENTWISE if self.response else _TRANSFORMS | (_TERMS if whole else {})
        if not isinstance(node.func, ast.Name) or function not in known or not node.args:
            if self.response and function in _TERMS | _TRANSFORMS:
                remedy = "Transform the column before fitting"
                fail(self.argument, "an elementwise response", repr(self.text), remedy)
            self._refuse(repr(ast.unparse(node)))
        if function == "offset" and isinstance(node.args[0], ast.Set):  # braces, as elsewhere
            node.args[:1] = node.args[0].elts
        if function in _OF_NUMBERS:
            self._number(node.args[0])
        else:
            self._expression(node.args[0])
        options = read_options(
            self.argument,
            ast.unparse(node),
            known[function],
            node.args[1:],
            node.keywords,
            self._is_coding,
        )
        for value in options.values():
            size = len(value) if isinstance(value, (list, tuple)) else value
            if isinstance(size, int):
                self.splines = max(self.splines, size)

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
        self.functions.add(name.split(".")[0])
        if isinstance(node, ast.Call):
            call, known = ast.unparse(node), _CODINGS[name]
            read_options(self.argument, call, known, node.args, node.keywords, self._is_coding)
        return True
