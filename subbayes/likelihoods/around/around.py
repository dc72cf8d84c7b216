"""The base class of families around another one with the same parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Kind
from subbayes.likelihoods.family import Family, family_from_name
from subbayes.likelihoods.tails.tails import Tails
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import Predictors, RowNumbers, RowTargets, RowWeights


@dataclass(frozen=True, repr=False)
class AroundFamily(Family):
    """Base class of families around another one, with the same parameters.

    Args:
        family: the family, or its name.
    """

    family: Any = field(kw_only=True)  # a name becomes a family
    unsaved = ("links",)
    is_for_networks = False

    def __post_init__(self) -> None:
        if isinstance(self.family, str):
            object.__setattr__(self, "family", family_from_name(self.family))
        if not isinstance(self.family, Family):
            fail_type("family", "a family, such as WeibullFamily()", self.family)
        if not hasattr(self.family, "log_tails"):
            fail(
                "family",
                "one whose tail probabilities have gradients: normal, student-t, log-normal, "
                "gamma, inverse-gaussian, beta, weibull, log-logistic, piecewise-exponential, "
                "asymmetric-laplace, poisson, negative-binomial or binomial with trials",
                repr(self.family),
            )
        object.__setattr__(self, "links", self.family.links)

    @classmethod
    def from_text(cls, text: str, link: str | None = None) -> Family:
        """Raise `InputError`: it is an object."""
        fail("family", "an object for a family around others", repr(text), cls.example)

    @override
    def with_link(self, link: str) -> Family:
        return replace(self, family=self.family.with_link(link))

    @property
    @override
    def innermost(self) -> Family:
        return self.family.innermost

    @property
    @override
    def kind(self) -> Kind:  # type: ignore[override]
        return self.family.kind

    @property
    @override
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        return self.family.bounds

    @property
    def allowed(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        """Links by parameter."""
        return self.family.allowed

    @property
    def support(self) -> str:
        """Description of the allowed responses."""
        return self.family.support

    @property
    @override
    def parameters(self) -> tuple[str, ...]:
        return self.family.parameters

    @property
    @override
    def known(self) -> dict[str, float | str]:
        return self.family.known

    def check_given(self, known: Mapping[str, np.ndarray]) -> None:
        """As of the family within."""
        self.family.check_given(known)

    @override
    def check_known(self, y: RowNumbers, known: Mapping[str, np.ndarray]) -> None:
        self.family.check_known(y, known)

    @override
    def level_values(self, y: RowNumbers, known: Mapping[str, np.ndarray]) -> RowNumbers:
        return self.family.level_values(y, known)

    @override
    def allows(self, y: Tensor) -> Tensor:
        return self.family.allows(y)

    @override
    def location_values(self, y: RowNumbers) -> RowNumbers:
        return self.family.location_values(y)

    @override
    def level(self, y: RowNumbers, weights: RowWeights = None) -> float:
        return self.family.level(y, weights)

    def initial_predictors(self, y: RowTargets) -> tuple[float, ...]:
        """As the family, from the values of the responses."""
        return self.family.initial_predictors(y if y.ndim == 1 else y[:, 0])

    def _tails(self, y: Tensor, eta: Predictors) -> Tails:
        found: tuple[Tensor, Tensor] = self.family.log_tails(y, eta)
        return found

    def __repr__(self) -> str:
        return f"{self.label} {self.family!r}"
