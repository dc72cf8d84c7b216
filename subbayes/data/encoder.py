"""Mixed tables to one float32 matrix through scikit-learn, with the fitted state as JSON."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float32, Float64
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.validation import check_is_fitted

from subbayes.data.columns import as_frame, as_labels, as_numbers, kind_of, mask_markers, quoted
from subbayes.data.tables import closest, read_table, split_target
from subbayes.data.targets import Target
from subbayes.utils.checks import InputError, check_choice, check_count, fail

__all__ = ["TabularEncoder", "Target", "read_table", "split_target"]

_FORMAT = 1
_RECUR = 20  # this many rows of text, no two alike, are taken for identifiers


class TabularEncoder(TransformerMixin, BaseEstimator):
    """A table of numbers, text, booleans and categories as one float32 matrix.

    Numbers are centred and divided by their standard deviation; each category becomes a column
    of zeros and ones. Text all of which reads as numbers counts as numbers. Columns with a single
    value are left out, with one warning that names them.

    When transforming, columns are found by name in any order, further ones are ignored, and those
    left out in fitting need not be there; an array must have the columns in the order of fitting.

    Args:
        unknown: what to do with a category not seen in fitting: `"error"`, or `"ignore"` it
            (zeros in all columns of its group).
        missing: what to do with missing values: `"error"`, or `"impute"` them (the median of
            numbers, the most frequent category).
        missing_indicator: with `missing="impute"`, add a column of zeros and ones for each column
            that had missing values in fitting.
        missing_values: values that stand for a missing one, such as `["?"]`.
        categorical: names of columns to read as categories although they hold numbers.
        max_categories: the most categories a column may have. Text that never recurs in 20 rows or
            more is refused too, unless named in `categorical`.

    Attributes:
        columns_: names of the columns it was fitted with.
        dropped_: those left out because they hold a single value.
        pipeline_: the fitted `sklearn.compose.ColumnTransformer`.

    Raises:
        InputError: in `fit` and `transform`, a table that cannot be used: the line names the
            column, what was expected, what came and what to do.

    Example:
        >>> X = pd.DataFrame({"age": [20, 40, 60], "job": ["smith", "baker", "smith"]})
        >>> encoder = TabularEncoder().fit(X)
        >>> encoder.get_feature_names_out().tolist()
        ['age', 'job=baker', 'job=smith']
        >>> encoder.transform(X.iloc[:1])
        array([[-1.2247449,  0.       ,  1.       ]], dtype=float32)
    """

    def __init__(
        self,
        *,
        unknown: str = "error",
        missing: str = "error",
        missing_indicator: bool = False,
        missing_values: Sequence[Any] = (),
        categorical: Sequence[str] = (),
        max_categories: int = 100,
    ) -> None:
        self.unknown = unknown
        self.missing = missing
        self.missing_indicator = missing_indicator
        self.missing_values = missing_values
        self.categorical = categorical
        self.max_categories = max_categories

    def fit(self, X: Any, y: Any = None) -> TabularEncoder:
        """Learn medians, scales and categories.

        Args:
            X: table (n, columns), n at least 2.
            y: ignored.

        Raises:
            InputError: see the class.

        Example:
            >>> TabularEncoder(missing="impute").fit([[1, "a"], [None, "b"], [2, "b"]]).columns_
            ['x0', 'x1']
        """
        self._check_options()
        frame, named = as_frame(X)
        if len(frame) < 2:
            fail("X", "at least 2 rows to learn from", f"{len(frame)} row")
        absent = [name for name in self.categorical if name not in frame]
        if absent:
            fail(
                "categorical",
                f"columns of the table: {quoted(frame.columns, 20)}",
                quoted(absent),
                closest(absent[0], list(frame.columns)),
            )
        table = self._typed(frame)
        self._check_missing(table)
        dropped = _constant(table)
        table = table.drop(columns=dropped)
        self._check_levels(table, frame)
        _warn_of_row_numbers(table)
        self._named, self.columns_, self.dropped_ = named, list(frame.columns), dropped
        self._set_sklearn_names()
        self._build(
            table,
            {name: sorted(table[name].dropna().unique()) for name in _text(table)},
            [name for name in table if self._flags(table[name])],
        )
        _check_scales(self._scaler(), self._numeric)
        return self

    def transform(self, X: Any) -> Float32[np.ndarray, "n features"]:
        """The matrix of a table.

        Args:
            X: table (n, columns) with the columns of fitting.

        Raises:
            InputError: see the class.

        Example:
            >>> TabularEncoder().fit([[0.0], [2.0]]).transform([[3.0]])
            array([[2.]], dtype=float32)
        """
        check_is_fitted(self, "pipeline_")
        table = self._typed_as_fitted(self._select(X))
        self._check_missing(table)
        if self.unknown == "error":
            self._check_known(table)
        with np.errstate(over="ignore"):
            matrix = self.pipeline_.transform(table).astype(np.float32)
        if not np.isfinite(matrix).all():
            column = int((~np.isfinite(matrix)).any(0).argmax())
            fail(
                "X",
                "numbers that float32 can hold after standardising",
                f"larger ones in column '{self.get_feature_names_out()[column]}'",
                "Correct or drop those rows",
            )
        return matrix

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Names of the matrix' columns: `age`, `job=smith`, `age missing`.

        Args:
            input_features: ignored; the names are those of fitting.

        Example:
            >>> TabularEncoder().fit([[0.0, True], [2.0, False]]).get_feature_names_out().tolist()
            ['x0', 'x1=False', 'x1=True']
        """
        check_is_fitted(self, "pipeline_")
        levels = [f"{name}={value}" for name, values in self._levels.items() for value in values]
        flags = [f"{name} missing" for name in self._flagged]
        return np.array([*self._numeric, *levels, *flags], dtype=object)

    def scales(self) -> tuple[Float64[np.ndarray, "features"], Float64[np.ndarray, "features"]]:
        """What is subtracted from each feature, and what it is divided by then.

        Example:
            >>> TabularEncoder().fit([[0.0, "a"], [2.0, "b"], [4.0, "b"]]).scales()[0]
            array([2., 0., 0.])
        """
        count = len(self.get_feature_names_out())
        mean, scale = np.zeros(count), np.ones(count)
        scaler = self._scaler()
        if scaler:  # numbers come first
            mean[: len(self._numeric)], scale[: len(self._numeric)] = scaler.mean_, scaler.scale_
        return mean, scale

    def to_config(self) -> dict[str, Any]:
        """The options and the fitted state in terms JSON has.

        Example:
            >>> TabularEncoder().fit([[0.0], [2.0]]).to_config()["numeric"]
            {'columns': ['x0'], 'median': [1.0], 'mean': [1.0], 'variance': [1.0], 'scale': [1.0]}
        """
        check_is_fitted(self, "pipeline_")
        options = {
            **self.get_params(deep=False),
            "missing_values": list(self.missing_values),
            "categorical": list(self.categorical),
        }
        scaler = self._scaler()
        return {
            "format": _FORMAT,
            "options": options,
            "columns": self.columns_,
            "named": self._named,
            "dropped": self.dropped_,
            "numeric": {
                "columns": self._numeric,
                "median": self._fills("numeric"),
                "mean": scaler.mean_.tolist() if scaler else [],
                "variance": scaler.var_.tolist() if scaler else [],
                "scale": scaler.scale_.tolist() if scaler else [],
            },
            "categorical": {
                "columns": list(self._levels),
                "levels": list(self._levels.values()),
                "most_frequent": self._fills("categorical"),
            },
            "flagged": self._flagged,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TabularEncoder:
        """The fitted encoder whose `to_config` gave `config`: it transforms to the same bits.

        The scikit-learn objects are fitted anew on one row that holds their medians and most
        frequent categories, then given the means and scales; so no version's private state is kept.

        Raises:
            InputError: entries that are missing or do not fit each other.

        Example:
            >>> encoder = TabularEncoder().fit([[0.0], [2.0]])
            >>> TabularEncoder.from_config(encoder.to_config()).transform([[3.0]])
            array([[2.]], dtype=float32)
        """
        try:
            if config["format"] != _FORMAT:
                fail(
                    "config",
                    f"format {_FORMAT}",
                    f"format {config['format']}",
                    "Use the version of subbayes that wrote it",
                )
            encoder = cls(**config["options"])
            encoder._restore(config)
        except InputError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            fail(
                "config", "what TabularEncoder.to_config gives", f"{type(error).__name__}: {error}"
            )
        return encoder

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.categorical = True
        tags.input_tags.allow_nan = self.missing == "impute"
        return tags

    # the steps of fitting

    def _check_options(self) -> None:
        check_choice("unknown", self.unknown, ("error", "ignore"))
        check_choice("missing", self.missing, ("error", "impute"))
        check_count("max_categories", self.max_categories, 2)
        for argument in ("missing_values", "categorical"):
            if isinstance(getattr(self, argument), str):
                fail(argument, "a list", repr(getattr(self, argument)), "Put it in brackets")

    def _typed(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Numbers in float64 and categories as text, by what the columns hold."""
        columns: dict[str, Any] = {}
        for name, column in frame.items():
            column, place = mask_markers(column, self.missing_values), f"column '{name}'"
            forced = name in self.categorical
            kind = "categorical" if forced else kind_of(column, place)
            columns[str(name)] = (
                _text_column(column) if kind == "categorical" else as_numbers(column, place)
            )
        return pd.DataFrame(columns)

    def _check_missing(self, table: pd.DataFrame) -> None:
        """With `missing="error"`, refuse missing values and count them by column."""
        counts = table.isna().sum()
        counts = counts[counts > 0]
        if self.missing == "error" and len(counts):
            got = [f"{n} in column '{name}'" for name, n in counts.items()]
            more = f" and in {len(got) - 5} more columns" if len(got) > 5 else ""
            fail(
                "X",
                "no missing values",
                ", ".join(got[:5]) + more,
                "Use missing='impute', or drop those rows",
            )

    def _check_levels(self, table: pd.DataFrame, frame: pd.DataFrame) -> None:
        """Refuse identifiers and columns of too many categories."""
        for name in _text(table):
            levels, n = table[name].nunique(), int(table[name].notna().sum())
            chosen = name in self.categorical or isinstance(frame[name].dtype, pd.CategoricalDtype)
            if levels > self.max_categories:
                fail(
                    "X",
                    f"at most {self.max_categories} categories in column '{name}'",
                    f"{levels} in {n} rows",
                    "Drop the column if it identifies rows, group its values, or raise "
                    "max_categories",
                )
            if levels == n >= _RECUR and not chosen:
                fail(
                    "X",
                    f"text that recurs in column '{name}'",
                    f"{levels} values in {n} rows",
                    "Drop the column if it identifies rows, or name it in categorical=[...]",
                )

    def _flags(self, column: pd.Series) -> bool:
        return self.missing == "impute" and self.missing_indicator and bool(column.isna().any())

    def _build(self, table: pd.DataFrame, levels: dict[str, list[str]], flagged: list[str]) -> None:
        """Fit the scikit-learn objects to a typed table, the categories being known."""
        self._numeric = [name for name in table if name not in levels]
        self._levels, self._flagged = levels, flagged
        numbers = Pipeline(
            [("impute", SimpleImputer(strategy="median")), ("scale", StandardScaler())]
        )
        encode = OneHotEncoder(
            categories=[np.array(v, dtype=object) for v in levels.values()],
            handle_unknown="ignore",
            sparse_output=False,
        )
        categories = Pipeline(
            [("impute", SimpleImputer(strategy="most_frequent")), ("encode", encode)]
        )
        pipeline = ColumnTransformer(
            [
                ("numeric", numbers, self._numeric),
                ("categorical", categories, list(levels)),
                ("missing", MissingIndicator(features="all"), flagged),
            ],
            sparse_threshold=0,
        )
        with np.errstate(over="ignore", invalid="ignore"):  # `_check_scales` says it better
            self.pipeline_ = pipeline.set_output(transform="default").fit(table)

    def _set_sklearn_names(self) -> None:
        """The attributes scikit-learn expects; no names after fitting an array."""
        self.n_features_in_ = len(self.columns_)
        if self._named:
            self.feature_names_in_ = np.array(self.columns_, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    # the steps of transforming

    def _select(self, X: Any) -> pd.DataFrame:
        """The columns kept in fitting, by name where there are names, else by position."""
        frame, named = as_frame(X)
        kept = [name for name in self.columns_ if name not in self.dropped_]
        if not (named and self._named):
            if frame.shape[1] != len(self.columns_):
                fail(
                    "X",
                    f"the {len(self.columns_)} columns it was fitted with",
                    f"{frame.shape[1]} columns",
                )
            return frame.set_axis(self.columns_, axis=1)[kept]
        absent = [name for name in kept if name not in frame]
        if absent:
            others = [name for name in frame if name not in self.columns_]
            fail(
                "X",
                "the columns it was fitted with",
                f"none named {quoted(absent)}",
                closest(absent[0], others) or "Add them to the table",
            )
        return frame[kept]

    def _typed_as_fitted(self, frame: pd.DataFrame) -> pd.DataFrame:
        columns: dict[str, Any] = {}
        for name, column in frame.items():
            column = mask_markers(column, self.missing_values)
            columns[str(name)] = (
                _text_column(column)
                if name in self._levels
                else as_numbers(column, f"column '{name}'")
            )
        return pd.DataFrame(columns)

    def _check_known(self, table: pd.DataFrame) -> None:
        """Refuse categories not seen in fitting, naming columns and values."""
        found = []
        for name, levels in self._levels.items():
            new = table[name][~table[name].isin(levels) & table[name].notna()]
            if len(new):
                found.append(
                    f"{quoted(new.unique())} in column '{name}' ({len(new)} of {len(table)} rows)"
                )
        if found:
            fail(
                "X",
                "the categories seen in fitting",
                "; ".join(found),
                "Correct them, fit with rows that have them, or use unknown='ignore'",
            )

    # state

    def _scaler(self) -> StandardScaler | None:
        pipeline = self.pipeline_.named_transformers_["numeric"]
        return pipeline.named_steps["scale"] if self._numeric else None

    def fills(self) -> dict[str, Any]:
        """What stands for missing entries by column: medians and most frequent categories.

        Returns:
            Nothing with `missing="error"`.

        Example:
            >>> TabularEncoder(missing="impute").fit([[1, "a"], [None, "b"], [2, "b"]]).fills()
            {'x0': 1.5, 'x1': 'b'}
        """
        check_is_fitted(self, "pipeline_")
        if self.missing == "error":
            return {}
        return dict(
            zip(
                (*self._numeric, *self._levels),
                (*self._fills("numeric"), *self._fills("categorical")),
                strict=True,
            )
        )

    def _fills(self, part: str) -> list[Any]:
        if not (self._numeric if part == "numeric" else self._levels):
            return []
        imputer = self.pipeline_.named_transformers_[part].named_steps["impute"]
        return list(imputer.statistics_.tolist())

    def _restore(self, config: dict[str, Any]) -> None:
        numeric, categorical = config["numeric"], config["categorical"]
        parts = [*numeric.values(), *categorical.values()]
        groups = (parts[: len(numeric)], parts[len(numeric) :])
        if any(len({len(values) for values in group}) > 1 for group in groups):
            fail("config", "as many medians, means and levels as columns", "lists of other lengths")
        self._check_options()
        self._named, self.columns_ = config["named"], list(config["columns"])
        self.dropped_ = list(config["dropped"])
        self._set_sklearn_names()
        self._build(*_one_row(config))
        scaler = self._scaler()
        if scaler is not None:
            scaler.mean_ = np.array(numeric["mean"], dtype=np.float64)
            scaler.var_ = np.array(numeric["variance"], dtype=np.float64)
            scaler.scale_ = np.array(numeric["scale"], dtype=np.float64)


def _one_row(config: dict[str, Any]) -> tuple[pd.DataFrame, dict[str, list[str]], list[str]]:
    """A row whose median and mode are the stored ones, and what else `_build` needs.

    The columns are in the order of fitting.
    """
    numeric, categorical = config["numeric"], config["categorical"]
    row: dict[str, Any] = {
        n: [float(v)] for n, v in zip(numeric["columns"], numeric["median"], strict=True)
    }
    for name, value in zip(categorical["columns"], categorical["most_frequent"], strict=True):
        row[name] = pd.Series([value], dtype=object)
    kept = [name for name in config["columns"] if name not in config["dropped"]]
    levels = dict(zip(categorical["columns"], map(list, categorical["levels"]), strict=True))
    return pd.DataFrame({name: row[name] for name in kept}), levels, list(config["flagged"])


def _text_column(column: pd.Series) -> pd.Series:
    return pd.Series(as_labels(column), dtype=object)


def _text(table: pd.DataFrame) -> list[str]:
    return [str(name) for name in table if table[name].dtype == object]


def _constant(table: pd.DataFrame) -> list[str]:
    """Columns with fewer than two values, with one warning; refuses a table of nothing else."""
    dropped = [str(name) for name in table if table[name].nunique() < 2]
    if len(dropped) == table.shape[1]:
        fail(
            "X",
            "a column that varies",
            f"a single value in each of {quoted(dropped)}",
            "Check the table",
        )
    if dropped:
        warnings.warn(
            f"X: left out, as they hold a single value: {quoted(dropped, 20)}.",
            UserWarning,
            stacklevel=3,
        )
    return dropped


def _warn_of_row_numbers(table: pd.DataFrame) -> None:
    """A column that counts the rows one by one is an index someone saved."""
    counters = [
        str(name)
        for name in table
        if table[name].dtype != object
        and len(table) >= _RECUR
        and (np.diff(table[name].to_numpy()) == 1).all()
    ]
    if counters:
        warnings.warn(
            f"X: {quoted(counters, 20)} only number the rows. Drop them unless the order "
            "of the rows carries meaning.",
            UserWarning,
            stacklevel=3,
        )


def _check_scales(scaler: StandardScaler | None, names: list[str]) -> None:
    variances: Float64[np.ndarray, "d"] = np.ones(0) if scaler is None else scaler.var_
    bad = [name for name, v in zip(names, variances, strict=True) if not np.isfinite(v)]
    if bad:
        fail(
            "X",
            "columns whose variance float64 can hold",
            f"overflow in {quoted(bad)}",
            "Divide them by a constant first",
        )
