"""Encoding of mixed tables: values against NumPy, configuration through JSON, errors."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import ValidationError
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline

from experiments.datasets import find_file
from subbayes.artifacts.facts import as_facts, encode
from subbayes.data.columns import as_labels, as_numbers, kind_of, mask_markers
from subbayes.data.encoder import TabularEncoder
from subbayes.data.encoder_module import EncoderModule
from subbayes.data.encoder_state import EncoderFacts
from subbayes.data.frames import quote
from subbayes.data.tables import read_table, split_target
from subbayes.data.targets import Target
from subbayes.utils.checks import InputError, InputTypeError


def people(n=40):
    generator = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": generator.integers(20, 60, n),
            "income": generator.normal(1e3, 2e2, n),
            "job": generator.choice(["smith", "baker", "clerk"], n),
            "member": generator.random(n) < 0.5,
            "grade": pd.Categorical(generator.choice(["A", "B"], n)),
        }
    )


def holey(n=40):
    X = people(n)
    X.loc[[1, 5], "income"] = np.nan
    X.loc[[2], "job"] = None
    return X


def refuse(pattern, X, fit_on=None, **options):
    """Expect one line matching the pattern from fit, or from transform after fitting."""
    encoder = TabularEncoder(**options)
    if fit_on is not None:
        encoder.fit(fit_on)
    with pytest.raises((InputError, InputTypeError), match=pattern) as error:
        (encoder.fit if fit_on is None else encoder.transform)(X)
    assert "\n" not in str(error.value)


# values


def test_numbers_are_standardised_and_categories_one_hot():
    X = people()
    encoder = TabularEncoder().fit(X)
    matrix = encoder.transform(X)
    names = encoder.get_feature_names_out().tolist()
    assert names == [
        "age",
        "income",
        "job=baker",
        "job=clerk",
        "job=smith",
        "member=False",
        "member=True",
        "grade=A",
        "grade=B",
    ]
    assert matrix.dtype == np.float32
    for j, name in enumerate(names):
        column, _, level = name.partition("=")
        values = X[column].to_numpy()
        expected = values.astype(str) == level if level else (values - values.mean()) / values.std()
        np.testing.assert_allclose(matrix[:, j], expected, rtol=1e-6, atol=1e-6)


def test_imputation_is_the_median_and_the_most_frequent():
    X = holey()
    encoder = TabularEncoder(missing="impute", missing_indicator=True).fit(X)
    matrix = pd.DataFrame(encoder.transform(X), columns=encoder.get_feature_names_out())
    filled = X.fillna({"income": X["income"].median(), "job": X["job"].mode()[0]})
    plain = TabularEncoder().fit(filled)
    np.testing.assert_array_equal(matrix.iloc[:, :9], plain.transform(filled))
    np.testing.assert_array_equal(matrix["income missing"], X["income"].isna())
    np.testing.assert_array_equal(matrix["job missing"], X["job"].isna())
    assert matrix.shape[1] == 11


def test_columns_without_missing_values_in_fit_are_imputed():
    encoder = TabularEncoder(missing="impute").fit(people())
    row = people().iloc[:1].astype(object)
    row.loc[0, ["age", "member"]] = None
    matrix = pd.DataFrame(encoder.transform(row), columns=encoder.get_feature_names_out())
    age = people()["age"]
    np.testing.assert_allclose(
        matrix["age"], (age.median() - age.mean()) / age.std(ddof=0), rtol=1e-6
    )
    assert matrix[["member=False", "member=True"]].to_numpy().sum() == 1


def test_unknown_category_ignored_is_a_row_of_zeros():
    X = people()
    encoder = TabularEncoder(unknown="ignore").fit(X)
    matrix = pd.DataFrame(
        encoder.transform(X.assign(job="pilot")), columns=encoder.get_feature_names_out()
    )
    assert (matrix.filter(like="job=") == 0).all(axis=None)
    assert (matrix.filter(like="grade=").sum(axis=1) == 1).all()


@pytest.mark.parametrize("unknown", ["error", "ignore"])
def test_numbers_are_no_unknown_booleans_nor_booleans_unknown_numbers(unknown):
    booleans = pd.DataFrame({"x": np.arange(8.0), "b": [True, False, False, True] * 2})
    numbers = booleans.assign(b=booleans.b.astype(int))
    for frame, other in ((booleans, numbers), (numbers, booleans)):
        encoder = TabularEncoder(unknown=unknown, categorical=["b"]).fit(frame)
        expected = np.column_stack([booleans.b == 0, booleans.b == 1])
        np.testing.assert_array_equal(encoder.transform(frame)[:, 1:], expected)
        for dtype in (None, float, str, "category", object):
            new = other if dtype is None else other.astype({"b": dtype})
            if dtype is float and other is booleans:
                continue  # which makes numbers of booleans
            with pytest.raises(InputError, match="X: expected .*, as in fitting, got .*'b'"):
                encoder.transform(new)


@pytest.mark.parametrize("column", [[1, -9, 3], ["1", "-9", "3"], [1.0, -9.0, 3.0], [1, "-9", 3]])
@pytest.mark.parametrize("marks", [["-9"], [-9]])
def test_markers_that_are_numbers_are_found_as_numbers_and_as_text(column, marks):
    X = pd.DataFrame({"a": column, "b": [1.0, 2.0, 4.0]})
    found = TabularEncoder(missing="impute", missing_values=marks).fit(X)
    given = X.assign(a=[1.0, np.nan, 3.0])
    expected = TabularEncoder(missing="impute").fit(given)
    assert found.fills() == expected.fills()
    np.testing.assert_array_equal(found.transform(X), expected.transform(given))
    huge = pd.Series([1, -9, 3])
    assert not mask_markers(huge, ["123456789012345678901", "1e400"]).isna().any()


def test_markers_are_missing_values_and_numeric_text_is_parsed():
    X = pd.DataFrame({"a": ["1", " ?", "3"], "b": ["u", "?", "v"], "c": [1, -9, 2]})
    encoder = TabularEncoder(missing="impute", missing_values=["?", -9]).fit(X)
    assert encoder.get_feature_names_out().tolist() == ["a", "c", "b=u", "b=v"]
    np.testing.assert_allclose(encoder.transform(X)[1], [0, 0, 1, 0], atol=1e-7)


def test_text_is_compared_with_markers_once_for_each_different_value():
    class Text(str):
        stripped = 0

        def strip(self, characters=None):
            Text.stripped += 1
            return str.strip(self, characters)

    values = [Text(v) for v in ("a", " ?", "b")]
    column = pd.Series(values * 100 + [None, 3, 3.0], dtype=object)
    masked = mask_markers(column, ["?"])
    assert masked.isna().tolist() == [False, True, False] * 100 + [True, False, False]
    assert Text.stripped == 3


def test_values_without_a_hash_are_categories_if_named_so():
    assert as_labels(pd.Series([[1], None, [1], {"a": 2}])).tolist() == [
        "[1]", np.nan, "[1]", "{'a': 2}",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "float32", "int8", "object", "string"])
def test_the_dtype_of_numbers_does_not_matter(dtype):
    X = pd.DataFrame({"a": [1, 2, 4, 4], "b": [0.0, 1, 0, 1]})
    expected = TabularEncoder().fit_transform(X)
    other = X.assign(a=X["a"].astype(dtype))
    np.testing.assert_array_equal(TabularEncoder().fit_transform(other), expected)
    np.testing.assert_array_equal(TabularEncoder().fit(X).transform(other), expected)


@pytest.mark.parametrize("dtype", ["object", "string", "category", "boolean"])
def test_the_dtype_of_booleans_does_not_matter(dtype):
    X = pd.DataFrame({"a": [True, False, True], "b": [0.0, 1, 2]})
    expected = TabularEncoder().fit_transform(X)
    other = X.assign(a=X["a"].astype(dtype))
    np.testing.assert_array_equal(TabularEncoder().fit(X).transform(other), expected)


def test_categorical_codes_do_not_depend_on_their_dtype():
    X = pd.DataFrame({"code": [3, 1, 3, 2], "b": [0.0, 1, 2, 3]})
    encoder = TabularEncoder(categorical=["code"], missing="impute").fit(X)
    assert encoder.get_feature_names_out().tolist() == ["b", "code=1", "code=2", "code=3"]
    for dtype in (float, str, "category"):
        other = X.assign(code=X["code"].astype(dtype))
        np.testing.assert_array_equal(encoder.transform(other), encoder.transform(X))


def test_columns_of_arrays_are_matched_by_position():
    X = np.random.default_rng(0).normal(size=(6, 2))
    encoder = TabularEncoder().fit(X)
    assert encoder.get_feature_names_out().tolist() == ["x0", "x1"]
    expected = encoder.transform(X)
    for other in (
        X.tolist(),
        torch.tensor(X),
        pd.DataFrame(X),
        pd.DataFrame(X, columns=["a", "b"]),
    ):
        np.testing.assert_array_equal(encoder.transform(other), expected)
    mixed = np.array([[1, "a"], [2, "b"], [3, "a"]], dtype=object)
    for other in (mixed, mixed.astype(str), mixed.tolist()):
        names = TabularEncoder().fit(other).get_feature_names_out().tolist()
        assert names == ["x0", "x1=a", "x1=b"]


def test_columns_are_found_by_name_and_further_ones_ignored():
    X = people()
    encoder = TabularEncoder().fit(X)
    shuffled = X[["grade", "job", "age", "member", "income"]].assign(extra=pd.Timestamp("2020"))
    np.testing.assert_array_equal(encoder.transform(shuffled), encoder.transform(X))


def test_constant_columns_are_dropped_with_one_warning_and_not_needed_later():
    X = people().assign(zero=0.0, word="same")
    with pytest.warns(UserWarning, match=r"^X: dropped columns.*'zero', 'word'\.$") as record:
        encoder = TabularEncoder().fit(X)
    assert len(record) == 1
    assert encoder.dropped_ == ["zero", "word"]
    np.testing.assert_array_equal(encoder.transform(people()), encoder.transform(X))
    np.testing.assert_array_equal(encoder.transform(X), TabularEncoder().fit_transform(people()))


def test_columns_of_row_numbers_warn():
    with pytest.warns(UserWarning, match=r"X: 'id' only number the rows\. Drop them"):
        TabularEncoder().fit(people().assign(id=range(7, 47)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TabularEncoder().fit(people(10).assign(id=range(10)))
        TabularEncoder().fit(people().assign(id=[1, 2, *range(4, 42)]))


def test_columns_may_come_in_another_order():
    encoder = TabularEncoder(missing="impute", missing_indicator=True).fit(holey())
    np.testing.assert_array_equal(
        encoder.transform(holey()[holey().columns[::-1]]), encoder.transform(holey())
    )


def test_a_single_row_can_be_transformed_without_changing_it():
    X = holey()
    before = X.copy(deep=True)
    encoder = TabularEncoder(missing="impute").fit(X)
    np.testing.assert_array_equal(encoder.transform(X.iloc[[3]])[0], encoder.transform(X)[3])
    pd.testing.assert_frame_equal(X, before)


def test_conforms_to_scikit_learn():
    X = people()
    y = X["income"] + 3 * X["age"]
    model = make_pipeline(TabularEncoder(unknown="ignore"), LinearRegression()).fit(X, y)
    assert model.score(X, y) > 0.999
    assert clone(model[0]).get_params() == model[0].get_params()
    frame = TabularEncoder().set_output(transform="pandas").fit_transform(X.set_index("age"))
    assert list(frame.columns[:2]) == ["income", "job=baker"]
    with sklearn.config_context(transform_output="pandas"):
        inner = TabularEncoder().fit_transform(X)
    np.testing.assert_array_equal(inner, TabularEncoder().fit_transform(X))
    with pytest.raises(ValueError, match="not fitted"):
        TabularEncoder().transform(X)


# state


def saved_and_read(encoder):
    text = json.dumps(encode(encoder.facts()), allow_nan=False)
    return TabularEncoder.from_facts(as_facts(json.loads(text), EncoderFacts))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"missing": "impute"},
        {"missing": "impute", "missing_indicator": True},
        {
            "unknown": "ignore",
            "missing": "impute",
            "missing_values": ("?",),
            "categorical": ("age",),
        },
    ],
)
def test_state_survives_json_bit_for_bit(options):
    X = holey() if options.get("missing") else people()
    encoder = TabularEncoder(**options).fit(X)
    again = saved_and_read(encoder)
    assert again.transform(X).tobytes() == encoder.transform(X).tobytes()
    assert again.get_feature_names_out().tolist() == encoder.get_feature_names_out().tolist()
    assert again.facts() == encoder.facts()
    assert again.n_features_in_ == encoder.n_features_in_ == 5


number = st.floats(-1e12, 1e12).map(lambda v: float(f"{v:.17g}"))


@settings(max_examples=12, deadline=None)
@given(
    a=st.lists(number, min_size=3, max_size=12, unique=True),
    words=st.lists(st.text(max_size=3), min_size=2, max_size=4, unique=True),
    hole=st.integers(0),
)
def test_state_survives_json_for_any_numbers_and_words(a, words, hole):
    X = pd.DataFrame({"a": a, "b": [words[i % len(words)] for i in range(len(a))]})
    X.loc[hole % len(a), "a"] = np.nan
    encoder = TabularEncoder(missing="impute", missing_indicator=True, categorical=["b"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder.fit(X)
    again = saved_and_read(encoder)
    assert again.transform(X).tobytes() == encoder.transform(X).tobytes()


@pytest.mark.parametrize(
    "X",
    [
        pd.DataFrame({"a": [1.0, 2, 4]}),
        pd.DataFrame({"b": ["u", "v", "u"]}),
        np.array([[1.0, 5], [2, 5]]),
    ],
)
@pytest.mark.filterwarnings("ignore:X. dropped columns")
def test_state_of_numbers_only_categories_only_and_arrays(X):
    encoder = TabularEncoder().fit(X)
    again = saved_and_read(encoder)
    assert again.transform(X).tobytes() == encoder.transform(X).tobytes()
    assert hasattr(again, "feature_names_in_") == isinstance(X, pd.DataFrame)


def test_a_damaged_state_raises():
    facts = encode(TabularEncoder().fit(people()).facts())
    numeric = facts["numeric"]
    for damage in (
        {},
        {**facts, "format": 2},
        {**facts, "numeric": {}},
        {**facts, "numeric": {**numeric, "mean": numeric["mean"][1:]}},
        {**facts, "dropped": ["age"]},
        {**facts, "options": {"speed": 1}},
    ):
        with pytest.raises(ValidationError):
            as_facts(damage, EncoderFacts)


# refusals in fitting


def test_options_are_checked():
    refuse(r"^unknown: expected one of 'error', 'ignore', got 'drop'", people(), unknown="drop")
    refuse(r"^missing: expected one of", people(), missing="drop")
    refuse(r"^max_categories: expected a whole number of at least 2", people(), max_categories=1)
    refuse(r"^missing_values: expected a list, got '\?'", people(), missing_values="?")
    refuse(
        r"^categorical: expected columns of the table.*got 'jobs'\. Did you mean 'job'",
        people(),
        categorical=["jobs"],
    )


@pytest.mark.parametrize(
    ("X", "pattern"),
    [
        (pd.DataFrame({"a": []}), "X: expected a table with rows and columns, got 0 rows"),
        (pd.DataFrame(index=range(3)), "got 3 rows and 0 columns"),
        (np.ones(3), r"two axes, got shape \(3,\)\. Reshape your data"),
        (np.ones((2, 2, 2)), r"got shape \(2, 2, 2\)"),
        ([[1, 2], [3]], r"got shape \(2,\)"),
        (pd.Series([1, 2]), "got a single column"),
        (3.0, "expected a DataFrame or a 2-D array, got float"),
        ({"a": [1]}, "expected a DataFrame or a 2-D array, got dict"),
        (
            pd.DataFrame([[1, 2]] * 2, columns=["a", "a"]),
            "one column of each name, got several.*'a'",
        ),
        (np.ones((1, 2)), "at least 2 rows to learn from, got 1 row"),
        (np.ones((5, 2)), "a column that varies, got a single value in each of 'x0', 'x1'"),
        (
            pd.DataFrame({"when": pd.date_range("2020", periods=3)}),
            r"numbers or categories in column 'when', got dates or times.*days since a fixed date",
        ),
        (pd.DataFrame({"when": [datetime.date(2020, 1, 1), None]}), "column 'when', got dates"),
        (pd.DataFrame({"lag": pd.to_timedelta([1, 2])}), "column 'lag', got dates or times"),
        (pd.DataFrame({"p": pd.period_range("2020", periods=2)}), "column 'p', got dates or times"),
        (pd.DataFrame({"l": [[1], [2]]}), "column 'l', got a list. Convert or drop"),
        (pd.DataFrame({"b": [b"x", b"y"]}), "column 'b', got a bytes"),
        (np.array([[1j], [2]]), "column 'x0', got a complex"),
        (
            pd.DataFrame({"a": [1.0, np.inf, -np.inf]}),
            r"finite numbers in column 'a', got 2 infinite values \(first in row 1\)",
        ),
        (pd.DataFrame({"a": [1e308, -1e308]}), "variance float64 can hold, got another in 'a'"),
        (
            pd.DataFrame({"a": ["1", "2", "?"]}),
            r"numbers in column 'a', got '\?' in 1 of 3 rows "
            r"\(first in row 2\)\. Correct them, declare them missing with missing_values=\['\?'\]",
        ),
    ],
)
def test_unusable_tables(X, pattern):
    refuse(pattern, X)


def test_sparse_matrices_are_named():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    refuse(r"got csr_matrix\. Call its toarray\(\) first", scipy_sparse.csr_matrix(np.eye(3)))


def test_missing_values_are_counted_by_column():
    refuse(
        r"^X: expected no missing values, got 2 in column 'income', 1 in column 'job'\. Use "
        r"missing='impute', or drop those rows\.$",
        holey(),
    )
    refuse(
        "got 1 in column 'b'", pd.DataFrame({"a": [1, 2], "b": ["u", "?"]}), missing_values=["?"]
    )
    refuse("got 1 in column 'x0' and in|5 more columns", np.full((2, 10), np.nan))


def test_identifiers_raise():
    names = [f"person {i}" for i in range(40)]
    refuse(
        r"text that recurs in column 'name', got 40 values in 40 rows\. Drop the column",
        people().assign(name=names),
    )
    refuse(
        r"at most 2 categories in column 'job', got 3 in 40 rows.*raise max_categories",
        people(),
        max_categories=2,
    )
    X = people().assign(name=names)
    assert TabularEncoder(categorical=["name"]).fit_transform(X).shape == (40, 49)


# refusals in transforming


def test_missing_columns_are_named_with_close_ones():
    X = people()
    refuse(
        r"^X: expected the columns it was fitted with, got none named 'age', 'job'\. Add them",
        X.drop(columns=["age", "job"]),
        fit_on=X,
    )
    refuse("got none named 'age'. Did you mean 'Age'", X.rename(columns={"age": "Age"}), fit_on=X)
    refuse("the 5 columns it was fitted with, got 2 columns", np.ones((3, 2)), fit_on=X)


def test_a_category_named_others_takes_no_unknown_ones():
    encoder = TabularEncoder().fit([["(others)"], ["a"], ["a"]])
    with pytest.raises(InputError, match="'zzz'"):
        encoder.transform([["zzz"]])
    ignoring = TabularEncoder(unknown="ignore").fit([["(others)"], ["a"], ["a"]])
    assert ignoring.transform([["zzz"]]).tolist() == [[0.0, 0.0]]
    module = EncoderModule(ignoring)(torch.zeros(1, 0).double(), torch.tensor([[2]]))
    assert module.tolist() == [[0.0, 0.0]]


def test_unknown_categories_are_named_with_their_columns():
    X = people()
    new = X.assign(job=["pilot", "dancer"] + ["smith"] * 38, grade="C")
    refuse(
        r"^X: expected the categories seen in fitting, got 'pilot', 'dancer' in column 'job' "
        r"\(2 of 40 rows\); 'C' in column 'grade' \(40 of 40 rows\)\. Correct.*unknown='ignore'",
        new,
        fit_on=X,
    )


def test_changed_columns_raise():
    X = people()
    refuse(r"numbers in column 'age', got '\?' in 40 of 40 rows", X.assign(age="?"), fit_on=X)
    refuse("column 'age', got dates", X.assign(age=pd.Timestamp("2020")), fit_on=X)
    refuse("no missing values, got 40 in column 'age'", X.assign(age=None), fit_on=X)
    refuse("finite numbers in column 'income'", X.assign(income=np.inf), fit_on=X)
    refuse(
        "float32 can hold after standardising, got larger ones in column 'income'",
        X.assign(income=1e300),
        fit_on=X,
    )
    refuse("got 0 rows and 5 columns", X.iloc[:0], fit_on=X)


# columns


def test_kinds_and_conversions():
    assert kind_of(pd.Series([None, None], dtype=object), "c") == "numeric"
    assert kind_of(pd.Series([1, "u", False], dtype=object), "c") == "categorical"
    assert kind_of(pd.Series([True, None], dtype=object), "c") == "categorical"
    np.testing.assert_array_equal(as_numbers(pd.Series([True, False]), "c"), [1.0, 0.0])
    labels = as_labels(pd.Series([np.int64(2), 2.5, np.True_, "x", 2**60 + 1], dtype=object))
    assert labels.tolist() == ["2", "2.5", "True", "x", str(2**60 + 1)]


# real tables


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "target", "classes", "width"),
    [
        ("credit_approval", "A16", ("+", "-"), None),
        ("raisin", "Class", ("Besni", "Kecimen"), 7),
        ("bank_marketing", "y", ("no", "yes"), None),
        ("dry_bean", "Class", None, 16),
    ],
)
def test_real_tables(name, target, classes, width):
    try:
        path = find_file(f"{name}/{name}.csv.gz")
    except InputError as error:
        pytest.skip(f"{name}/{name}.csv.gz is absent: {error}")
    X, y = split_target(read_table(path, missing_values="?"), target)
    encoder = TabularEncoder(missing="impute", missing_indicator=True).fit(X)
    matrix = encoder.transform(X)
    assert np.isfinite(matrix).all()
    assert width in (None, matrix.shape[1])
    again = saved_and_read(encoder)
    assert again.transform(X).tobytes() == matrix.tobytes()
    assert classes in (None, Target.infer(y).classes)


def test_a_real_table_with_undeclared_markers_raises():
    try:
        path = find_file("credit_approval/credit_approval.csv.gz")
    except InputError as error:
        pytest.skip(f"credit_approval/credit_approval.csv.gz is absent: {error}")
    X, _ = split_target(read_table(path), "A16")
    refuse(
        r"numbers in column 'A2', got '\?' in 12 of 690 rows \(first in row \d+\).*"
        r"missing_values=\['\?'\]",
        X,
    )


# the package


def test_importing_the_package_imports_neither_pandas_nor_scikit_learn():
    code = (
        "import sys, subbayes; "
        "print([m for m in ('pandas', 'sklearn', 'scipy.stats') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_many_or_long_names_are_cut_in_messages():
    assert len(quote("x" * 10_000 for _ in range(1000))) < 400
    assert quote(iter("abcdefg")) == "'a', 'b', 'c', 'd', 'e' and 2 more"
