"""Records of an experiment by key, saved to a JSON file after each result.

Several processes may save to one file; none loses what another has saved.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

import subbayes
from subbayes.utils.checks import fail
from subbayes.utils.files import atomic_write_text

__all__ = ["RESULTS", "Store", "device_name", "key_of", "versions"]

RESULTS = Path(__file__).parent / "results"
"""Folder of the results, with a subfolder for each experiment."""

Record = dict[str, Any]


class Store:
    """Records by key in a JSON file, which every `put` rewrites atomically.

    A `put` adds to the records that are in the file by then, under the lock of the file of the same
    name with the suffix `.lock`, so that two processes lose none.

    Args:
        path: JSON file, created by the first `put`.

    Raises:
        InputError: an existing file that does not hold records.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.records: dict[str, Record] = self._read()

    def _read(self) -> dict[str, Record]:
        if not self.path.exists():
            return {}
        try:
            records = json.loads(self.path.read_text())
        except (OSError, ValueError) as error:
            self._fail(f"a JSON file of records at '{self.path}'", str(error))
        if not (isinstance(records, dict) and all(isinstance(r, dict) for r in records.values())):
            self._fail(f"an object of records in '{self.path}'", type(records).__name__)
        return records

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
            records = self.records | self._read() | new
            lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(records.items()))
            atomic_write_text(self.path, "{\n" + ",\n".join(lines) + "\n}\n")
        self.records = records

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other process write the file meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
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
