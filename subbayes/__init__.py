"""Bayesian inference over the part of a neural network that matters.

Choose what is random (a subspace), choose how to infer it, predict.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS = {
    "Approximation": "inference.variational",
    "Bernoulli": "likelihoods",
    "Categorical": "likelihoods",
    "CoordinateSubspace": "subspace",
    "Curvature": "curvature",
    "Curve": "subspaces.curves",
    "Data": "data",
    "DenseSubspace": "subspace",
    "Draws": "draws",
    "FittedModel": "api",
    "FullSubspace": "subspace",
    "Gaussian": "likelihoods",
    "HeteroscedasticGaussian": "likelihoods",
    "InputError": "checks",
    "InputTypeError": "checks",
    "JointSubspace": "subspace",
    "Likelihood": "likelihoods",
    "LinearisedLaplace": "inference.linearised_laplace",
    "MLP": "modules",
    "Network": "network",
    "Normal": "priors",
    "Poisson": "likelihoods",
    "Posterior": "posterior",
    "Predictive": "predictive",
    "RandomSubspace": "subspace",
    "RefreshedPosterior": "batchnorm",
    "SparseClassifier": "sparse.estimators",
    "SparseRegressor": "sparse.estimators",
    "Standardized": "likelihoods",
    "Subspace": "subspace",
    "SubspaceClassifier": "estimators",
    "SubspaceRegressor": "estimators",
    "Training": "api",
    "TrajectoryRecorder": "subspaces.trajectory",
    "choose_temperature": "tempering",
    "compare": "choice",
    "connect": "curve_training",
    "curve_losses": "subspaces.curves",
    "eigenvalues": "curvature",
    "elliptical_slice": "inference.elliptical_slice",
    "fit": "api",
    "hmc": "inference.hmc",
    "judge": "judging",
    "laplace": "inference.laplace",
    "linearised_laplace": "inference.linearised_laplace",
    "load": "api",
    "nuts": "inference.nuts",
    "optimal": "subspaces.optimal",
    "parallel_tempering": "inference.parallel_tempering",
    "slice_sampling": "inference.slice_sampling",
    "smc": "inference.smc",
    "subnetwork": "subspaces.subnetwork",
    "swa": "training",
    "swa_many": "training_many",
    "train": "training",
    "train_curve": "curve_training",
    "train_many": "training_many",
    "variational": "inference.variational",
    "variational_fit": "inference.variational",
}

__all__ = ["__version__", *sorted(_ROOMS)]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import subbayes` stays light."""
    if name in _ROOMS:
        return getattr(importlib.import_module(f"subbayes.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'subbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
