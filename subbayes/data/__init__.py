"""Observations in batches, and tables encoded as numbers."""

from subbayes.utils.registry import lazy_imports

_NAMES = {"Data": "data", "TabularEncoder": "encoder"}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
