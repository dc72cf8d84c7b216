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
    DeepEnsemble,
    LastLayer,
    NaiveSubspace,
    NetworkSubspace,
    SemiStructuredSubspace,
)

__all__ = [
    "AllWeights",
    "BernoulliFamily",
    "BetaFamily",
    "Deep",
    "DeepEnsemble",
    "EffectPrior",
    "Exponential",
    "Family",
    "Flexible",
    "GammaFamily",
    "LastLayer",
    "NaiveSubspace",
    "NetworkSubspace",
    "NegativeBinomialFamily",
    "NormalFamily",
    "NormalPrior",
    "OrdinalFamily",
    "PoissonFamily",
    "SemiStructuredRegression",
    "SemiStructuredSubspace",
    "StudentT",
]
