"""Base classes of the scikit-learn estimators."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Shaped
from msgspec import Meta
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import _safe_indexing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _num_samples,
    check_is_fitted,
    check_random_state,
    column_or_1d,
    validate_data,
)
from torch import Tensor
from typing_extensions import override

from subbayes.artifacts.facts import DrawCount, check_known
from subbayes.artifacts.saving import Nested
from subbayes.data.arrays import check_finite_targets, check_not_masked, native_array, to_tensor
from subbayes.data.data import check_weights
from subbayes.data.encoder import TabularEncoder
from subbayes.data.frames import check_names
from subbayes.data.targets import Target, keep_label_types
from subbayes.data.to_pandas import to_pandas
from subbayes.diagnostics.conformal import Conformal
from subbayes.inference.configuration import Sampling
from subbayes.models.configuration import change
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import LIKELIHOODS, TableSettings, configured, encode_parameters
from subbayes.tables.array_model import fit_arrays
from subbayes.tables.encoded_model import EncodedFacts, EncodedModel
from subbayes.utils.checks import (
    InputError,
    InputTypeError,
    check_finite,
    check_same_length,
    error_text,
    fail,
)
from subbayes.utils.text_table import printable
from subbayes.utils.types import RowNumbers

_LABELS = r"\A(\|b1|\|[iu]1|[<>][iuf][248])\Z"  # dtypes of NumPy

_Estimator = TypeVar("_Estimator", bound="Estimator")


class _Params(TypedDict, total=False):
    draws: DrawCount


class EstimatorFacts(EncodedFacts):
    """An estimator but for its tensors."""

    kinds = ("fitted-model", "sparse-network", "stack")

    estimator: str
    params: dict[str, Any]
    seed: int
    dtype: Annotated[str, Meta(pattern=_LABELS)] | None = None  # of labels that are no text

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known(self.params, _Params)


class Estimator(EncodedModel, BaseEstimator):
    """Checks, encoding, parameters, predictions and saving of all estimators."""

    kind: ClassVar[str] = "estimator"
    model_: Any
    encoder_: TabularEncoder
    target_: Target
    _defaults: ClassVar[dict[str, Any]]  # configurations among the parameters
    _method: ClassVar[str | None] = None  # of `fit_arrays`
    _default_likelihood: ClassVar[str | None] = None
    _takes_several: ClassVar[bool] = False  # targets, in columns of y

    @property
    def model(self) -> Any:
        """`model_`."""
        check_is_fitted(self)
        return self.model_

    @property
    def encoder(self) -> TabularEncoder:
        """`encoder_`."""
        check_is_fitted(self)
        return self.encoder_

    @property
    def target(self) -> Target:
        """`target_`."""
        check_is_fitted(self)
        return self.target_

    @override
    def _with_model(self: _Estimator, model: Any) -> _Estimator:
        other = copy.copy(self)
        other.model_ = model
        return other

    # --- fitting ----------------------------------------------------------------------------

    @property
    def _task(self) -> str:
        return "count" if self.likelihood in LIKELIHOODS["count"] else "regression"

    def fit(self: _Estimator, X: Any, y: Any, sample_weight: Any = None) -> _Estimator:
        """Fit the model.

        Args:
            X: features (n, d) in an array or a data frame of any library; n at least 2. They are
                numbers; tables of `TableRegressor` and `TableClassifier` may have text, categories
                and missing values.
            y: targets (n,). Of regressors numbers that vary, or counts for `likelihood="poisson"`;
                of classifiers labels of at least two classes: text, whole numbers or booleans. Of
                all but sparse networks also several, (n, T): numbers, counts, or 1 and 0 for labels
                that a row has or not. Of these NaN is missing: the row counts with the others.
            sample_weight: weights (n,) of at least 0, which multiply the log-likelihood of each
                row; by default 1. Columns and y are standardised by weighted means and standard
                deviations, columns of tables by unweighted ones; rows of weight 0 have no effect: a
                label of such rows alone is no class.

        Raises:
            InputError: see the class.
        """
        X, y, weights = _weighted_rows(X, y, sample_weight)
        inputs = self._learned(X, weights)
        y = self._check_y(y, len(inputs))
        self.target_ = self._infer(y)
        self.seed_ = self._seed()
        self.model_ = fit_arrays(
            inputs,
            self.target_.encode(y),
            self.target_.task,
            self._settings(),
            method=self._method,
            n_classes=len(self.target_.classes) or None,
            weights=weights,
            progress=bool(self.verbose),
        )
        return self

    def _learned(self, X: Any, weights: RowNumbers | None) -> Float[np.ndarray, "n features"]:
        """Network inputs of a table whose encoding is learned."""
        raise NotImplementedError

    def _infer(self, y: Shaped[np.ndarray, "n *T"]) -> Target:
        """The encoding of targets."""
        return Target.infer(y, self._task)

    def _seed(self) -> int:
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state)
        state = check_random_state(self.random_state)
        return int(state.randint(np.iinfo(np.int32).max))

    # --- parameters -------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; with `deep`, the fields of configurations as `training__epochs`."""
        params: dict[str, Any] = super().get_params(deep=False)
        if deep:
            for name, default in self._defaults.items():
                with suppress(ValueError, TypeError):  # `fit` reports invalid configurations
                    config = configured(name, params[name], default)
                    for field in dataclasses.fields(config):
                        params[f"{name}__{field.name}"] = getattr(config, field.name)
        return params

    def set_params(self: _Estimator, **params: Any) -> _Estimator:
        """Set parameters; `training__epochs=50` sets one field of a configuration."""
        nested: dict[str, dict[str, Any]] = {}
        for key in list(params):
            name, separator, field = key.partition("__")
            if separator and name in self._defaults:
                nested.setdefault(name, {})[field] = params.pop(key)
        super().set_params(**params)
        for name, changes in nested.items():
            config = configured(name, getattr(self, name), self._defaults[name])
            setattr(self, name, change(config, changes))
        return self

    def _settings(self) -> TableSettings:
        fields = {field.name for field in dataclasses.fields(TableSettings)}
        found = {k: v for k, v in self.get_params(deep=False).items() if k in fields}
        for name, default in self._defaults.items():
            found[name] = configured(name, found[name], default)
        found["likelihood"] = found["likelihood"] or self._default_likelihood
        found["sampling"] = dataclasses.replace(found.get("sampling", Sampling()), seed=self.seed_)
        return TableSettings(**found)

    def _check_y(self, y: Any, n: int) -> Shaped[np.ndarray, "n *T"]:
        """Check targets and convert them to a vector without missing values, or a matrix."""
        if y is None:
            raise InputError(
                f"This {type(self).__name__} estimator requires y to be passed, but "
                "the target y is None."
            )
        y = to_pandas("y", y)
        check_not_masked("y", y)
        matrix = np.asarray(keep_label_types(y))
        several = self._takes_several and matrix.ndim == 2 and matrix.shape[1] > 1
        y = matrix if several else column_or_1d(matrix, warn=True)
        y = native_array("y", y) if y.dtype.kind in "uf" else y
        check_same_length(["X", "y"], [n, len(y)])
        if y.dtype.kind == "f":
            check_finite_targets("y", y)
        return y

    def update(
        self: _Estimator,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        forgetting: float = 1.0,
        seed: int = 0,
    ) -> _Estimator:
        """Another estimator after new rows, for which the posterior of this one is the prior.

        Columns and targets are encoded as those of the fit; see `FittedModel.update`. The record of
        the update is in `model_.updates` of the result.

        Args:
            X: features (n, n_features_in_).
            y: targets (n,).
            sample_weight: weights (n,) of at least 0.
            forgetting: power of the likelihood of all earlier rows, above 0 and at most 1.
            seed: of resampling and draws.

        Raises:
            InputError: rows of another schema, labels that `fit` has not seen, a sparse network.
        """
        X, y, weights = _weighted_rows(X, y, sample_weight)
        return self._updated(X, y, weights, forgetting, seed)

    # --- predicting -------------------------------------------------------------------------

    @override
    def rows_and_targets(self, rows: Any, y: Any = None) -> tuple[Any, Any]:
        check_is_fitted(self)
        rows = to_pandas("X", rows)
        return rows, self.target_.encode(self._check_y(y, len(rows)))

    def cross_conformal(self, X: Any, y: Any, folds: int = 10, **settings: Any) -> Conformal:
        """Calibrate with the rows that the models are fitted to; see `tables.cross_conformal`.

        Args:
            X: features, as for `fit`.
            y: targets.
            folds: number of models, each a clone fitted to the rows of the other folds.
            settings: `score` and `penalty` of `conformal`.
        """
        from subbayes.tables.cross_conformal import cross_conformal

        return cross_conformal(self, X, y, folds, **settings)

    # --- saving -----------------------------------------------------------------------------

    @override
    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        check_is_fitted(self)
        return super().save(path, overwrite=overwrite)

    def facts(self) -> EstimatorFacts:
        """The model, and the parameters and fitted attributes of the estimator."""
        saved = saved_class(type(self))
        params = {name: getattr(self, name) for name in saved._get_param_names()}
        params = encode_parameters(params, self._defaults)
        if not isinstance(self.random_state, (int, np.integer, type(None))):
            params["random_state"] = self.seed_
        return EstimatorFacts(
            estimator=saved.__name__,
            model=Nested.of(self.model_),
            encoder=self.encoder_.facts(),
            target=self.target_,
            params=params,
            seed=self.seed_,
        )

    def _restore(self, facts: EstimatorFacts) -> None:
        self.seed_, self.target_ = facts.seed, facts.target
        self._take_names(TabularEncoder.from_facts(facts.encoder))

    def _take_names(self, encoder: TabularEncoder) -> None:
        """An encoder, and the attributes of scikit-learn that say which columns it takes."""
        self.encoder_, self.n_features_in_ = encoder, encoder.n_features_in_
        self.__dict__.pop("feature_names_in_", None)  # of a fit before this one
        if hasattr(encoder, "feature_names_in_"):
            self.feature_names_in_ = encoder.feature_names_in_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = self._takes_several
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """The state without `model_.posterior`, which holds the training data."""
        state = dict(super().__getstate__())
        if isinstance(state.get("model_"), FittedModel):
            state["model_"] = dataclasses.replace(state["model_"], posterior=None)
        return state


