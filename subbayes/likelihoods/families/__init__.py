"""Families of responses by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from subbayes.likelihoods.families.base import CommonParameters, Family
from subbayes.likelihoods.families.classes import BernoulliFamily, CategoricalFamily, OrdinalFamily
from subbayes.likelihoods.families.continuous import BetaFamily, GammaFamily, NormalFamily
from subbayes.likelihoods.families.counts import (
    BinomialFamily,
    NegativeBinomialFamily,
    PoissonFamily,
)
from subbayes.likelihoods.families.custom import Custom
from subbayes.likelihoods.families.heavy_tails import AsymmetricLaplaceFamily, StudentTFamily
from subbayes.likelihoods.families.incomplete import CensoredFamily
from subbayes.likelihoods.families.links import LINKS
from subbayes.likelihoods.families.literal_calls import literal_call
from subbayes.likelihoods.families.mixtures import MixtureFamily
from subbayes.likelihoods.families.positive import InverseGaussianFamily, LogNormalFamily
from subbayes.likelihoods.families.survival import (
    LogLogisticFamily,
    PiecewiseExponentialFamily,
    WeibullFamily,
)
from subbayes.likelihoods.families.truncated import TruncatedFamily
from subbayes.likelihoods.families.zeros import (
    HurdleNegativeBinomialFamily,
    HurdlePoissonFamily,
    ZeroInflatedNegativeBinomialFamily,
    ZeroInflatedPoissonFamily,
)
from subbayes.utils.checks import check_choice, fail, fail_type

__all__ = [
    "FAMILIES",
    "LINKS",
    "AsymmetricLaplaceFamily",
    "BernoulliFamily",
    "BetaFamily",
    "BinomialFamily",
    "CategoricalFamily",
    "CensoredFamily",
    "CommonParameters",
    "Custom",
    "Family",
    "GammaFamily",
    "HurdleNegativeBinomialFamily",
    "HurdlePoissonFamily",
    "InverseGaussianFamily",
    "LogLogisticFamily",
    "LogNormalFamily",
    "MixtureFamily",
    "NegativeBinomialFamily",
    "NormalFamily",
    "OrdinalFamily",
    "PiecewiseExponentialFamily",
    "PoissonFamily",
    "StudentTFamily",
    "TruncatedFamily",
    "WeibullFamily",
    "ZeroInflatedNegativeBinomialFamily",
    "ZeroInflatedPoissonFamily",
    "family_from_config",
    "family_from_name",
    "is_own_family",
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
        BinomialFamily,
        CategoricalFamily,
        ZeroInflatedPoissonFamily,
        ZeroInflatedNegativeBinomialFamily,
        HurdlePoissonFamily,
        HurdleNegativeBinomialFamily,
        WeibullFamily,
        LogLogisticFamily,
        PiecewiseExponentialFamily,
        AsymmetricLaplaceFamily,
        CensoredFamily,
        TruncatedFamily,
        MixtureFamily,
    )
}
"""Families by name."""

_REMEDIES = {
    "censored": "Pass CensoredFamily(family=WeibullFamily(), status='column')",
    "truncated": "Pass TruncatedFamily(family=NormalFamily(), lower=0.0)",
    "mixture": "Pass 'mixture(normal, normal)', or MixtureFamily(first=..., second=...)",
}
_AROUND = tuple(_REMEDIES)
_MOST_CLASSES = 100_000  # of a family in a file
_MIXTURE = re.compile(r"mixture\(([\w .-]{1,50}),([\w .-]{1,50})\)", re.IGNORECASE)


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
    "multinomial": "categorical",
    "zip": "zero-inflated-poisson",
    "zinb": "zero-inflated-negative-binomial",
    "zero-inflated-negbinomial": "zero-inflated-negative-binomial",
    "hurdle-negbinomial": "hurdle-negative-binomial",
    "asym-laplace": "asymmetric-laplace",
    "quantile": "asymmetric-laplace",
}


def family_from_name(family: str | Family, link: str | None = None) -> Family:
    """A family from its name.

    Args:
        family: a name of `FAMILIES`, a name that other libraries use ("gaussian", "negbin",
            "cumulative"; "binomial" without trials is "bernoulli"), one with options as in
            "asymmetric-laplace(quantile=0.9)", "mixture(normal, student-t)", or a family. Censored
            and truncated families are objects.
        link: link of the location.

    Raises:
        InputError: an unknown name, options that the family does not have, or a link that it does
            not support.

    Example:
        >>> family_from_name("piecewise-exponential(cuts=[1, 2, 5])").cuts
        (1.0, 2.0, 5.0)
        >>> family_from_name("poisson")
        poisson(mu: log)
        >>> family_from_name("mixture(normal, student-t)").parameters
        ('mu1', 'sigma1', 'mu2', 'sigma2', 'nu2', 'theta')
    """
    if isinstance(family, Family):
        return family if link is None else _with_link(family, link)
    if not isinstance(family, str):
        fail_type("family", "a name or a Family", family)
    mixture = _MIXTURE.fullmatch(family.strip())
    if mixture and link is None:
        first, second = (family_from_name(name.strip()) for name in mixture.groups())
        return MixtureFamily(first=first, second=second)
    around = _known_name(family.partition("(")[0].strip())
    if around in _AROUND:
        fail("family", "an object for a family around others", repr(family), _REMEDIES[around])
    call = literal_call("family", family)
    name, options = (family, {}) if call is None else (call.name, dict(call.options))
    for word in ("link", "cumulative"):
        if word in options:
            link = _one_link(link, options.pop(word))
    name = _known_name(name)
    if name == "bernoulli" and "trials" in options:  # a binomial family
        name = "binomial"
    names = (*(name for name in FAMILIES if name not in _AROUND), "gaussian")
    check_choice("family", name, names, "subbayes.likelihoods.families.FAMILIES")
    kind = FAMILIES[name]
    known = [field.name for field in fields(kind) if field.name not in ("links", "cumulative")]
    bare = call is not None and not call.options
    if call is not None and (call.values or bare or not set(options) <= set(known)):
        listed = ", ".join(f"{option}=" for option in known)
        expected = f"{name}({listed})" if known else f"{name!r}, which has no options"
        fail("family", expected, repr(family))
    if link is not None and kind is OrdinalFamily:
        options["cumulative"] = link
    elif link is not None and kind is CategoricalFamily:
        check_choice(f"link of family {name!r}", link, ("logit",))
    elif link is not None:
        check_choice(f"link of family {name!r}", link, kind.allowed["mu"])
        options["links"] = (link, *(links[0] for links in list(kind.allowed.values())[1:]))
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def _with_link(family: Family, link: str) -> Family:
    """A family with another link of its location."""
    if isinstance(family, (CensoredFamily, TruncatedFamily)):
        return replace(family, family=_with_link(family.family, link))
    if isinstance(family, (Custom, MixtureFamily)):
        remedy = "Pass links to Custom, or to the families of a mixture"
        fail("link", f"None for family {family.label!r}, which has its own", repr(link), remedy)
    if isinstance(family, OrdinalFamily):
        return replace(family, cumulative=link)
    if isinstance(family, CategoricalFamily):
        check_choice(f"link of family {family.label!r}", link, ("logit",))
        return family
    check_choice(f"link of family {family.label!r}", link, family.allowed[family.parameters[0]])
    return replace(family, links=(link, *family.links[1:]))


def _one_link(given: str | None, own: Any) -> str:
    """The link of a family's call, unless another one is given beside it."""
    if not isinstance(own, str) or given not in (None, own):
        fail(
            "link", "one name of a link", f"{own!r}" if given is None else f"{given!r} and {own!r}"
        )
    return own


def _known_name(name: str) -> str:
    return _ALIASES.get(name.lower().replace("_", "-"), name)


def is_own_family(family: Family) -> bool:
    """Whether a family, or one within it, is of the user, so that files do not hold it.

    Example:
        >>> is_own_family(PoissonFamily())
        False
    """
    inner = [part for part in vars(family).values() if isinstance(part, Family)]
    return type(family) not in FAMILIES.values() or any(map(is_own_family, inner))


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
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
    name = options.pop("name", None)
    if name not in FAMILIES:
        fail(f"{where}['name']", "a family of this version", repr(name))
    for key in ("family", "first", "second"):
        if isinstance(options.get(key), Mapping):
            options[key] = family_from_config(options[key], f"{where}[{key!r}]")
    if (options.get("n_classes") or 0) > _MOST_CLASSES:  # each takes memory
        fail(f"{where}['n_classes']", f"at most {_MOST_CLASSES}", options["n_classes"])
    return FAMILIES[name](**options)
