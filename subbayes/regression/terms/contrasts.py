"""Contrasts of the levels of a factor: treatment, sum, Helmert, differences and polynomials.

Beside an intercept a factor of n levels has n - 1 columns, the rows of a matrix of contrasts;
without one it has an indicator of each level. The matrices are those of R, but for differences
(Venables and Ripley 2002, "Modern Applied Statistics with S", section 6.2, `contr.sdif`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from subbayes.data.levels import check_levels
from subbayes.regression.formula.functions import contrasts_of, options_of
from subbayes.regression.formula.grammar import FunctionCall, Name, Node, label
from subbayes.regression.shapes import TermColumns
from subbayes.regression.terms.transforms import polynomials
from subbayes.utils.checks import fail, one_of


@dataclass(frozen=True)
class Coding:
    """The levels of a factor, and their contrasts.

    Attributes:
        name: the factor.
        key: the column whose values are the levels, or the expression.
        is_column: whether it is a column.
        levels: the levels in training.
        kind: the kind of contrasts.
        options: of the contrasts.
        spans_intercept: whether indicators of the levels are contrasts where others span these.
    """

    name: str
    key: str
    is_column: bool
    levels: list[Any]
    kind: str = "treatment"
    options: Mapping[str, Any] = field(default_factory=dict)
    spans_intercept: bool = True

    @property
    def reference(self) -> Any:
        """The level that the others are compared with; None if contrasts have none."""
        if self.kind not in ("treatment", "SAS"):
            return None
        level = self.levels[-1 if self.kind == "SAS" else 0]
        level = self.options.get("reference", self.options.get("base", level))
        if level not in self.levels:
            fail(f"term {self.name!r}", one_of(self.levels), repr(level))
        return level

    def columns(self, values: Any, reduced: bool) -> tuple[TermColumns, list[str]]:
        """The columns of values, 0 for those that are no level, and their names.

        Args:
            values: the values of rows.
            reduced: contrasts in place of indicators.

        Raises:
            InputError: values of an expression that are undefined or no level; those of columns
                are checked by the design.
        """
        if not self.is_column:
            cells = pd.Series(values)
            if bad := int(cells.isna().sum()):
                got = f"{bad} of {len(cells)} rows without one"
                fail(f"term {self.name!r}", "a level in each row", got, "Drop these rows")
            remedy = "Drop these rows, or make a column of the levels"
            check_levels(f"term {self.name!r}", self.levels, cells, remedy)
        matrix, labels = np.eye(len(self.levels)), self.levels
        if reduced:
            matrix, labels = self._contrasts()
        cells = pd.Index(np.asarray(values), dtype=object)
        codes = pd.Index(self.levels, dtype=object).get_indexer(cells)
        rows = np.vstack([matrix, np.zeros(matrix.shape[1])])[codes]
        return rows, [f"{self.name}[{label}]" for label in labels]

    def _contrasts(self) -> tuple[Float[np.ndarray, "levels columns"], list[str]]:
        """The matrix of contrasts, and what they are called."""
        n, levels, options = len(self.levels), self.levels, self.options
        above, steps = np.triu(np.ones((n, n - 1))), np.arange(1, n)
        if self.kind in ("treatment", "SAS"):
            base = levels.index(self.reference)
            others = [level for i, level in enumerate(levels) if i != base]
            return np.delete(np.eye(n), base, axis=1), [f"T.{level}" for level in others]
        if self.kind == "sum":
            matrix = np.eye(n, n - 1)
            matrix[-1] = -1
            return matrix, [f"S.{level}" for level in levels[:-1]]
        if self.kind == "poly":
            scores = np.array(options.get("scores", range(n)), dtype=np.float64)
            if len(scores) != n:
                fail(f"term {self.name!r}", f"{n} scores", f"{len(scores)}")
            powers = [".L", ".Q", ".C", *(f"^{k}" for k in range(4, n))]
            return polynomials(scores, n - 1)(scores), powers[: n - 1]
        forward = options.get("reverse", options.get("backward", True))
        named = levels[1:] if forward else levels[:-1]
        if self.kind == "diff":
            return (steps / n - above) * (1 if forward else -1), [f"D.{level}" for level in named]
        matrix = np.eye(n, n - 1, -1) * steps - above
        matrix = matrix / (steps + 1) if options.get("scale") else matrix
        return matrix if forward else matrix[::-1, ::-1], [f"H.{level}" for level in named]


def coding_of(argument: str, factor: Node, values: Any) -> Coding | None:
    """The coding of a factor by its values in training rows; None for numbers.

    Args:
        argument: name of the argument, for errors.
        factor: the factor.
        values: the values.
    """
    inner, options = factor, dict[str, Any]()
    contrasts: tuple[str, dict[str, Any]] = ("treatment", {})
    if isinstance(factor, FunctionCall) and factor.function == "C":
        options = options_of(argument, factor)
        inner = factor.arguments[0]
        if "contrasts" in options:
            contrasts = contrasts_of(argument, options["contrasts"])
    elif not isinstance(values, pd.Series):
        return None
    levels = options.get("levels") or list(pd.Series(values).astype("category").cat.categories)
    if len(levels) == 1:
        remedy = "Leave it out of the formula"
        fail(label(inner), "at least 2 levels of a factor", levels[0], remedy)
    spans, is_column = options.get("spans_intercept", True), isinstance(inner, Name)
    key = label(inner if is_column else factor)
    return Coding(label(factor), key, is_column, levels, *contrasts, spans)
