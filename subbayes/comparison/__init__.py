"""Comparisons of methods on test rows, and draws as data of ArviZ."""

from subbayes.utils.registry import lazy_imports

_NAMES = {"Comparison": "comparison", "compare_methods": "comparison", "to_arviz": "arviz"}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
