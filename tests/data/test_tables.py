"""Reading CSV and Parquet: every format gives the same table, every error is one line."""

from __future__ import annotations

import gzip
import warnings

import numpy as np
import pandas as pd
import pytest

from subbayes.data.columns import kind_of
from subbayes.data.encoder import TabularEncoder
from subbayes.data.table_batches import TableBatches
from subbayes.data.tables import read_table, split_target
from subbayes.data.targets import Target
from subbayes.utils.checks import InputError


def people(n=40):
    generator = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": generator.integers(20, 60, n),
            "income": generator.normal(1e3, 2e2, n),
            "job": generator.choice(["smith", "baker"], n),
            "member": generator.random(n) < 0.5,
        }
    )


def written(folder, name, text):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.CSV", "t.csv.gz", "t.tsv", "t.tsv.gz", "t.parquet"])
def test_every_format_reads_the_same(tmp_path, name):
    table = people()
    path = tmp_path / name
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False, sep="\t" if "tsv" in name else ",")
    read = read_table(path, target="job")
    pd.testing.assert_frame_equal(read, table, check_dtype=False)
    X, y = split_target(read, "job")
    assert list(X) == ["age", "income", "member"]
    assert y.tolist() == table["job"].tolist()


def test_markers_spaces_and_byte_order_marks(tmp_path):
    path = written(tmp_path, "t.csv", "\ufeffa, b\n1, x\n?, y\n,?\n")
    table = read_table(path, missing_values="?")
    assert list(table) == ["a", "b"]
    assert table["a"].dtype == float
    assert table.isna().sum().tolist() == [2, 1]
    assert read_table(path, missing_values=["?", "y"])["b"].isna().sum() == 2


def test_markers_and_named_index_in_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"a": ["?", "2"]}, index=pd.Index([5, 7], name="id"))
    frame.to_parquet(tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet", missing_values="?")
    assert list(table) == ["id", "a"]
    assert table["a"].isna().tolist() == [True, False]


@pytest.mark.parametrize("marks", [["-999"], [-999], ["-999.0"], [-999.0], ["?", "-999", 7]])
def test_markers_that_are_numbers_mean_the_same_in_every_format(tmp_path, marks):
    pytest.importorskip("pyarrow")
    table = pd.DataFrame(
        {"whole": [1, -999, 7], "real": [-999.0, 1.5, 7.0], "text": ["-999", "u", "007"]}
    )
    table["group"] = table["whole"].astype("category")
    table["flag"] = [True, False, True]
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_parquet(tmp_path / "t.parquet")
    expected = read_table(tmp_path / "t.csv", missing_values=marks).isna()
    assert expected["whole"].tolist() == [False, True, 7 in marks]
    found = read_table(tmp_path / "t.parquet", missing_values=marks)
    pd.testing.assert_frame_equal(found.isna(), expected)


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("t.csv", "", "path: expected a table with a header row, got an empty file"),
        ("t.csv", "\n\n", "a .csv file that can be read, got .*No columns to parse"),
        ("t.csv", "a,b\n", "at least 2 rows in '.*', got no rows below the header"),
        ("t.csv", "a,b\n1,2\n", "at least 2 rows in '.*', got one row"),
        (
            "t.csv",
            "a,b\n1,2\n1,2\n1,2,3,4\n",
            "that can be read, got .*Expected 2 fields in line 4",
        ),
        ("t.csv", "a,b\n1,2,3\n1,2,3\n", "in every row as in the header of .*got rows with more"),
        ("t.csv", "a,b\n0,2,3\n1,2,3\n", "in every row as in the header of .*got rows with more"),
        ("t.csv", "a,b,a\n1,2,3\n1,2,3\n", "one column of each name, got several named 'a'"),
        ("t.csv", "a;b\n1;2\n1;2\n", r"^separator: .*Try separator=';'"),
        ("t.json", "{}", r"a name that ends in .csv, .csv.gz, .*got 't.json'\. Convert"),
        ("t.parquet", "no parquet", "a .parquet file that can be read"),
    ],
)
def test_unusable_files(tmp_path, name, text, pattern):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match=pattern) as error:
        read_table(written(tmp_path, name, text))
    assert "\n" not in str(error.value)


