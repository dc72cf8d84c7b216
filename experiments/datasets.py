"""Locate and load data sets: a data directory, an environment variable, or a download cache."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from subbayes.utils.checks import InputError, check_choice, error_text, fail

VARIABLE = "SUBBAYES_DATA"
"""The environment variable that names the data directory."""

RAW = ("boston", "concrete", "energy", "naval", "protein", "wine_red", "yacht")
"""UCI tables as published, with the 20 usual 90/10 splits (protein 5)."""

CENTRED = ("airfoil", "elevators", "forest", "keggdirected", "keggundirected", "pol", "skillcraft")
"""UCI tables with centred columns and 10 splits 90/10."""


@dataclass(frozen=True)
class _Source:
    """A public text table.

    Attributes:
        url: address of the file.
        fingerprint: checksum of the numbers, see `_fingerprint`.
        separator: separator of the columns; white space if None.
        header: whether the first line names the columns.
        target: column of the target.
        drop: columns to omit.
        member: path of the table within a zip archive.
    """

    url: str
    fingerprint: str
    separator: str | None = None
    header: bool = False
    target: int = -1
    drop: tuple[int, ...] = ()
    member: str | None = None


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_SOURCES = {
    "boston": _Source(
        _UCI + "housing/housing.data",
        "c4cb95f497fdbae2e9140b80d52fbc86b5e38d71d6378e8d8b44e07bb2bbe988",
    ),
    "naval": _Source(
        _UCI + "00316/UCI%20CBM%20Dataset.zip",
        "a76f3a89db916170bf15d1e0ef0814bf9100cd0c50a4909c0df834b4f48ca395",
        target=16,
        drop=(17,),
        member="UCI CBM Dataset/data.txt",
    ),
    "protein": _Source(
        _UCI + "00265/CASP.csv",
        "1b7e3cfda8954f3ea2b2660e375c494171935340aeb466cec9528ad5887144a9",
        separator=",",
        header=True,
        target=0,
    ),
    "wine_red": _Source(
        _UCI + "wine-quality/winequality-red.csv",
        "2c33f9efe2c275f25ed7b6d24f01cb72c992ebc8245bdec9f8826f1a74794afd",
        separator=";",
        header=True,
    ),
    "yacht": _Source(
        _UCI + "00243/yacht_hydrodynamics.data",
        "547880ac1116f554480d94e856d9230537b52d5907816ff12e52bb67f963d2ed",
    ),
}
_SPLITS = {"protein": 5}
_TIMEOUT = 30  # seconds


def cache_dir() -> Path:
    """The folder of downloads: `$XDG_CACHE_HOME/subbayes`, or `~/.cache/subbayes`.

    Example:
        >>> cache_dir().name
        'subbayes'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subbayes"


def data_dir(option: str | os.PathLike[str] | None = None) -> Path:
    """The folder that data are read from: `option`, else `$SUBBAYES_DATA`, else the cache.

    Args:
        option: a folder given by the caller (the command line's `--data-dir`).

    Returns:
        The folder; it exists, unless it is the cache.

    Raises:
        InputError: the option or the variable is not a folder.

    Example:
        >>> data_dir(".").is_dir()
        True
    """
    for argument, value in (("data_dir", option), (VARIABLE, os.environ.get(VARIABLE))):
        if value is not None and str(value):
            folder = Path(value).expanduser()
            if not folder.is_dir():
                fail(
                    argument,
                    "a folder that exists",
                    f"'{folder}'",
                    f"Correct the path, or leave it out to use the cache '{cache_dir()}'",
                )
            return folder
    return cache_dir()


_data_dir = data_dir  # the functions below have an argument of the same name


