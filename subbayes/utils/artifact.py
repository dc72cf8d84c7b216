"""The artifact format: a JSON manifest and a safetensors file, written atomically.

An artifact is a folder or a single file. A folder holds `manifest.json` and
`tensors-<16 random hex digits>.safetensors`, which the manifest names. A single file is a
safetensors file with the manifest under the key "subbayes" of its metadata. Nothing is ever pickled
or unpickled.

Writing a folder creates a new tensor file first, then replaces the manifest by one that names it,
in one step, then removes the earlier tensor file. No writer waits for another: each has a tensor
file of its own, and the last one wins. A killed process leaves the old artifact or the new one, and
maybe a file that no manifest names, which a writer removes when it is an hour old.

The digest of the tensors covers their names, dtypes, shapes and values; the digest of the manifest
covers all its entries. Reading verifies both before it returns anything. What the facts of a kind
of artifact must look like is checked by `subbayes.utils.saving`.

In `facts`, NaN and infinities are `{"__float__": "nan" | "inf" | "-inf"}` and integers beyond 64
bits are `{"__int__": "0x…"}`, so that the manifest is strict JSON and every number is restored
exactly. Tuples are restored as lists, NumPy scalars and small arrays as plain numbers and lists.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from subbayes.utils.checks import check_device
from subbayes.utils.files import (
    CHECK,
    ArtifactError,
    StrPath,
    as_path,
    fail_artifact,
    link,
    make_folder,
    new_file,
    quoted,
    remove,
    rename,
    replace_file,
    sync_folder,
    temporary_stem,
    translate_os_errors,
    write_new,
    write_temporary,
)
from subbayes.utils.first_process import is_first_process
from subbayes.utils.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    check_manifest,
    is_tensor_file,
    manifest_of,
    new_tensor_file,
    raw_manifest,
    tensor_file_of,
)
from subbayes.utils.strict_json import decode, encode
from subbayes.utils.tensor_file import (
    Stored,
    add_to_digest,
    as_tensors,
    fingerprint,
    safetensors_pieces,
    tensors_digest,
)
from subbayes.utils.tensor_parts import Kept, fail_of_file, read_verified

__all__ = [
    "FORMAT_VERSION",
    "Artifact",
    "ArtifactError",
    "check_destination",
    "delete",
    "fingerprint",
    "has_manifest",
    "is_artifact",
    "kind_of",
    "read",
    "write",
    "write_file",
]

_STEMS = (MANIFEST, CHECK)  # of temporary files
_KeptBy = Callable[[dict[str, Any]], Kept] | None
_ATTEMPTS = 100  # to read an artifact that others replace meanwhile
_LEFT = 3600.0  # seconds


class Artifact(NamedTuple):
    """What an artifact holds.

    Attributes:
        tensors: tensors by name, with a `DividedTensor` for one of which a part was read.
        facts: the other values, as JSON has them.
        kind: what the artifact is, e.g. "fitted-model".
    """

    tensors: dict[str, Any]
    facts: dict[str, Any]
    kind: str


# --- writing and reading ------------------------------------------------------------------------


def write(
    path: StrPath,
    kind: str,
    tensors: Mapping[str, Stored | np.ndarray],
    facts: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write tensors and facts to the folder `path`, entirely or not at all.

    An earlier artifact stays readable until the new one has replaced it, and files that do not
    belong to the artifact are never touched. Of several writers of one path, the last one wins.

    Args:
        path: the folder; it and its parents are created if they do not exist.
        kind: what the artifact is, e.g. `"fitted-model"`.
        tensors: arrays of any shape and a real dtype, on any device.
        facts: what JSON can represent, plus tuples, NumPy scalars and small arrays, NaN,
            infinities and integers of up to 4096 bits.
        overwrite: replace an existing artifact.

    Raises:
        ArtifactError: the path holds something else, or cannot be written (full disk, permission).
        InputTypeError: a tensor or a fact of a type that the format cannot represent.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> write(folder, "example", {"z": torch.eye(2)}, {"state": 2**100, "scores": (1, 2.5)})
        >>> tensors, facts, kind = read(folder)
        >>> tensors["z"].tolist(), facts["state"] == 2**100, facts["scores"]
        ([[1.0, 0.0], [0.0, 1.0]], True, [1, 2.5])
    """
    arrays, plain = as_tensors(tensors), encode(facts)
    if not is_first_process():
        return
    with translate_os_errors(path), make_folder(as_path(path)) as directory:
        _check_destination(directory, overwrite)
        _publish(directory, kind, arrays, plain, overwrite)


