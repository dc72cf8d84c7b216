"""Regression by formulas: terms, priors, the design matrix, and posteriors of effects."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "Dirichlet": "priors.dirichlet",
    "EffectPrior": "priors.prior",
    "Exponential": "priors.exponential",
    "Flexible": "priors.flexible",
    "HalfNormal": "priors.half_normal",
    "Horseshoe": "priors.horseshoe",
    "LKJ": "priors.lkj",
    "NormalPrior": "priors.normal",
    "Regression": "model",
    "StudentT": "priors.student_t",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
