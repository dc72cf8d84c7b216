"""Results that survive an interruption: records by key, in one JSON file written whole."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

import subbayes
from subbayes.utils.checks import fail
from subbayes.utils.files import atomic_write_text

__all__ = ["RESULTS", "Store", "key_of", "versions"]

RESULTS = Path(__file__).parent / "results"
"""Where results are kept, a folder for each experiment."""

Record = dict[str, Any]


class Store:
    """Records of an experiment by key, kept in `path`; every `put` rewrites the file whole.

    Args:
        path: a JSON file, made at the first `put`.

    Raises:
        InputError: a file that is there and holds no records.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.records: dict[str, Record] = self._read() if self.path.exists() else {}

    def _read(self) -> dict[str, Record]:
        try:
            records = json.loads(self.path.read_text())
        except (OSError, ValueError) as error:
            fail(
                "results",
                f"a JSON file of records at '{self.path}'",
                str(error),
                "Delete it to start again",
            )
        if not (isinstance(records, dict) and all(isinstance(r, dict) for r in records.values())):
            fail(
                "results",
                f"an object of records in '{self.path}'",
                type(records).__name__,
                "Delete it to start again",
            )
        return records

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def __getitem__(self, key: str) -> Record:
        return self.records[key]

    def put(self, key: str, record: Record) -> None:
        """File a record and save all of them.

        Raises:
            ValueError: a record that JSON cannot hold; the file stays as it was.
        """
        records = self.records | {key: json.loads(json.dumps(record, allow_nan=False))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(records.items()))
        atomic_write_text(self.path, "{\n" + ",\n".join(lines) + "\n}\n")
        self.records = records


def key_of(name: str, settings: Record) -> str:
    """A readable name and a digest of all settings: changed settings are another record.

    Example:
        >>> key_of("yacht-3", {"rank": 20}) == key_of("yacht-3", {"rank": 10})
        False
    """
    text = json.dumps(settings, sort_keys=True)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def versions() -> dict[str, str]:
    """Versions of what the numbers may depend on."""
    return {
        "subbayes": subbayes.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
