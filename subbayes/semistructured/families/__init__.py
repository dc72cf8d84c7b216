"""Families of responses by name."""

from __future__ import annotations

from subbayes.semistructured.families.base import LINKS, Family
from subbayes.semistructured.families.classes import BernoulliFamily, OrdinalFamily
from subbayes.semistructured.families.continuous import BetaFamily, GammaFamily, NormalFamily
from subbayes.semistructured.families.counts import NegativeBinomialFamily, PoissonFamily
from subbayes.utils.checks import check_choice, fail_type

__all__ = [
    "FAMILIES",
    "LINKS",
    "BernoulliFamily",
    "BetaFamily",
    "Family",
    "GammaFamily",
    "NegativeBinomialFamily",
    "NormalFamily",
    "OrdinalFamily",
    "PoissonFamily",
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
