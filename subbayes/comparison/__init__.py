"""Comparisons of methods on test rows, and of posteriors by their evidence and weights."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "Comparison": "comparison",
    "ModelComparison": "posteriors",
    "compare_methods": "comparison",
    "compare_posteriors": "posteriors",
    "reweight": "posteriors",
    "to_arviz": "arviz",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