def test_missing_files_and_folders_raise(tmp_path):
    with pytest.raises(InputError, match=r"a table in a file, got no such file: '.*gone.csv'"):
        read_table(tmp_path / "gone.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match="got a folder"):
        read_table(tmp_path / "folder.csv")


def test_damaged_bytes(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"a,b\n\xff\xfe,2\n1,2\n")
    with pytest.raises(InputError, match=r"encoding: expected text in utf-8 in .*got byte 0xff"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 9999)[:-30])
    with pytest.raises(InputError, match="damaged compression"):
        read_table(tmp_path / "t.csv.gz")
    (tmp_path / "u.csv.gz").write_bytes(b"a,b\n1,2\n1,2\n")
    with pytest.raises(InputError, match="damaged compression"):
        read_table(tmp_path / "u.csv.gz")


def test_target_column_and_row_count(tmp_path):
    path = written(tmp_path, "t.csv", "Price,area\n1,2\n3,4\n")
    with pytest.raises(
        InputError,
        match=r"^target: expected one of the columns 'Price', 'area', "
        r"got 'price'\. Did you mean 'Price'\?$",
    ):
        read_table(path, target="price")
    with pytest.raises(InputError, match="got 'zzz'. Name the column to predict"):
        read_table(path, target="zzz")
    with pytest.raises(InputError, match="other columns to predict from, got 'y' alone"):
        split_target(pd.DataFrame({"y": [1]}), "y")
    assert len(read_table(written(tmp_path, "u.csv", "a\n1\n"), min_rows=1)) == 1


def test_parquet_without_a_reader_says_what_to_install(tmp_path, monkeypatch):
    def absent(path):
        raise ImportError("no engine")

    monkeypatch.setattr(pd, "read_parquet", absent)
    with pytest.raises(InputError, match=r"no Parquet reader.*pip install 'subbayes\[parquet\]'"):
        read_table(written(tmp_path, "t.parquet", "x"))


@pytest.mark.parametrize(
    "metadata",
    [b"[]", b"5", b"[" * 100_000, b'{"columns": "abc", "index_columns": [5]}',
     b'{"columns": [], "index_columns": [{"kind": "range", "name": "i"}]}'],
    ids=["list", "number", "deep", "text", "range"],
)  # fmt: skip
def test_metadata_of_parquet_that_pandas_did_not_write(tmp_path, metadata):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"a": [1.0, 2.0], "b": ["x", "y"]})
    pq.write_table(table.replace_schema_metadata({b"pandas": metadata}), tmp_path / "t.parquet")
    for read in (read_table, lambda path: list(TableBatches(path))):
        with pytest.raises(InputError, match="path: expected a .parquet file that can be") as e:
            read(tmp_path / "t.parquet")
        assert "\n" not in str(e.value)


def test_whole_numbers_beyond_floating_point(tmp_path):
    file = tmp_path / "t.csv"
    rows = "".join(f"{10**400 + i},{i}\n" for i in range(3))
    file.write_text("a,b\n" + rows, encoding="utf-8")
    table = read_table(file)
    if isinstance(table["a"][0], str):
        pytest.skip("pandas 2.2 reads them as text")
    with pytest.raises(InputError, match="in column 'a' within the range of float64"):
        TabularEncoder().fit(table)


def test_a_target_with_hardly_two_rows_a_label_is_refused():
    with pytest.raises(InputError, match="classes that recur, got 30 labels in 40 rows"):
        Target.infer([f"day {i % 30}" for i in range(40)])


COMMAS = "a;b;c\n1,5;x;1.234,5\n-2,25;y;2.000,0\n3,0;z;7,5\n4,125;x;1,0\n"


