"""Fitted models, estimators, models of arrays and data frames, and comparisons of methods."""

from subbayes.utils.namespace import lazy_imports

_NAMES = {
    "Comparison": "method_comparison",
    "DataFrameModel": "data_frame_model",
    "FittedModel": "fitted",
    "Model": "model",
    "compare_methods": "method_comparison",
    "fit_arrays": "array_model",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
