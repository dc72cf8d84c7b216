"""scikit-learn estimators of Bayesian neural networks: posteriors in subspaces, sparse networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
from jaxtyping import Float
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from typing_extensions import override

from subbayes.artifacts.saving import artifact
from subbayes.data.encoder import TabularEncoder
from subbayes.data.to_pandas import to_pandas
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import (
    TABLE_TRAINING,
    Perceptron,
    SparseSettings,
    TableSettings,
    decode_parameters,
)
from subbayes.priors import EvidencePrior
from subbayes.subspaces.base import SubspaceMethod
from subbayes.tables.array_model import HIERARCHICAL, SPARSE
from subbayes.tables.estimator_base import (
    Classifier,
    Estimator,
    EstimatorFacts,
    MatrixEstimator,
    Regressor,
)
from subbayes.tables.hierarchical import ENCODING, Effort
from subbayes.tables.stacked import Stack
from subbayes.training.configuration import Training
from subbayes.utils.checks import check_count
from subbayes.utils.types import RowNumbers

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class _SubspaceEstimator(MatrixEstimator):
    """Parameters of estimators with a posterior in a subspace."""

    _takes_several = True
    _defaults: ClassVar[dict[str, Any]] = {
        "network": Perceptron(),
        "training": TABLE_TRAINING,
        "sampling": Sampling(),
    }

    network: Perceptron | Mapping[str, Any] | None = None
    likelihood: str | None = None
    subspace: str | SubspaceMethod | None = None
    inference: str | Engine | None = None
    prior: float | str | EvidencePrior | None = None
    temperature: float | str = 1.0
    training: Training | Mapping[str, Any] | None = None
    sampling: Sampling | Mapping[str, Any] | None = None
    standardize: bool = True
    random_state: Any = None
    verbose: bool = False


class SubspaceRegressor(_SubspaceEstimator, Regressor):
    r"""A neural network for numbers or counts, with a posterior over a subspace of its weights.

    $$ p(y \mid x) \approx \frac{1}{S} \sum_s p(y \mid f(x;\, \hat w + P z_s)) $$

    Without subspace, inference and prior, they are those of `subbayes.fit`: linearised Laplace of
    all weights for numbers and counts; for classes, several targets or more than 2000 weights, the
    principal directions of a trajectory of SGD, and elliptical slice sampling. The prior in
    training is then that of the largest evidence, unless `training` has one.

    With several targets, y of shape (n, T), the network has all of them as outputs, and draws of
    `predict_dist(X).sample` share one function; the noise is independent given the network. Entries
    of y that are NaN are missing.

    `network`, `training` and `sampling` take an object, or a dict of the fields that differ from
    the defaults. Their fields are parameters too, as in `set_params(training__epochs=50)` and in a
    grid search.

    Args:
        network: a `Perceptron` (hidden, activation, dropout).
        likelihood: "heteroscedastic" (the default; noise that depends on x, plus a global
            variance), "gaussian" (one noise scale), "student-t"; "log-normal", "gamma" or
            "inverse-gaussian" for y above 0; "poisson" or "negative-binomial" for counts.
        subspace: a method of `subbayes.subspaces` such as `PCA(rank=5)`, or its name: "pca",
            "random", "curve", "optimal", "subnetwork", "full".
        inference: an engine of `subbayes.inference` such as `NUTS()`, or its name.
        prior: scale of the prior of the coordinates, or "evidence", as for `subbayes.fit`.
        temperature: T > 0 of the posterior, or "loo" or "validation" to choose it.
        training: a `Training`; by default 100 epochs, in two or three trainings, and 40 of weight
            averaging. With a subspace, an engine or a prior of your choice it is one training, with
            a prior of scale 0.3 of the weights (1 for classes).
        sampling: a `Sampling` (draws, chains, warmup); its seed is `random_state`. Its `checkpoint`
            is the folder of one fit: other rows or parameters, as in cross-validation, are refused.
        standardize: centre the columns of X and divide them by their standard deviation. (The
            target is always standardised internally; predictions are in its own units.)
        random_state: an integer gives the same model each time.
        verbose: show progress bars.

    Attributes:
        model_: the `FittedModel`: its draws, diagnostics and subspace.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X was a DataFrame with names.
        mean_: means that are subtracted from the columns, shape (d,).
        scale_: standard deviations that divide the columns, shape (d,).
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

    model_: FittedModel