def test_decimal_commas_are_read_as_numbers(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text(COMMAS.replace(".", ""))
    expected = pd.read_csv(file, sep=";", decimal=",")
    for separator in (None, ";"):
        pd.testing.assert_frame_equal(read_table(file, decimal=",", separator=separator), expected)
    batches = TableBatches(file, decimal=",", batch_size=2)
    pd.testing.assert_frame_equal(pd.concat(batches, ignore_index=True), expected)
    assert expected["a"].tolist() == [1.5, -2.25, 3.0, 4.125]
    with pytest.raises(InputError, match="decimal: expected another mark than between cells"):
        read_table(file, decimal=",", separator=",")
    with pytest.raises(InputError, match="decimal: expected one of '.', ','"):
        read_table(file, decimal="'")


def test_decimal_commas_are_not_read_as_categories_without_a_word(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text(COMMAS)
    frame = read_table(file, separator=";")
    line = r"X: column 'a' has numbers with a decimal comma, such as '1,5', .* decimal=','$"
    with pytest.warns(UserWarning, match=line):
        assert kind_of(frame["a"], "column 'a'") == "categorical"
    with pytest.warns(UserWarning, match="such as '1.234,5'"):
        kind_of(frame["c"], "column 'c'")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values in (["x", "y"], ["a,5", "b"], ["1,2,3", "4,5,6"], ["1", "2"]):
            kind_of(pd.Series(values), "column 'b'")


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "latin-1", "utf-8", "UTF_8", "utf-8-sig"])
def test_encodings(tmp_path, encoding):
    file = tmp_path / "table.csv"
    file.write_bytes("näme,b\nMüller,1\nŠimek,2\n".replace("Š", "Ö").encode(encoding))
    frame = read_table(file, encoding=encoding)
    assert list(frame) == ["näme", "b"]
    assert frame["näme"].tolist() == ["Müller", "Öimek"]
    batches = TableBatches(file, encoding=encoding)
    assert next(iter(batches))["näme"].tolist() == ["Müller", "Öimek"]


@pytest.mark.parametrize(
    ("written", "other"), [("cp1252", "cp1252"), ("utf-16", "utf-16")], ids=["bytes", "wide"]
)
@pytest.mark.parametrize("header", [True, False])
def test_bytes_that_are_not_text(tmp_path, written, other, header):
    text = "näme,b\nx,1\ny,2\n" if header else "name,b\n" + "x,1\n" * 9 + "ü,1\n"
    file = tmp_path / "table.csv"
    file.write_bytes(text.encode(written))
    line = rf"^encoding: expected text in utf-8.* in '.*', got byte 0x.. .*|encoding='{other}'"
    for read in (read_table, TableBatches):
        with pytest.raises(InputError, match=line) as caught:
            read(file)
        assert f"encoding='{other}'" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-99", "zip", "hex", "", "a\x00b"])
def test_unknown_encodings(tmp_path, encoding):
    file = tmp_path / "table.csv"
    file.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(InputError, match="encoding: expected an encoding of text"):
        read_table(file, encoding=encoding)


class CountedName(str):
    """A name that counts how often it is compared with another one."""

    comparisons = 0
    __hash__ = str.__hash__

    def __str__(self):
        return self

    def __eq__(self, other):
        CountedName.comparisons += 1
        return str.__eq__(self, other)


def test_names_of_a_header_are_not_compared_with_each_other(tmp_path, monkeypatch):
    """40,000 names, each compared with all others, took half a minute."""
    names = [CountedName(f"c{i}") for i in range(2000)]
    path, read = written(tmp_path, "t.csv", f"{','.join(names)}\n{'1,' * 1999}1\n"), pd.read_csv

    def read_names(file, **options):
        of_names = options.get("header", 0) is None
        return pd.DataFrame([names], dtype=object) if of_names else read(file, **options)

    monkeypatch.setattr(pd, "read_csv", read_names)
    monkeypatch.setattr(CountedName, "comparisons", 0)
    assert read_table(path, min_rows=1).shape == (1, 2000)
    assert CountedName.comparisons <= 5 * len(names)


@pytest.mark.parametrize(
    "error",
    [MemoryError("Unable to allocate 9.9 GiB"), pd.errors.ParserError("C error: out of memory")],
    ids=["numpy", "parser"],
)
@pytest.mark.parametrize("read", [read_table, TableBatches])
def test_a_table_larger_than_the_memory_is_said_to_be(tmp_path, monkeypatch, read, error):
    def fails(*_, **__):
        raise error

    path = written(tmp_path, "t.csv", "a,b\n1,2\n3,4\n")
    monkeypatch.setattr(pd, "read_csv", fails)
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.argument == "path"
    assert caught.value.expected == "a table that fits into memory"
