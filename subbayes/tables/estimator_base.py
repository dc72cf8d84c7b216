"""Base classes of the scikit-learn estimators."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Shaped
from msgspec import Meta
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import _safe_indexing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    _num_samples,
    check_is_fitted,
    check_random_state,
    column_or_1d,
    validate_data,
)
from torch import Tensor
from typing_extensions import override

from subbayes.artifacts.facts import DrawCount, Finite, Name, Positive, check_known
from subbayes.artifacts.files import fail_damaged
from subbayes.artifacts.saving import Nested, WrappedFacts, read, rebuild, save
from subbayes.data.arrays import check_not_masked, native_array
from subbayes.data.data import Data, check_weights
from subbayes.data.encoder_state import EncoderFacts
from subbayes.data.frames import LEAST_SCALE, check_names, row_index
from subbayes.data.targets import check_label_types
from subbayes.data.to_pandas import to_pandas
from subbayes.diagnostics.conformal import Calibratable, Conformal
from subbayes.inference.configuration import Sampling
from subbayes.models.configuration import change
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import LIKELIHOODS, TableSettings, configured, encode_parameters
from subbayes.predictions.exporting import write_graph
from subbayes.predictions.modules import LEVELS, DrawnFunctions
from subbayes.predictions.predictive import Predictive
from subbayes.tables.array_model import fit_arrays, labelled
from subbayes.utils.checks import (
    InputError,
    InputTypeError,
    check_finite,
    check_same_length,
    error_text,
    fail,
)
from subbayes.utils.text_table import printable
from subbayes.utils.types import Inputs

_LABELS = r"\A(\|[bO]1?|\|[iu]1|[<>][iuf][248]|[<>]U([1-9][0-9]{0,2}|1000))\Z"  # dtypes of NumPy

_Estimator = TypeVar("_Estimator", bound="Estimator")


class _Params(TypedDict, total=False):
    draws: DrawCount


class EstimatorFacts(WrappedFacts):
    """An estimator but for its tensors."""

    kinds = ("fitted-model", "sparse-network", "stack")

    estimator: str
    params: dict[str, Any]
    seed: int
    mean: list[Finite]
    scale: list[Positive]
    feature_names: list[Name] | None
    classes: list[Name | int | float | bool] | None = None
    dtype: Annotated[str, Meta(pattern=_LABELS)] = "|O"
    encoder: EncoderFacts | None = None  # of tables

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known(self.params, _Params)
        lists = (self.mean, self.scale, self.feature_names or self.mean)
        if len({len(values) for values in lists}) > 1:
            raise ValueError("expected a mean, a scale and a name of each column")


class _Standardise(torch.nn.Module):
    """Columns in float64 as inputs of a network."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Float[np.ndarray, "d"], scale: Float[np.ndarray, "d"]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.from_numpy(mean))
        self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, inputs: Tensor) -> Tensor:
        return ((inputs - self.mean) / self.scale).float()


