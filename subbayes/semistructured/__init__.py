"""Semi-structured regression: interpretable effects beside neural networks."""

from subbayes.utils.namespace import lazy_imports

_NAMES = {
    "AllWeights": "subspace",
    "AsymmetricLaplaceFamily": "families",
    "BernoulliFamily": "families",
    "BetaFamily": "families",
    "BinomialFamily": "families",
    "CategoricalFamily": "families",
    "CensoredFamily": "families",
    "Custom": "families",
    "Deep": "predictors",
    "DeepEnsemble": "subspace",
    "EffectPrior": "effect_priors",
    "Exponential": "effect_priors",
    "Family": "families",
    "Flat": "flat_prior",
    "Flexible": "effect_priors",
    "GammaFamily": "families",
    "HalfNormal": "effect_priors",
    "HurdleNegativeBinomialFamily": "families",
    "HurdlePoissonFamily": "families",
    "InverseGaussianFamily": "families",
    "LastLayer": "subspace",
    "LogLogisticFamily": "families",
    "LogNormalFamily": "families",
    "MixtureFamily": "families",
    "NaiveSubspace": "subspace",
    "NegativeBinomialFamily": "families",
    "NetworkSubspace": "subspace",
    "NormalFamily": "families",
    "NormalPrior": "effect_priors",
    "OrdinalFamily": "families",
    "PiecewiseExponentialFamily": "families",
    "PoissonFamily": "families",
    "SemiStructuredRegression": "model",
    "SemiStructuredSubspace": "subspace",
    "StudentT": "effect_priors",
    "StudentTFamily": "families",
    "TruncatedFamily": "families",
    "WeibullFamily": "families",
    "ZeroInflatedNegativeBinomialFamily": "families",
    "ZeroInflatedPoissonFamily": "families",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