class SubspaceClassifier(_SubspaceEstimator, Classifier):
    """A neural network for classes, with a posterior over a subspace of its weights.

    Parameters, attributes, errors and source are those of `SubspaceRegressor`; `likelihood` is
    "categorical". Probabilities are averages over the draws of the posterior. With y of shape
    (n, T) there are T labels, 0 or 1, each of which a row has or not.

    Attributes:
        classes_: the labels, sorted, shape (K,).

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

    model_: FittedModel


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class _TableEstimator(Estimator):
    """Parameters of estimators of tables, the encoding of tables, and their fit."""

    _method = HIERARCHICAL
    _takes_several = True
    _defaults: ClassVar[dict[str, Any]] = {}

    effort: str | Effort = "standard"
    likelihood: str | None = None
    categorical: Sequence[str] = ()
    checkpoint: str | Path | None = None
    random_state: Any = None
    verbose: bool = False

    @override
    def _learned(self, X: Any, weights: RowNumbers | None) -> Float[np.ndarray, "n features"]:
        X = to_pandas("X", X)
        self._take_names(TabularEncoder(**ENCODING, categorical=self.categorical).fit(X))
        return self.encoder_.transform(X)

    def _settings(self) -> TableSettings:
        settings = super()._settings()
        sampling = dataclasses.replace(settings.sampling, checkpoint=self.checkpoint)
        return dataclasses.replace(settings, sampling=sampling)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the posteriors of the members, which hold the training data."""
        state = super().__getstate__()
        if isinstance(stack := state.get("model_"), Stack):
            members = tuple(dataclasses.replace(one, posterior=None) for one in stack.members)
            state["model_"] = dataclasses.replace(stack, members=members)
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.categorical = tags.input_tags.allow_nan = True
        return tags


class TableRegressor(_TableEstimator, Regressor):
    """The default model of a table with a number or a count to predict.

    Small networks with a hierarchical prior, all of whose parameters are sampled, on standardised
    columns, their ranks and harmonics of these; see `subbayes.tables.hierarchical`. Tables may have
    numbers, text, categories and missing values. With several targets, y of shape (n, T), one
    network has all of them as outputs, so that draws of `predict_dist(X).sample` share one
    function; entries of y that are NaN are missing.

    Args:
        effort: "quick", "standard" or "long": fixed numbers of steps, see
            `subbayes.tables.hierarchical.EFFORTS`.
        likelihood: "student-t" (the default), "heteroscedastic", "gaussian"; "log-normal", "gamma"
            or "inverse-gaussian" for y above 0; "negative-binomial" or "poisson" for counts.
        categorical: names of numeric columns that are categories.
        checkpoint: folder of one fit, from which an interrupted one resumes.
        random_state: an integer gives the same model each time.
        verbose: show progress bars.

    Attributes:
        model_: the `Stack` of fitted models; `model_.record` is what was compared.
        encoder_: the `TabularEncoder` of the columns.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X was a data frame with names.
        seed_: the seed in use.

    Raises:
        InputError: in `fit` and `predict`, data or parameters that cannot be used.

    Source:
        Neal (1996), Bayesian Learning for Neural Networks; Sommer et al. (2025), Microcanonical
        Langevin ensembles.

    Example:
        >>> from subbayes.tables.hierarchical import Candidate, Effort
        >>> small = Effort((Candidate((4,), 1),), climb=50, chains=2, steps=100)
        >>> x = np.random.default_rng(0).normal(size=(50, 2))
        >>> model = TableRegressor(effort=small, random_state=0).fit(x, 3 * x[:, 0])
        >>> lower, upper = model.predict_interval([[0.5, 0.0]], level=0.9)
        >>> bool(lower[0] < 1.5 < upper[0])
        True
    """


class TableClassifier(_TableEstimator, Classifier):
    """The default model of a table with classes to predict.

    Parameters, attributes, errors and source are those of `TableRegressor`; `likelihood` is
    "categorical". With y of shape (n, T) there are T labels, 0 or 1, which a row has or not.

    Attributes:
        classes_: the labels, sorted, shape (K,).

    Example:
        >>> from subbayes.tables.hierarchical import Candidate, Effort
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> small = Effort((Candidate((4,), None),), climb=50, chains=2, steps=100)
        >>> model = TableClassifier(effort=small, random_state=0).fit(X[::2], y[::2])
        >>> model.score(X[1::2], y[1::2]) > 0.9
        True
    """


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class _SparseEstimator(MatrixEstimator):
    """Parameters, inclusion probabilities and export of estimators of sparse networks."""

    _method = SPARSE
    _defaults: ClassVar[dict[str, Any]] = {
        "network": Perceptron(),
        "sparse": SparseSettings(),
        "training": dataclasses.replace(TABLE_TRAINING, epochs=200),
    }

    network: Perceptron | Mapping[str, Any] | None = None
    likelihood: str | None = None
    sparse: SparseSettings | Mapping[str, Any] | None = None
    training: Training | Mapping[str, Any] | None = None
    draws: int = 100
    standardize: bool = True
    random_state: Any = None
    verbose: bool = False

    @override
    def _draw_count(self, n_draws: int | None = None) -> int:
        return int(self.draws) if n_draws is None else n_draws

    def _settings(self) -> TableSettings:
        check_count("draws", self.draws)
        return super()._settings()

    @property
    def feature_inclusion_(self) -> pd.Series:
        """Probability that the network uses each column, shape (d,).

        A column is used if a path of included weights leads from it to the output; see
        `SparseNetwork.feature_inclusion`.

        Raises:
            InputError: with `structure="units"`, whose columns have no indicators.
        """
        import pandas as pd

        check_is_fitted(self)
        return pd.Series(
            self.model_.feature_inclusion(),
            index=self.encoder.get_feature_names_out(),
            name="inclusion probability",
        )

    @property
    def density_(self) -> float:
        """Share of the weights with an inclusion probability above one half."""
        check_is_fitted(self)
        return self.model_.density()


