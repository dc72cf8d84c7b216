"""Semi-structured regression: interpretable effects beside neural networks."""

from __future__ import annotations

from subbayes.semistructured.effect_priors import (
    EffectPrior,
    Exponential,
    Flexible,
    NormalPrior,
    StudentT,
)
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
from subbayes.semistructured.predictors import Deep
from subbayes.semistructured.subspace import (
    AllWeights,
    Fitting,
    LastLayer,
    NaiveSubspace,
    SemiStructuredSubspace,
)

__all__ = [
    "AllWeights",
    "BernoulliFamily",
    "BetaFamily",
    "Deep",
    "EffectPrior",
    "Exponential",
    "Family",
    "Fitting",
    "Flexible",
    "GammaFamily",
    "LastLayer",
    "NaiveSubspace",
    "NegativeBinomialFamily",
    "NormalFamily",
    "NormalPrior",
    "OrdinalFamily",
    "PoissonFamily",
    "SemiStructuredRegression",
    "SemiStructuredSubspace",
    "StudentT",
]
