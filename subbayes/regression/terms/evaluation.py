"""Evaluate the expressions of formulas in double precision, whatever the dtypes of columns.

As R does, arithmetic takes whole numbers and booleans as numbers in float64: products of small
integers do not overflow, and sums of booleans are no logical operations. Levels of factors, as in
`C(k % 2)`, are computed in int64 from whole numbers, and comparisons and & | ~ take values as they
are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from subbayes.regression.formula.functions import FACTORS, KNOWN, NUMPY, options_of, refuse
from subbayes.regression.formula.grammar import (
    COMPARISONS,
    Constant,
    FunctionCall,
    Name,
    Node,
    Operation,
    label,
)
from subbayes.regression.terms.transforms import TRANSFORMS, Transform
from subbayes.utils.checks import fail

_OPERATORS = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv},
    **{"//": operator.floordiv, "%": operator.mod, "**": operator.pow},
    **{"&": operator.and_, "|": operator.or_, "==": operator.eq, "!=": operator.ne},
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
}


class Evaluation:
    """The values of factors at rows.

    Args:
        argument: name of the argument, for errors.
        frame: the rows.
        learned: what functions have learned from training rows, by their calls; what is missing is
            learned from these rows.
        response: whether a factor is the response, which is elementwise.
    """

    def __init__(
        self,
        argument: str,
        frame: pd.DataFrame,
        learned: Mapping[Node, Transform] | None = None,
        *,
        response: bool = False,
    ) -> None:
        self.argument, self.frame, self.response = argument, frame, response
        self.learned = dict(learned or {})

    def factor(self, factor: Node) -> Any:
        """Numbers in float64, shape (n,) or (n, columns), or the values of a factor of levels.

        Raises:
            InputError: anything but columns, numbers, operators and known functions.
        """
        self._factor = factor
        self._of_levels = False
        match factor:
            case FunctionCall("C", (Name(name), *_)) if not self.response:
                return self.frame[name]
            case FunctionCall("C", (inner, *_)) if not self.response:
                self._of_levels = True
                with np.errstate(all="ignore"):
                    return self._value(inner)
        with np.errstate(all="ignore"):
            found = self._double_or_text(factor)
        return found if np.ndim(found) else np.full(len(self.frame), found)

    def _value(self, node: Node) -> Any:
        """The value of an expression in its own dtype; text and categories are a series."""
        match node:
            case Name(name):
                column = self.frame[name]
                if not pd.api.types.is_numeric_dtype(column.dtype):
                    return column
                return column.to_numpy(dtype=getattr(column.dtype, "numpy_dtype", column.dtype))
            case Constant(value=int() | float() as value):
                return value
            case Operation("~", (operand,)):
                return self._number(operand) == 0
            case Operation("-" | "+" as sign, (operand,)):
                return self._double(operand) * (-1 if sign == "-" else 1)
            case Operation(symbol, operands) if symbol in _OPERATORS:
                convert = self._double
                if symbol in COMPARISONS:
                    convert = self._side
                elif symbol in ("&", "|"):
                    convert = self._number
                return np.asarray(_OPERATORS[symbol](*map(convert, operands)))
            case FunctionCall("I", (inner,), ()):
                return self._double_or_text(inner)
            case FunctionCall(name, arguments, ()) if NUMPY.get(name) == len(arguments):
                return getattr(np, name.removeprefix("np."))(*map(self._double, arguments))
            case FunctionCall(name, (inner, *_)) if name in KNOWN and not self.response:
                if name not in FACTORS or (node is self._factor and name != "C"):
                    return self._learned_value(node, inner)
        refuse(self.argument, node, label(self._factor), self.response)

    def _learned_value(self, call: FunctionCall, inner: Node) -> Any:
        """The value of a function that learns from training rows, or of an offset."""
        options, x = options_of(self.argument, call), self._double(inner)
        if call.function == "offset":
            return x
        if call not in self.learned:
            self.learned[call] = TRANSFORMS[call.function](x, **options)
        return self.learned[call](x)

    def _side(self, node: Node) -> Any:
        """A side of a comparison, which may be text."""
        if isinstance(node, Constant) and isinstance(node.value, str):
            return node.value
        return self._value(node)

    def _number(self, node: Node) -> Any:
        """The value of an expression of numbers or booleans."""
        value = self._value(node)
        if isinstance(value, pd.Series):
            got = f"{value.name!r} of dtype {value.dtype} in {label(self._factor)!r}"
            fail(self.argument, "columns of numbers in arithmetic", got, "Convert the column")
        return value

    def _double(self, node: Node) -> Any:
        """The value of an expression in float64; of whole numbers that are levels in int64."""
        return self._converted(self._number(node))

    def _double_or_text(self, node: Node) -> Any:
        value = self._value(node)
        return value if isinstance(value, pd.Series) else self._converted(value)

    def _converted(self, value: Any) -> Any:
        value = np.asarray(value)
        if not self._of_levels:
            return value.astype(np.float64, copy=False)
        return value.astype(np.int64) if np.can_cast(value.dtype, np.int64) else value