class SparseRegressor(_SparseEstimator, Regressor):
    r"""A sparse Bayesian network for numbers or counts: each weight is included or excluded.

    $$ w = \gamma \odot \beta, \qquad p(y \mid x) \approx \frac{1}{S} \sum_s p(y \mid f(x;\, w_s)),
       \quad w_s \sim q $$

    `network`, `sparse` and `training` take an object, or a dict of the fields that differ from the
    defaults.

    Args:
        network: a `Perceptron` (hidden, activation, dropout).
        likelihood: "gaussian" (the default; one noise scale), "heteroscedastic" (noise that
            depends on x, plus a global variance), "student-t"; "log-normal", "gamma" or
            "inverse-gaussian" for y above 0; "poisson" or "negative-binomial" for counts.
        sparse: a `SparseSettings` (structure, posterior, slab, prior_inclusion, early_epochs).
        training: a `Training` (epochs, learning_rate, batch_size); by default 200 epochs, including
            those that learn the priors. Inclusion probabilities have a larger learning rate where
            steps are few.
        draws: number of networks drawn from the posterior that predictions average.
        standardize: centre the columns of X and divide them by their standard deviation. (The
            target is always standardised internally; predictions are in its own units.)
        random_state: an integer gives the same model each time.
        verbose: show a progress bar.

    Attributes:
        model_: the `SparseNetwork`: its history, inclusion by layer, predictions in every mode.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X was a DataFrame with names.
        mean_: means that are subtracted from the columns, shape (d,).
        scale_: standard deviations that divide the columns, shape (d,).
        seed_: the seed in use.

    Raises:
        InputError: in `fit` and `predict`, data or parameters that cannot be used.

    Source:
        Hubin and Storvik (2024), Sparse Bayesian neural networks.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 3))
        >>> model = SparseRegressor(
        ...     network={"hidden": ()}, training={"epochs": 40}, random_state=0)
        >>> model = model.fit(X, 5 * X[:, 1])
        >>> (model.feature_inclusion_ > 0.5).to_dict()
        {'x0': False, 'x1': True, 'x2': False}
    """

    _default_likelihood = "gaussian"


class SparseClassifier(_SparseEstimator, Classifier):
    """A sparse Bayesian network for classes: each weight is included or excluded.

    Parameters, attributes, errors and source are those of `SparseRegressor`; `likelihood` is
    "categorical". Probabilities are averages over networks drawn from the posterior.

    Attributes:
        classes_: the labels, sorted, shape (K,).

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = SparseClassifier(
        ...     network={"hidden": ()}, training={"epochs": 150}, random_state=0)
        >>> model = model.fit(X[::2], y[::2])
        >>> model.predict_proba(X[1::2]).shape, model.score(X[1::2], y[1::2]) > 0.9
        ((75, 3), True)
    """


_ESTIMATORS: dict[str, type[Estimator]] = {
    cls.__name__: cls
    for cls in (
        TableRegressor,
        TableClassifier,
        SubspaceRegressor,
        SubspaceClassifier,
        SparseRegressor,
        SparseClassifier,
    )
}


@artifact("estimator", EstimatorFacts)
def rebuild(tensors: dict[str, Tensor], facts: EstimatorFacts) -> Estimator:
    """Rebuild an estimator from its artifact; see `subbayes.load`."""
    cls = _ESTIMATORS[facts.estimator]
    params = decode_parameters(facts.params, cls._defaults)
    if "effort" in params:
        params["effort"] = msgspec.convert(params["effort"], str | Effort)
    estimator = cls(**params)
    estimator.model_ = facts.model.rebuild(tensors)
    estimator._restore(facts)
    return estimator
