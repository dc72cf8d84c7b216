"""Tables read and written in batches, against pandas on the whole table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from subbayes import InputError
from subbayes.data.encoder import TabularEncoder
from subbayes.data.table_batches import TableBatches, escape_formulas, text_pieces, write_batches
from subbayes.data.tables import read_table

TABLE = pd.DataFrame(
    {
        "whole": range(11),
        "real": [None, None, None, *np.linspace(0, 1, 8)],
        "late text": ["1", "2", "3.0", "4", "5", "6", "7", "8", "x", "9", "1"],
        "late real": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10.5, 11],
        "flag": [True, False] * 5 + [None],
        "flag or text": ["True", "False", "True"] * 3 + ["maybe", "True"],
        "empty": [None] * 11,
        "text": [None, None, None, "a", "b", "NA", "?", "c,d", "é", "a", "a"],
    }
)


def assert_same(batches: TableBatches, whole: pd.DataFrame) -> None:
    assert (batches.n, batches.columns) == (len(whole), list(whole.columns))
    parts = list(batches)
    assert max(map(len, parts)) <= batches.batch_size
    assert all(list(part.index) == list(range(len(part))) for part in parts)
    assert all(list(part.columns) == batches.columns for part in parts)
    found = pd.concat(parts, ignore_index=True)
    for name in whole:  # text has the same letters, numbers the same type
        if whole[name].dtype.kind in "if":
            assert found[name].dtype == whole[name].dtype
        pd.testing.assert_series_equal(
            found[name].astype(object).where(found[name].notna(), None),
            whole[name].astype(object).where(whole[name].notna(), None),
        )


@pytest.mark.few(3)
@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 100])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".parquet"])
def test_batches_are_the_table_as_it_is_read_at_once(tmp_path, suffix, batch_size):
    path = tmp_path / f"table{suffix}"
    if suffix == ".parquet":
        TABLE.drop(columns="empty").to_parquet(path, index=False)
    else:
        TABLE.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    whole = read_table(path, missing_values=["?"])
    batches = TableBatches(path, missing_values=["?"], batch_size=batch_size)
    if suffix == ".parquet":  # whole numbers with missing values depend on those of the batch
        assert (batches.n, batches.columns) == (11, list(whole.columns))
        encoder = TabularEncoder(missing="impute", categorical=["late text"]).fit(whole)
        rows = np.concatenate([encoder.transform(batch) for batch in batches])
        np.testing.assert_array_equal(rows, encoder.transform(whole))
    else:
        assert_same(batches, whole)
    assert_same(batches, whole)  # and again


def test_unnamed_indices_of_parquet_files_are_dropped(tmp_path):
    for index in (list("abcdefghijk"), range(5, 16)):
        path = tmp_path / "table.parquet"
        TABLE[["real", "whole"]].set_axis(index).to_parquet(path)
        assert_same(TableBatches(path, batch_size=4), read_table(path))


def test_named_indices_of_parquet_files_are_columns(tmp_path):
    path = tmp_path / "table.parquet"
    for name in ("whole", "late real", "flag"):  # a range is not stored, others are columns
        TABLE.set_index(name)[["real"]].to_parquet(path)
        assert_same(TableBatches(path, batch_size=4), read_table(path))


@pytest.mark.parametrize("text", ["a,b\n", "", "a,a\n1,2\n", "a;b\n1;2\n", "a,b\nx,2,3\ny,5,6\n"])
def test_errors_are_those_of_a_whole_table(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(InputError) as whole:
        read_table(path, min_rows=1)
    with pytest.raises(InputError) as batches:
        list(TableBatches(path))
    assert str(batches.value) == str(whole.value)


@pytest.mark.xfail(
    Version(pd.__version__).major < 3, reason="pandas 2 drops further cells of a batch's first row"
)
def test_a_row_that_is_too_long_is_found_before_any_is_used(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b\n" + "1,2\n" * 20 + "1,2,3\n")
    with pytest.raises(InputError, match="line 22"):
        TableBatches(path, batch_size=5)
    with pytest.raises(InputError, match="batch_size: expected a whole number of at least 1"):
        TableBatches(path, batch_size=0)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_batches_are_written_below_each_other(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    path.write_text("earlier")
    parts = [TABLE.iloc[:3], TABLE.iloc[3:4], TABLE.iloc[4:]]
    assert write_batches(path, iter(parts)) == 11
    whole = read_table(path)
    assert whole.shape == TABLE.shape
    np.testing.assert_array_equal(whole["whole"], TABLE["whole"])
    np.testing.assert_allclose(whole["real"], TABLE["real"], rtol=1e-15)
    assert whole["text"].dropna().tolist() == ["a", "b", "?", "c,d", "é", "a", "a"] or (
        suffix == ".parquet"
    )
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1),
    st.lists(st.integers(-(2**53), 2**53), min_size=1),
)
def test_numbers_are_read_back_from_text(numbers, ids):
    pieces = text_pieces([pd.DataFrame({"x": numbers}), pd.DataFrame({"x": [*ids, np.nan]})])
    cells = "".join(pieces).splitlines()[1:]
    assert [float(cell) for cell in cells[: len(numbers)]] == numbers
    assert cells[len(numbers) : -1] == [str(number) for number in ids]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_an_error_in_a_batch_leaves_the_earlier_file(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    path.write_text("earlier")

    def broken():
        yield TABLE.iloc[:3]
        assert [file.suffix for file in tmp_path.iterdir() if file != path] == [".subbayes-tmp"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_batches(path, broken())
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_one_folder_are_written_at_the_same_time(tmp_path: Path):
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"

    def slow():
        yield TABLE
        assert write_batches(other, [TABLE]) == 11  # would wait for ever for an exclusive lock
        assert write_batches(one, [TABLE]) == 11
        yield TABLE

    assert write_batches(one, slow()) == 22
    assert len(read_table(one)) == 22


def test_text_that_looks_like_a_formula_is_quoted(tmp_path):
    texts = [
        "=1+1",
        "+cmd",
        "-x",
        "@sum",
        "\tz",
        "\rz",
        "\nz",
        "plain",
        "a=b",
        "-1.5",
        "+2e3",
        None,
    ]
    frame = pd.DataFrame({"=name": texts, "number": np.arange(12) - 6.5})
    frame["label"] = pd.Categorical(["=a", "b"] * 6)
    before, path = frame.copy(), tmp_path / "out.csv"
    write_batches(path, [frame])
    pd.testing.assert_frame_equal(frame, before)
    found = pd.read_csv(path, dtype=str, keep_default_na=False)
    assert list(found) == ["'=name", "number", "label"]
    assert found["'=name"].tolist() == [
        "'=1+1", "'+cmd", "'-x", "'@sum", "'\tz", "'\nz", "'\nz", "plain", "a=b", "-1.5", "+2e3", ""
    ]  # fmt: skip
    assert found["number"].astype(float).tolist() == frame["number"].tolist()
    assert set(found["label"]) == {"'=a", "b"}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_file_replaced_while_it_is_read_is_refused(tmp_path, suffix, when):
    def write(shift):
        frame = pd.DataFrame({"x": np.arange(9) + shift, "name": ["a"] * 9})
        new = tmp_path / f"new{suffix}"
        frame.to_csv(new, index=False) if suffix == ".csv" else frame.to_parquet(new, index=False)
        new.replace(tmp_path / f"table{suffix}")

    write(0)
    batches = TableBatches(tmp_path / f"table{suffix}", batch_size=4)
    rows = iter(batches)
    if when == "during":
        assert next(rows)["x"].tolist() == [0, 1, 2, 3]
    write(1000)
    with pytest.raises(InputError, match="path: expected a file that does not change while it"):
        list(rows)


def test_a_file_of_one_batch_is_read_once(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("x\n1\n2\n")
    batches = TableBatches(path)
    path.write_text("x\n3\n")
    assert [batch["x"].tolist() for batch in batches] == [[1, 2]]


@pytest.mark.parametrize("mark", [";", "\t"])
def test_cells_with_separators_of_other_programs_are_quoted(tmp_path, mark):
    path = tmp_path / "table.csv"
    frame = pd.DataFrame({"a": [f"x{mark}=1+1{mark}", "b"], "n": [1.5, 2.0]})
    write_batches(path, [frame])
    assert f'"x{mark}=1+1{mark}"' in path.read_text()
    pd.testing.assert_frame_equal(pd.read_csv(path), frame)
    write_batches(path, [frame.rename(columns={"n": f"n{mark}=1"})[1:]])
    assert f'"n{mark}=1"' in path.read_text()


@pytest.mark.parametrize("sign", "＝＋－＠=+-@")
def test_full_width_signs_begin_formulas_too(sign):
    assert escape_formulas(pd.DataFrame({"a": [f"{sign}A1"]}))["a"].tolist() == [f"'{sign}A1"]


@pytest.mark.parametrize("text", ["=1+1", "@sum", "-x"])
def test_a_byte_order_mark_does_not_hide_a_formula(tmp_path, text):
    """Spreadsheets leave out the mark at the start of a file, and read what follows."""
    path = tmp_path / "out.csv"
    write_batches(path, [pd.DataFrame({f"\ufeff{text}": [f"\ufeff\ufeff{text}", "a"]})])
    assert path.read_text().splitlines() == [f"'\ufeff{text}", f"'\ufeff\ufeff{text}", "a"]


def test_escaped_columns_keep_their_places_and_types():
    frame = pd.DataFrame([["=a", 1, "x", 2.5], ["b", 2, "+y", 3.5]], index=[5, 5])
    frame.columns = ["t", "n", "t", "x"]
    found = escape_formulas(frame)
    assert found.to_numpy().tolist() == [["'=a", 1, "x", 2.5], ["b", 2, "'+y", 3.5]]
    assert list(found) == list(frame)
    assert found.index.tolist() == [5, 5]
    assert [dtype.kind for dtype in found.dtypes] == ["O", "i", "O", "f"]
