"""Models of tables: scikit-learn estimators, models of data frames, and their default."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "DataFrameModel": "data_frame_model",
    "SparseClassifier": "estimators",
    "SparseRegressor": "estimators",
    "SubspaceClassifier": "estimators",
    "SubspaceRegressor": "estimators",
    "TableClassifier": "estimators",
    "TableRegressor": "estimators",
    "fit_arrays": "array_model",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