def find_file(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The path of a data file in the data directory or the cache.

    Args:
        name: path inside the data directory, such as `"yacht/yacht.npz"`.
        data_dir: the folder, see `data_dir`.

    Raises:
        InputError: neither has the file.

    Example:
        >>> find_file("no/such.npz", ".")
        Traceback (most recent call last):
            ...
        subbayes.InputError: data_dir: expected the file 'no/such.npz', got \
none in '.'. Pass a data_dir that has it (--data-dir) or set SUBBAYES_DATA.
    """
    folder = _data_dir(data_dir)
    for path in (folder / name, cache_dir() / name):
        if path.is_file():
            return path
    _fail_absent(name, folder)


def _fail_absent(name: str, folder: Path, why: str = "") -> NoReturn:
    fail(
        "data_dir",
        f"the file '{name}'",
        f"none in '{folder}'",
        f"{why}Pass a data_dir that has it (--data-dir) or set {VARIABLE}",
    )


def load_uci(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    centred: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Load a UCI regression table with its usual train/test splits.

    The tables in `RAW` are the published columns in the published order, with the splits of
    Hernández-Lobato and Adams (2015) that Gal and Ghahramani (2016) took over. Those in `CENTRED`
    have every column and the target shifted to mean zero, and some targets were transformed before
    (the target of forest is a logarithm). Of several targets upstream, `energy` holds the heating
    load and `naval` the compressor's decay coefficient; `wine_red` predicts the quality score.
    Two columns of `naval` are constant.

    Args:
        name: one of `RAW` or `CENTRED`.
        data_dir: the folder that contains `name/name.npz`, see `data_dir`; the cache is searched
            after it.
        download: whether to download a table that is in neither from the UCI repository into the
            cache: boston, naval, protein, wine_red and yacht. The numbers of a download are
            verified by a checksum.
        centred: the other copy of a table in `RAW` that a file may have, as those in `CENTRED`:
            with its own splits and order of rows, and a target that may be transformed (that of
            protein is a logarithm). It is not downloaded.

    Returns:
        X (n, d) and y (n,) in float64, and `test_masks` (splits, n), True for test rows:
        `X[~test_masks[i]]` are the training rows of split i.

    Raises:
        InputError: an unknown name; a file that does not exist and cannot be downloaded; a file
            that is damaged or lacks an array.

    Source:
        Hernández-Lobato and Adams (2015), Probabilistic backpropagation; Gal and Ghahramani (2016),
        Dropout as a Bayesian approximation; the UCI machine learning repository.

    Example:
        >>> load_uci("yatch")  # doctest: +ELLIPSIS +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
            ...
        subbayes.InputError: name: expected one of the 14 that experiments.datasets lists, got
        'yatch'. Did you mean 'yacht'?
    """
    check_choice("name", name, sorted(RAW + CENTRED), "experiments.datasets")
    file = f"{name}/{name}.npz"
    folder = _data_dir(data_dir)
    try:
        path = find_file(file, data_dir)
    except InputError:
        if centred or not (download and name in _SOURCES):
            raise
        table = _download(name, folder)
        return table[:, :-1], table[:, -1], usual_splits(len(table), _SPLITS.get(name, 20))
    return _read(name, path, centred or name in CENTRED)


def usual_splits(n: int, splits: int) -> np.ndarray:
    """The 90/10 splits of Hernández-Lobato and Adams (2015), as boolean test masks (splits, n).

    They are `splits` successive permutations from NumPy's legacy generator seeded with 1; the rows
    after the first round(0.9 n) of each are the test rows.

    Example:
        >>> usual_splits(308, 20).sum(1)[:3]
        array([31, 31, 31])
    """
    generator = np.random.RandomState(1)
    masks = np.zeros((splits, n), dtype=bool)
    for mask in masks:
        mask[generator.choice(n, n, replace=False)[round(n * 0.9) :]] = True
    return masks


def _read(name: str, path: Path, centred: bool) -> tuple[Any, Any, Any]:
    """The arrays of one table; `gal_*` are the unprocessed ones where a file has both."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: np.asarray(values) for key, values in file.items()}
    except Exception as error:  # zipfile and NumPy raise a dozen types for damaged archives
        fail(
            "data_dir",
            f"an .npz archive at '{path}'",
            f"an unreadable file ({error_text(error)})",
            "Delete it and fetch it again",
        )
    prefix = "gal_" if "gal_X" in arrays and not centred else ""
    masks = "test_mask" if centred else "gal_test_mask"
    X, y, mask = arrays[f"{prefix}X"], arrays[f"{prefix}y"].reshape(-1), arrays[masks]
    return X.astype(np.float64), y.astype(np.float64), np.ascontiguousarray(mask.astype(bool).T)


def _download(name: str, folder: Path) -> np.ndarray:
    """Download a table unless the cache has it, and verify its numbers."""
    import pooch
    from requests import RequestException

    source, file = _SOURCES[name], f"{name}/{name}.npz"
    try:
        # the repository publishes no hashes; the numbers of the table are verified instead
        path = Path(
            pooch.retrieve(
                source.url,
                known_hash=None,
                path=cache_dir() / name,
                fname=source.url.rpartition("/")[2],
                downloader=pooch.HTTPDownloader(timeout=_TIMEOUT),
            )
        )
    except RequestException as error:
        _fail_absent(file, folder, f"Fetching {source.url} failed ({error_text(error)[:60]}). ")
    except OSError as error:
        fail(
            "XDG_CACHE_HOME",
            f"a cache that can be written, for '{cache_dir() / name}'",
            error.strerror or error_text(error),
            "Free space there, or point it to another folder",
        )
    try:
        table = _parse(path.read_bytes(), source)
    except Exception as error:  # as damaged archives, or a page in place of the table
        path.unlink()
        _fail_absent(file, folder, f"Reading {source.url} failed ({error_text(error)[:60]}). ")
    if _fingerprint(table) != source.fingerprint:
        path.unlink()
        _fail_absent(file, folder, f"{source.url} no longer holds the expected table. ")
    return table


def _parse(content: bytes, source: _Source) -> np.ndarray:
    """The numbers of a text table, with the target in the last column."""
    if source.member is not None:
        content = zipfile.ZipFile(io.BytesIO(content)).read(source.member)
    if not content.strip():
        raise ValueError("it is empty")
    table = np.loadtxt(
        io.BytesIO(content.strip()),
        delimiter=source.separator,
        skiprows=int(source.header),
        ndmin=2,
    )
    target = source.target % table.shape[1]
    features = [j for j in range(table.shape[1]) if j != target and j not in source.drop]
    return table[:, [*features, target]]


def _fingerprint(table: np.ndarray) -> str:
    """A checksum of the numbers to nine digits, independent of their text format."""
    text = io.BytesIO()
    np.savetxt(text, table + 0.0, fmt="%.9g")
    return hashlib.sha256(text.getvalue()).hexdigest()
