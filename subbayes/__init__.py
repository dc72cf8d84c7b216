"""Bayesian inference over the part of a neural network that matters.

Choose what is random (a subspace), choose how to infer it, predict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subbayes.utils.registry import lazy_imports

if TYPE_CHECKING:
    __version__: str

_NAMES = {
    "CheckpointError": "utils.checks",
    "Diverged": "training.loop",
    "Draws": "draws",
    "InputError": "utils.checks",
    "InputTypeError": "utils.checks",
    "MLP": "networks.mlp",
    "Network": "networks.network",
    "Posterior": "posterior",
    "Predictive": "predictions.predictive",
    "Regression": "regression.model",
    "Sampling": "inference.configuration",
    "SemiStructuredRegression": "semistructured.model",
    "SparseClassifier": "tables.estimators",
    "SparseRegressor": "tables.estimators",
    "SubspaceClassifier": "tables.estimators",
    "SubspaceRegressor": "tables.estimators",
    "TableClassifier": "tables.estimators",
    "TableRegressor": "tables.estimators",
    "Training": "training.configuration",
    "__version__": "utils.registry",
    "fit": "models.fit",
    "load": "artifacts.saving",
    "recommend": "recommendation.recommend",
}
_ROOMS = (
    "active",
    "baselines",
    "comparison",
    "curvature",
    "data",
    "diagnostics",
    "distributed",
    "inference",
    "likelihoods",
    "models",
    "networks",
    "plots",
    "posterior",
    "predictions",
    "priors",
    "recommendation",
    "regression",
    "reports",
    "semistructured",
    "sparse",
    "subspace",
    "subspaces",
    "tables",
    "training",
)

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES, _ROOMS)
