"""Families of responses, which are likelihoods; see `subbayes.likelihoods.families`."""

from __future__ import annotations

from subbayes.likelihoods.families import (
    FAMILIES,
    LINKS,
    BernoulliFamily,
    BetaFamily,
    Family,
    GammaFamily,
    InverseGaussianFamily,
    LogNormalFamily,
    NegativeBinomialFamily,
    NormalFamily,
    OrdinalFamily,
    PoissonFamily,
    StudentTFamily,
    family_from_config,
    family_from_name,
)

__all__ = [
    "FAMILIES",
    "LINKS",
    "BernoulliFamily",
    "BetaFamily",
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