class MatrixEstimator(Estimator):
    """Base class of estimators of columns of numbers, all of which are kept."""

    standardize: bool

    @property
    def mean_(self) -> Float[np.ndarray, "features"]:
        """Means that are subtracted from the columns."""
        return self.encoder.scales()[0]

    @property
    def scale_(self) -> Float[np.ndarray, "features"]:
        """Standard deviations that divide the columns."""
        return self.encoder.scales()[1]

    @override
    def _inputs(self, rows: Any) -> Float[np.ndarray, "n d"]:
        check_is_fitted(self)
        return self._standardize(self._check_X(rows, fitting=False))

    @override
    def _encoding(self) -> tuple[torch.nn.Module, Any, dict[str, Any], Tensor]:
        before, rows, _, features = super()._encoding()
        names = getattr(self, "feature_names_in_", None)
        return (
            before,
            rows["numbers"],
            {} if names is None else {"columns": names.tolist()},
            features,
        )

    @override
    def _learned(self, X: Any, weights: RowNumbers | None) -> Float[np.ndarray, "n features"]:
        matrix = self._check_X(X, fitting=True)
        names = getattr(self, "feature_names_in_", None)
        self.encoder_ = TabularEncoder.of_numbers(
            matrix, names, weights, standardize=self.standardize
        )
        return self._standardize(matrix)

    def _standardize(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        mean, scale = self.encoder_.scales()
        with np.errstate(over="ignore"):
            matrix = ((X - mean) / scale).astype(np.float32)
        check_finite("X", matrix)
        return matrix

    def _check_X(self, X: Any, *, fitting: bool) -> Float[np.ndarray, "n d"]:
        """Check features and convert them to a finite float64 matrix."""
        X = to_pandas("X", X)
        check_names(X)
        check_not_masked("X", X)
        _check_no_dates(X)
        try:
            X = validate_data(
                self,
                X,
                dtype=np.float64,
                ensure_all_finite=False,
                reset=fitting,
                ensure_min_samples=2 if fitting else 1,
            )
        except (TypeError, ValueError) as error:
            axes = X.ndim if hasattr(X, "ndim") else np.asarray(X, dtype=object).ndim
            if axes == 1:
                fail(
                    "X",
                    "a matrix with one row per observation",
                    f"one axis of {len(X)} values",
                    "Reshape your data: one row is X[:1], or X[None]; one column is X[:, None]",
                )
            text = _first_text(X)
            if text is None:
                kind = InputTypeError if isinstance(error, TypeError) else InputError
                raise kind(printable(error_text(error))) from error
            fail(
                "X",
                "numbers",
                repr(text),
                "Put a subbayes.data.encoder.TabularEncoder before it in a pipeline",
            )
        check_finite("X", X)
        return X


def saved_class(cls: type[Estimator]) -> type[Estimator]:
    """The class that a file names for an estimator: that of this library which it extends."""
    room = __name__.rpartition(".")[0]
    return next(one for one in cls.__mro__ if one.__module__.rpartition(".")[0] == room)


def _weighted_rows(
    X: Any, y: Any, sample_weight: Any
) -> tuple[Any, Any, Float[np.ndarray, "m"] | None]:
    """The rows whose weight is not 0, which nothing is learned from, and their weights."""
    if sample_weight is None or y is None:
        return X, y, None
    X, y = to_pandas("X", X), to_pandas("y", y)
    array = np.asarray(to_pandas("sample_weight", sample_weight))
    given = to_tensor("sample_weight", array, keep_double=True).double()
    check_weights(given)
    weights = given.numpy()
    lengths = [_num_samples(X), _num_samples(y), len(weights)]
    check_same_length(["X", "y", "sample_weight"], lengths)
    kept = np.flatnonzero(weights)
    if len(kept) < len(weights):
        X, y = _safe_indexing(X, kept), _safe_indexing(y, kept)
    return X, y, weights[kept]


class Regressor(RegressorMixin, Estimator):
    """Base class for numbers and counts."""

    def predict(
        self, X: Any, return_std: bool = False
    ) -> Float[np.ndarray, "n *T"] | tuple[Float[np.ndarray, "n *T"], Float[np.ndarray, "n *T"]]:
        """Mean of the predictive distribution, and optionally its standard deviation.

        Args:
            X: features (n, n_features_in_).
            return_std: return (mean, std), both of the shape and in the units of y; std is that of
                a new observation: epistemic and aleatoric uncertainty together.
        """
        each = [(p.mean, p.std) if return_std else (p.mean,) for p in self.predict_batches(X)]
        columns = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        return (columns[0], columns[1]) if return_std else columns[0]

    def predict_interval(
        self, X: Any, level: float = 0.95
    ) -> tuple[Float[np.ndarray, "n *T"], Float[np.ndarray, "n *T"]]:
        """Central interval that contains a new observation with probability `level`.

        Args:
            X: features (n, n_features_in_).
            level: a probability strictly between 0 and 1.

        Returns:
            Lower and upper ends, both (n,), or (n, T), in the units of y.
        """
        each = [p.interval(level) for p in self.predict_batches(X)]
        lower, upper = (np.concatenate(parts) for parts in zip(*each, strict=True))
        return lower, upper


class Classifier(ClassifierMixin, Estimator):
    """Base class for classes."""

    classes_: np.ndarray
    _task = "classification"

    @override
    def _infer(self, y: Shaped[np.ndarray, "n *T"]) -> Target:
        if y.dtype.kind == "f" and y.ndim == 1:
            check_classification_targets(y)
        target = super()._infer(y)
        self.classes_ = _labels(target, y.dtype)
        return target

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n K"]:
        """Class probabilities (n, K), averaged over the draws, in the order of `classes_`.

        Of several labels of a row, the probability of each.

        Args:
            X: features (n, n_features_in_).
        """
        several = self.target.columns > 1
        batches = self.predict_batches(X)
        return np.concatenate([p.mean if several else p.probabilities for p in batches])

    def predict(self, X: Any) -> Shaped[np.ndarray, "n *T"]:
        """Most probable class of each row, (n,); of several labels 0 and 1, (n, T).

        Args:
            X: features (n, n_features_in_).
        """
        p = self.predict_proba(X)
        return (p > 0.5).astype(int) if self.target.columns > 1 else self.classes_[p.argmax(1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = self._takes_several
        return tags

    @override
    def facts(self) -> EstimatorFacts:
        facts = super().facts()
        if self.classes_.dtype.kind in "biuf":
            facts.dtype = self.classes_.dtype.str
        return facts

    @override
    def _restore(self, facts: EstimatorFacts) -> None:
        super()._restore(facts)
        self.classes_ = _labels(facts.target, np.dtype(facts.dtype or object))


def _labels(target: Target, dtype: np.dtype[Any]) -> np.ndarray:
    """The classes as an array, of numbers in their dtype; of several labels their positions."""
    if target.columns > 1:
        return np.arange(target.columns)
    labels = target.decode(np.arange(len(target.classes)))
    return labels.astype(dtype) if dtype.kind in "biuf" else labels


def _check_no_dates(X: Any) -> None:
    """Check that neither an array nor a column of a frame holds dates or durations."""
    frame = hasattr(X, "columns") and hasattr(X, "dtypes")
    for name, dtype in (dict(X.dtypes) if frame else {"": getattr(X, "dtype", None)}).items():
        if getattr(dtype, "kind", "O") in "mM":
            got = f"dtype {dtype}" + (f" in column {name!r}" if frame else "")
            fail("X", "numbers", got, "Convert them, such as to days since the first date")


def _first_text(X: Any) -> str | None:
    """The first string in an array that is not a number, or None."""
    for value in np.asarray(X, dtype=object).ravel():
        try:
            float(value)
        except ValueError:
            return str(value)
        except TypeError:
            continue
    return None
