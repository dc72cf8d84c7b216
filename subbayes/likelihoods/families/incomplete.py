"""Responses that are known to lie in an interval, or are seen only there.

A censored response is known to be at most, at least, or between two numbers: its likelihood is the
probability of that. A truncated response is seen only within bounds: its density is divided by the
probability of the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.base import Kind, Moments, column
from subbayes.likelihoods.families.base import Family, ScipyFamily, moment
from subbayes.likelihoods.families.tails import log_difference
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import Outputs, PerPoint, Targets

__all__ = ["CensoredFamily", "TruncatedFamily"]

_MOST_COUNTS = 4096  # in a sum over counts
_STATUS = {"left": -1, "none": 0, "right": 1, "interval": 2}


@dataclass(frozen=True, repr=False)
class _Around(Family):
    """Base class of families around another one, with the same parameters.

    Args:
        family: the family, or its name.
    """

    family: Any = field(kw_only=True)  # a name becomes a family

    def __post_init__(self) -> None:
        if isinstance(self.family, str):
            from subbayes.likelihoods.families import family_from_name

            object.__setattr__(self, "family", family_from_name(self.family))
        if not isinstance(self.family, Family):
            fail_type("family", "a family, such as WeibullFamily()", self.family)
        if not hasattr(self.family, "log_tails"):
            fail(
                "family",
                "one whose tail probabilities have gradients: normal, student-t, log-normal, "
                "weibull, log-logistic, piecewise-exponential, asymmetric-laplace or poisson",
                repr(self.family),
            )
        object.__setattr__(self, "links", self.family.links)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """The kind of the family."""
        return self.family.kind

    @property
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        """Ends of the support."""
        return self.family.bounds

    @property
    def allowed(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        """Links by parameter."""
        return self.family.allowed

    @property
    def support(self) -> str:  # type: ignore[override]
        """Description of the allowed responses."""
        return self.family.support

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return self.family.parameters

    def allows(self, y: Tensor) -> Tensor:
        """As the family."""
        return self.family.allows(y)

    def location_values(self, y: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """As the family."""
        return self.family.location_values(y)

    def initial_predictors(self, y: Float[np.ndarray, "n *m"]) -> tuple[float, ...]:
        """As the family, from the values of the responses."""
        return self.family.initial_predictors(y if y.ndim == 1 else y[:, 0])

    def _tails(self, y: Tensor, eta: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.family.log_tails(y, eta)
        return found

    def __repr__(self) -> str:
        return f"{self.label} {self.family!r}"


@dataclass(frozen=True, repr=False)
class CensoredFamily(_Around):
    r"""Responses of which some are known only to lie in an interval.

    A response is (y, status) or (y, status, upper): y itself for status 0, at most y for -1
    (left-censored), at least y for 1 (right-censored), and from y to upper for 2. Predictions are
    those of the responses without censoring. Curvature and scores of new rows take them as seen.

    Args:
        family: the family of the responses.
        status: column of the data frame with the status: these numbers, or "none", "left",
            "right", "interval", or whether the response is right-censored.
        upper: column with the upper ends of intervals.

    Example:
        >>> from subbayes.likelihoods.families import WeibullFamily
        >>> family = CensoredFamily(family=WeibullFamily())
        >>> y = torch.tensor([[1.0, 0.0], [1.0, 1.0]])  # seen at 1, and alive at 1
        >>> family.log_prob(torch.zeros(2, 2), y)
        tensor([-1., -1.])
    """

    status: str = "censored"
    upper: str | None = None
    label = "censored"

    @property
    def response_columns(self) -> tuple[str, ...]:
        """The status and the upper ends."""
        return (self.status,) if self.upper is None else (self.status, self.upper)

    def responses(
        self, y: Float[np.ndarray, "n"], columns: Mapping[str, np.ndarray]
    ) -> Float[np.ndarray, "n *m"]:
        """The responses with their status, and upper ends."""
        values = np.asarray(columns[self.status])
        if values.dtype.kind not in "biuf":
            unknown = sorted({str(v) for v in values} - set(_STATUS))
            if unknown:
                fail(self.status, "one of " + ", ".join(_STATUS), ", ".join(unknown[:5]))
            values = np.array([_STATUS[str(v)] for v in values])
        status = values.astype(np.float64)
        others = [np.asarray(columns[self.upper], dtype=np.float64)] if self.upper else []
        return np.column_stack([y, status, *others])

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for responses outside the support, or an unknown status."""
        value = y if isinstance(y, Tensor) else y[0]
        if value.ndim != 2 or value.shape[1] not in (2, 3):
            fail("y", "columns of the value, the status and the upper end", tuple(value.shape))
        self.family.check_targets(value[:, 0] if isinstance(y, Tensor) else (value[:, 0], y[1]))
        status = value[:, 1]
        bad = ~torch.isin(status, torch.tensor([-1.0, 0.0, 1.0, 2.0]).to(status))
        if bool(bad.any()):
            got = f"{status[bad][0].item():g}"
            fail("status", "-1 (left), 0 (none), 1 (right) or 2 (interval)", got)
        inside = status == 2
        if bool(inside.any()) and value.shape[1] < 3:
            fail("upper", "upper ends of intervals", "none", "Pass upper= of CensoredFamily")
        if value.shape[1] == 3 and not bool((value[inside, 2] > value[inside, 0]).all()):
            fail("upper", "upper ends above the lower ones", "others")

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density or probability of each observation, times its weight, shape (..., N)."""
        value, weight = (y, None) if isinstance(y, Tensor) else (y[0], y[1])
        value = value.to(outputs.dtype)
        eta = outputs.unbind(-1)
        if value.ndim == 1:
            terms = self.family.log_density(value, eta)
        else:
            terms = self._terms(value, eta)
        return terms if weight is None else terms * weight.to(outputs.dtype)

    def _terms(self, value: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        y, status = value[:, 0], value[:, 1]
        below, above = self._tails(y, eta)
        terms = torch.where(status == 0, self.family.log_density(y, eta), below)
        terms = torch.where(status == 1, above, terms)
        if value.shape[1] == 2:
            return terms
        upper = torch.where(status == 2, value[:, 2], y + 1)
        beyond, left = self._tails(upper, eta)[1], above
        return torch.where(status == 2, log_difference(left, beyond), terms)

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses that are seen."""
        return self.family.log_density(y, eta)

    def log_tails(self, y: Tensor, eta: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """As the family."""
        return self._tails(y, eta)

    def mean(self, outputs: Outputs) -> Moments:
        """Mean without censoring."""
        return self.family.mean(outputs)

    def variance(self, outputs: Outputs) -> Moments:
        """Variance without censoring."""
        return self.family.variance(outputs)

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y) without censoring."""
        return self.family.cdf(outputs, y)

    def quantiles(self, outputs: Outputs, q: float) -> Moments | None:
        """Quantiles without censoring."""
        return self.family.quantiles(outputs, q)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """Responses without censoring."""
        return self.family.sample(outputs, generator)

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """The Fisher information of responses without censoring."""
        return self.family.curvature(outputs)

    def to_config(self) -> dict[str, Any]:
        """Family and columns, for JSON."""
        return {
            "name": self.label,
            "family": self.family.to_config(),
            "status": self.status,
            "upper": self.upper,
        }


@dataclass(frozen=True, repr=False)
class TruncatedFamily(_Around):
    r"""Responses that are seen only between two bounds: $p(y) / P(l \le Y \le u)$.

    Args:
        family: the family before truncation.
        lower: the lower bound; for counts inclusive.
        upper: the upper bound, inclusive.

    Example:
        >>> from subbayes.likelihoods.families import NormalFamily
        >>> family = TruncatedFamily(family=NormalFamily(), lower=0.0)
        >>> family.mean(torch.zeros(1, 2, dtype=torch.float64)).round(decimals=4)  # sqrt(2 / pi)
        tensor([[0.7979]], dtype=torch.float64)
    """

    lower: float = -math.inf
    upper: float = math.inf
    label = "truncated"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.family, (ScipyFamily, Family)) or not self.lower < self.upper:
            fail("lower", "a bound below the upper one", f"{self.lower:g} and {self.upper:g}")
        if isinstance(self.family, _Around):
            fail("family", "a family that is not truncated or censored", repr(self.family))

    @property
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        """Ends of the support."""
        low, high = self.family.bounds
        return max(low, self.lower), min(high, self.upper)

    @property
    def support(self) -> str:  # type: ignore[override]
        """Description of the allowed responses."""
        return f"{self.family.support} from {self.lower:g} to {self.upper:g}"

    def allows(self, y: Tensor) -> Tensor:
        """Within the bounds."""
        return self.family.allows(y) & (y >= self.lower) & (y <= self.upper)

    @property
    def _below(self) -> float:
        """The largest number below the bounds: the one before for counts."""
        return self.lower - 1 if self.kind == "count" else self.lower

    def _log_mass(self, eta: tuple[Tensor, ...]) -> Tensor:
        """Log of P(lower <= Y <= upper)."""
        zero = torch.zeros_like(eta[0])
        start = max(self.family.bounds[0], 0.0) if self.kind == "count" else self.family.bounds[0]
        has_low = self._below > start or (self.kind == "count" and self._below >= 0)
        has_high = self.upper < self.family.bounds[1]
        low = self._tails(zero + self._below, eta) if has_low else None
        high = self._tails(zero + self.upper, eta) if has_high else None
        if low is None:
            return zero if high is None else high[0]
        if high is None:
            return low[1]
        # the difference of the smaller tails, which does not cancel
        return torch.where(
            low[1] < high[0], log_difference(low[1], high[1]), log_difference(high[0], low[0])
        )

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses within the bounds."""
        return self.family.log_density(y, eta) - self._log_mass(eta)

    def _levels(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Distribution function of the family at the bounds, each (..., N)."""
        shape = outputs.shape[:-1]

        def at(bound: float, else_: float) -> Tensor:
            if math.isinf(bound):
                return torch.full(shape, else_, dtype=torch.float64)
            full = torch.full((*shape, 1), bound, dtype=torch.float64)
            return self.family.cdf(outputs.double(), full.reshape(-1, 1)[: shape[-1]])[..., 0]

        return at(self._below, 0.0), at(self.upper, 1.0)

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y) within the bounds."""
        low, high = self._levels(outputs)
        inner = self.family.cdf(outputs.double(), column(y, outputs).double())[..., 0]
        return moment(((inner - low) / (high - low)).clamp(0, 1).to(outputs))

    def _at_levels(self, outputs: Outputs, u: Tensor) -> Tensor:
        """Quantiles at levels u between 0 and 1 within the bounds, shape of u."""
        low, high = self._levels(outputs)
        inner: Any = self.family
        levels = (low + u * (high - low)).clamp_max(1 - 1e-14)  # whose quantile is finite
        value = torch.from_numpy(np.asarray(inner._distribution_at(outputs).ppf(levels.numpy())))
        if bool(value.isnan().any()):  # SciPy's quantiles of huge counts
            wide = outputs.double()
            mean, variance = (part[..., 0] for part in (inner.mean(wide), inner.variance(wide)))
            value = torch.where(
                value.isnan(), mean + variance.sqrt() * torch.special.ndtri(levels), value
            )
        return value.clamp(self.lower, self.upper)

    def quantiles(self, outputs: Outputs, q: float) -> Moments:
        """Quantiles within the bounds."""
        level = torch.tensor(q, dtype=torch.float64)
        return moment(self._at_levels(outputs, level).to(outputs))

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """Responses within the bounds."""
        u = torch.rand(outputs.shape[:-1], generator=generator, dtype=torch.float64)
        return moment(self._at_levels(outputs, u.clamp(1e-12, 1 - 1e-12)))

    def _quantile_rule(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Responses at levels, and the weights of a sum over them that is an expectation."""
        shape = (-1, *[1] * (outputs.ndim - 1))
        if self.kind == "count":
            ends = self._at_levels(outputs, torch.tensor(1 - 1e-12, dtype=torch.float64))
            first = max(self.lower, 0.0)
            last = (
                ends[ends.isfinite()].clamp_min(first).max()
                if bool(ends.isfinite().any())
                else first
            )
        if self.kind == "count" and float(last) - first < _MOST_COUNTS:
            y = torch.arange(first, float(last) + 1, dtype=torch.float64)
            y = y.reshape(shape).expand(-1, *outputs.shape[:-1])
            weight = self.log_density(y, outputs.double().unbind(-1)).exp()
            return y, weight / weight.sum(0)
        x = torch.linspace(-7, 7, 257, dtype=torch.float64)
        weight = torch.exp(-0.5 * x.square())
        y = self._at_levels(outputs, torch.special.ndtr(x).reshape(shape))
        return y, (weight / weight.sum()).reshape(shape).expand(y.shape)

    def mean(self, outputs: Outputs) -> Moments:
        """The mean, as an integral over quantiles."""
        y, weight = self._quantile_rule(outputs)
        return moment((weight * y).sum(0).to(outputs))

    def variance(self, outputs: Outputs) -> Moments:
        """The variance, as an integral over quantiles."""
        y, weight = self._quantile_rule(outputs)
        mean = (weight * y).sum(0)
        found = (weight * (y - mean).square()).sum(0)
        if math.isinf(self.lower) or math.isinf(self.upper):  # a tail remains
            whole = self.family.variance(outputs)[..., 0].to(found)
            found = torch.where(torch.isinf(whole), whole, found)
        return moment(found.to(outputs))

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """The Fisher information, as an integral over quantiles."""
        y, weight = self._quantile_rule(outputs)
        wide = outputs.expand(len(y), *outputs.shape)
        value = y.to(outputs)
        score = torch.func.grad(lambda f: self.log_density(value, f.unbind(-1)).sum())(wide)
        return torch.einsum("m...,m...a,m...b->...ab", weight.to(outputs), score, score)

    def to_config(self) -> dict[str, Any]:
        """Family and bounds, for JSON; infinite bounds are None."""
        ends = [None if math.isinf(end) else end for end in (self.lower, self.upper)]
        return {
            "name": self.label,
            "family": self.family.to_config(),
            "lower": ends[0],
            "upper": ends[1],
        }
