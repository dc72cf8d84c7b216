"""The bounds of truncated responses: numbers, or columns of the data frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.families.incomplete import AroundFamily
from subbayes.utils.checks import fail
from subbayes.utils.types import Outputs

_ENDS = ("lower", "upper")

Predictors = tuple[Tensor, ...]


@dataclass(frozen=True, repr=False)
class BoundedFamily(AroundFamily):
    """Base class of families around another one between bounds.

    Bounds by row are given parameters: their values follow the predictors of the family.

    Args:
        lower: the lower bound, or its column. None for no bound.
        upper: the upper bound, or its column. None for no bound.

    Raises:
        InputError: bounds that are not in order, or between which the family has no responses.
    """

    lower: Any = -math.inf  # None becomes no bound
    upper: Any = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.family, AroundFamily):
            fail("family", "a family that is not truncated or censored", repr(self.family))
        if self.kind != "count" and not hasattr(self.family, "from_log_tails"):
            fail("family", "one with the method from_log_tails", repr(self.family))
        for name, none in zip(_ENDS, (-math.inf, math.inf), strict=True):
            value = getattr(self, name)
            if not isinstance(value, str):
                object.__setattr__(self, name, none if value is None else float(value))
        by_row = ("identity",) * len(self._by_row)
        object.__setattr__(self, "links", (*self.family.links, *by_row))
        lower, upper = self._numbers
        if not lower < upper:
            fail("lower", "a bound below the upper one", f"{lower:g} and {upper:g}")
        low, high = self.bounds
        if self.kind == "count":
            low, high = (
                max(self._before(lower), -1.0),
                math.floor(high) if high < math.inf else high,
            )
        trials = self.known.get("trials", math.inf)
        if not low < high or (not isinstance(trials, str) and trials < lower):
            fail("lower and upper", f"bounds around {self.family.support}", self._shown)

    @property
    def _by_row(self) -> dict[str, str]:
        """The bounds that a column has."""
        return {name: end for name in _ENDS if isinstance(end := getattr(self, name), str)}

    @property
    def _numbers(self) -> tuple[float, float]:
        """Both bounds, without those by row."""
        lower = -math.inf if isinstance(self.lower, str) else self.lower
        return lower, math.inf if isinstance(self.upper, str) else self.upper

    @property
    def allowed(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        """Links by parameter, with bounds by row."""
        return {**self.family.allowed, **dict.fromkeys(self._by_row, ("identity",))}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, with bounds by row."""
        return (*self.family.parameters, *self._by_row)

    @property
    def known(self) -> dict[str, float | str]:
        """As the family, and the columns of bounds."""
        return {**self.family.known, **self._by_row}

    def _ends_by_row(self, known: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The lower and the upper bounds, where one of them is a column."""
        n = max((len(known[name]) for name in self._by_row), default=0)
        return [known.get(name, np.full(n, getattr(self, name))) for name in _ENDS]

    def check_given(self, known: Mapping[str, np.ndarray]) -> None:
        """Raise `InputError` for bounds by row that are not finite, or in the wrong order."""
        super().check_given(known)
        for name, place in self._by_row.items():
            if not np.isfinite(known[name]).all():
                far = "below" if name == "lower" else "above"
                remedy = f"Give rows without a bound one {far} all responses"
                fail(place, "finite numbers as bounds", "others", remedy)
        lower, upper = self._ends_by_row(known)
        wrong = np.flatnonzero(~(lower < upper))
        if len(wrong):
            row = wrong[0]
            shown = f"{lower[row]:g} and {upper[row]:g} at row {row}"
            columns = " and ".join(self._by_row.values())
            fail(columns, "lower bounds below the upper ones", shown)

    def check_known(self, y: Float[np.ndarray, "n"], known: Mapping[str, np.ndarray]) -> None:
        """Raise `InputError` for bounds by row that do not hold responses."""
        super().check_known(y, known)
        if not self._by_row:
            return
        self.check_given(known)
        lower, upper = self._ends_by_row(known)
        outside = np.flatnonzero((y < lower) | (y > upper))
        if len(outside):
            row = outside[0]
            shown = f"{y[row]:g} between {lower[row]:g} and {upper[row]:g} at row {row}"
            expected = f"responses within the bounds {', '.join(self._by_row.values())}"
            fail("y", expected, shown, "Leave out rows that truncation excludes")

    def initial_predictors(self, y: Float[np.ndarray, "n *m"]) -> tuple[float, ...]:
        """As the family; bounds by row are given."""
        return (*super().initial_predictors(y), *(0.0 for _ in self._by_row))

    @property
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        """Ends of the support, without bounds by row."""
        (low, high), (lower, upper) = self.family.bounds, self._numbers
        return max(low, lower), min(high, upper)

    @property
    def _shown(self) -> str:
        ends = (self.lower, self.upper)
        return " and ".join(end if isinstance(end, str) else f"{end:g}" for end in ends)

    @property
    @override
    def support(self) -> str:
        return f"{self.family.support} from {self._shown.replace(' and ', ' to ')}"

    def allows(self, y: Tensor) -> Tensor:
        """Within the bounds that are numbers."""
        lower, upper = self._numbers
        return self.family.allows(y) & (y >= lower) & (y <= upper)

    def _before(self, lower: Any) -> Any:
        """The largest number below a lower bound: the one before for counts."""
        if self.kind != "count":
            return lower
        return lower.ceil() - 1 if isinstance(lower, Tensor) else np.ceil(lower) - 1

    def _split(self, eta: Predictors) -> tuple[Predictors, Any, Any]:
        """The predictors of the family, and both bounds: numbers, or tensors by row."""
        ends = dict(zip(self._by_row, eta[len(self.family.parameters) :], strict=True))
        own = eta[: len(self.family.parameters)]
        return own, ends.get("lower", self.lower), ends.get("upper", self.upper)

    def _of_family(self, outputs: Outputs) -> Outputs:
        """The predictors of the family, shape (..., N, K)."""
        return outputs[..., : len(self.family.parameters)]

    @property
    def _bounded(self) -> tuple[bool, bool]:
        """Whether there is a lower and an upper bound."""
        return self.lower != -math.inf, self.upper != math.inf
