"""The base class of families around another one with the same parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from subbayes.likelihoods.base import property_of
from subbayes.likelihoods.family import Family, family_from_name
from subbayes.utils.checks import fail
from subbayes.utils.types import RowTargets


@dataclass(frozen=True, repr=False)
class AroundFamily(Family):
    """Base class of families around another one, with the same parameters.

    Args:
        family: the family, or its name.
    """

    family: Any = field(kw_only=True)  # a name becomes a family
    unsaved = ("links",)
    is_for_networks = False

    innermost = property_of("family", "innermost")
    kind = property_of("family", "kind")
    bounds = property_of("family", "bounds")
    allowed = property_of("family", "allowed")
    support = property_of("family", "support")
    parameters = property_of("family", "parameters")
    known = property_of("family", "known")
    check_given = property_of("family", "check_given")
    check_known = property_of("family", "check_known")
    allows = property_of("family", "allows")
    level = property_of("family", "level")
    level_values = property_of("family", "level_values")
    location_values = property_of("family", "location_values")
    log_tails = property_of("family", "log_tails")

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", family_from_name(self.family))
        if type(self.family).log_tails is Family.log_tails:
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

    def initial_predictors(self, y: RowTargets) -> tuple[float, ...]:
        """As the family, from the values of the responses."""
        return self.family.initial_predictors(y if y.ndim == 1 else y[:, 0])

    def __repr__(self) -> str:
        return f"{self.label} {self.family!r}"
