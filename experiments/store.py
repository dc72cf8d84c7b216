"""Records of an experiment by key, saved to a compressed JSON file after each result.

Several processes may save to one file; none loses what another has saved.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import platform
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

import subbayes
from subbayes.artifacts.files import atomic_write_bytes
from subbayes.utils.checks import fail

__all__ = ["RESULTS", "Store", "device_name", "key_of", "versions"]

RESULTS = Path(__file__).parent / "results"
"""Folder of the results, with a subfolder for each experiment."""

Record = dict[str, Any]


class Store:
    """Records by key in a part of the compressed JSON file of an experiment, `records.json.gz`.

    Every `put` rewrites the file atomically, with the records that other processes have added
    meanwhile: a lock on `records.lock` lets one process write at a time.

    Args:
        folder: of the results of the experiment, made by the first `put`.
        part: name of the part, such as a data set.

    Raises:
        InputError: an existing file that does not hold records.
    """

    def __init__(self, folder: str | Path, part: str = "records") -> None:
        self.path, self.part = Path(folder) / "records.json.gz", part
        self.records: dict[str, Record] = self._read().get(part, {})

    def _read(self) -> dict[str, dict[str, Record]]:
        if not self.path.exists():
            return {}
        try:
            parts = json.loads(gzip.decompress(self.path.read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            self._fail(f"a compressed JSON file of records at '{self.path}'", str(error))
        tables = list(parts.values()) if isinstance(parts, dict) else [parts]
        if not all(isinstance(table, dict) for table in tables):
            self._fail(f"parts with records by key in '{self.path}'", "others")
        return parts

    @staticmethod
    def _fail(expected: str, got: str) -> NoReturn:
        fail("results", expected, got, "Delete it to start again")

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def __getitem__(self, key: str) -> Record:
        return self.records[key]

    def put(self, key: str, record: Record) -> None:
        """Add a record to those of the file, which other processes may have added to, and save.

        Raises:
            ValueError: a record that JSON cannot represent; the file is left unchanged.
            InputError: a file that no longer holds records.
        """
        new = {key: json.loads(json.dumps(record, allow_nan=False))}
        with self._locked():
            parts = self._read()
            records = self.records | parts.get(self.part, {}) | new
            parts[self.part] = dict(sorted(records.items()))
            text = json.dumps(dict(sorted(parts.items())), separators=(",", ":"))
            # without the time of writing, equal records are equal files
            atomic_write_bytes(self.path, gzip.compress(text.encode(), mtime=0))
        self.records = records

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other process write the file meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name("records.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a record of another process would be lost
            yield

    def get(
        self,
        key: str,
        compute: Callable[[], Record],
        report: Callable[[Record], object] = lambda _: None,
    ) -> Record:
        """Return the record of a key; if there is none, compute, save and report it.

        Args:
            key: see `key_of`.
            compute: returns the record.
            report: called with a new record, for example to print a line.
        """
        if key not in self:
            self.put(key, compute())
            report(self[key])
        return self[key]


def key_of(name: str, settings: Record) -> str:
    """Return a readable name with a digest of all settings, so that changed settings differ.

    Example:
        >>> key_of("yacht-3", {"rank": 20}) == key_of("yacht-3", {"rank": 10})
        False
    """
    text = json.dumps(settings, sort_keys=True)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def versions() -> dict[str, str]:
    """Return the versions of the packages that results may depend on."""
    return {
        "subbayes": subbayes.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def device_name(device: str) -> str:
    """Return the model of a GPU, or else the kind of device."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
