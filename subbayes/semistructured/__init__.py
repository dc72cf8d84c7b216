"""Semi-structured regression: interpretable effects beside neural networks."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "AllWeights": "subspace",
    "Deep": "predictors",
    "DeepEnsemble": "subspace",
    "Dirichlet": "dirichlet",
    "EffectPrior": "effect_prior",
    "Exponential": "effect_priors",
    "Flat": "flat_prior",
    "Flexible": "effect_priors",
    "HalfNormal": "effect_priors",
    "Horseshoe": "horseshoe",
    "LKJ": "lkj",
    "LastLayer": "subspace",
    "NaiveSubspace": "subspace",
    "NetworkSubspace": "subspace",
    "NormalPrior": "effect_priors",
    "SemiStructuredRegression": "model",
    "SemiStructuredSubspace": "subspace",
    "StudentT": "effect_priors",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
