"""scikit-learn estimators: a network that says how sure it is, behind `fit` and `predict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float, Shaped
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_is_fitted,
    check_random_state,
    column_or_1d,
    validate_data,
)

from subbayes.api import load
from subbayes.checks import check_finite, check_same_length, fail
from subbayes.fitted import FittedModel
from subbayes.predictive import Predictive
from subbayes.settings import PRIOR_SCALES, Settings
from subbayes.table_model import fit_matrix, pieces

__all__ = ["SubspaceClassifier", "SubspaceRegressor"]

_DEFAULT = Settings()
_COUNTS = "poisson"
_Estimator = TypeVar("_Estimator", bound="_SubspaceEstimator")


class _SubspaceEstimator(BaseEstimator):
    """What regressor and classifier share: checks, standardisation, saving."""

    model_: FittedModel
    mean_: Float[np.ndarray, "d"]
    scale_: Float[np.ndarray, "d"]

    # --- fitting ----------------------------------------------------------------------------

    def _fit(
        self, X: Float[np.ndarray, "n d"], y: Shaped[np.ndarray, "n"], task: str,
        n_classes: int | None = None,
    ) -> None:
        """Learn the scales of the columns, then the model."""
        self.mean_, self.scale_ = self._moments(X)
        self.seed_ = self._seed()
        self.model_ = fit_matrix(self._matrix(X), y, task, self._settings(),
                                 n_classes=n_classes, progress=bool(self.verbose))

    def _moments(
        self, X: Float[np.ndarray, "n d"]
    ) -> tuple[Float[np.ndarray, "d"], Float[np.ndarray, "d"]]:
        if not self.standardize:
            return np.zeros(X.shape[1]), np.ones(X.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):
            mean, scale = X.mean(0), X.std(0)
        if not np.isfinite(scale).all():
            fail("X", "columns whose variance float64 can hold",
                 f"overflow in column {int((~np.isfinite(scale)).argmax())}",
                 "Divide it by a constant first")
        # a column that is constant but for rounding carries nothing: it stays near 0
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
        return mean, np.where(constant, 1.0, scale)

    def _matrix(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """What the network takes: standardised, in float32."""
        with np.errstate(over="ignore"):
            matrix = ((X - self.mean_) / self.scale_).astype(np.float32)
        check_finite("X", matrix)
        return matrix

    def _seed(self) -> int:
        """The integer itself, or one drawn from the random state."""
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _settings(self) -> Settings:
        names = {field.name for field in dataclasses.fields(Settings)}
        chosen = {k: v for k, v in self.get_params(deep=False).items() if k in names}
        return Settings(**chosen, seed=self.seed_)

    def _check_X(self, X: Any, *, fitting: bool) -> Float[np.ndarray, "n d"]:
        """A finite float64 matrix with the columns of fitting."""
        try:
            X = validate_data(self, X, dtype=np.float64, ensure_all_finite=False, reset=fitting,
                              ensure_min_samples=2 if fitting else 1)
        except ValueError as error:
            if "could not convert string" not in str(error):
                raise
            fail("X", "numbers", str(error).removeprefix("could not convert string to float: "),
                 "Put a subbayes.tabular.TabularEncoder before it in a pipeline")
        check_finite("X", X)
        return X

    def _check_y(self, y: Any, n: int) -> Shaped[np.ndarray, "n"]:
        """One column without missing values."""
        if y is None:
            raise ValueError(f"This {type(self).__name__} estimator requires y to be passed, but "
                             "the target y is None.")
        y = column_or_1d(y, warn=True)
        check_same_length(["X", "y"], [n, len(y)])
        if y.dtype.kind == "f":
            check_finite("y", y)
        return y

    # --- predicting -------------------------------------------------------------------------

    def _inputs(self, X: Any) -> Float[np.ndarray, "n d"]:
        check_is_fitted(self)
        return self._matrix(self._check_X(X, fitting=False))

    def predict_dist(self, X: Any) -> Predictive:
        """The predictive distribution of each row, in the units of y.

        Args:
            X: features (n, n_features_in_).

        Returns:
            A `Predictive`, with `mean`, `std`, `epistemic`, `aleatoric`, `interval`, `quantile`,
            `log_prob`, `probabilities`, `decide`. It holds the outputs of all draws: for very
            many rows call it on some at a time.
        """
        inputs = self._inputs(X)
        return self.model_.predict(inputs)

    def _pieces(self, X: Any) -> Iterator[Predictive]:
        inputs = self._inputs(X)
        return pieces(self.model_, inputs)

    # --- saving -----------------------------------------------------------------------------

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON, no pickle; see `load`.

        Args:
            path: the folder.
            overwrite: replace a model that is already there.

        Raises:
            InputError: the path is taken (pass `overwrite=True`), or cannot be written.
        """
        check_is_fitted(self)
        model = dataclasses.replace(self.model_, extra={"estimator": self._state()})
        return model.save(path, overwrite=overwrite)

    def _state(self) -> dict[str, Any]:
        """Parameters and what was learned beside the model, in terms JSON has."""
        params = self.get_params(deep=False)
        if not isinstance(self.random_state, (int, np.integer, type(None))):
            params["random_state"] = self.seed_
        names = getattr(self, "feature_names_in_", None)
        return {"class": type(self).__name__, "params": params, "seed": self.seed_,
                "mean": self.mean_.tolist(), "scale": self.scale_.tolist(),
                "feature_names": None if names is None else names.tolist()}

    @classmethod
    def load(cls: type[_Estimator], path: str | Path) -> _Estimator:
        """Load what `save` wrote.

        Raises:
            InputError: no such artifact, a damaged one, or one of something else.
        """
        model = load(path)
        state = model.extra.get("estimator", {})
        if state.get("class") != cls.__name__:
            fail("path", f"a saved {cls.__name__}",
                 f"{state.get('class') or 'another kind of model'} at '{path}'",
                 f"Use {state['class']}.load" if state else
                 "Use subbayes.load, or the command that saved it")
        estimator = cls(**state["params"] | {"hidden": tuple(state["params"]["hidden"])})
        estimator.model_ = dataclasses.replace(model, extra={})
        estimator._restore(state)
        return estimator

    def _restore(self, state: dict[str, Any]) -> None:
        self.seed_, self.n_features_in_ = state["seed"], len(state["mean"])
        self.mean_ = np.array(state["mean"], dtype=np.float64)
        self.scale_ = np.array(state["scale"], dtype=np.float64)
        if state["feature_names"] is not None:
            self.feature_names_in_ = np.array(state["feature_names"], dtype=object)

    def __getstate__(self) -> dict[str, Any]:
        """Traced graphs stay behind; `model_.posterior` is None in a copy."""
        state = dict(super().__getstate__())
        if "model_" in state:
            state["model_"] = dataclasses.replace(state["model_"], posterior=None)
        return state


