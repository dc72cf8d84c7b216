"""The encoding of a row of a file does not depend on the other rows of the file."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from cases import table_settings

from subbayes.cli.files import read_rows, row_batches
from subbayes.cli.options import TextOptions
from subbayes.cli.regression_model import RegressionModel
from subbayes.data.columns import kind_of_labels, labels_as_fitted
from subbayes.data.encoder import TabularEncoder
from subbayes.data.table_batches import TableBatches
from subbayes.data.tables import read_table, text_columns
from subbayes.regression import Regression
from subbayes.tables.data_frame_model import DataFrameModel

SMALL = table_settings(hidden=(3,), epochs=2, swa_epochs=1)
COLUMNS = {
    "codes": ["01234", "02139", "1", "K1A", "H2X"],
    "versions": ["1.50", "1.5", "2", "A", "B"],
    "answers": ["true", "false", "maybe", "True", "0"],
    "numbers": ["1", "2", "3", "5", "2.5"],
    "booleans": ["True", "False", "True", "True", "False"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of a table with a column of each kind, and classes that are text."""
    path = tmp_path_factory.mktemp("types") / "train.csv"
    rng = np.random.default_rng(0)
    places = np.arange(60) % 5
    table = pd.DataFrame({name: np.array(cells)[places] for name, cells in COLUMNS.items()})
    table["x"], table["y"] = rng.normal(size=60), np.array(["01", "B", "A", "B", "A"])[places]
    table.to_csv(path, index=False)
    encoder = TabularEncoder(categorical=list(COLUMNS), unknown="ignore")
    return DataFrameModel.fit(read_table(path), "y", SMALL, method="map", encoder=encoder)


def lines(rows):
    """The text of a file with some rows."""
    return "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n"


def row(place, **others):
    """The cells of a row."""
    cells = {name: values[place] for name, values in COLUMNS.items()}
    return cells | {"x": "0.5", "y": "01"} | others


def test_columns_of_text_are_known(model):
    assert model.text_columns == ["codes", "versions", "answers", "y"]


@pytest.mark.parametrize("place", range(5))
def test_a_row_alone_is_encoded_as_beside_others(model, place, tmp_path):
    alone, beside, batches = (tmp_path / f"{name}.csv" for name in ("alone", "beside", "batches"))
    alone.write_text(lines([row(place)]))
    odd = {"numbers": "new", "booleans": "new"}  # cells that make the whole column text
    beside.write_text(lines([row(place), row(3, **odd), row(4, **odd)]))
    batches.write_text(beside.read_text())
    found = [
        read_rows(model, path, TextOptions(), needs_target=True) for path in (alone, beside)
    ] + [next(iter(row_batches(model, batches, TextOptions())))]
    encoded = [model.encoder.transform(frame)[0] for frame in found]
    whole = pd.DataFrame({name: np.array(cells) for name, cells in COLUMNS.items()})
    expected = {f"{name}={whole[name][place]}" for name in COLUMNS}
    names = model.encoder.get_feature_names_out()
    for vector, frame in zip(encoded, found, strict=True):
        np.testing.assert_array_equal(vector, encoded[0])
        levels = {name for name, value in zip(names, vector, strict=True) if value == 1}
        assert levels - {"x"} == expected
        assert model.target.encode(frame["y"])[0] == 0


def test_numbers_written_otherwise_are_the_same_level(model):
    rows = [row(1, numbers=cell, booleans="true") for cell in ("2", "2.0", " 2", "2e0")]
    table = pd.DataFrame(rows)
    encoded = model.encoder.transform(table)
    assert (encoded == encoded[0]).all()
    new = model.encoder.transform(pd.DataFrame([row(1, numbers="2_0", booleans="yes")]))
    assert new.sum() == encoded[0].sum() - 2


def test_numbers_where_text_was_fitted_are_warned_of(model):
    table = pd.DataFrame([row(2)]).assign(codes=[1234])
    with pytest.warns(
        UserWarning, match="'codes' was fitted with text such as '01234' and has num"
    ):
        model.encoder.transform(table)


def test_a_regression_reads_text_as_text(tmp_path):
    path, new = tmp_path / "train.csv", tmp_path / "new.csv"
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"code": np.array(["01", "1", "A"])[np.arange(30) % 3]})
    table["y"] = 3.0 * (table["code"] == "01") + 0.1 * rng.normal(size=30)
    table.to_csv(path, index=False)
    fitted = Regression("y ~ code").fit(read_table(path), inference="laplace")
    new.write_text("code\n01\n1\n")
    mean = RegressionModel(fitted).frame(
        read_rows(RegressionModel(fitted), new, TextOptions(), needs_target=False)
    )["mean"]
    assert mean.tolist() == pytest.approx([3.0, 0.0], abs=0.3)


def test_text_columns_of_files_in_batches(tmp_path):
    path = tmp_path / "codes.csv"
    path.write_text("code,x\n" + "01,1\n" * 3 + ",2\n02,3\n")
    batches = TableBatches(path, batch_size=2, as_text=["code", "absent"])
    whole = read_table(path, as_text=["code", "absent"])
    pd.testing.assert_frame_equal(pd.concat(list(batches), ignore_index=True), whole)
    assert whole["code"].tolist()[:3] == ["01"] * 3
    assert whole["code"].isna().tolist() == [False] * 3 + [True, False]
    assert text_columns(whole) == ["code"]


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["1", "-2", "2.5"], "numbers"),
        (["1e-05", "100000000000000000000"], "numbers"),
        (["1", "01"], "text"),
        (["1.50"], "text"),
        (["inf", "1"], "text"),
        (["9" * 400], "text"),
        (["False", "True"], "booleans"),
        (["True", "1"], "text"),
    ],
)
def test_kinds_of_labels(labels, kind):
    found = kind_of_labels(labels)
    assert found == kind


def test_labels_keep_missing_values():
    labels = np.array(["1.0", np.nan, "x"], dtype=object)
    found = labels_as_fitted(labels, ["1"], pd.Series(labels), "'a'")
    assert found[[0, 2]].tolist() == ["1", "x"]
    assert np.isnan(found[1])
