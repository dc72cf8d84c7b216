"""Atomic writing of files, with one-line errors.

A file is written under a temporary name beside its target, synced and renamed, so that a reader
finds the old file or the new one, and the last of several writers wins. No writer waits for
another. A process that is killed leaves its temporary file, `.<name>.<16 hex digits>.subbayes-tmp`.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from subbayes.utils.checks import InputError, fail_type
from subbayes.utils.warning import is_first_process

StrPath = str | os.PathLike[str]


class ArtifactError(InputError):
    """A path that cannot be written or does not hold the expected content."""


# --- whole files --------------------------------------------------------------------------------


def atomic_write_text(path: StrPath, text: str, overwrite: bool = True) -> None:
    """Write a text file as UTF-8, entirely or not at all.

    Args:
        path: the file; its folder is created if missing. Links are followed, and devices are
            written to.
        text: the content; line ends are not converted.
        overwrite: replace an existing file.

    Raises:
        ArtifactError: the file exists, if it may not be replaced, or cannot be written (full disk,
            permission); an earlier one is intact.
    """
    atomic_write_bytes(path, text.encode("utf-8"), overwrite)


def atomic_write_bytes(path: StrPath, data: bytes, overwrite: bool = True) -> None:
    """Write a binary file, entirely or not at all; see `atomic_write_text`."""
    replace_file(as_path(path), [data], overwrite)


def replace_file(path: Path, pieces: Iterable[bytes], overwrite: bool = True) -> None:
    """Write a file from pieces, entirely or not at all; see `atomic_write_bytes`."""
    if not is_first_process():
        return
    with translate_os_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():  # a device, such as a terminal
            with path.open("wb") as device:
                device.writelines(pieces)
            return
        target = Path(os.path.realpath(new_file(path, overwrite)))
        mode = target.stat().st_mode & 0o777 if target.exists() else None
        if mode is not None and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_file(target.parent, target.name)
        write_new(temporary, pieces, mode)
        publish(temporary, target, overwrite)


def read_start(path: Path, most: int) -> bytes:
    """The first bytes of a file, whose size may change meanwhile."""
    with open_file(path) as file:  # reading n bytes takes n bytes of memory, whatever is there
        return file.read(min(most, os.fstat(file.fileno()).st_size + 1))


def open_file(path: Path) -> BufferedReader:
    """Open a file to read it; a pipe or a device is not waited for."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a file")
    return path.open("rb")


# --- the steps ----------------------------------------------------------------------------------

_BINARY = getattr(os, "O_BINARY", 0)
_STEM = 50  # characters of a file's name in that of its temporary file


def temporary_file(directory: Path, stem: str) -> Path:
    """The path of a temporary file that no other writer chooses."""
    return directory / f".{stem[:_STEM]}.{secrets.token_hex(8)}.subbayes-tmp"


def write_new(file: Path, pieces: Iterable[bytes], mode: int | None = None) -> None:
    """Write and sync a file that does not exist yet; leave nothing behind on failure."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        try:
            if mode is not None:
                file.chmod(mode)
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        remove(file)
        raise


def publish(temporary: Path, target: Path, overwrite: bool) -> None:
    """Move a temporary file to its target in one step; remove it on failure."""
    try:
        new_file(target, overwrite)  # perhaps made meanwhile
        os.replace(temporary, target)
    except BaseException:
        remove(temporary)
        raise
    _sync_folder(target.parent)


def remove(file: Path) -> None:
    """Remove a file, if it is there."""
    with suppress(OSError):
        os.unlink(file)


def _sync_folder(directory: Path) -> None:
    """Make renames durable, if the system can sync a folder."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_writable(argument: str, folder: Path) -> None:
    """Check before a long computation that files can be written to a folder, perhaps a new one."""
    with translate_os_errors(folder, argument):
        while not folder.exists():
            folder = folder.parent
        file = temporary_file(folder, "check")
        write_new(file, [])
        remove(file)


# --- errors -------------------------------------------------------------------------------------


def fail_artifact(
    argument: str, expected: str, got: str, remedy: str = "Check the path"
) -> NoReturn:
    """Raise `ArtifactError` without the errors that caused it."""
    raise ArtifactError(argument, expected, got, remedy) from None


def fail_damaged(expected: str, got: Any) -> NoReturn:
    """Raise `ArtifactError` for an artifact whose parts do not fit each other."""
    fail_artifact("path", expected, str(got)[:200], "The artifact is damaged: write it again")


def as_path(path: StrPath, argument: str = "path") -> Path:
    """Convert to a path; other types are errors."""
    if not isinstance(path, (str, os.PathLike)):
        fail_type(argument, "a path", path)
    return Path(path)


def new_file(path: StrPath, overwrite: bool) -> Path:
    """Convert to a path at which there is no file, unless it may be replaced."""
    file = as_path(path)
    if os.path.lexists(file) and not overwrite:
        remedy = "Pass overwrite=True to replace it, or choose another path"
        fail_artifact("path", "a new file", f"an existing one: {quoted(path)}", remedy)
    return file


def quoted(path: StrPath) -> str:
    """Quote a path."""
    return repr(os.fspath(path))


@contextmanager
def translate_os_errors(
    path: StrPath, argument: str = "path", to: str = "write to"
) -> Iterator[None]:
    """Turn an `OSError` into an `ArtifactError` with the path."""
    try:
        yield
    except OSError as error:
        expected, remedy = f"a path to {to}", "Check the path"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            expected, remedy = "free disk space", "Free some, or choose another path"
        got = f"{error.strerror or error} at {quoted(path)}"
        fail_artifact(argument, expected, got, remedy)
