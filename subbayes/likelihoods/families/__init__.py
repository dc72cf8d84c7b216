"""Families of responses by name."""

from __future__ import annotations

from subbayes.likelihoods.families.base import (
    FAMILIES,
    CommonParameters,
    Family,
    family,
    family_from_config,
    family_from_name,
    is_own_family,
)
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
    "family",
    "family_from_config",
    "family_from_name",
    "is_own_family",
]
