"""Overwriting files of results without overwriting the files of anybody else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from subbayes.artifacts.facts import parse
from subbayes.artifacts.files import as_path, atomic_write_text, translate_os_errors
from subbayes.utils.checks import fail

__all__ = ["OverwritableFiles"]

RECORD = "files.json"
_MAX_RECORD = 2**20  # bytes
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_REMEDY = "Move it away, or choose another folder"


class OverwritableFiles:
    """Files of a folder that may be overwritten: those written before and unchanged since.

    The record `files.json` holds a checksum of each. Any other file of one of the names is an
    error, which is raised before anything is written.

    Args:
        folder: the folder; it need not exist.
        names: paths in it that are going to be written.

    Raises:
        InputError: a file that must not be overwritten, or the folder is a file.

    Example:
        >>> files = OverwritableFiles("results", ["table.csv"])
        >>> files.begin()
        >>> atomic_write_text(files.folder / "table.csv", "a,b")
        >>> files.finish()
        >>> again = OverwritableFiles("results", ["table.csv"])
    """

    def __init__(self, folder: str | Path, names: Iterable[str]) -> None:
        self.folder = as_path(folder)
        self.names = list(names)
        if self.folder.exists() and not self.folder.is_dir():
            fail("out", "a folder", f"a file: '{folder}'", "Choose another path")
        self.before = self._read()
        for name in self.names:
            self._check(name)

    def _check(self, name: str) -> None:
        path = self.folder / name
        if not path.exists():
            return
        why = "was not written by it"
        if name in self.before:
            if self.before[name] in (None, _digest(path)):
                return
            why = "was changed since"
        expected = "a folder whose files of the same names this command wrote itself"
        fail("out", expected, f"'{path}', which {why}", _REMEDY)

    def _read(self) -> dict[str, str | None]:
        """Checksums of an earlier run; None for files that it may not have finished."""
        path = self.folder / RECORD
        if not path.is_file():
            return {}
        try:
            if path.stat().st_size > _MAX_RECORD:
                raise ValueError(f"more than {_MAX_RECORD} bytes")
            record = parse(path.read_bytes())["files"]
            for name, digest in record.items():
                self._check_entry(name, digest)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            fail("out", "a folder of its own", f"another '{path}'", _REMEDY)
        return record

    def _check_entry(self, name: str, digest: Any) -> None:
        """Raise unless it names a file within the folder: files of the record may be deleted."""
        place = Path(name)
        if place.is_absolute() or ".." in place.parts or "\0" in name:
            raise ValueError(f"{name!r} is not within the folder")
        if not (self.folder / place).resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{name!r} is a link out of the folder")
        if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise ValueError(f"{name!r} has no checksum")

    def begin(self) -> None:
        """Record the names before writing, so that an interrupted run can be repeated."""
        self._write(dict.fromkeys([*self.before, *self.names]))

    def finish(self) -> None:
        """Remove files of earlier runs that were not written again, and record the others."""
        for name in set(self.before) - set(self.names):
            path = self.folder / name
            if path.is_file() and self.before[name] == _digest(path):
                path.unlink()
        written = [name for name in self.names if (self.folder / name).is_file()]
        self._write({name: _digest(self.folder / name) for name in written})

    def _write(self, files: dict[str, str | None]) -> None:
        text = json.dumps({"made by": "subbayes", "files": files}, indent=1)
        atomic_write_text(self.folder / RECORD, text + "\n")


def _digest(path: Path) -> str:
    with translate_os_errors(path, to="read"):
        return hashlib.sha256(path.read_bytes()).hexdigest()
