r"""Smooths of the levels of a factor: `s(x, g, bs="fs")` and `s(g, x, bs="sz")` (Wood 2017, 7.7.4).

With the unpenalised function $\ell$ and the penalised ones Z of `s(x)`, standardised over all
training rows, the function of level j is

$$ f_j(x) = a_j + b_j\, \ell(x) + Z(x)^\top u_j . $$

- "fs": $a_j \sim N(0, \tau_a^2)$, $b_j \sim N(0, \tau_b^2)$ and $u_j \sim N(0, \tau^2 I)$, so that
  all functions shrink to zero: random curves of groups, beside `s(x)` or alone.
- "sz": the functions add up to zero at each x, $\sum_j f_j = 0$, so that they are deviations from
  `s(x)`. $a_j$ and $b_j$ are not penalised, and the $u_j$ are as above given that they add up to
  zero: $u = Q v$ with $Q Q^\top = I - 1 1^\top / J$ and $v \sim N(0, \tau^2 I)$.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.linalg import helmert
from typing_extensions import override

from subbayes.data.levels import levels_of
from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.formula.grammar import FunctionCall
from subbayes.regression.formula.options import one_of
from subbayes.regression.shapes import TermColumns
from subbayes.regression.terms.bases import BASES
from subbayes.regression.terms.calls import CallTerm, parse_call
from subbayes.regression.terms.law import BlockLaw, Counts, Hyperparameter, LearnedTerm, WrittenTerm
from subbayes.regression.terms.smooths import SmoothColumns, SmoothTerm, products
from subbayes.utils.checks import fail

_KINDS = ("fs", "sz")


class AnySmoothTerm(SmoothTerm):
    """A smooth `s(...)` as written, of a column, of two, or of a column and a factor."""

    options = SmoothTerm.options | {"bs": one_of(*BASES, *_KINDS)}

    @classmethod
    @override
    def parse(cls, argument: str, call: FunctionCall) -> Sequence[WrittenTerm]:
        smooth = parse_call(argument, call, cls)
        return [(FactorSmoothTerm if smooth.options.get("bs") in _KINDS else SmoothTerm)(smooth)]


@dataclass(frozen=True)
class FactorSmoothTerm(CallTerm):
    """A smooth of a column of numbers for each level of a factor, as written."""

    def _columns(self, frame: pd.DataFrame) -> tuple[str, str]:
        """The column of numbers and the factor, which is last for "fs" and first for "sz"."""
        columns = self.call.columns[:: -1 if self.call.options["bs"] == "sz" else 1]
        if len(columns) == 2 and not has_numbers(frame[columns[0]]):
            columns = columns[::-1]
        return columns[0], columns[-1]

    @override
    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        call, kind = self.call, self.call.options["bs"]
        known = set(frame.columns).issuperset(call.columns)
        x, factor = self._columns(frame) if known else call.columns[-2:] or ("", "")
        if x == factor or call.expressions or call.by or (known and not has_numbers(frame[x])):
            expected = f"a column of numbers and a factor for bs={kind!r}, without by="
            fail(argument, expected, repr(call.text))
        if not {*call.options} <= {"bs", "k", "df"}:
            fail(argument, f"k= alone beside bs={kind!r}", repr(call.text))
        return call.columns

    @override
    def width(self, frame: pd.DataFrame) -> int:
        x, factor = self._columns(frame)
        return (self._smooth(x).width(frame) + 1) * frame[factor].nunique()

    def _smooth(self, x: str) -> SmoothTerm:
        """The smooth of the column of numbers alone."""
        options = {name: value for name, value in self.call.options.items() if name != "bs"}
        return SmoothTerm(replace(self.call, columns=(x,), options=options))

    def learn(
        self, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
    ) -> list[LearnedTerm]:
        """Learn the levels, and the smooth of all rows."""
        x, factor = self._columns(frame)
        levels = levels_of(frame[factor])
        if len(levels) < 2:
            fail(argument, f"at least 2 levels of {factor} in {self.call.text}", levels[0])
        (smooth,) = self._smooth(x).learn(argument, frame, "", weights)
        assert isinstance(smooth, SmoothColumns)
        name, count = prefix + self.call.text, len(smooth.labels) - 1
        ends, wiggles = ["", ":linear"], [f":wiggle{i}" for i in range(1, count + 1)]
        shrunk = self.call.options["bs"] == "fs"
        own: Sequence[Any] = levels if shrunk else levels[:-1]
        labels = [f"{level}{end}" for end in ends for level in own]
        directions = own if shrunk else range(1, len(levels))
        labels += [f"{each}{end}" for each in directions for end in wiggles]
        blocks = {"level": len(levels), "linear": len(levels)} if shrunk else {}
        blocks["wiggle"] = len(own) * count
        hyper = tuple(Hyperparameter(f"sd({name}[{block}])", "sd") for block in blocks)
        learned = FactorSmoothColumns(
            name=name,
            kind="factor smooth",
            labels=tuple(f"{name}[{label}]" for label in labels),
            variables=tuple(sorted(self.call.columns)),
            fixed=0 if shrunk else 2 * len(own),
            law=BlockLaw(hyper, tuple(blocks.values())),
            levels={factor: levels},
            smooth=smooth,
            factor=factor,
            sums_to_zero=not shrunk,
        )
        return [learned]


@dataclass(frozen=True)
class FactorSmoothColumns(LearnedTerm):
    """Smooths of levels as learned from training rows.

    Attributes:
        smooth: the smooth of all rows.
        factor: the factor.
        sums_to_zero: whether the functions add up to zero.
    """

    smooth: SmoothColumns
    factor: str
    sums_to_zero: bool

    def columns(self, frame: pd.DataFrame) -> TermColumns:
        """Levels, straight lines and penalised functions; all are 0 for other levels."""
        levels = self.levels[self.factor]
        of_level = np.column_stack([(frame[self.factor] == v).to_numpy(float) for v in levels])
        found: Float[np.ndarray, "n c"] = self.smooth.columns(frame)
        line, wiggles = found[:, :1] / self.smooth.margins[0].size, found[:, 1:]
        if not self.sums_to_zero:
            return np.column_stack(
                [of_level, products([of_level, line]), products([of_level, wiggles])]
            )
        others = of_level[:, :-1] - of_level[:, -1:]
        turned = of_level @ helmert(len(levels)).T
        return np.column_stack([others, products([others, line]), products([turned, wiggles])])
