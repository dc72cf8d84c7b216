"""Semi-structured regression: interpretable effects beside neural networks."""

from subbayes.utils.namespace import lazy_imports

_NAMES = {
    "AllWeights": "subspace",
    "BernoulliFamily": "families",
    "BetaFamily": "families",
    "Deep": "predictors",
    "DeepEnsemble": "subspace",
    "Dirichlet": "dirichlet",
    "EffectPrior": "effect_priors",
    "Exponential": "effect_priors",
    "Family": "families",
    "Flexible": "effect_priors",
    "GammaFamily": "families",
    "HalfNormal": "effect_priors",
    "LKJ": "lkj",
    "LastLayer": "subspace",
    "NaiveSubspace": "subspace",
    "NegativeBinomialFamily": "families",
    "NetworkSubspace": "subspace",
    "NormalFamily": "families",
    "NormalPrior": "effect_priors",
    "OrdinalFamily": "families",
    "PoissonFamily": "families",
    "SemiStructuredRegression": "model",
    "SemiStructuredSubspace": "subspace",
    "StudentT": "effect_priors",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
