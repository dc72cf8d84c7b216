"""Tables as data frames: labels of columns, and the limits of names and labels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from subbayes.data.columns import as_labels, as_numpy, kind_of, mask_markers
from subbayes.data.encoder import TabularEncoder
from subbayes.tables.estimators import SubspaceRegressor
from subbayes.utils.checks import InputError


def numbers(n=20, d=3):
    return pd.DataFrame(np.random.default_rng(0).normal(size=(n, d)) * [1, 10, 100][:d])


@pytest.mark.parametrize("fitted", ["frame", "array", "without one"])
def test_numbered_columns_are_found_by_their_numbers(fitted):
    X = numbers()
    own = {"frame": X, "array": X.to_numpy(), "without one": X.drop(columns=1)}[fitted]
    encoder = TabularEncoder().fit(own)
    expected = encoder.transform(own)
    others = [X, X[[2, 1, 0]], X[[1, 2, 0]], X.assign(y=1.0), X.rename(columns=str)]
    for other in others:
        np.testing.assert_array_equal(encoder.transform(other), expected)
    np.testing.assert_array_equal(encoder.transform(np.asarray(own)), expected)
    with pytest.raises(InputError, match="the columns it was fitted with, got none named 'x?2'"):
        encoder.transform(X[[0, 1]])
    with pytest.raises(InputError, match="none named"):
        encoder.transform(X.rename(columns={0: 7, 1: 8, 2: 9}))


def test_other_names_beside_an_array_go_by_position_and_the_given_ones_by_name():
    X = numbers()
    encoder = TabularEncoder().fit(X.to_numpy())
    expected = encoder.transform(X.to_numpy())
    named = X.set_axis(["a", "b", "c"], axis=1)
    np.testing.assert_array_equal(encoder.transform(named), expected)
    shown = X.set_axis(encoder.columns_, axis=1)
    np.testing.assert_array_equal(encoder.transform(shown[["x2", "x0", "x1"]]), expected)
    # x1, x2, x3 are names that users give: not those of this encoder
    np.testing.assert_array_equal(
        encoder.transform(X.set_axis(["x1", "x2", "x3"], axis=1)), expected
    )
    by_name = TabularEncoder().fit(named)
    np.testing.assert_array_equal(by_name.transform(pd.DataFrame(X.to_numpy())), expected)


def test_true_and_one_are_different_values():
    column = pd.Series([1, True, "1", False, 0, None], dtype=object)
    for order in ([0, 1, 2, 3, 4, 5], [3, 4, 1, 0, 5, 2]):
        found = as_labels(column.iloc[order])
        expected = np.array(["1", "True", "1", "False", "0", np.nan], dtype=object)[order]
        assert [str(label) for label in found] == [str(label) for label in expected]
    answers = pd.Series([True, False, None], dtype=object)
    assert mask_markers(answers, [0]).isna().tolist() == [False, False, True]
    assert mask_markers(answers, [False]).isna().tolist() == [False, True, True]
    assert mask_markers(pd.Series([0, 1, 2]), [False, 1]).isna().tolist() == [False, True, False]
    mixed = pd.Series([[1], True, "a"], dtype=object)
    assert as_labels(mixed).tolist() == ["[1]", "True", "a"]


def test_columns_without_a_value_of_any_type_are_empty():
    pa = pytest.importorskip("pyarrow")
    column = pd.Series(pd.array([None, None], dtype=pd.ArrowDtype(pa.null())))
    assert kind_of(column, "column 'a'") == "numeric"
    X = pd.DataFrame({"a": [1.0, 3.0], "b": [2.0, 8.0]})
    encoder = TabularEncoder(missing="impute").fit(X)
    row = pd.DataFrame({"a": column, "b": [2.0, 8.0]})
    np.testing.assert_allclose(encoder.transform(row)[:, 0], [0, 0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1, 2], dtype=">i4"), "int32"),
        (np.array([1.5, 2], dtype=">f8"), "float64"),
        (np.array([1.5, 2], dtype=np.longdouble), "float64"),
        (pd.arrays.SparseArray([0.0, 2.0]), "float64"),
        ("uint8[pyarrow]", "uint8"),
        ("halffloat[pyarrow]", "float16"),
        ("bool[pyarrow]", "bool"),
        ("decimal128(9, 2)[pyarrow]", "float64"),
        ("string[pyarrow]", "object"),
    ],
)
def test_columns_of_other_formats_become_those_of_numpy(values, expected):
    if isinstance(values, str):
        pa = pytest.importorskip("pyarrow")
        kinds = {
            "uint8": pa.uint8(),
            "halffloat": pa.float16(),
            "bool": pa.bool_(),
            "string": pa.string(),
        }
        kind = kinds.get(values.partition("[")[0], pa.decimal128(9, 2))
        plain = ["a", "b"] if kind == pa.string() else np.array([0, 1]).astype(expected).tolist()
        values = pd.Series(plain, dtype=object).astype(pd.ArrowDtype(kind))
    column = pd.Series(values).set_axis([3, 5]).rename("a")
    found = as_numpy(column)
    assert found.dtype == expected
    assert found.dtype.isnative
    assert (list(found.index), found.name) == ([3, 5], "a")
    assert found.tolist() == column.tolist()


def test_missing_numbers_of_pyarrow_are_nan_and_dictionaries_are_categories():
    pa = pytest.importorskip("pyarrow")
    found = as_numpy(pd.Series([1, None], dtype=pd.ArrowDtype(pa.int8())))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, [1.0, np.nan])
    coded = pd.Series(["b", "a", "b"]).astype(pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string())))
    assert as_numpy(coded).cat.categories.tolist() == ["a", "b"]
    assert as_numpy(coded).tolist() == ["b", "a", "b"]
    same = pd.Series([1.0])
    assert as_numpy(same) is same


@pytest.mark.parametrize("scale", [1e-153, 1e152])
def test_scales_that_cannot_be_saved_are_refused_in_fit(scale):
    X = numbers(d=2) * [1, scale]
    with pytest.raises(InputError, match="columns whose variance float64 can hold"):
        TabularEncoder().fit(X)
    with pytest.raises(InputError, match="columns whose variance float64 can hold"):
        SubspaceRegressor().fit(X.to_numpy(), X[0])