class Estimator(Calibratable, BaseEstimator):
    """Checks, standardisation, parameters, predictions and saving of all estimators."""

    kind: ClassVar[str] = "estimator"
    model_: Any
    mean_: Float[np.ndarray, "d"]
    scale_: Float[np.ndarray, "d"]
    _defaults: ClassVar[dict[str, Any]]  # configurations among the parameters
    _method: ClassVar[str | None] = None  # of `fit_arrays`
    _default_likelihood: ClassVar[str | None] = None
    _takes_several: ClassVar[bool] = False  # targets, in columns of y

    def _draw_count(self, n_draws: int | None = None) -> int | None:
        """Number of draws that predictions average, by default all."""
        return n_draws

    # --- fitting ----------------------------------------------------------------------------

    def _fit(
        self,
        X: Float[np.ndarray, "n d"],
        y: Shaped[np.ndarray, "n *T"],
        task: str,
        weights: Float[np.ndarray, "n"] | None,
        n_classes: int | None = None,
    ) -> None:
        """Learn the scales of the columns, then the model."""
        self.mean_, self.scale_ = self._moments(X, weights)
        self.seed_ = self._seed()
        self.model_ = fit_arrays(
            self._standardize(X),
            y,
            task,
            self._settings(),
            method=self._method,
            n_classes=n_classes,
            weights=weights,
            progress=bool(self.verbose),
        )

    def _moments(
        self, X: Float[np.ndarray, "n d"], weights: Float[np.ndarray, "n"] | None
    ) -> tuple[Float[np.ndarray, "d"], Float[np.ndarray, "d"]]:
        if not self.standardize:
            return np.zeros(X.shape[1]), np.ones(X.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):
            if weights is None:
                mean, scale = X.mean(0), X.std(0)
            else:
                share = weights / weights.sum()
                mean = share @ X
                scale = np.sqrt(share @ (X - mean) ** 2)
        held = (scale == 0) | ((scale > LEAST_SCALE) & (scale < 1 / LEAST_SCALE))
        if not held.all():
            expected, remedy = "columns whose variance float64 can hold", "Divide it by a constant"
            fail("X", expected, f"another in column {int((~held).argmax())}", f"{remedy} first")
        # a column that is constant up to rounding must not be scaled up to noise
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
        return mean, np.where(constant, 1.0, scale)

    def _standardize(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        with np.errstate(over="ignore"):
            matrix = ((X - self.mean_) / self.scale_).astype(np.float32)
        check_finite("X", matrix)
        return matrix

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

    def _check_X(self, X: Any, *, fitting: bool) -> Float[np.ndarray, "n d"]:
        """Check features and convert them to a finite float64 matrix."""
        X = to_pandas("X", X)
        check_names(X)
        check_not_masked("X", X)
        _check_no_dates("X", X)
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

    def _check_y(self, y: Any, n: int) -> Shaped[np.ndarray, "n *T"]:
        """Check targets and convert them to a vector, or a matrix, without missing values."""
        if y is None:
            raise InputError(
                f"This {type(self).__name__} estimator requires y to be passed, but "
                "the target y is None."
            )
        y = to_pandas("y", y)
        _check_no_dates("y", y)
        _check_no_missing(y)
        check_not_masked("y", y)
        matrix = np.asarray(y)
        several = self._takes_several and matrix.ndim == 2 and matrix.shape[1] > 1
        y = matrix if several else column_or_1d(y, warn=True)
        y = native_array("y", y) if y.dtype.kind in "uf" else y
        check_same_length(["X", "y"], [n, len(y)])
        if y.dtype.kind == "f":
            check_finite("y", y)
        return y

    def _codes(self, y: Shaped[np.ndarray, "n *T"]) -> Shaped[np.ndarray, "n *T"]:
        """Targets as the likelihood takes them."""
        raise NotImplementedError

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
        inputs = self._inputs(X)
        targets = self._codes(self._check_y(y, len(inputs)))
        data = Data.of((inputs, targets))
        data = data if weights is None else data.weighted(weights)
        updated = copy.copy(self)
        updated.model_ = self.model_.update(data, forgetting=forgetting, seed=seed)
        return updated

    # --- predicting -------------------------------------------------------------------------

    def _inputs(self, X: Any) -> Float[np.ndarray, "n d"]:
        check_is_fitted(self)
        return self._standardize(self._check_X(X, fitting=False))

    def predict_dist(self, X: Any, n_draws: int | None = None) -> Predictive:
        """The predictive distribution of each row, in the units of y.

        Args:
            X: features (n, n_features_in_).
            n_draws: average this many draws; by default all, or `draws` of a sparse network.

        Returns:
            A `Predictive`, with `mean`, `std`, `interval`, `probabilities`, `decide`, `to_frame`
            and more, of the outputs of all draws: for very many rows use `predict_batches`.
        """
        X = to_pandas("X", X)
        inputs = self._inputs(X)  # checks that there is a model
        predictive = self.model_.predict(inputs, n_draws=self._draw_count(n_draws))
        named = predictive.with_classes(getattr(self, "classes_", None))
        return named.with_index(row_index(X, len(inputs)))

    def predict_batches(self, X: Any, n_draws: int | None = None) -> Iterator[Predictive]:
        """The predictive distributions of batches of rows; see `Predictor.predict_batches`."""
        X = to_pandas("X", X)
        inputs = self._inputs(X)  # checks that there is a model
        batches = self.model_.predict_batches(inputs, n_draws=self._draw_count(n_draws))
        return labelled(batches, getattr(self, "classes_", None), row_index(X, len(inputs)))

    @override
    def rows_and_targets(self, rows: Any, y: Any = None) -> tuple[Any, Any]:
        check_is_fitted(self)
        rows = to_pandas("X", rows)
        return rows, self._codes(self._check_y(y, len(rows)))

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

    def functions(self, *, n_draws: int | None = None) -> DrawnFunctions:
        """Functions drawn from the posterior, as a module that differentiates in X.

        It takes X in its own units, as a tensor in float64 (n, n_features_in_), and returns what
        `Predictor.functions` does; that of `TableRegressor` and `TableClassifier` takes "numbers"
        and "categories", see `DataFrameModel.export`.

        Args:
            n_draws: number of draws, all by default.
        """
        check_is_fitted(self)
        before, rows, _ = self._encoding()
        features = before(**rows) if isinstance(rows, dict) else before(rows)
        inner = self.model_.functions(features, n_draws=self._draw_count(n_draws))
        return DrawnFunctions(list(inner.components), rows, before)

    # --- saving -----------------------------------------------------------------------------

    def export(
        self, path: str | Path, *, levels: Sequence[float] = LEVELS, overwrite: bool = False
    ) -> Path:
        """Write the predictive distribution to a file that other programs run.

        Its graph takes X as "inputs" in float64, in its own units; that of `TableRegressor` and
        `TableClassifier` takes "numbers" and "categories", see `DataFrameModel.export`. It returns
        what `Predictor.to_module` does, in the units of y.

        Args:
            path: a file .onnx (needs the extra "onnx") or .pt2 (`torch.export.load`).
            levels: of the quantiles; () for none.
            overwrite: replace an existing file.

        Raises:
            InputError: as `Predictor.export`.
        """
        check_is_fitted(self)
        before, rows, facts = self._encoding()
        options: dict[str, Any] = {"n_draws": self._draw_count(), "levels": levels}
        features = before(**rows) if isinstance(rows, dict) else before(rows)
        module, _ = self.model_.predictive_module(features, **options)
        facts |= {"method": type(self).__name__, **module.facts}
        classes = getattr(self, "classes_", None)
        facts |= {} if classes is None else {"classes": classes.tolist()}
        return write_graph(module, rows, path, facts, before=before, overwrite=overwrite)

    def _encoding(self) -> tuple[torch.nn.Module, Inputs, dict[str, Any]]:
        """What makes inputs of the network in a graph, rows that it takes, and names of columns."""
        rows = torch.zeros(2, len(self.mean_), dtype=torch.float64)
        names = getattr(self, "feature_names_in_", None)
        facts = {} if names is None else {"columns": names.tolist()}
        return _Standardise(self.mean_, self.scale_), rows, facts

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON; see `subbayes.artifacts.saving.save`."""
        check_is_fitted(self)
        return save(self, path, overwrite=overwrite)

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Tensors of the model."""
        return self.model_.tensors()

    def facts(self) -> EstimatorFacts:
        """The model, and the parameters and fitted attributes of the estimator."""
        saved = saved_class(type(self))
        params = {name: getattr(self, name) for name in saved._get_param_names()}
        params = encode_parameters(params, self._defaults)
        if not isinstance(self.random_state, (int, np.integer, type(None))):
            params["random_state"] = self.seed_
        names = getattr(self, "feature_names_in_", None)
        return EstimatorFacts(
            estimator=saved.__name__,
            model=Nested.of(self.model_),
            params=params,
            seed=self.seed_,
            mean=self.mean_.tolist(),
            scale=self.scale_.tolist(),
            feature_names=None if names is None else names.tolist(),
        )

    @classmethod
    def load(cls: type[_Estimator], path: str | Path) -> _Estimator:
        """Load a saved estimator.

        Raises:
            InputError: no such artifact, a damaged one, or one of something else.
        """
        tensors, facts, kind = read(path)
        is_estimator = kind == "estimator"
        name = facts.estimator if is_estimator else f"a {kind}"
        if name != cls.__name__:
            remedy = f"Use {name}.load" if is_estimator else "Use subbayes.load"
            fail("path", f"a saved {cls.__name__}", f"{name} at '{path}'", remedy)
        estimator: _Estimator = rebuild(kind, tensors, facts, {}, path)
        return estimator

    def _restore(self, facts: EstimatorFacts) -> None:
        self.seed_, self.n_features_in_ = facts.seed, len(facts.mean)
        self.mean_ = np.array(facts.mean, dtype=np.float64)
        self.scale_ = np.array(facts.scale, dtype=np.float64)
        if facts.feature_names is not None:
            self.feature_names_in_ = np.array(facts.feature_names, dtype=object)

    def __getstate__(self) -> dict[str, Any]:
        """The state without `model_.posterior`, which holds the training data."""
        state = dict(super().__getstate__())
        if isinstance(state.get("model_"), FittedModel):
            state["model_"] = dataclasses.replace(state["model_"], posterior=None)
        return state


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
    check_same_length(["X", "y"], [_num_samples(X), _num_samples(y)])
    weights = _sample_weights(sample_weight, X)
    check_weights(torch.from_numpy(weights))
    kept = np.flatnonzero(weights)
    if len(kept) < len(weights):
        X, y = _safe_indexing(X, kept), _safe_indexing(y, kept)
    return X, y, weights[kept]


class Regressor(RegressorMixin, Estimator):
    """Base class for numbers and counts."""

    def fit(self: _Estimator, X: Any, y: Any, sample_weight: Any = None) -> _Estimator:
        """Fit the model.

        Args:
            X: features (n, d) in an array or a data frame of any library; n at least 2. They are
                numbers; tables of `TableRegressor` may have text, categories and missing values.
            y: targets (n,): numbers that vary, or counts for `likelihood="poisson"`; of
                `SubspaceRegressor` with Gaussian noise also several, (n, T).
            sample_weight: weights (n,) of at least 0, which multiply the log-likelihood of each
                row; by default 1. Columns and y are standardised by weighted means and standard
                deviations, columns of `TableRegressor` by unweighted ones; rows of weight 0 have no
                effect.

        Raises:
            InputError: see the class.
        """
        X, y, weights = _weighted_rows(X, y, sample_weight)
        X = self._check_X(X, fitting=True)
        y = self._codes(self._check_y(y, len(X)))
        self._fit(
            X, y, "count" if self.likelihood in LIKELIHOODS["count"] else "regression", weights
        )
        return self

    def _codes(self, y: Shaped[np.ndarray, "n *T"]) -> Shaped[np.ndarray, "n *T"]:
        try:
            y = y.astype(np.float64)
        except (TypeError, ValueError):
            other = type(self).__name__.replace("Regressor", "Classifier")
            remedy = f"Convert them, or use {other} for labels"
            fail("y", "numbers", f"values of type {y.dtype}", remedy)
        check_finite("y", y)
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.isfinite(y.std()):
                remedy = "Divide them by a constant first"
                fail("y", "targets whose variance float64 can hold", "overflow", remedy)
        return y

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

    def fit(self: _Estimator, X: Any, y: Any, sample_weight: Any = None) -> _Estimator:
        """Fit the model.

        Args:
            X: features (n, d) in an array or a data frame of any library; n at least 2. They are
                numbers; tables of `TableClassifier` may have text, categories and missing values.
            y: labels (n,) of at least two classes: text, whole numbers or booleans.
            sample_weight: weights (n,) of at least 0, which multiply the log-likelihood of each
                row; by default 1. Columns are standardised by weighted means and standard
                deviations, those of `TableClassifier` by unweighted ones. Rows of weight 0 have no
                effect: a label of such rows alone is no class.

        Raises:
            InputError: see the class.
        """
        X, y, weights = _weighted_rows(X, y, sample_weight)
        X = self._check_X(X, fitting=True)
        y = self._check_y(y, len(X))
        check_label_types({type(label): label for label in np.ravel(y).tolist()}.values())
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            fail(
                "y",
                "at least 2 classes",
                f"1 class, {self.classes_.tolist()[0]!r}",
                "Fit with rows of every class",
            )
        self._fit(X, codes.astype(np.int64), "classification", weights, len(self.classes_))
        return self

    def _codes(self, y: Shaped[np.ndarray, "n *T"]) -> Shaped[np.ndarray, "n *T"]:
        known = np.isin(y, self.classes_)
        if not known.all():
            row = int((~known).argmax())
            fail("y", "labels of fit", repr(y.tolist()[row]), "Refit on all rows", row=row)
        return np.searchsorted(self.classes_, y)

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n K"]:
        """Class probabilities (n, K), averaged over the draws, in the order of `classes_`.

        Args:
            X: features (n, n_features_in_).
        """
        return np.concatenate([p.probabilities for p in self.predict_batches(X)])

    def predict(self, X: Any) -> Shaped[np.ndarray, "n"]:
        """Most probable class of each row, (n,).

        Args:
            X: features (n, n_features_in_).
        """
        codes = self.predict_proba(X).argmax(1)
        return self.classes_[codes]

    def facts(self) -> EstimatorFacts:
        """The facts of any estimator, and the labels."""
        facts = super().facts()
        facts.classes, facts.dtype = self.classes_.tolist(), self.classes_.dtype.str
        return facts

    def _restore(self, facts: EstimatorFacts) -> None:
        super()._restore(facts)
        assert facts.classes is not None
        self.classes_ = _labels(facts.classes, facts.dtype)


_TEXT = 2**24  # bytes of labels that are held as text of one length


def _labels(saved: list[Any], dtype: str) -> np.ndarray:
    """Labels of an artifact, which their dtype must hold unchanged, sorted as `fit` sorts them."""
    try:
        kind = np.dtype(dtype)
        if kind.kind == "U" and len(saved) * kind.itemsize > _TEXT:
            kind = np.dtype(object)  # arrays of text take the longest for each
        labels = np.array(saved, dtype=kind)
        ordered = np.unique(labels).tolist()
    except (TypeError, ValueError, OverflowError) as error:
        fail_damaged(f"labels of dtype {dtype!r}", error_text(error))
    found = labels.tolist()
    if found != saved or list(map(type, found)) != list(map(type, saved)) or ordered != saved:
        fail_damaged(f"different labels in order, of dtype {dtype!r}", saved[:8])
    return labels


def _sample_weights(given: Any, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n"]:
    """Weights of rows as scikit-learn takes them, with one line about those that it refuses."""
    given = to_pandas("sample_weight", given)
    try:
        return np.array(_check_sample_weight(given, X, dtype=np.float64))
    except (TypeError, ValueError) as error:
        expected = "one finite number of at least 0 for each row"
        fail("sample_weight", expected, error_text(error).rstrip(".!"), cause=error)


def _check_no_dates(argument: str, values: Any) -> None:
    """Check that neither an array nor a column of a frame holds dates or durations."""
    frame = hasattr(values, "columns") and hasattr(values, "dtypes")
    named = dict(values.dtypes) if frame else {"": getattr(values, "dtype", None)}
    for name, dtype in named.items():
        if getattr(dtype, "kind", "O") in "mM":
            got = f"dtype {dtype}" + (f" in column {name!r}" if frame else "")
            remedy = "Convert them, such as to days since the first date"
            fail(argument, "numbers" if argument == "X" else "numbers or labels", got, remedy)


def _check_no_missing(y: Any) -> None:
    """Check that labels in a list or an array of objects are all there."""
    if isinstance(y, np.ndarray) and y.dtype != object:
        return
    values = np.asarray(y, dtype=object).ravel()
    absent = np.array([value is None or value is pd.NA or value != value for value in values])
    if absent.any():
        got, row = f"{int(absent.sum())} missing", int(absent.argmax())
        fail("y", "no missing targets", got, "Drop those rows", row=row)


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
