"""Encode mixed tables as a float32 matrix with scikit-learn; the fitted state is JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from jaxtyping import Float32, Float64
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted

from subbayes.data.columns import (
    MANY_ROWS,
    as_labels,
    as_numbers,
    constant_columns,
    kind_of,
    kind_of_labels,
    labels_as_fitted,
    mask_markers,
    warn_about_row_numbers,
)
from subbayes.data.encoder_state import CategoriesFacts, EncoderFacts, EncoderOptions, NumbersFacts
from subbayes.data.frames import LEAST_SCALE, as_frame, by_label, quote
from subbayes.utils.checks import check_choice, check_count, closest, fail
from subbayes.utils.warning import warn_user

__all__ = ["TabularEncoder"]

OTHERS = "(others)"  # the category of rare ones


@dataclass(eq=False, repr=False, kw_only=True)
class TabularEncoder(TransformerMixin, BaseEstimator):
    """Encode a table of numbers, text, booleans and categories as a float32 matrix.

    Numbers are centred and divided by their standard deviation; categories are one-hot encoded.
    A text column whose values are all numbers is numeric. Columns with a single value are dropped
    with a warning.

    A table is a data frame of pandas, polars, pyarrow or another library, an array, or a list of
    rows. `transform` finds columns by name, in any order, and ignores additional ones; dropped
    columns may be absent. An array must have the columns in the order of `fit`.

    Args:
        unknown: treatment of categories that were not seen in `fit`: `"error"`, or `"ignore"`,
            which sets all columns of the group to zero.
        missing: treatment of missing values: `"error"`, or `"impute"`, which inserts the median of
            numbers and the most frequent category.
        missing_indicator: with `missing="impute"`, add an indicator column for each column with
            missing values in `fit`.
        missing_values: values that denote a missing one, such as `["?"]`.
        categorical: names of numeric columns to encode as categories.
        max_categories: largest number of categories of a column. Text columns of 20 or more rows
            without repeated values are refused too, unless named in `categorical`.
        many: with "group", the most frequent categories of a column with more than
            `max_categories` are kept and all others are one, as are new ones later; text without
            repeated values is dropped with a warning. With "error" such columns are refused.

    A table has at most 100,000 columns, of which at most 10,000 are categorical.

    Attributes:
        columns_: names of the columns in `fit`.
        dropped_: names of the columns dropped because they have a single value.

    Raises:
        InputError: in `fit` and `transform`, a table that cannot be encoded.

    Example:
        >>> X = pd.DataFrame({"age": [20, 40, 60], "job": ["smith", "baker", "smith"]})
        >>> encoder = TabularEncoder().fit(X)
        >>> encoder.get_feature_names_out().tolist()
        ['age', 'job=baker', 'job=smith']
        >>> encoder.transform(X.iloc[:1])
        array([[-1.2247449,  0.       ,  1.       ]], dtype=float32)
    """

    unknown: str = "error"
    missing: str = "error"
    missing_indicator: bool = False
    missing_values: Sequence[Any] = ()
    categorical: Sequence[str] = ()
    max_categories: int = 100
    many: str = "error"

    def fit(self, X: Any, y: Any = None) -> TabularEncoder:
        """Estimate medians, scales and categories of a table with at least 2 rows; y is ignored.

        Example:
            >>> TabularEncoder(missing="impute").fit([[1, "a"], [None, "b"], [2, "b"]]).columns_
            ['x0', 'x1']
        """
        self._check_options()
        frame, labels = as_frame(X)
        if len(frame) < 2:
            fail("X", "at least 2 rows to learn from", f"{len(frame)} row")
        absent = [name for name in self.categorical if name not in frame]
        if absent:
            expected = f"columns of the table: {quote(frame.columns, 20)}"
            fail("categorical", expected, quote(absent), closest(absent[0], list(frame.columns)))
        table = self._typed(frame)
        self._check_missing(table)
        empty = [str(name) for name, is_empty in table.isna().all().items() if is_empty]
        if empty:
            got = f"missing ones only in {quote(empty)}"
            fail("X", "values to impute from in each column", got, "Drop these columns")
        dropped = constant_columns(table)
        if self.many == "group":
            dropped += self._identifiers(table)
        table = table.drop(columns=dropped)
        table = self._grouped(table, self._frequent(table))
        self._check_levels(table, frame)
        warn_about_row_numbers(table)
        self._named = labels == "names"
        self.columns_, self.dropped_ = list(frame.columns), dropped
        self._numbers = _numbers_of(table.drop(columns=_text_columns(table)))
        self._categories = _categories_of(table[_text_columns(table)])
        self._flagged = (
            []
            if not self.missing_indicator
            else [str(name) for name, is_missing in table.isna().any().items() if is_missing]
        )
        self._set_sklearn_names()
        self._check_scales()
        return self

    @classmethod
    def of_numbers(
        cls,
        X: Float64[np.ndarray, "n d"],
        names: Iterable[str] | None = None,
        weights: Float64[np.ndarray, "n"] | None = None,
        *,
        standardize: bool = True,
    ) -> TabularEncoder:
        """The encoder of columns of finite numbers, all of which are kept, even constant ones.

        Args:
            X: the columns.
            names: of the columns, which are found by their position.
            weights: of the rows, for weighted means and standard deviations.
            standardize: subtract the mean of each column, and divide it by its standard deviation.

        Example:
            >>> TabularEncoder.of_numbers(np.array([[0.0], [2.0]]), weights=np.ones(2)).scales()
            (array([1.]), array([1.]))
        """
        columns = [f"x{k}" for k in range(X.shape[1])] if names is None else list(names)
        encoder = cls()
        encoder.columns_, encoder.dropped_, encoder._named = columns, [], names is not None
        encoder._categories, encoder._flagged = _categories_of(pd.DataFrame()), []
        encoder._numbers = numbers = _numbers_of(pd.DataFrame(X, columns=columns), weights)
        encoder._check_scales(constant=True)
        if not standardize:
            numbers.mean, numbers.scale = [0.0] * len(columns), [1.0] * len(columns)
        encoder._set_sklearn_names()
        return encoder

    def transform(self, X: Any) -> Float32[np.ndarray, "n features"]:
        """Encode a table with the columns of `fit`.

        Example:
            >>> TabularEncoder().fit([[0.0], [2.0]]).transform([[3.0]])
            array([[2.]], dtype=float32)
        """
        check_is_fitted(self, "columns_")
        levels = self._categories.by_column()
        table = self._grouped(self._typed(self._select(X), levels), levels)
        self._check_missing(table)
        if self.unknown == "error":
            self._check_known(table)
        with np.errstate(over="ignore"):
            matrix = self._matrix(table)
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
        """Names of the columns of the matrix: `age`, `job=smith`, `age missing`.

        Example:
            >>> TabularEncoder().fit([[0.0, True], [2.0, False]]).get_feature_names_out().tolist()
            ['x0', 'x1=False', 'x1=True']
        """
        check_is_fitted(self, "columns_")
        by_column = self._categories.by_column().items()
        levels = [f"{name}={value}" for name, values in by_column for value in values]
        flags = [f"{name} missing" for name in self._flagged]
        return np.array([*self._numbers.columns, *levels, *flags], dtype=object)

    def scales(self) -> tuple[Float64[np.ndarray, "features"], Float64[np.ndarray, "features"]]:
        """The mean that is subtracted from each feature and the scale that divides it.

        Example:
            >>> TabularEncoder().fit([[0.0, "a"], [2.0, "b"], [4.0, "b"]]).scales()[0]
            array([2., 0., 0.])
        """
        numbers = self._numbers
        others = len(self.get_feature_names_out()) - len(numbers.columns)  # numbers come first
        return np.append(numbers.mean, np.zeros(others)), np.append(numbers.scale, np.ones(others))

    def facts(self) -> EncoderFacts:
        """The options and the fitted state, for an artifact."""
        check_is_fitted(self, "columns_")
        options = self.get_params(deep=False)
        options |= {name: list(options[name]) for name in ("missing_values", "categorical")}
        return EncoderFacts(
            format=1,
            options=EncoderOptions(**options),
            columns=self.columns_,
            named=self._named,
            dropped=self.dropped_,
            numeric=self._numbers,
            categorical=self._categories,
            flagged=self._flagged,
        )

    @classmethod
    def from_facts(cls, facts: EncoderFacts) -> TabularEncoder:
        """The encoder of `facts`; its output is bitwise the same.

        Example:
            >>> encoder = TabularEncoder().fit([[0.0], [2.0]])
            >>> TabularEncoder.from_facts(encoder.facts()).transform([[3.0]])
            array([[2.]], dtype=float32)
        """
        encoder = cls(**msgspec.structs.asdict(facts.options))
        encoder._named, encoder.columns_, encoder.dropped_ = (
            facts.named,
            facts.columns,
            facts.dropped,
        )
        encoder._numbers, encoder._categories = facts.numeric, facts.categorical
        encoder._flagged = facts.flagged
        encoder._set_sklearn_names()
        return encoder

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.categorical = True
        tags.input_tags.allow_nan = self.missing == "impute"
        return tags

    # --- fitting ----------------------------------------------------------------------------

    def _check_options(self) -> None:
        check_choice("unknown", self.unknown, ("error", "ignore"))
        check_choice("missing", self.missing, ("error", "impute"))
        check_choice("many", self.many, ("error", "group"))
        check_count("max_categories", self.max_categories, 2)
        for argument in ("missing_values", "categorical"):
            value = getattr(self, argument)
            if isinstance(value, (str, Mapping)) or not isinstance(value, Collection):
                fail(argument, "a list", repr(value)[:60], "Put it in brackets")

    def _check_scales(self, constant: bool = False) -> None:
        """Check that float64 holds the variances, of which those of constant columns may be 0."""
        scales = np.sqrt(self._numbers.variance)
        fits = (scales > LEAST_SCALE) & (scales < 1 / LEAST_SCALE) | (constant & (scales == 0))
        if not fits.all():
            got = f"another in {quote(np.array(self._numbers.columns)[~fits])}"
            remedy = "Divide them by a constant first"
            fail("X", "columns whose variance float64 can hold", got, remedy)

    def _typed(
        self, frame: pd.DataFrame, fitted_levels: Mapping[str, Any] | None = None
    ) -> pd.DataFrame:
        """Numeric columns in float64 and categorical ones as text, detected or as in `fit`."""
        columns: dict[str, Any] = {}
        for name, column in frame.items():
            column, place = mask_markers(column, self.missing_values), f"column '{name}'"
            if fitted_levels is None:
                as_text = name in self.categorical or kind_of(column, place) == "categorical"
            else:
                as_text = name in fitted_levels
            labels = as_labels(column) if as_text else None
            if labels is not None and fitted_levels is not None:
                labels = labels_as_fitted(labels, fitted_levels[name], column, place)
            columns[str(name)] = (
                as_numbers(column, place) if labels is None else pd.Series(labels, dtype=object)
            )
        return pd.DataFrame(columns)

    def _check_missing(self, table: pd.DataFrame) -> None:
        """With `missing="error"`, raise for missing values, counted by column."""
        counts = table.isna().sum()
        counts = counts[counts > 0]
        if self.missing == "error" and len(counts):
            got = [f"{n} in column '{name}'" for name, n in counts.items()]
            more = f" and in {len(got) - 5} more columns" if len(got) > 5 else ""
            remedy = "Use missing='impute', or drop those rows"
            fail("X", "no missing values", ", ".join(got[:5]) + more, remedy)

    def _check_levels(self, table: pd.DataFrame, frame: pd.DataFrame) -> None:
        """Raise for identifiers and for columns with too many categories."""
        for name in _text_columns(table):
            levels, n = table[name].nunique(), int(table[name].notna().sum())
            chosen = name in self.categorical or isinstance(frame[name].dtype, pd.CategoricalDtype)
            if levels > self.max_categories:
                fail(
                    "X",
                    f"at most {self.max_categories} categories in column '{name}'",
                    f"{levels} in {n} rows",
                    "Drop the column if it identifies rows, group values, or raise max_categories",
                )
            if levels == n >= MANY_ROWS and not chosen:
                fail(
                    "X",
                    f"text that recurs in column '{name}'",
                    f"{levels} values in {n} rows",
                    "Drop the column if it identifies rows, or name it in categorical=[...]",
                )

    def _identifiers(self, table: pd.DataFrame) -> list[str]:
        """Columns of text without repeated values, which are dropped with a warning."""
        found = []
        for name in _text_columns(table):
            levels, n = table[name].nunique(), int(table[name].notna().sum())
            if levels == n >= MANY_ROWS and name not in self.categorical:
                found.append(name)
        if found:
            warn_user(f"X: column {quote(found)} has another text in each row and is dropped")
        return found

    def _frequent(self, table: pd.DataFrame) -> dict[str, list[str]]:
        """The categories that are kept of columns with too many, and what stands for the others."""
        found = {}
        for name in _text_columns(table) if self.many == "group" else ():
            counts = table[name].value_counts()
            if len(counts) > self.max_categories:
                kept = sorted(counts.index, key=lambda level: (-counts[level], level))
                found[name] = [*kept[: self.max_categories - 1], OTHERS]
        return found

    def _grouped(self, table: pd.DataFrame, levels: Mapping[str, Sequence[str]]) -> pd.DataFrame:
        """A table in which categories that are not kept are one."""
        for name, kept in levels.items():
            if self.many == "group" and OTHERS in kept:
                column = table[name]
                table[name] = column.where(column.isin(kept) | column.isna(), OTHERS)
        return table

    def _set_sklearn_names(self) -> None:
        """Set the attributes that scikit-learn expects; an array has no names."""
        self.n_features_in_ = len(self.columns_)
        if self._named:
            self.feature_names_in_ = np.array(self.columns_, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    # --- transforming -----------------------------------------------------------------------

    def _select(self, X: Any) -> pd.DataFrame:
        """The encoded columns, by name if the table has names, else by position."""
        unlabelled, labels = as_frame(X)
        dropped = set(self.dropped_)
        kept = [name for name in self.columns_ if name not in dropped]
        frame = by_label(unlabelled, labels, self.columns_, self._named)
        if frame is None:
            if unlabelled.shape[1] != len(self.columns_):
                expected = f"the {len(self.columns_)} columns it was fitted with"
                fail("X", expected, f"{unlabelled.shape[1]} columns")
            return unlabelled.set_axis(self.columns_, axis=1)[kept]
        absent = [name for name in kept if name not in frame]
        if absent:
            others = [name for name in frame if name not in self.columns_]
            fail(
                "X",
                "the columns it was fitted with",
                f"none named {quote(absent)}",
                closest(absent[0], others) or "Add them to the table",
            )
        return frame[kept]

    def _matrix(self, table: pd.DataFrame) -> Float32[np.ndarray, "n features"]:
        """Standardised numbers, categories as zeros and ones, and flags of missing values."""
        numbers = self._numbers
        values = table[numbers.columns].to_numpy(dtype=np.float64)
        values = np.where(np.isnan(values), numbers.median, values)
        parts = [(values - np.array(numbers.mean)) / np.array(numbers.scale)]
        modes = self._categories.most_frequent
        for (name, levels), mode in zip(self._categories.by_column().items(), modes, strict=True):
            column = table[name].where(table[name].notna(), mode)
            indicators = np.eye(len(levels) + 1, len(levels))  # the last row is of unknown ones
            parts.append(indicators[pd.Index(levels, dtype=object).get_indexer(column)])
        parts.append(table[self._flagged].isna().to_numpy(dtype=np.float64))
        return np.concatenate([part.astype(np.float32) for part in parts], axis=1)

    def _check_known(self, table: pd.DataFrame) -> None:
        """Raise for categories not seen in `fit`, by column and value."""
        found = []
        for name, levels in self._categories.by_column().items():
            new = table[name][~table[name].isin(levels) & table[name].notna()]
            if len(new):
                found.append(
                    f"{quote(new.unique())} in column '{name}' ({len(new)} of {len(table)} rows)"
                )
        if found:
            fail(
                "X",
                "the categories seen in fitting",
                "; ".join(found),
                "Correct them, or fit with rows that have them or with unknown='ignore'",
            )

    @property
    def text_columns(self) -> list[str]:
        """Categorical columns of text, whose cells are text even where all are digits."""
        check_is_fitted(self, "columns_")
        levels = self._categories.by_column()
        return [name for name in levels if kind_of_labels(levels[name]) == "text"]

    def fills(self) -> dict[str, Any]:
        """The imputed values by column; empty with `missing="error"`.

        Example:
            >>> TabularEncoder(missing="impute").fit([[1, "a"], [None, "b"], [2, "b"]]).fills()
            {'x0': 1.5, 'x1': 'b'}
        """
        check_is_fitted(self, "columns_")
        if self.missing == "error":
            return {}
        parts = self._numbers, self._categories
        medians, modes = self._numbers.median, self._categories.most_frequent
        names = [name for part in parts for name in part.columns]
        return dict(zip(names, [*medians, *modes], strict=True))


def _text_columns(table: pd.DataFrame) -> list[str]:
    is_text = pd.api.types.is_object_dtype
    return [str(name) for name, dtype in table.dtypes.items() if is_text(dtype)]


def _numbers_of(
    table: pd.DataFrame, weights: Float64[np.ndarray, "n"] | None = None
) -> NumbersFacts:
    """Medians, by which missing numbers are replaced, and means and scales after that."""
    if not table.shape[1]:
        return NumbersFacts(columns=[], median=[], mean=[], variance=[], scale=[])
    impute, scale = SimpleImputer(strategy="median"), StandardScaler()
    with np.errstate(over="ignore", invalid="ignore"):  # `fit` checks the variances
        filled = impute.set_output(transform="default").fit_transform(table)
        scale.fit(filled, sample_weight=weights)
    return NumbersFacts(
        columns=list(table),
        median=impute.statistics_.tolist(),
        mean=scale.mean_.tolist(),
        variance=scale.var_.tolist(),
        scale=scale.scale_.tolist(),
    )


def _categories_of(table: pd.DataFrame) -> CategoriesFacts:
    """Levels in order, and the most frequent ones, which replace missing values."""
    return CategoriesFacts(
        columns=list(table),
        levels=[sorted(table[name].dropna().unique()) for name in table],
        most_frequent=[table[name].mode()[0] for name in table],
    )
