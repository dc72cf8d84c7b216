"""Families of responses by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from subbayes.likelihoods.families.base import LINKS, Family
from subbayes.likelihoods.families.classes import BernoulliFamily, OrdinalFamily
from subbayes.likelihoods.families.common_parameters import CommonParameters
from subbayes.likelihoods.families.continuous import BetaFamily, GammaFamily, NormalFamily
from subbayes.likelihoods.families.counts import NegativeBinomialFamily, PoissonFamily
from subbayes.likelihoods.families.heavy_tails import StudentTFamily
from subbayes.likelihoods.families.positive import InverseGaussianFamily, LogNormalFamily
from subbayes.utils.checks import check_choice, fail, fail_type

__all__ = [
    "FAMILIES",
    "LINKS",
    "BernoulliFamily",
    "BetaFamily",
    "CommonParameters",
    "Family",
    "GammaFamily",
    "InverseGaussianFamily",
    "LogNormalFamily",
    "NegativeBinomialFamily",
    "NormalFamily",
    "OrdinalFamily",
    "PoissonFamily",
    "StudentTFamily",
    "family_from_config",
    "family_from_name",
]

FAMILIES: dict[str, type[Family]] = {
    family.label: family
    for family in (
        NormalFamily,
        PoissonFamily,
        BernoulliFamily,
        NegativeBinomialFamily,
        GammaFamily,
        BetaFamily,
        OrdinalFamily,
        StudentTFamily,
        LogNormalFamily,
        InverseGaussianFamily,
    )
}
"""Families by name."""


_ALIASES = {name: name for name in FAMILIES} | {
    "gaussian": "normal",
    "binomial": "bernoulli",
    "cumulative": "ordinal",
    "negbin": "negative-binomial",
    "nb": "negative-binomial",
    "nbinom": "negative-binomial",
    "negativebinomial": "negative-binomial",
    "student": "student-t",
    "t": "student-t",
    "lognormal": "log-normal",
    "inverse.gaussian": "inverse-gaussian",
    "invgauss": "inverse-gaussian",
    "wald": "inverse-gaussian",
}


def family_from_name(family: str | Family, link: str | None = None) -> Family:
    """A family from its name.

    Args:
        family: a name of `FAMILIES`, a name that other libraries use ("gaussian", "binomial",
            "negbin", "cumulative"), or a family.
        link: link of the location.

    Raises:
        InputError: an unknown name, or a link that the family does not support.

    Example:
        >>> family_from_name("poisson")
        poisson(mu: log)
    """
    if isinstance(family, Family):
        return family
    if not isinstance(family, str):
        fail_type("family", "a name or a Family", family)
    family = _ALIASES.get(family.lower().replace("_", "-"), family)
    check_choice("family", family, tuple(FAMILIES))
    kind = FAMILIES[family]
    if link is None or kind is OrdinalFamily:
        return kind()
    check_choice(f"link of family {family!r}", link, kind.allowed["mu"])
    return kind((link, *(links[0] for links in list(kind.allowed.values())[1:])))


def family_from_config(config: Mapping[str, Any], where: str = "family") -> Family:
    """Rebuild a family from its `to_config`.

    Args:
        config: the description.
        where: its place, for errors.

    Raises:
        InputError: an unknown name, or options that the family does not have.

    Example:
        >>> family_from_config(StudentTFamily().to_config())
        student-t(mu: identity, sigma: log, nu: logm1)
    """
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
    name = options.pop("name", None)
    if name not in FAMILIES:
        fail(f"{where}['name']", "one of " + ", ".join(FAMILIES), repr(name))
    kind = FAMILIES[name]
    links = options.get("links", ())
    if "links" in options and len(links) != len(kind.allowed):
        fail(f"{where}['links']", f"links of family {name!r}", list(links))
    known = {field.name for field in fields(kind)}
    if not set(options) <= known:
        fail(where, f"options of family {name!r}", sorted(set(options) - known))
    return kind(**options)
