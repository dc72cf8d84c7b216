"""Fitted models: `fit` and what it returns."""

from subbayes.utils.registry import lazy_imports

_NAMES = {"FittedModel": "fitted"}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
