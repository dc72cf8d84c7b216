"""Families of responses by name."""

from __future__ import annotations

from subbayes.likelihoods.around.atoms import (
    HurdleGammaFamily,
    HurdleLogNormalFamily,
    ZeroOneInflatedBetaFamily,
)
from subbayes.likelihoods.around.censored import CensoredFamily
from subbayes.likelihoods.around.mixture import MixtureFamily
from subbayes.likelihoods.around.truncated import TruncatedFamily
from subbayes.likelihoods.around.zeros import (
    HurdleNegativeBinomialFamily,
    HurdlePoissonFamily,
    ZeroInflatedNegativeBinomialFamily,
    ZeroInflatedPoissonFamily,
)
from subbayes.likelihoods.families.asymmetric_laplace import AsymmetricLaplaceFamily
from subbayes.likelihoods.families.beta import BetaFamily
from subbayes.likelihoods.families.classes import Bernoulli, Categorical, OrdinalFamily
from subbayes.likelihoods.families.counts import BinomialFamily, NegativeBinomialFamily, Poisson
from subbayes.likelihoods.families.custom import Custom
from subbayes.likelihoods.families.gamma import GammaFamily
from subbayes.likelihoods.families.inverse_gaussian import InverseGaussianFamily
from subbayes.likelihoods.families.log_normal import LogNormalFamily
from subbayes.likelihoods.families.normal import NormalFamily
from subbayes.likelihoods.families.sequential import SequentialFamily
from subbayes.likelihoods.families.student_t import StudentTFamily
from subbayes.likelihoods.families.survival import (
    LogLogisticFamily,
    PiecewiseExponentialFamily,
    WeibullFamily,
)
from subbayes.likelihoods.family import (
    FAMILIES,
    CommonParameters,
    Family,
    family,
    family_from_config,
    family_from_name,
    is_own_family,
)
from subbayes.likelihoods.links import LINKS

__all__ = [
    "FAMILIES",
    "LINKS",
    "AsymmetricLaplaceFamily",
    "Bernoulli",
    "BetaFamily",
    "BinomialFamily",
    "Categorical",
    "CensoredFamily",
    "CommonParameters",
    "Custom",
    "Family",
    "GammaFamily",
    "HurdleGammaFamily",
    "HurdleLogNormalFamily",
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
    "Poisson",
    "SequentialFamily",
    "StudentTFamily",
    "TruncatedFamily",
    "WeibullFamily",
    "ZeroInflatedNegativeBinomialFamily",
    "ZeroInflatedPoissonFamily",
    "ZeroOneInflatedBetaFamily",
    "family",
    "family_from_config",
    "family_from_name",
    "is_own_family",
]
