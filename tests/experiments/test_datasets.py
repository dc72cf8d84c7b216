"""Locating real data, reading the UCI tables, and fetching originals through a local file."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import numpy as np
import pooch
import pytest
from requests import ConnectionError

from experiments import datasets
from experiments.datasets import CENTRED, RAW, data_dir, find_file, load_uci, usual_splits
from subbayes.utils.checks import InputError

SHAPES = {
    "boston": (506, 13),
    "concrete": (1030, 8),
    "energy": (768, 8),
    "naval": (11934, 16),
    "protein": (45730, 9),
    "wine_red": (1599, 11),
    "yacht": (308, 6),
}


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """No environment variable, an empty cache and no network: any download fails the test."""
    monkeypatch.delenv("SUBBAYES_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    download(monkeypatch, lambda url: pytest.fail(f"fetched {url}"))
    return tmp_path


def download(monkeypatch, contents):
    """Replace the content of downloads by a function of their address."""

    def save(url, path, _):
        Path(path).write_bytes(contents(url))

    monkeypatch.setattr(pooch, "HTTPDownloader", lambda timeout: save)


def real(name):
    """A real table, or a skip that names the file."""
    try:
        return load_uci(name, download=False)
    except InputError as error:
        pytest.skip(f"{name}/{name}.npz is absent: {error}")


def save(folder, name, **arrays):
    (folder / name).mkdir(parents=True)
    np.savez(folder / name / f"{name}.npz", **arrays)


def table(n=30, d=3, splits=4):
    generator = np.random.default_rng(0)
    return {
        "X": generator.normal(size=(n, d)).astype(np.float32),
        "y": generator.normal(size=n),
        "mask": generator.random((n, splits)) < 0.1,
    }


# where data lie


def test_data_dir_prefers_option_then_variable_then_cache(alone, monkeypatch):
    assert data_dir() == alone / "cache" / "subbayes"
    (alone / "variable").mkdir()
    (alone / "option").mkdir()
    monkeypatch.setenv("SUBBAYES_DATA", str(alone / "variable"))
    assert data_dir() == alone / "variable"
    assert data_dir(alone / "option") == alone / "option"
    assert data_dir("") == alone / "variable"


def test_a_missing_folder_raises_with_its_argument(alone, monkeypatch):
    with pytest.raises(InputError, match=r"^data_dir: expected a folder that exists, got '.*gone'"):
        data_dir(alone / "gone")
    monkeypatch.setenv("SUBBAYES_DATA", str(alone / "gone"))
    with pytest.raises(InputError, match=r"^SUBBAYES_DATA: expected a folder that exists"):
        data_dir()


def test_find_file_looks_in_the_folder_then_in_the_cache(alone):
    cached = alone / "cache" / "subbayes" / "a.csv"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert find_file("a.csv", alone) == cached
    (alone / "a.csv").touch()
    assert find_file("a.csv", alone) == alone / "a.csv"
    with pytest.raises(InputError, match=r"expected the file 'b.csv', .* set SUBBAYES_DATA\.$"):
        find_file("b.csv", alone)


# reading


def test_raw_copy_is_preferred_and_masks_come_split_first(alone):
    t, other = table(), table(splits=2)
    save(
        alone,
        "yacht",
        X=other["X"] + 9,
        y=other["y"] + 9,
        test_mask=other["mask"],
        gal_X=t["X"],
        gal_y=t["y"][:, None],
        gal_test_mask=t["mask"],
    )
    X, y, masks = load_uci("yacht", alone)
    np.testing.assert_array_equal(X, t["X"])
    np.testing.assert_array_equal(y, t["y"])
    np.testing.assert_array_equal(masks, t["mask"].T)
    assert (X.dtype, y.dtype, masks.dtype) == (np.float64, np.float64, bool)
    X, y, masks = load_uci("yacht", alone, centred=True)
    np.testing.assert_array_equal(X, other["X"] + 9)
    np.testing.assert_array_equal(y, other["y"] + 9)
    np.testing.assert_array_equal(masks, other["mask"].T)


def test_naval_and_centred_layouts(alone):
    t = table()
    save(alone, "naval", X=t["X"], y=t["y"], gal_test_mask=t["mask"])
    save(alone, "airfoil", X=t["X"], y=t["y"], test_mask=t["mask"])
    for name in ("naval", "airfoil"):
        X, y, masks = load_uci(name, alone)
        assert (X.shape, y.shape, masks.shape) == ((30, 3), (30,), (4, 30))
    np.testing.assert_array_equal(load_uci("airfoil", alone, centred=True)[0], t["X"])
    with pytest.raises(InputError, match=r"boston/boston\.npz"):
        load_uci("boston", alone, centred=True)


def test_an_unknown_name_raises():
    with pytest.raises(InputError, match="^name: expected one of the .* lists, got 'mauna'"):
        load_uci("mauna")


def test_damaged_files_raise(alone):
    (alone / "yacht").mkdir()
    (alone / "yacht" / "yacht.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(InputError, match=r"expected an \.npz archive at .*Delete it and fetch it"):
        load_uci("yacht", alone)


def test_pickled_arrays_raise(alone):
    save(alone, "yacht", gal_X=np.array([{}], dtype=object))
    with pytest.raises(InputError, match="unreadable file"):
        load_uci("yacht", alone)


@pytest.mark.parametrize("name", ["concrete", "energy", "airfoil"])
def test_missing_tables_without_a_source_raise(alone, name):
    pattern = rf"file '{name}/{name}.npz', got none in .* \(--data-dir\) or set SUBBAYES_DATA\.$"
    with pytest.raises(InputError, match=pattern):
        load_uci(name, alone)


def test_download_can_be_disabled(alone):
    with pytest.raises(InputError, match="yacht/yacht.npz"):
        load_uci("yacht", alone, download=False)


# fetching


def serve(monkeypatch, name, content, X, y, **fields):
    """Let `name` be fetched as `content`, the text of the table (X, y)."""
    fingerprint = datasets._fingerprint(np.column_stack([X, y]))
    source = datasets._Source("https://example.org/original", fingerprint, **fields)
    monkeypatch.setitem(datasets._SOURCES, name, source)
    download(monkeypatch, lambda url: content)


def numbers(n=20, d=3):
    values = np.random.default_rng(1).normal(size=(n, d + 1)).round(3)
    return values[:, :d], values[:, d]


def text(values, separator=" ", header=""):
    lines = [header] * bool(header) + [separator.join(map(repr, row)) for row in values.tolist()]
    return ("\n".join(lines) + "\n \n").encode()


def zipped(content, member):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(member, content)
    return archive.getvalue()


def test_fetched_text_is_cached_with_the_usual_splits(alone, monkeypatch):
    X, y = numbers()
    serve(monkeypatch, "yacht", text(np.column_stack([X, y])), X, y)
    first = load_uci("yacht", alone)
    download(monkeypatch, lambda url: pytest.fail("fetched twice"))
    for a, b in zip(first, load_uci("yacht"), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(first[0], X)
    np.testing.assert_array_equal(first[1], y)
    np.testing.assert_array_equal(first[2], usual_splits(20, 20))
    assert [p.name for p in (alone / "cache/subbayes/yacht").iterdir()] == ["original"]


def test_header_separator_target_first_and_zip_member(alone, monkeypatch):
    X, y = numbers()
    serve(
        monkeypatch,
        "protein",
        text(np.column_stack([y, X]), ",", "RMSD,F1,F2,F3"),
        X,
        y,
        separator=",",
        header=True,
        target=0,
    )
    np.testing.assert_array_equal(load_uci("protein")[0], X)
    assert load_uci("protein")[2].shape == (5, 20)
    content = zipped(text(np.column_stack([X, y, y + 1])), "in side/data.txt")
    serve(monkeypatch, "naval", content, X, y, target=3, drop=(4,), member="in side/data.txt")
    np.testing.assert_array_equal(load_uci("naval")[1], y)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"<html>not here</html>", "failed"),
        (b"", "empty"),
        (b"1 2 3\n4 5\n", "failed"),
        (text(np.ones((20, 4))), "no longer holds the expected table"),
    ],
)
def test_a_wrong_download_raises_and_is_not_cached(alone, monkeypatch, content, why):
    serve(monkeypatch, "yacht", content, *numbers())
    with pytest.raises(InputError, match=f"{why}.*--data-dir") as e:
        load_uci("yacht", alone)
    assert e.value.argument == "data_dir"
    assert "\n" not in str(e.value)
    assert not [p for p in (alone / "cache").rglob("*") if p.is_file()]


def test_a_failed_download_raises_in_one_line(alone, monkeypatch):
    def unreachable(url):
        raise ConnectionError("Name or service\nnot known")

    download(monkeypatch, unreachable)
    pattern = r"^data_dir: expected the file 'yacht/yacht.npz', got none .*service not known"
    with pytest.raises(InputError, match=pattern):
        load_uci("yacht")


def test_an_unwritable_cache_raises(alone, monkeypatch):
    X, y = numbers()
    serve(monkeypatch, "yacht", text(np.column_stack([X, y])), X, y)
    (alone / "cache").touch()
    with pytest.raises(InputError, match=r"^XDG_CACHE_HOME: expected a cache that can be written"):
        load_uci("yacht")


def test_sources_are_the_public_repository():
    urls = [source.url for source in datasets._SOURCES.values()]
    assert all(re.match(r"https://archive\.ics\.uci\.edu/", url) for url in urls)
    assert all(len(s.fingerprint) == 64 for s in datasets._SOURCES.values())


# the real files


@pytest.mark.parametrize("name", RAW)
def test_raw_tables(name):
    X, y, masks = real(name)
    assert X.shape == SHAPES[name]
    np.testing.assert_array_equal(masks, usual_splits(len(X), 5 if name == "protein" else 20))
    assert np.isfinite(X).all()
    assert np.isfinite(y).all()
    if name in datasets._SOURCES:
        fingerprint = datasets._fingerprint(np.column_stack([X, y]))
        assert fingerprint == datasets._SOURCES[name].fingerprint


def test_targets_are_the_documented_ones():
    np.testing.assert_allclose(real("energy")[1].mean(), 22.3072, atol=1e-4)  # the heating load
    y = real("naval")[1]
    assert (y.min(), y.max()) == (0.95, 1.0)  # the turbine's would start at 0.975
    assert set(real("wine_red")[1]) == {3.0, 4.0, 5.0, 6.0, 7.0, 8.0}


@pytest.mark.parametrize("name", CENTRED)
def test_centred_tables(name):
    X, y, masks = real(name)
    assert masks.shape == (10, len(X))
    assert abs(y.mean()) < 1e-3 * y.std()
    np.testing.assert_allclose(masks.mean(1), 0.1, atol=0.01)


def test_a_real_table_survives_a_download(alone, monkeypatch):
    monkeypatch.undo()
    X, y, _ = real("yacht")
    monkeypatch.setenv("XDG_CACHE_HOME", str(alone / "cache"))
    download(monkeypatch, lambda url: text(np.column_stack([X, y]), "  "))
    (alone / "empty").mkdir()
    fetched = load_uci("yacht", alone / "empty")
    np.testing.assert_array_equal(fetched[0], X)
    np.testing.assert_array_equal(fetched[1], y)


def changed_bits(content, place, value):
    """An archive of zip with another byte at a place of its first entry in the directory."""
    start = content.index(b"PK\x01\x02")
    return content[: start + place] + bytes([value]) + content[start + place + 1 :]


@pytest.mark.parametrize("place", [8, 10], ids=["encrypted", "compression"])
def test_archives_that_zipfile_cannot_read_raise_one_line(alone, place):
    t = table()
    save(alone, "yacht", gal_X=t["X"], gal_y=t["y"], gal_test_mask=t["mask"])
    path = alone / "yacht" / "yacht.npz"
    path.write_bytes(changed_bits(path.read_bytes(), place, 97))
    with pytest.raises(InputError, match=r"^data_dir: expected an \.npz archive"):
        load_uci("yacht", alone)


def test_an_array_in_place_of_an_archive_raises(alone):
    (alone / "yacht").mkdir()
    with (alone / "yacht" / "yacht.npz").open("wb") as file:
        np.save(file, np.zeros((3, 2)))
    with pytest.raises(InputError, match=r"^data_dir: expected an \.npz archive"):
        load_uci("yacht", alone)
