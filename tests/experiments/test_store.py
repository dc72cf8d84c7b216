"""Records of experiments in their files."""

from __future__ import annotations

import gzip
import json
import threading

import pytest

from experiments.store import Store, key_of
from subbayes.utils.checks import InputError


def test_records_are_restored_from_the_file(tmp_path):
    folder = tmp_path / "new"
    Store(folder, "yacht").put("b", {"score": 0.1})
    store = Store(folder, "yacht")
    store.put("a", {"score": None})
    Store(folder, "energy").put("a", {"score": 2})
    assert Store(folder, "yacht").records == {"a": {"score": None}, "b": {"score": 0.1}}
    parts = json.loads(gzip.decompress((folder / "records.json.gz").read_bytes()))
    assert list(parts) == ["energy", "yacht"]
    assert list(parts["yacht"]) == ["a", "b"]
    assert [file.name for file in folder.iterdir()].count("records.json.gz") == 1


def test_two_stores_of_one_file_lose_no_record(tmp_path):
    """As of two processes that read the file before either has written."""
    path = tmp_path / "new"
    one, other = Store(path), Store(path)
    one.put("a", {"score": 1})
    other.put("b", {"score": 2})
    one.put("c", {"score": 3})
    assert Store(path).records == one.records == {k: {"score": i + 1} for i, k in enumerate("abc")}
    assert "a" in other


def test_stores_that_save_at_once_lose_no_record(tmp_path):
    path = tmp_path
    workers = [
        threading.Thread(target=lambda i=i: [Store(path).put(f"{i} {j}", {}) for j in range(8)])
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(Store(path).records) == 32


def test_an_invalid_record_leaves_the_file_unchanged(tmp_path):
    store = Store(tmp_path, "x")
    store.put("a", {"score": 1.0})
    before = store.path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        store.put("b", {"score": float("nan")})
    assert store.path.read_bytes() == before


@pytest.mark.parametrize("content", ["{", "[]", '{"x": 1}', None])
def test_a_damaged_file_is_reported(tmp_path, content):
    data = b"plain text" if content is None else gzip.compress(content.encode())
    (tmp_path / "records.json.gz").write_bytes(data)
    with pytest.raises(InputError, match=r"results: expected .*json.*Delete it to start again"):
        Store(tmp_path, "x")


def test_the_key_changes_with_any_setting():
    settings = {"chosen": {"rank": 20}, "split": 3}
    assert key_of("a", settings) == key_of("a", dict(reversed(settings.items())))
    assert key_of("a", settings) != key_of("a", settings | {"chosen": {"rank": 19}})