def write_file(
    path: StrPath,
    kind: str,
    tensors: Mapping[str, Tensor | np.ndarray],
    facts: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write tensors and facts to one safetensors file, entirely or not at all.

    Args:
        path: the file, best with the ending .safetensors.
        kind: as for `write`, like the following ones.
        tensors: tensors by name.
        facts: other values.
        overwrite: replace an existing file.

    Raises:
        ArtifactError: the file exists, or cannot be written.
        InputTypeError: as for `write`.
    """
    arrays, file = as_tensors(tensors), new_file(path, overwrite)
    manifest = manifest_of(kind, arrays, encode(facts), tensors_digest(arrays))
    metadata = {"format": "pt", FORMAT: json.dumps(manifest, allow_nan=False)}
    replace_file(file, safetensors_pieces(arrays, metadata), overwrite)


def read(
    path: StrPath,
    kind: str | None = None,
    *,
    device: str | torch.device = "cpu",
    kept: _KeptBy = None,
) -> Artifact:
    """Read an artifact after verifying its version, kind, digests, shapes and dtypes.

    Args:
        path: the folder or file that was written.
        kind: the expected kind; any if None.
        device: where to put the tensors.
        kept: from the facts, which parts of tensors to keep; by default all.

    Returns:
        Tensors (in memory of their own), facts and kind.

    Raises:
        ArtifactError: there is no artifact, or it is of another kind or version, or damaged.

    Example:
        >>> read("no/such/folder")
        Traceback (most recent call last):
        ...
        subbayes.utils.files.ArtifactError: path: expected an artifact, got 'no/such/folder', which
        does not exist. Check the path.
    """
    check_device(device)
    location = as_path(path)
    with translate_os_errors(path, reading=True):
        tensors, facts, found = _read(location, kind, kept)
    return Artifact({k: tensor.to(device) for k, tensor in tensors.items()}, facts, found)


def has_manifest(path: StrPath, kind: str | None = None) -> bool:
    """Whether there is an artifact, of which only the manifest is verified.

    Args:
        path: the folder or file.
        kind: as for `read`.

    Raises:
        ArtifactError: a manifest that `read` refuses.

    Example:
        >>> has_manifest("no/such/folder")
        False
    """
    location = as_path(path)
    if not (location.is_file() or os.path.lexists(location / MANIFEST)):
        return False
    with translate_os_errors(path, reading=True):
        check_manifest(location, kind)
    return True


def check_destination(path: StrPath, *, overwrite: bool = False) -> None:
    """Check before a long computation that `write` will not refuse what is in a folder.

    Args:
        path: the folder; it need not exist.
        overwrite: as for `write`.

    Raises:
        ArtifactError: as `write`, for what the folder holds.

    Example:
        >>> check_destination("no/such/folder")
    """
    directory = as_path(path)
    if directory.is_dir():
        with translate_os_errors(path):
            _check_destination(directory, overwrite)


def is_artifact(path: StrPath) -> bool:
    """Whether `path` is a folder or file with a manifest of this library; `read` verifies it.

    Example:
        >>> is_artifact("no/such/folder")
        False
    """
    with translate_os_errors(path, reading=True):
        return _holds_artifact(as_path(path))


def kind_of(path: StrPath) -> str | None:
    """The kind that the manifest at `path` names, None without an artifact; see `read`.

    Example:
        >>> kind_of("no/such/folder") is None
        True
    """
    if not is_artifact(path):
        return None
    with translate_os_errors(path, reading=True):
        return str(raw_manifest(as_path(path)).get("kind"))


def delete(path: StrPath, kind: str) -> None:
    """Delete the folder of an artifact of one kind, and what a killed writer left in it.

    Files that do not belong to the artifact, artifacts of other kinds, and a folder to which
    `path` is a symbolic link are left alone; the folder is removed if nothing else is in it.

    Args:
        path: the folder; it need not exist.
        kind: the kind of the artifact.

    Example:
        >>> delete("no/such/folder", "sampling-checkpoint")
    """
    directory = as_path(path)
    is_folder = directory.is_dir() and not directory.is_symlink()  # links lead elsewhere
    if not (is_first_process() and is_folder and kind_of(directory) in (None, kind)):
        return
    with translate_os_errors(path):
        names = [name for name in os.listdir(directory) if _is_ours(name)]
        if _holds_artifact(directory):
            names = [MANIFEST, *names]
        elif (directory / MANIFEST).exists():  # of another program
            return
        for name in names:
            remove(directory / name)
        if names:
            with suppress(OSError):
                directory.rmdir()


# --- writing a folder ---------------------------------------------------------------------------


def _publish(
    directory: Path, kind: str, tensors: dict[str, Any], plain: Any, overwrite: bool
) -> None:
    """Write a new tensor file, then put the manifest that names it in the place of the old one."""
    name, digest = new_tensor_file(), hashlib.sha256()
    file = directory / name
    try:
        write_new(file, add_to_digest(safetensors_pieces(tensors), digest))
        content = manifest_of(kind, tensors, plain, digest.hexdigest(), name)
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        sync_folder(directory)
        previous = _tensor_file_in_use(directory)
        manifest = write_temporary(directory, MANIFEST, [text.encode()])
        publish = rename if overwrite else link
        publish(manifest, directory / MANIFEST)
    except BaseException:
        if _tensor_file_in_use(directory) != name:
            remove(file)
        raise
    sync_folder(directory)
    if previous is not None:
        remove(directory / previous)
    for other in os.listdir(directory):
        if _is_ours(other) and other != name and _is_left(directory / other):
            remove(directory / other)


def _check_destination(directory: Path, overwrite: bool) -> None:
    """Check that the folder may be written to."""
    names = os.listdir(directory)
    others = sorted(name for name in names if not _is_ours(name))
    if others and not _holds_artifact(directory):
        fail_artifact("path", "a new folder, an empty one or an artifact",
                      f"{quoted(directory)} with other files ({others[0]!r})",
                      "Choose another path; nothing was written")  # fmt: skip
    if MANIFEST in names and not overwrite:
        fail_artifact("path", "a new or an empty folder", f"an artifact at {quoted(directory)}",
                      "Pass overwrite=True to replace it, or choose another path")  # fmt: skip


def _holds_artifact(location: Path) -> bool:
    try:
        return raw_manifest(location).get("format") == FORMAT
    except (ArtifactError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _is_ours(name: str) -> bool:
    return is_tensor_file(name) or temporary_stem(name) in _STEMS


def _is_left(file: Path) -> bool:
    """Whether nobody has written to a file for an hour, so that its writer was killed."""
    try:
        return time.time() - os.lstat(file).st_mtime > _LEFT
    except OSError:
        return False


def _tensor_file_in_use(directory: Path) -> str | None:
    """The tensor file that the manifest names; None without one."""
    if not (directory / MANIFEST).is_file():
        return None
    try:
        return tensor_file_of(raw_manifest(directory))
    except (ArtifactError, OSError):
        return None


# --- reading ------------------------------------------------------------------------------------


def _read(location: Path, kind: str | None, kept: _KeptBy) -> Artifact:
    """Read an artifact, again if it was replaced before its tensor file was opened."""
    for _ in range(_ATTEMPTS):
        content = check_manifest(location, kind)
        try:
            return _read_once(location, content, kept)
        except (ArtifactError, OSError):
            if not location.is_dir() or raw_manifest(location) == content:
                raise
    fail_artifact("path", "an artifact that is not replaced while it is read",
                  f"{quoted(location)}, which always was", "Read it again later")  # fmt: skip


def _read_once(location: Path, content: dict[str, Any], kept: _KeptBy) -> Artifact:
    file = location
    if location.is_dir():
        file = location / content["tensor_file"]
        if not file.is_file():
            fail_of_file(file, "the tensor file", "no such file")
    try:
        facts = dict(decode(content["facts"]))
    except (ValueError, TypeError) as error:
        fail_of_file(location, "facts that subbayes can decode", str(error).splitlines()[0])
    keep = None if kept is None else kept(facts)
    tensors = read_verified(file, keep, content["tensors"], content["tensors_sha256"])
    return Artifact(tensors, facts, content["kind"])
