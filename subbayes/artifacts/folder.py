"""The format of an artifact: a folder with a JSON manifest and a safetensors file.

A folder holds `manifest.json` and `tensors-<16 random hex digits>.safetensors`, which the manifest
names. Nothing is ever pickled or unpickled.

Writing creates a new tensor file first, then replaces the manifest by one that names it, in one
step, then removes the earlier tensor file. No writer waits for another: each has a tensor file of
its own, and the last one wins. A killed process leaves the old artifact or the new one, and maybe a
file that no manifest names.

The manifest has the sha256 of the tensor file, and a digest of its own entries. Reading verifies
both before it returns anything. What the facts of a kind must look like is checked by
`subbayes.artifacts.saving`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from subbayes.artifacts.facts import canonical_bytes, decode, encode, parse
from subbayes.artifacts.files import (
    ArtifactError,
    StrPath,
    as_path,
    fail_artifact,
    fail_damaged,
    publish,
    quoted,
    read_start,
    remove,
    temporary_file,
    translate_os_errors,
    write_new,
)
from subbayes.artifacts.tensors import add_to_digest, as_tensors, read_tensors, safetensors_pieces
from subbayes.utils.checks import InputError, check_device
from subbayes.utils.registry import __version__
from subbayes.utils.warning import is_first_process

MANIFEST = "manifest.json"
FORMAT_VERSION = 4

_FORMAT = "subbayes"
_TENSOR_FILE = r"tensors-[0-9a-f]{16}\.safetensors"
_OURS = rf"{_TENSOR_FILE}|\.(manifest\.json|check)\.[0-9a-f]{{16}}\.subbayes-tmp"
_MOST_BYTES = 100 * 2**20  # of a manifest; safetensors has this limit for its own header
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Artifact(NamedTuple):
    """What an artifact holds.

    Attributes:
        tensors: tensors by name.
        facts: the other values, as JSON has them.
        kind: what the artifact is, e.g. "fitted-model".
    """

    tensors: dict[str, Any]
    facts: Any
    kind: str


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    format_version: int
    kind: str
    library_version: str
    tensor_file: Annotated[str, msgspec.Meta(pattern=rf"\A{_TENSOR_FILE}\Z")]
    tensors_sha256: _Digest
    facts: dict[str, Any]
    manifest_sha256: _Digest


# --- writing and reading ------------------------------------------------------------------------


def write(
    path: StrPath,
    kind: str,
    tensors: Mapping[str, Tensor | np.ndarray],
    facts: Any,
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
        facts: what JSON can represent, plus `Facts`, dataclasses, tuples, NumPy scalars and small
            arrays, NaN and infinities.
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
    directory = as_path(path)
    with translate_os_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        _check_destination(directory, overwrite)
        file, digest = directory / f"tensors-{secrets.token_hex(8)}.safetensors", hashlib.sha256()
        try:
            write_new(file, add_to_digest(safetensors_pieces(arrays), digest))
            content = {
                "format": _FORMAT,
                "format_version": FORMAT_VERSION,
                "kind": kind,
                "library_version": __version__,
                "tensor_file": file.name,
                "tensors_sha256": digest.hexdigest(),
                "facts": plain,
            }
            content["manifest_sha256"] = manifest_digest(content)
            text = json.dumps(content, indent=2, allow_nan=False) + "\n"
            manifest, previous = temporary_file(directory, MANIFEST), _tensor_file_of(directory)
            write_new(manifest, [text.encode()])
            publish(manifest, directory / MANIFEST, overwrite)
        except BaseException:
            if _tensor_file_of(directory) != file.name:
                remove(file)
            with suppress(OSError):  # unless there are files in it
                directory.rmdir()
            raise
        if previous is not None:
            remove(directory / previous)


def read(path: StrPath, kind: str | None = None, *, device: str | torch.device = "cpu") -> Artifact:
    """Read an artifact after verifying its version, kind and digests.

    Args:
        path: the folder that was written.
        kind: the expected kind; any if None.
        device: where to put the tensors.

    Returns:
        Tensors (in memory of their own), facts and kind.

    Raises:
        ArtifactError: there is no artifact, or it is of another kind or version, or damaged.

    Example:
        >>> read("no/such/folder")
        Traceback (most recent call last):
        ...
        subbayes.artifacts.files.ArtifactError: path: expected an artifact, got 'no/such/folder',
        which does not exist. Check the path.
    """
    check_device(device)
    location = as_path(path)
    with translate_os_errors(path, to="read"):
        while True:  # until the artifact is not replaced meanwhile
            manifest = _verified_manifest(location, kind)
            try:
                tensors, facts = _content(location, manifest)
                break
            except (ArtifactError, OSError):
                if _verified_manifest(location, kind) == manifest:
                    raise
    return Artifact({k: t.to(device) for k, t in tensors.items()}, facts, manifest.kind)


def has_manifest(path: StrPath, kind: str | None = None) -> bool:
    """Whether there is an artifact, of which only the manifest is verified; see `read`."""
    location = as_path(path)
    if not os.path.lexists(location / MANIFEST) and not location.is_file():
        return False
    with translate_os_errors(path, to="read"):
        _verified_manifest(location, kind)
    return True


def check_destination(path: StrPath, *, overwrite: bool = False) -> None:
    """Check before a long computation that `write` will not refuse what is in a folder."""
    directory = as_path(path)
    if directory.is_dir():
        with translate_os_errors(path):
            _check_destination(directory, overwrite)


def is_artifact(path: StrPath) -> bool:
    """Whether `path` is a folder with a manifest of this library; `read` verifies it."""
    return kind_of(path) is not None


def kind_of(path: StrPath) -> str | None:
    """The kind that the manifest at `path` names, None without an artifact; see `read`."""
    with translate_os_errors(path, to="read"):
        content = _raw_manifest(as_path(path))
    return None if content is None else str(content.get("kind"))


def delete(path: StrPath, kind: str) -> None:
    """Delete the folder of an artifact of one kind, and what a killed writer left in it.

    Files that do not belong to the artifact, artifacts of other kinds, and a folder to which
    `path` is a symbolic link are left alone; the folder is removed if nothing else is in it.

    Args:
        path: the folder; it need not exist.
        kind: the kind of the artifact.
    """
    directory = as_path(path)
    if not is_first_process() or directory.is_symlink() or not directory.is_dir():
        return
    found = kind_of(directory)
    if found != kind and (found is not None or (directory / MANIFEST).exists()):
        return
    with translate_os_errors(path):
        names = [name for name in os.listdir(directory) if name == MANIFEST or _is_ours(name)]
        for name in sorted(names):  # the manifest first
            remove(directory / name)
        if names:
            with suppress(OSError):
                directory.rmdir()


def manifest_digest(content: Mapping[str, Any]) -> str:
    """The digest of a manifest: of all its entries but the digest itself."""
    entries = {key: value for key, value in content.items() if key != "manifest_sha256"}
    return hashlib.sha256(canonical_bytes(entries)).hexdigest()


# --- the folder ---------------------------------------------------------------------------------


def _check_destination(directory: Path, overwrite: bool) -> None:
    """Check that the folder may be written to."""
    others = sorted(name for name in os.listdir(directory) if not _is_ours(name))
    if others and _raw_manifest(directory) is None:
        fail_artifact("path", "a new folder, an empty one or an artifact",
                      f"{quoted(directory)} with other files ({others[0]!r})",
                      "Choose another path; nothing was written")  # fmt: skip
    if MANIFEST in others and not overwrite:
        fail_artifact("path", "a new or an empty folder", f"an artifact at {quoted(directory)}",
                      "Pass overwrite=True to replace it, or choose another path")  # fmt: skip


def _is_ours(name: str) -> bool:
    return bool(re.fullmatch(_OURS, name))


def _tensor_file_of(directory: Path) -> str | None:
    """The tensor file that the manifest names; None without one."""
    name = (_raw_manifest(directory) or {}).get("tensor_file")
    return name if isinstance(name, str) and re.fullmatch(_TENSOR_FILE, name) else None


def _raw_manifest(location: Path) -> dict[str, Any] | None:
    """The manifest of a folder, not verified; None without one of this library."""
    with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        content = parse(read_start(location / MANIFEST, _MOST_BYTES))
        if isinstance(content, dict) and content.get("format") == _FORMAT:
            return content
    return None


def _verified_manifest(location: Path, kind: str | None) -> _Manifest:
    """Read a manifest, and verify its version, its kind and its digest."""
    remedy = "Check the path"
    if not location.exists():
        fail_artifact("path", "an artifact", f"{quoted(location)}, which does not exist", remedy)
    if not location.is_dir():
        remedy = "Pass the folder of the artifact"
        fail_artifact("path", "an artifact", f"{quoted(location)}, a file", remedy)
    if not os.path.lexists(location / MANIFEST):
        if (location / "model" / MANIFEST).is_file():  # as `subbayes fit` writes it
            remedy = f"Pass {quoted(location / 'model')}, the model in it"
        fail_artifact("path", "an artifact", f"{quoted(location)}, which has no {MANIFEST}", remedy)
    text = read_start(location / MANIFEST, _MOST_BYTES + 1)
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        content = parse(text)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            got = f"another manifest in {quoted(location)}"
            fail_artifact("path", "an artifact of subbayes", got)
        _check_version(location, content)
        manifest = msgspec.convert(content, _Manifest)
        if manifest.manifest_sha256 != manifest_digest(content):
            raise ValueError("altered content")
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        if isinstance(error, InputError):
            raise
        fail_damaged(f"the manifest of an artifact in {quoted(location / MANIFEST)}", error)
    if kind is not None and manifest.kind != kind:
        fail_artifact("path", f"an artifact of kind {kind!r}",
                      f"kind {manifest.kind!r} at {quoted(location)}",
                      "Pass the path of the right artifact")  # fmt: skip
    return manifest


def _check_version(location: Path, content: Mapping[str, Any]) -> None:
    version = content.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        remedy = "Upgrade subbayes" if version > FORMAT_VERSION else "Fit and save it again"
        written_by = f"written by subbayes {content.get('library_version')}"
        got = f"version {version} at {quoted(location)}, {written_by}"
        fail_artifact("path", f"an artifact of format version {FORMAT_VERSION}", got, remedy)


def _content(location: Path, manifest: _Manifest) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the facts."""
    try:
        facts = dict(decode(manifest.facts))
    except (ValueError, TypeError, RecursionError) as error:
        fail_damaged(f"facts that subbayes can decode in {quoted(location / MANIFEST)}", error)
    file = location / manifest.tensor_file
    try:
        tensors, sha256 = read_tensors(file)
    except InputError:
        raise
    except FileNotFoundError:
        fail_damaged(f"the tensor file in {quoted(file)}", "no such file")
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        fail_damaged(f"a safetensors file in {quoted(file)}", error)
    if sha256 != manifest.tensors_sha256:
        got = f"{sha256[:16]}… (altered content)"
        expected = f"tensors with sha256 {manifest.tensors_sha256[:16]}… in {quoted(file)}"
        fail_damaged(expected, got)
    return tensors, facts
