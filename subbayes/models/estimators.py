"""scikit-learn estimators: a network with a posterior over a subspace of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Shaped

from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.models.array_model import fit_matrix
from subbayes.models.estimator_base import Classifier, Estimator, Regressor
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import TABLE_TRAINING, Perceptron, TableSettings
from subbayes.priors import EvidencePrior
from subbayes.subspaces.base import SubspaceMethod
from subbayes.training.configuration import Training

__all__ = ["SubspaceClassifier", "SubspaceRegressor"]


class _Sampled(Estimator):
    """Fits a posterior in a subspace."""

    model_: FittedModel
    _defaults: ClassVar[dict[str, Any]] = {
        "network": Perceptron(),
        "training": TABLE_TRAINING,
        "sampling": Sampling(),
    }

    def _settings(self) -> TableSettings:
        return TableSettings(
            likelihood=getattr(self, "likelihood", None),
            subspace=self.subspace,
            inference=self.inference,
            prior=self.prior,
            temperature=self.temperature,
            **self._configurations(),
        )

    def _train(
        self,
        x: Float[np.ndarray, "n d"],
        y: Shaped[np.ndarray, "n"],
        task: str,
        n_classes: int | None,
    ) -> FittedModel:
        return fit_matrix(
            x, y, task, self._settings(), n_classes=n_classes, progress=bool(self.verbose)
        )


class SubspaceRegressor(_Sampled, Regressor):
    r"""A neural network for numbers or counts, with a posterior over a subspace of its weights.

    Training finds the maximum a posteriori and continues at a constant rate; the principal
    directions of that trajectory span the subspace, and elliptical slice sampling draws from the
    posterior in it:

    $$ p(y \mid x) \approx \frac{1}{S} \sum_s p(y \mid f(x;\, \hat w + P z_s)) $$

    `network`, `training` and `sampling` take an object, or a dict of the settings that differ from
    the defaults. Their fields are parameters too: `set_params(training__epochs=50)`, and so in a
    grid search.

    Args:
        network: a `Perceptron` (hidden, activation, dropout).
        likelihood: "heteroscedastic" (noise that depends on x, plus a global variance),
            "gaussian" (one noise scale), or "poisson" for counts.
        subspace: a method of `subbayes.subspaces` such as `PCA(rank=5)`, or its name: "pca",
            "random", "curve", "optimal", "subnetwork", "full".
        inference: an engine of `subbayes.inference` such as `NUTS()`, or its name.
        prior: scale of the prior of the coordinates, or "evidence", as for `subbayes.fit`.
        temperature: T > 0 of the posterior, or "loo" or "validation" to choose it.
        training: a `Training`; by default 100 epochs and 40 of weight averaging, with a prior of
            scale 0.3 of the weights.
        sampling: a `Sampling` (draws, chains, warmup); its seed is `random_state`.
        standardize: centre the columns of X and divide them by their standard deviation. (The
            target is always standardised inside; predictions are in its own units.)
        random_state: an integer gives the same model each time.
        verbose: show progress bars.

    Attributes:
        model_: the `FittedModel`: its draws, diagnostics and subspace.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X was a DataFrame with names.
        mean_: subtracted from the columns, shape (d,).
        scale_: the columns are divided by, shape (d,).
        seed_: the seed in use.

    Raises:
        InputError: in `fit` and `predict`, data or parameters that cannot be used.

    Source:
        Izmailov et al. (2019), Subspace Inference for Bayesian Deep Learning.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = SubspaceRegressor(
        ...     training={"epochs": 30, "swa_epochs": 12}, sampling={"draws": 50}, random_state=0)
        >>> model = model.fit(X[:400], y[:400])
        >>> mean, std = model.predict(X[400:], return_std=True)
        >>> lower, upper = model.predict_interval(X[400:], level=0.9)
        >>> bool((lower < mean).all() and (mean < upper).all())
        True
    """

    def __init__(
        self,
        *,
        network: Perceptron | Mapping[str, Any] | None = None,
        likelihood: str = "heteroscedastic",
        subspace: str | SubspaceMethod = "pca",
        inference: str | Engine = "elliptical-slice",
        prior: float | str | EvidencePrior = 1.0,
        temperature: float | str = 1.0,
        training: Training | Mapping[str, Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.network = network
        self.likelihood = likelihood
        self.subspace = subspace
        self.inference = inference
        self.prior = prior
        self.temperature = temperature
        self.training = training
        self.sampling = sampling
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose


class SubspaceClassifier(_Sampled, Classifier):
    r"""A neural network for classes, with a posterior over a subspace of its weights.

    Probabilities are averages over the draws of that posterior; see `SubspaceRegressor`.

    Args:
        network: a `Perceptron` (hidden, activation, dropout), or a dict of what differs.
        subspace: a method of `subbayes.subspaces` such as `PCA(rank=5)`, or its name.
        inference: an engine of `subbayes.inference` such as `NUTS()`, or its name.
        prior: scale of the prior of the coordinates, or "evidence", as for `subbayes.fit`.
        temperature: T > 0 of the posterior, or "loo" or "validation" to choose it.
        training: a `Training`, or a dict of what differs; by default 100 epochs and 40 of weight
            averaging, with a prior of scale 1 of the weights.
        sampling: a `Sampling` (draws, chains, warmup), or a dict of what differs; its seed is
            `random_state`.
        standardize: centre the columns of X and divide them by their standard deviation.
        random_state: an integer gives the same model each time.
        verbose: show progress bars.

    Attributes:
        classes_: the labels, sorted, shape (K,).
        model_: the `FittedModel`: its draws, diagnostics and subspace.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X was a DataFrame with names.
        mean_: subtracted from the columns, shape (d,).
        scale_: the columns are divided by, shape (d,).
        seed_: the seed in use.

    Raises:
        InputError: in `fit` and `predict`, data or parameters that cannot be used.

    Source:
        Izmailov et al. (2019), Subspace Inference for Bayesian Deep Learning.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = SubspaceClassifier(
        ...     training={"epochs": 30, "swa_epochs": 12}, sampling={"draws": 50}, random_state=0)
        >>> model = model.fit(X[::2], y[::2])
        >>> model.predict_proba(X[1::2]).shape
        (75, 3)
        >>> model.score(X[1::2], y[1::2]) > 0.9
        True
    """

    def __init__(
        self,
        *,
        network: Perceptron | Mapping[str, Any] | None = None,
        subspace: str | SubspaceMethod = "pca",
        inference: str | Engine = "elliptical-slice",
        prior: float | str | EvidencePrior = 1.0,
        temperature: float | str = 1.0,
        training: Training | Mapping[str, Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.network = network
        self.subspace = subspace
        self.inference = inference
        self.prior = prior
        self.temperature = temperature
        self.training = training
        self.sampling = sampling
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose
