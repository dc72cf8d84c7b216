"""scikit-learn estimators: a network that says how sure it is, behind `fit` and `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from subbayes.models.array_model import fit_matrix
from subbayes.models.estimator_base import Classifier, Estimator, Regressor
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import PRIOR_SCALES, Settings

__all__ = ["SubspaceClassifier", "SubspaceRegressor"]

_DEFAULT = Settings()


class _Sampled(Estimator):
    """Fits a posterior in a subspace."""

    model_: FittedModel

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
    r"""A neural network for numbers or counts, with the posterior over a subspace of its weights.

    Training goes to the maximum a posteriori, then along it at a constant rate; the principal
    directions of that trajectory span the subspace, and elliptical slice sampling draws from the
    posterior in it:

    $$ p(y \mid x) \approx \frac{1}{S} \sum_s p(y \mid f(x;\, \hat w + P z_s)) $$

    Args:
        hidden: widths of the hidden layers; empty for a linear model.
        activation: "relu", "tanh", "silu" or "gelu".
        likelihood: "heteroscedastic" (noise that depends on x, plus a global variance),
            "gaussian" (one noise scale), or "poisson" for counts.
        subspace: "pca" (of the SGD trajectory), "random", "curve" (of low loss to a second
            solution), "optimal" (keeps most of the predictive covariance), "subnetwork" (the
            weights that keep most of the predictive variance) or "full".
        rank: number of coordinates of the subspace, below `swa_epochs` for "pca"; None takes 5,
            or fewer where the trajectory has fewer directions, 2 for "curve", 20 for "optimal",
            100 for "subnetwork".
        covariance: "exact", or "kfac", "low-rank" or "diagonal", by which the subspace "optimal"
            is chosen.
        prior: scale of the posterior's prior, of z or of the weights as `fit` has it; or
            "evidence", for the subspaces "optimal", "subnetwork" and "full".
        scale_prior: for the subspace "subnetwork": widen its prior by its share of the weights, as
            `fit` does.
        inference: "elliptical-slice", "nuts" or another engine of `fit`.
        temperature: T > 0 of the posterior, or "loo" or "validation" to choose it.
        dropout: dropout probability in training, after each hidden layer.
        prior_scale: s of the prior N(0, s^2 I) of the weights in training; smaller is smoother,
            infinite is no prior. 0.3 by default.
        epochs: passes over the data to the maximum a posteriori.
        learning_rate: of Adam in these epochs.
        batch_size: rows per step; None takes all rows in each.
        patience: stop these epochs early, after so many without a better score on held-out rows.
        validation_fraction: of the rows, held out for `patience` and for
            `temperature="validation"`.
        swa_epochs: passes of SGD at a constant rate, one snapshot after each.
        swa_learning_rate: the constant rate; larger explores further.
        draws: draws per chain.
        chains: number of chains.
        warmup: draws per chain to drop first; by default half of the draws.
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
        InputError: in `fit` and `predict`, data or parameters that cannot be used, in one line.

    Source:
        Izmailov et al. (2019), Subspace Inference for Bayesian Deep Learning.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = SubspaceRegressor(epochs=30, swa_epochs=12, draws=50, random_state=0)
        >>> model = model.fit(X[:400], y[:400])
        >>> mean, std = model.predict(X[400:], return_std=True)
        >>> lower, upper = model.predict_interval(X[400:], level=0.9)
        >>> bool((lower < mean).all() and (mean < upper).all())
        True
    """

    def __init__(
        self,
        *,
        hidden: Sequence[int] = _DEFAULT.hidden,
        activation: str = _DEFAULT.activation,
        likelihood: str = "heteroscedastic",
        subspace: str = _DEFAULT.subspace,
        rank: int | None = _DEFAULT.rank,
        covariance: str = _DEFAULT.covariance,
        prior: float | str = _DEFAULT.prior,
        scale_prior: bool = _DEFAULT.scale_prior,
        inference: str = _DEFAULT.inference,
        temperature: float | str = _DEFAULT.temperature,
        dropout: float = _DEFAULT.dropout,
        prior_scale: float = PRIOR_SCALES["regression"],
        epochs: int = _DEFAULT.epochs,
        learning_rate: float = _DEFAULT.learning_rate,
        batch_size: int | None = _DEFAULT.batch_size,
        patience: int | None = _DEFAULT.patience,
        validation_fraction: float = _DEFAULT.validation_fraction,
        swa_epochs: int = _DEFAULT.swa_epochs,
        swa_learning_rate: float = _DEFAULT.swa_learning_rate,
        draws: int = _DEFAULT.draws,
        chains: int = _DEFAULT.chains,
        warmup: int | None = _DEFAULT.warmup,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.likelihood = likelihood
        self.subspace = subspace
        self.rank = rank
        self.covariance = covariance
        self.prior = prior
        self.scale_prior = scale_prior
        self.inference = inference
        self.temperature = temperature
        self.dropout = dropout
        self.prior_scale = prior_scale
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.swa_epochs = swa_epochs
        self.swa_learning_rate = swa_learning_rate
        self.draws = draws
        self.chains = chains
        self.warmup = warmup
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose


class SubspaceClassifier(_Sampled, Classifier):
    r"""A neural network for classes, with the posterior over a subspace of its weights.

    Probabilities are averages over the draws of that posterior; see `SubspaceRegressor` for how
    they come about.

    Args:
        hidden: widths of the hidden layers; empty for a linear model.
        activation: "relu", "tanh", "silu" or "gelu".
        subspace: "pca" (of the SGD trajectory), "random", "curve" (of low loss to a second
            solution), "optimal" (keeps most of the predictive covariance), "subnetwork" (the
            weights that keep most of the predictive variance) or "full".
        rank: number of coordinates of the subspace, below `swa_epochs` for "pca"; None takes 5,
            or fewer where the trajectory has fewer directions, 2 for "curve", 20 for "optimal",
            100 for "subnetwork".
        covariance: "exact", or "kfac", "low-rank" or "diagonal", by which the subspace "optimal"
            is chosen.
        prior: scale of the posterior's prior, of z or of the weights as `fit` has it; or
            "evidence", for the subspaces "optimal", "subnetwork" and "full".
        scale_prior: for the subspace "subnetwork": widen its prior by its share of the weights, as
            `fit` does.
        inference: "elliptical-slice", "nuts" or another engine of `fit`.
        temperature: T > 0 of the posterior, or "loo" or "validation" to choose it.
        dropout: dropout probability in training, after each hidden layer.
        prior_scale: s of the prior N(0, s^2 I) of the weights in training; smaller is smoother,
            infinite is no prior. 1 by default.
        epochs: passes over the data to the maximum a posteriori.
        learning_rate: of Adam in these epochs.
        batch_size: rows per step; None takes all rows in each.
        patience: stop these epochs early, after so many without a better score on held-out rows.
        validation_fraction: of the rows, held out for `patience` and for
            `temperature="validation"`.
        swa_epochs: passes of SGD at a constant rate, one snapshot after each.
        swa_learning_rate: the constant rate; larger explores further.
        draws: draws per chain.
        chains: number of chains.
        warmup: draws per chain to drop first; by default half of the draws.
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
        InputError: in `fit` and `predict`, data or parameters that cannot be used, in one line.

    Source:
        Izmailov et al. (2019), Subspace Inference for Bayesian Deep Learning.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = SubspaceClassifier(epochs=30, swa_epochs=12, draws=50, random_state=0)
        >>> model = model.fit(X[::2], y[::2])
        >>> model.predict_proba(X[1::2]).shape
        (75, 3)
        >>> model.score(X[1::2], y[1::2]) > 0.9
        True
    """

    def __init__(
        self,
        *,
        hidden: Sequence[int] = _DEFAULT.hidden,
        activation: str = _DEFAULT.activation,
        subspace: str = _DEFAULT.subspace,
        rank: int | None = _DEFAULT.rank,
        covariance: str = _DEFAULT.covariance,
        prior: float | str = _DEFAULT.prior,
        scale_prior: bool = _DEFAULT.scale_prior,
        inference: str = _DEFAULT.inference,
        temperature: float | str = _DEFAULT.temperature,
        dropout: float = _DEFAULT.dropout,
        prior_scale: float = PRIOR_SCALES["classification"],
        epochs: int = _DEFAULT.epochs,
        learning_rate: float = _DEFAULT.learning_rate,
        batch_size: int | None = _DEFAULT.batch_size,
        patience: int | None = _DEFAULT.patience,
        validation_fraction: float = _DEFAULT.validation_fraction,
        swa_epochs: int = _DEFAULT.swa_epochs,
        swa_learning_rate: float = _DEFAULT.swa_learning_rate,
        draws: int = _DEFAULT.draws,
        chains: int = _DEFAULT.chains,
        warmup: int | None = _DEFAULT.warmup,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.subspace = subspace
        self.rank = rank
        self.covariance = covariance
        self.prior = prior
        self.scale_prior = scale_prior
        self.inference = inference
        self.temperature = temperature
        self.dropout = dropout
        self.prior_scale = prior_scale
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.swa_epochs = swa_epochs
        self.swa_learning_rate = swa_learning_rate
        self.draws = draws
        self.chains = chains
        self.warmup = warmup
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose
