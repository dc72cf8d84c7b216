"""Regression by formulas: terms, priors, the design matrix, and posteriors of effects."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "Dirichlet": "priors.dirichlet",
    "EffectPrior": "priors.prior",
    "Exponential": "design.priors",
    "Flat": "design.flat_prior",
    "Flexible": "design.priors",
    "HalfNormal": "design.priors",
    "Horseshoe": "design.horseshoe",
    "LKJ": "priors.lkj",
    "NormalPrior": "design.priors",
    "StudentT": "design.priors",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
