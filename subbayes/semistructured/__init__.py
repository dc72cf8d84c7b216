"""Semi-structured regression: interpretable effects beside neural networks."""

from __future__ import annotations

from subbayes.semistructured.families import (
    BernoulliFamily,
    BetaFamily,
    Family,
    GammaFamily,
    NegativeBinomialFamily,
    NormalFamily,
    OrdinalFamily,
    PoissonFamily,
)
from subbayes.semistructured.model import SemiStructuredRegression
from subbayes.semistructured.module import Deep
from subbayes.semistructured.priors import EffectPrior, Exponential, Flexible, NormalPrior, StudentT
from subbayes.semistructured.subspace import Fitting

__all__ = [
    "BernoulliFamily",
    "BetaFamily",
    "Deep",
    "EffectPrior",
    "Exponential",
    "Family",
    "Fitting",
    "Flexible",
    "GammaFamily",
    "NegativeBinomialFamily",
    "NormalFamily",
    "NormalPrior",
    "OrdinalFamily",
    "PoissonFamily",
    "SemiStructuredRegression",
    "StudentT",
]
