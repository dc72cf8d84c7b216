"""Bayesian inference over the part of a neural network that matters.

Choose what is random (a subspace), choose how to infer it, predict.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS = {
    "Approximation": "inference.variational.variational",
    "Bernoulli": "likelihoods",
    "Categorical": "likelihoods",
    "CoordinateSubspace": "subspace",
    "Curvature": "curvature",
    "Curve": "subspaces.curve",
    "Data": "data.data",
    "DenseSubspace": "subspace",
    "Draws": "draws",
    "FittedModel": "models.fit",
    "FullSubspace": "subspace",
    "Gaussian": "likelihoods",
    "HeteroscedasticGaussian": "likelihoods",
    "InputError": "utils.checks",
    "InputTypeError": "utils.checks",
    "JointSubspace": "subspace",
    "Likelihood": "likelihoods",
    "LinearisedLaplace": "inference.laplace.linearised",
    "MLP": "networks.mlp",
    "Network": "networks.network",
    "Normal": "priors",
    "Poisson": "likelihoods",
    "Posterior": "posterior",
    "Predictive": "predictions.predictive",
    "RandomSubspace": "subspace",
    "RefreshedPosterior": "inference.refreshed_posterior",
    "SparseClassifier": "models.sparse_estimators",
    "SparseRegressor": "models.sparse_estimators",
    "Standardized": "likelihoods",
    "Subspace": "subspace",
    "SubspaceClassifier": "models.estimators",
    "SubspaceRegressor": "models.estimators",
    "Training": "models.fit",
    "TrajectoryRecorder": "subspaces.pca",
    "choose_temperature": "inference.tempering",
    "compare": "diagnostics.model_comparison",
    "connect": "training.curve",
    "curve_losses": "subspaces.curve",
    "eigenvalues": "curvature",
    "elliptical_slice": "inference.samplers.elliptical_slice",
    "fit": "models.fit",
    "hmc": "inference.samplers.hmc",
    "judge": "inference.laplace.subspace_error",
    "laplace": "inference.laplace.laplace",
    "linearised_laplace": "inference.laplace.linearised",
    "load": "models.fit",
    "nuts": "inference.samplers.nuts",
    "optimal": "subspaces.optimal",
    "parallel_tempering": "inference.samplers.parallel_tempering",
    "slice_sampling": "inference.samplers.slice",
    "smc": "inference.samplers.smc",
    "subnetwork": "subspaces.subnetwork",
    "swa": "training.trainer",
    "swa_many": "training.many",
    "train": "training.trainer",
    "train_curve": "training.curve",
    "train_many": "training.many",
    "variational": "inference.variational.variational",
    "variational_fit": "inference.variational.variational",
}

__all__ = ["__version__", *sorted(_ROOMS)]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import subbayes` stays light."""
    if name in _ROOMS:
        return getattr(importlib.import_module(f"subbayes.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'subbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
