r"""Mixtures of two families: $p(y) = \theta\, p_1(y) + (1 - \theta)\, p_2(y)$."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Kind, Moments
from subbayes.likelihoods.family import Family, family, family_from_name, log_sum
from subbayes.likelihoods.links import bernoulli_variance
from subbayes.utils.checks import fail
from subbayes.utils.types import Outputs, Predictors, RowNumbers

_MIXTURE = re.compile(r"\w+\(([\w .-]{1,50}),([\w .-]{1,50})\)")
_HALVINGS = 60  # of the distance between quantiles of two components


def allowed_rows(family: Family, y: RowNumbers) -> Bool[np.ndarray, "n"]:
    """The rows that a component of a mixture may have given; all if there are none.

    Example:
        >>> from subbayes.likelihoods.families import GammaFamily
        >>> allowed_rows(GammaFamily(), np.array([-1.0, 2.0]))
        array([False,  True])
    """
    found = family.allows(torch.from_numpy(y)).numpy()
    return found if found.any() else ~found


@family("mixture")
@dataclass(frozen=True, repr=False)
class MixtureFamily(Family):
    r"""A mixture of two families, whose weight $\theta$ is a parameter as well.

    The parameters are those of the first with a 1 behind their names, those of the second with
    a 2, and `theta`. Two components of one family have no order: chains may exchange them, so that
    means of their parameters over chains mean nothing unless priors or effects tell them apart.

    Args:
        first: the first family.
        second: the second family, of the same kind of responses.

    Example:
        >>> from subbayes.likelihoods.families import NormalFamily
        >>> MixtureFamily(first=NormalFamily(), second=NormalFamily()).parameters
        ('mu1', 'sigma1', 'mu2', 'sigma2', 'theta')
    """

    first: Any = field(kw_only=True)  # a name becomes a family
    second: Any = field(kw_only=True)
    example = "Pass 'mixture(normal, normal)', or MixtureFamily(first=..., second=...)"
    is_for_networks = False
    unsaved = ("links",)

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            part = family_from_name(getattr(self, name))
            object.__setattr__(self, name, part)
            if part.kind == "classification" or part.columns or isinstance(part, type(self)):
                fail(name, "a family of numbers or counts without columns", repr(part))
        if self.first.kind != self.second.kind:
            fail("second", f"a family of {self.first.kind}", repr(self.second))
        object.__setattr__(self, "links", (*self.first.links, *self.second.links, "logit"))

    @classmethod
    def from_text(cls, text: str, link: str | None = None) -> Family:
        """The mixture of two names in brackets."""
        names = _MIXTURE.fullmatch(text.strip())
        if names is None:
            fail("family", "an object for a family around others", repr(text), cls.example)
        made = cls(first=names[1].strip(), second=names[2].strip())
        return made if link is None else made.with_link(link)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """The kind of the families."""
        return self.first.kind

    @property
    def support(self) -> str:
        """Description of the allowed responses."""
        return f"{self.first.support}, or {self.second.support}"

    @property
    @override
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        a, b = self.first.bounds, self.second.bounds
        return min(a[0], b[0]), max(a[1], b[1])

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters of both, and the weight of the first."""
        first = (f"{name}1" for name in self.first.parameters)
        return (*first, *(f"{name}2" for name in self.second.parameters), "theta")

    @property
    def locations(self) -> tuple[str, ...]:
        """The locations of both."""
        return (f"{self.first.parameters[0]}1", f"{self.second.parameters[0]}2")

    def location_values(self, y: RowNumbers) -> RowNumbers:
        """As the first family."""
        return self.first.location_values(y)

    def component(self, parameter: str) -> tuple[Family, str]:
        """The family of which a parameter is one, and its name there."""
        place = self.parameters.index(parameter)
        n = len(self.first.parameters)
        if place == len(self.parameters) - 1:
            return self, parameter
        return (self.first if place < n else self.second), parameter[:-1]

    def initial_predictors(self, y: RowNumbers) -> tuple[float, ...]:
        """Predictors that suit the lower and the upper half of the responses."""
        low, high = (y[allowed_rows(part, y)] for part in (self.first, self.second))
        low, high = low[low <= np.median(low)], high[high >= np.median(high)]
        return (*self.first.initial_predictors(low), *self.second.initial_predictors(high), 0.0)

    @override
    def check_outputs(self, n_outputs: int, y: Any) -> None:
        self.check_parameters(n_outputs)

    def allows(self, y: Tensor) -> Tensor:
        """What one of them allows."""
        return self.first.allows(y) | self.second.allows(y)

    def _split(self, values: Any) -> tuple[Any, Any]:
        n = len(self.first.parameters)
        return values[..., :n], values[..., n:-1]

    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        """Log density of responses, of which a component may not have given all."""
        n = len(self.first.parameters)
        return log_sum(
            F.logsigmoid(eta[-1]) + _log_density_of(self.first, y, eta[:n]),
            F.logsigmoid(-eta[-1]) + _log_density_of(self.second, y, eta[n:-1]),
        )

    def mean(self, outputs: Outputs) -> Moments:
        """The weighted mean."""
        a, b = self._split(outputs)
        return self._weighted(outputs, self.first.mean(a), self.second.mean(b))

    def variance(self, outputs: Outputs) -> Moments:
        """The weighted variance, and that of the means."""
        a, b = self._split(outputs)
        within = self._weighted(outputs, self.first.variance(a), self.second.variance(b))
        gap = self.first.mean(a) - self.second.mean(b)
        shares = bernoulli_variance("logit", outputs[..., -1:])
        # means that are infinite have infinite variances already
        return torch.where(within.isinf(), within, within + shares * gap.square())

    def _weighted(self, outputs: Outputs, first: Moments, second: Moments) -> Moments:
        """The weighted sum of moments; one that is infinite stays so, however small its weight."""
        parts = (outputs[..., -1:].sigmoid() * first, (-outputs[..., -1:]).sigmoid() * second)
        a, b = (torch.where(m.isinf(), m, p) for m, p in zip((first, second), parts, strict=True))
        return a + b

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """If both families have it."""
        a, b = self._split(outputs)
        return self.first.has_moment(a, order) & self.second.has_moment(b, order)

    @property
    def has_cdf(self) -> bool:
        """Whether both have a distribution function."""
        return self.first.has_cdf and self.second.has_cdf

    @override
    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        a, b = self._split(outputs)
        return self._weighted(outputs, self.first.cdf(a, y), self.second.cdf(b, y))

    def quantiles(self, outputs: Outputs, q: float) -> Moments | None:
        """By bisection between those of both; None if one of them is not known."""
        a, b = self._split(outputs)
        first, second = self.first.quantiles(a, q), self.second.quantiles(b, q)
        if first is None or second is None:
            return None
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            is_below = self.cdf(outputs, middle) < q
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        return 0.5 * (low + high)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One response per row, from one of them."""
        a, b = self._split(outputs)
        share = outputs[..., -1:].sigmoid().double().cpu()
        u = torch.rand(share.shape, generator=generator, dtype=torch.float64)
        first = self.first.sample(a, generator).double().cpu()
        return torch.where(u < share, first, self.second.sample(b, generator).double().cpu())

    def __repr__(self) -> str:
        return f"mixture({self.first!r}, {self.second!r})"


def _log_density_of(family: Family, y: Tensor, eta: Predictors) -> Tensor:
    """Log density of responses, -inf outside the support; gradients are finite there too."""
    allowed = family.allows(y)
    inside = family.log_density(torch.where(allowed, y, family.response_within()), eta)
    return torch.where(allowed, inside, -math.inf)
