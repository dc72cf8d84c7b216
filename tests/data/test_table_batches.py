"""Tables written in batches, against pandas on the whole table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subbayes.data.table_batches import escape_formulas, text_pieces, write_batches
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
