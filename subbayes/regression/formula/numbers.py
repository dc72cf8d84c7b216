"""Evaluate formulas in double precision, whatever the dtypes of columns.

As R does, arithmetic takes whole numbers and booleans as numbers in float64: products of small
integers do not overflow, and sums of booleans are no logical operations. Levels of factors, as in
`C(k)`, are the values of the column itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from formulaic import Formula, ModelMatrix, ModelSpec
from formulaic.materializers import PandasMaterializer
from formulaic.materializers.base import FormulaMaterializerMeta
from formulaic.parser.types import Factor
from formulaic.utils.code import sanitize_variable_names
from formulaic.utils.layered_mapping import LayeredMapping

from subbayes.data.levels import check_levels
from subbayes.utils.checks import fail

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

_KNOWN = "__levels__"  # levels of factors in training by expression, in the context


def to_double(values: Any, levels: bool = False) -> Any:
    """Numbers and booleans in float64; other values, such as text, as they are.

    Args:
        values: a column, an array, a number, or anything else.
        levels: convert booleans and integers to int64 instead, so that levels computed from whole
            numbers remain whole, and leave other numbers as they are.

    Example:
        >>> to_double(pd.Series([200, 100], dtype="uint8")) * to_double(np.array([2, 2]))
        0    400.0
        1    200.0
        dtype: float64
    """
    if isinstance(values, (int, float)):  # which neither grow without end nor become complex
        return np.int64(values) if levels and isinstance(values, int) else np.float64(values)
    if not isinstance(values, (pd.Series, np.ndarray)):
        return values
    dtype = values.dtype
    if not pd.api.types.is_numeric_dtype(dtype) or pd.api.types.is_complex_dtype(dtype):
        return values
    target: Any = np.float64
    if levels:
        whole = pd.api.types.is_bool_dtype(dtype) or pd.api.types.is_integer_dtype(dtype)
        if not whole or str(dtype).lower() == "uint64" or pd.isna(values).any():
            return values
        target = np.int64
    if dtype == target:
        return values
    if isinstance(values, np.ndarray):
        return values.astype(target)
    missing = {} if levels else {"na_value": np.nan}
    numbers = values.to_numpy(dtype=target, **missing)
    return pd.Series(numbers, index=values.index, name=values.name)


def without_quotes(expression: str) -> tuple[str, dict[str, str]]:
    """An expression with identifiers in place of quoted names, and these names by identifier.

    Example:
        >>> without_quotes("I(`body mass`*2)")
        ('I( _column_body_mass *2)', {'_column_body_mass': 'body mass'})
    """
    aliases: dict[str, str] = {}
    taken: dict[str, Any] = dict.fromkeys(re.findall(r"\w+", expression))
    return sanitize_variable_names(expression, taken, aliases, template="_column_{}"), aliases


def in_doubles(expression: str) -> str:
    """An expression of a formula, with the operands of its arithmetic converted to float64.

    The operands of comparisons and of & | ~ are not converted, nor are options and columns that
    are levels. ~ is a comparison with 0. Braces around the argument of `offset` are
    left out.

    Example:
        >>> in_doubles("I(a * 2)")
        'I(__double__(__double__(a) * __double__(2)))'
        >>> in_doubles("C(a)")
        'C(a)'
    """
    code, aliases = without_quotes(expression)
    body = _Doubles(aliases).visit(ast.parse(code, mode="eval").body)
    return ast.unparse(body if isinstance(body, ast.Call) else _converted(body, False))


class _Doubles(ast.NodeTransformer):
    """Insert conversions into an expression, and restore the quoted names of columns."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.aliases = aliases
        self.levels = False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        name = self.aliases.get(node.id)
        return node if name is None else ast.Name(f"`{name}`", node.ctx)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            node.left = _converted(node.left, self.levels)
            node.right = _converted(node.right, self.levels)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Invert):  # of whole numbers Python's ~ would be -1 - number
            return ast.Compare(node.operand, [ast.Eq()], [ast.Constant(0)])
        node.operand = _converted(node.operand, self.levels)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = ast.unparse(node.func)
        if function == "C":  # of levels
            self.levels = True
            node.args[0] = self.visit(node.args[0])
            self.levels = False
            return node
        count = len(node.args) if function.startswith("np.") else 1  # the others are options
        for i, arg in enumerate(node.args[:count]):
            if function == "offset" and isinstance(arg, ast.Set):
                (arg,) = arg.elts
            node.args[i] = _converted(self.visit(arg), self.levels)
        return node


def _converted(node: ast.expr, levels: bool) -> ast.expr:
    """The expression, converted."""
    options: list[ast.expr] = [ast.Constant(True)] if levels else []
    return ast.Call(ast.Name(CONVERSION, ast.Load()), [node, *options], [])


class _DoubleMaterializer(PandasMaterializer):
    """formulaic's evaluation of formulas, in float64."""

    REGISTER_NAME = "subbayes"
    REGISTER_INPUTS = ()  # only where it is named

    @FormulaMaterializerMeta.override
    def _lookup(self, name: str) -> tuple[Any, set[Any]]:
        values, variables = super()._lookup(name)
        return to_double(values), variables

    @FormulaMaterializerMeta.override
    def _evaluate(self, expr: str, metadata: Any, spec: ModelSpec) -> tuple[Any, set[Any]]:
        values, variables = super()._evaluate(in_doubles(expr), metadata, spec)
        is_column = factor_column(expr) in self.data.columns  # whose levels `Design` checks
        if getattr(values, "__formulaic_metadata__", None) and not is_column:
            _check_factor(expr, values, self.layered_context[_KNOWN].get(expr))
        return values, variables


def factor_column(expression: Any) -> str:
    """`sex` of `C(sex)`."""
    text = str(expression).strip()
    found = re.match(r"C\((`[^`]*`|[^,)]*)\s*[,)]", text)
    return found[1].strip(" `") if found else text


def _check_factor(expression: str, values: Any, levels: Any) -> None:
    """Check the values of a factor of an expression, such as `C(np.floor(x))`.

    formulaic gives values that are undefined or new the zeros of the reference level.
    """
    if values.__formulaic_metadata__.kind is not Factor.Kind.CATEGORICAL:
        return
    cells = pd.Series(np.asarray(values))
    if bad := int(cells.isna().sum()):
        got = f"{bad} of {len(cells)} rows without one"
        fail(f"term {expression!r}", "a level in each row", got, "Drop these rows")
    if levels is not None:
        remedy = "Drop these rows, or make a column of the levels"
        check_levels(f"term {expression!r}", list(levels), cells, remedy)


def model_matrix(
    formula: str | ModelSpec, frame: pd.DataFrame, context: Mapping[str, Any]
) -> ModelMatrix:
    """All columns of a formula, or of one that was evaluated before, with missing values kept.

    Args:
        formula: a right-hand side that `check_formula` has checked, or its specification.
        frame: the rows, with the columns that it reads and no others.
        context: functions and other names.

    Raises:
        FormulaicError, ValueError: values that a term does not accept.
    """
    known: dict[str, Any] = {}
    if isinstance(formula, ModelSpec):
        states = formula.encoder_state.items()
        known = {str(one): state.get("categories") for one, (_, state) in states}
    context = LayeredMapping({CONVERSION: to_double, _KNOWN: known}, context, FUNCTIONS)
    if isinstance(formula, ModelSpec):
        return formula.get_model_matrix(frame, context=context, na_action="ignore")
    return Formula(formula).get_model_matrix(
        frame, context=context, na_action="ignore", materializer=_DoubleMaterializer
    )
