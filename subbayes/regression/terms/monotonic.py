r"""Monotonic effects of ordered predictors: `mo(x)` (Bürkner and Charpentier 2020).

With D + 1 ordered values, the effect of value j is $b\, D \sum_{i \le j} s_i$ with a simplex s: b
is the average difference between neighbours, and s how it is distributed among them ("Modelling
monotonic effects of ordinal predictors in Bayesian regression models", eq. 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.data.levels import check_levels
from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.shapes import ColumnValues, ExtraValues, PointValues, TermColumns
from subbayes.regression.terms.calls import Call, CallTerm
from subbayes.regression.terms.columns import column_scales
from subbayes.regression.terms.law import Counts, Hyperparameter, Law, LearnedTerm, Priors
from subbayes.utils.checks import fail

_MOST = 100  # ordered values


@dataclass(frozen=True)
class MonotonicTerm(CallTerm):
    """A monotonic effect as written."""

    @override
    def width(self, frame: pd.DataFrame) -> int:
        return _MOST

    @override
    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        (name,) = self.call.columns
        if name in frame:
            _values(argument, self.call, frame[name])
        return self.call.columns

    def learn(
        self, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
    ) -> list[LearnedTerm]:
        """Learn the ordered values: all categories, or all whole numbers from least to largest."""
        (variable,) = self.call.columns
        values = _values(argument, self.call, frame[variable])
        if not 2 <= len(values) <= _MOST:
            fail(argument, f"from 2 to {_MOST} ordered values", f"{len(values)} in {self.name}")
        name = prefix + self.name
        code = frame[variable].map({v: i for i, v in enumerate(values)}).astype(float)
        sd = float(column_scales(code.to_numpy()[:, None], weights=weights)[0])
        learned = MonotonicColumns(
            name=name,
            kind="monotonic",
            labels=tuple(f"{name}[{a} to {b}]" for a, b in zip(values, values[1:], strict=False)),
            variables=(variable,),
            law=MonotonicLaw(
                (
                    Hyperparameter(name, "effect", 1 / max(sd, 1e-6), size=0),
                    Hyperparameter(f"simplex({name})", "simplex", size=0),
                )
            ),
            values=tuple(values),
        )
        return [learned]


def _values(argument: str, call: Call, column: pd.Series) -> Sequence[Any]:
    """The ordered values of a column."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        if column.cat.ordered:
            return list(column.cat.remove_unused_categories().cat.categories)
    elif has_numbers(column):
        present = column.dropna().to_numpy(dtype=np.float64)
        if np.isfinite(present).all() and (present == present.round()).all() and len(present):
            low, high = int(present.min()), int(present.max())
            if high - low >= _MOST:
                fail(argument, f"at most {_MOST} ordered values", f"{low} to {high} in {call.text}")
            return list(range(low, high + 1))
    fail(
        argument,
        "an ordered category or whole numbers in mo(...)",
        f"{call.columns[0]!r} of dtype {column.dtype}",
        f"Pass pd.Categorical(data[{call.columns[0]!r}], categories=[...], ordered=True)",
    )


@dataclass(frozen=True)
class MonotonicColumns(LearnedTerm):
    """Indicators of each step up to a value; `values` are the ordered values."""

    values: tuple[Any, ...]

    def columns(self, frame: pd.DataFrame) -> TermColumns:
        """Column i is 1 for rows above value i.

        Raises:
            InputError: values unseen in training, which have no effect.
        """
        (variable,) = self.variables
        check_levels(variable, list(self.values), frame[variable], "Drop these rows")
        place = {value: i for i, value in enumerate(self.values)}
        code = np.array([place[v] for v in frame[variable].tolist()], dtype=np.int64)
        return (code[:, None] > np.arange(len(self.values) - 1)).astype(np.float64)


@dataclass(frozen=True)
class MonotonicLaw(Law):
    """The law of the steps; the first coordinate is that of b, the others those of the simplex."""

    is_linear = False
    hyperparameters: tuple[Hyperparameter, ...]

    def _parts(self, zeta: Tensor, priors: Priors) -> tuple[Tensor, Tensor]:
        """Draws of b and of the simplex."""
        effect, simplex = (priors[part.name] for part in self.hyperparameters)
        return effect.from_standard(zeta[..., :1]), simplex.from_standard(zeta[..., 1:])

    def coefficients(self, zeta: ColumnValues, extra: ExtraValues, priors: Priors) -> ColumnValues:
        """The differences between neighbours, $b D s_i$."""
        effect, simplex = self._parts(zeta, priors)
        return effect * zeta.shape[-1] * simplex

    def blocks(self, count: int) -> list[range]:
        """None: the steps are not normal."""
        return []

    def reported(
        self, zeta: Float[Tensor, "S c"], extra: Float[Tensor, "S e"], priors: Priors
    ) -> dict[str, PointValues]:
        """B, and the parts of the simplex."""
        effect, simplex = self._parts(zeta, priors)
        name, parts = (part.name for part in self.hyperparameters)
        found = {name: effect[..., 0]}
        if simplex.shape[-1] > 1:
            found |= {f"{parts}[{i + 1}]": s for i, s in enumerate(torch.unbind(simplex, -1))}
        return found
