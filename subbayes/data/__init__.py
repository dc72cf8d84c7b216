"""Observations in batches, data sets, and tables encoded as numbers."""

from subbayes.utils.namespace import lazy

_NAMES = {"Data": "data", "TabularEncoder": "encoder", "load_uci": "datasets"}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy(__name__, _NAMES)
