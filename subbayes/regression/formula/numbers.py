"""Evaluate formulas in double precision, whatever the dtypes of columns.

As R does, arithmetic takes whole numbers and booleans as numbers in float64: products of small
integers do not overflow, and sums of booleans are no logical operations. Levels of factors, as in
`C(k)`, are the values of the column itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from formulaic import Formula, ModelMatrix, ModelSpec
from formulaic.materializers import PandasMaterializer
from formulaic.materializers.base import FormulaMaterializerMeta
from formulaic.parser.types import Factor as FormulaicFactor
from formulaic.utils.layered_mapping import LayeredMapping

from subbayes.data.levels import check_levels
from subbayes.regression.formula.factors import CONVERSION, FUNCTIONS, Factor
from subbayes.utils.checks import fail

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
        factor = Factor("formula", expr, response=False)
        factor.parse()
        values, variables = super()._evaluate(factor.code, metadata, spec)
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
    if values.__formulaic_metadata__.kind is not FormulaicFactor.Kind.CATEGORICAL:
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