class SubspaceRegressor(RegressorMixin, _SubspaceEstimator):
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

    def fit(self, X: Any, y: Any) -> SubspaceRegressor:
        """Train, build the subspace, sample its posterior.

        Args:
            X: features (n, d), numbers; n at least 2.
            y: targets (n,): numbers that vary, or counts for `likelihood="poisson"`.

        Raises:
            InputError: see the class.
        """
        X = self._check_X(X, fitting=True)
        y = self._check_y(y, len(X))
        try:
            y = y.astype(np.float64)
        except (TypeError, ValueError):
            fail("y", "numbers", f"values of type {y.dtype}",
                 "Convert them, or use SubspaceClassifier for labels")
        check_finite("y", y)
        counts = self.likelihood == _COUNTS
        self._fit(X, y, "count" if counts else "regression")
        return self

    def predict(
        self, X: Any, return_std: bool = False
    ) -> Float[np.ndarray, "n"] | tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
        """Mean of the predictive distribution, and its standard deviation if asked for.

        Args:
            X: features (n, n_features_in_).
            return_std: return (mean, std), both (n,), in the units of y; the deviation is of a
                new observation: what the draws disagree about, and the noise.
        """
        each = [(p.mean, p.std) if return_std else (p.mean,)
                for p in self._pieces(X)]
        columns = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        return (columns[0], columns[1]) if return_std else columns[0]

    def predict_interval(
        self, X: Any, level: float = 0.95
    ) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
        """Central interval that holds a new observation with probability `level`.

        Args:
            X: features (n, n_features_in_).
            level: a probability strictly between 0 and 1.

        Returns:
            Lower and upper ends, both (n,), in the units of y.
        """
        each = [p.interval(level) for p in self._pieces(X)]
        lower, upper = (np.concatenate(parts) for parts in zip(*each, strict=True))
        return lower, upper


class SubspaceClassifier(ClassifierMixin, _SubspaceEstimator):
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

    classes_: np.ndarray

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

    def fit(self, X: Any, y: Any) -> SubspaceClassifier:
        """Train, build the subspace, sample its posterior.

        Args:
            X: features (n, d), numbers; n at least 2.
            y: labels (n,) of at least two classes: text, whole numbers or booleans.

        Raises:
            InputError: see the class.
        """
        X = self._check_X(X, fitting=True)
        y = self._check_y(y, len(X))
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            fail("y", "at least 2 classes", f"1 class, {self.classes_[0]!r}",
                 "Fit with rows of every class")
        self._fit(X, codes.astype(np.int64), "classification", len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n K"]:
        """Class probabilities (n, K), averaged over the draws, in the order of `classes_`.

        Args:
            X: features (n, n_features_in_).
        """
        return np.concatenate([p.probabilities for p in self._pieces(X)])

    def predict(self, X: Any) -> Shaped[np.ndarray, "n"]:
        """Most probable class of each row, (n,).

        Args:
            X: features (n, n_features_in_).
        """
        codes = self.predict_proba(X).argmax(1)
        return self.classes_[codes]

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"classes": self.classes_.tolist(),
                                   "dtype": self.classes_.dtype.str}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self.classes_ = np.array(state["classes"], dtype=np.dtype(state["dtype"]))
