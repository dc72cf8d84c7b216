"""Responses of which some are known only to lie in an interval.

A censored response is known to be at most, at least, or between two numbers: its likelihood is the
probability of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.around.around import AroundFamily
from subbayes.likelihoods.around.truncated import TruncatedFamily
from subbayes.likelihoods.base import property_of, refuse_rows, target_values
from subbayes.likelihoods.family import Family, family
from subbayes.likelihoods.tails.tails import log_between
from subbayes.utils.checks import fail
from subbayes.utils.types import Predictors, RowColumns, RowNumbers, RowTargets, Targets

_STATUS = {"left": -1, "none": 0, "right": 1, "interval": 2}


@family("censored")
@dataclass(frozen=True, repr=False)
class CensoredFamily(AroundFamily):
    r"""Responses of which some are known only to lie in an interval.

    A response is (y, status) or (y, status, upper): y itself for status 0, at most y for -1
    (left-censored), more than y for 1 (right-censored), and more than y and at most upper for 2.
    For counts "more than y" leaves y out, as in brms: give y - 1 for "at least y". Predictions are
    those of the responses without censoring. Survival times with delayed entry are truncated too:
    `CensoredFamily(family=TruncatedFamily(family="weibull", lower="entry"))`. Curvature and scores
    of new rows take responses as seen.

    Args:
        family: the family of the responses.
        status: column of the data frame with the status: these numbers, or "none", "left",
            "right", "interval", or whether the response is right-censored.
        upper: column with the upper ends of intervals; other rows may have none.

    Example:
        >>> from subbayes.likelihoods.families import WeibullFamily
        >>> family = CensoredFamily(family=WeibullFamily())
        >>> y = torch.tensor([[1.0, 0.0], [1.0, 1.0]])  # seen at 1, and alive at 1
        >>> family.log_prob(torch.zeros(2, 2), y)
        tensor([-1., -1.])
    """

    status: str = "censored"
    upper: str | None = None
    example = "Pass CensoredFamily(family=WeibullFamily(), status='column')"

    # of responses that are seen
    log_density = property_of("family", "log_density")
    mean = property_of("family", "mean")
    averaged = property_of("family", "averaged")
    average_name = property_of("family", "average_name")
    variance = property_of("family", "variance")
    has_moment = property_of("family", "has_moment")
    cdf = property_of("family", "cdf")
    quantiles = property_of("family", "quantiles")
    sample = property_of("family", "sample")
    curvature = property_of("family", "curvature")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.family, CensoredFamily):
            fail("family", "a family that is not censored", repr(self.family))

    @property
    def response_columns(self) -> tuple[str, ...]:
        """The status and the upper ends."""
        return (self.status,) if self.upper is None else (self.status, self.upper)

    def needed(self, columns: RowColumns) -> dict[str, Bool[np.ndarray, "n"]]:
        """Upper ends are those of intervals."""
        if self.upper is None:
            return {}
        return {self.upper: _status_numbers(columns[self.status]) == _STATUS["interval"]}

    def responses(self, y: RowNumbers, columns: RowColumns) -> RowTargets:
        """The responses with their status, and upper ends."""
        values = np.asarray(columns[self.status])
        status = _status_numbers(values)
        unknown = values[np.isnan(status)]
        if len(unknown):
            fail(self.status, "one of " + ", ".join(_STATUS), unknown[0])
        if not self.upper:
            return np.column_stack([y, status])
        upper = np.asarray(columns[self.upper], dtype=np.float64)
        return np.column_stack([y, status, np.where(status == _STATUS["interval"], upper, y)])

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for responses outside the support, or an unknown status."""
        value = target_values(y)
        if value.ndim != 2 or value.shape[1] not in (2, 3):
            fail("y", "columns of the value, the status and the upper end", tuple(value.shape))
        low, status, upper = value[:, 0], value[:, 1], value[:, -1]
        interval, end = status == _STATUS["interval"], self.bounds[1]
        refuse_rows(
            interval & (low <= self.bounds[0]) & ~self.family.allows(low),
            low,
            "y",
            f"lower ends of intervals that are {self.support}",
            "Give such a row its upper end as y, and the status -1 (left-censored)",
        )
        remedy = "Give such a row the status 1 (right-censored)"
        refuse_rows(
            interval & upper.isinf(), upper, "upper", "finite upper ends of intervals", remedy
        )
        self.family.check_targets(low if isinstance(y, Tensor) else (low, y[1]))
        known = torch.isin(status, torch.tensor([-1.0, 0.0, 1.0, 2.0]).to(status))
        refuse_rows(~known, status, "status", "-1 (left), 0 (none), 1 (right) or 2 (interval)")
        if bool(interval.any()) and value.shape[1] < 3:
            fail("upper", "upper ends of intervals", "none", "Pass upper= of CensoredFamily")
        remedy = "Give rows that are seen exactly the status 0"
        wrong = interval & ~(upper > low)
        refuse_rows(wrong, upper, "upper", "upper ends above the lower ones", remedy)
        refuse_rows(interval & (upper > end), upper, "upper", f"upper ends of at most {end:g}")
        self._check_possible(value)

    def _check_possible(self, y: Tensor) -> None:
        """Raise `InputError` for what no response can be, such as more than the upper bound."""
        is_count, trials = self.kind == "count", self.known.get("trials", math.inf)
        low, high = self.bounds
        most = high if isinstance(trials, str) else min(high, trials)
        status = y[:, 1]
        upper = torch.where(status == 2, y[:, -1], most).clamp_max(most)
        empty = (status > 0) & ((upper.floor() if is_count else upper) <= y[:, 0])
        if not is_count:
            empty = empty | ((status == -1) & (y[:, 0] <= low))
        what = "an interval that holds a whole number" if is_count else "possible responses"
        refuse_rows(empty, y[:, 0], "y", f"{what} in each row", "Leave the row out")

    @override
    def completed(
        self, outputs: Float[Tensor, "S n C"], y: Float[Tensor, "n m"], generator: torch.Generator
    ) -> Float[Tensor, "S n"] | None:
        y = y.double()
        found = y[:, 0].expand(len(outputs), -1).clone()
        rows = torch.nonzero(y[:, 1] != 0)[:, 0]
        if len(rows):
            found[:, rows] = self._drawn(outputs[:, rows].double(), y[rows], generator)
        return found

    def _drawn(
        self, outputs: Float[Tensor, "S n C"], y: Float[Tensor, "n m"], generator: torch.Generator
    ) -> Float[Tensor, "S n"]:
        """Draws of the family truncated to what is known of each response."""
        value, status = y[:, 0], y[:, 1]
        upper = torch.where(status == 1, math.inf, y[:, -1] if y.shape[1] == 3 else value)
        upper = torch.where(status == -1, value, upper).expand(outputs.shape[:-1])
        first = value + 1 if self.kind == "count" else value  # of more than the value
        lower = torch.where(status == -1, -math.inf, first).expand(outputs.shape[:-1])
        inner: Family = self.family
        if isinstance(inner, TruncatedFamily):
            outputs, least, most = inner.split_outputs(outputs)
            lower, upper, inner = lower.maximum(least), upper.minimum(most), inner.family
        within = TruncatedFamily(family=inner, lower="lower", upper="upper")
        predictors = torch.cat([outputs, lower.unsqueeze(-1), upper.unsqueeze(-1)], -1)
        return within.sample(predictors, generator)[..., 0].double()

    def _terms(self, value: Tensor, eta: Predictors) -> Tensor:
        """Log density or probability of each observation."""
        if value.ndim == 1:
            return self.family.log_density(value, eta)
        y, status = value[:, 0], value[:, 1]
        below, above = self.log_tails(y, eta)
        terms = torch.where(status == 0, self.family.log_density(y, eta), below)
        terms = torch.where(status == 1, above, terms)
        if value.shape[1] == 2:
            return terms
        end = self.bounds[1]  # other rows need a number above y, within the support
        upper = torch.where(status == 2, value[:, 2], (y + end) / 2 if end < math.inf else y + 1)
        inside = log_between((below, above), self.log_tails(upper, eta))
        return torch.where(status == 2, inside, terms)


def _status_numbers(column: Any) -> RowNumbers:
    """A column of status as numbers; NaN for unknown text."""
    values = np.asarray(column)
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    numbers = [v if isinstance(v, Number) else _STATUS.get(str(v), math.nan) for v in values]
    return np.array(numbers, dtype=np.float64)
