"""Artifacts: a folder of one JSON manifest and one safetensors file, written atomically.

A folder holds `manifest.json` and `tensors-<first 16 hex digits of its sha256>.safetensors`. The
tensor file is put in place first, then the manifest that names it is replaced in one step, then
what the earlier manifest named is removed: whoever is killed, wherever, leaves the old or the new
artifact behind, whole. Nothing is ever pickled or unpickled.

In `meta`, and in the manifest, NaN and infinities are `{"__float__": "nan" | "inf" | "-inf"}` and
integers beyond 64 bits are `{"__int__": "0x…"}`, so that the file is strict JSON and every number
comes back as it was. Tuples come back as lists, NumPy scalars and small arrays as plain numbers
and lists.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from subbayes.utils.checks import fail_type
from subbayes.utils.files import (
    ArtifactError,
    StrPath,
    as_path,
    atomic_write_bytes,
    atomic_write_text,
    explained,
    folder,
    locked,
    refuse,
    rename,
    shown,
    sync_folder,
    write_temporary,
)
from subbayes.utils.strict_json import as_plain, canonical, decode
from subbayes.utils.version import __version__

__all__ = [
    "FORMAT_VERSION",
    "ArtifactError",
    "atomic_write_bytes",
    "atomic_write_text",
    "fingerprint",
    "is_artifact",
    "kind_of",
    "read",
    "write",
]

FORMAT = "subbayes"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

_TENSOR_FILE = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_TEMPORARY = re.compile(r"\.(tensors|manifest\.json)\.[0-9a-f]{16}\.tmp")
_PIECE = 8 * 2**20  # bytes copied, hashed and written at a time
_CODES = {  # torch's name -> the safetensors format's
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


# --- what can be written, and read back ---------------------------------------------------------


def write(
    path: StrPath,
    kind: str,
    tensors: Mapping[str, Tensor | np.ndarray],
    meta: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write tensors and metadata to the folder `path`, entirely or not at all.

    An earlier artifact stays readable until the new one has replaced it, and files that are not
    the artifact's own are never touched. Writers of one path wait for each other; the last wins.

    Args:
        path: the folder; it and its parents are made where missing.
        kind: what the artifact is, e.g. `"draws"`; `read` can ask for it.
        tensors: arrays of any shape and of a real dtype, on any device; may be empty.
        meta: anything JSON can say, plus tuples, NumPy scalars and small arrays, NaN, infinities
            and integers of any size (see the module's text for their form).
        overwrite: replace an artifact that is already there.

    Raises:
        ArtifactError: the path holds something else, or cannot be written (full disk, permission).
        InputTypeError: a tensor or a value in `meta` of a type that has no form in the file.

    Source:
        The safetensors format, https://github.com/huggingface/safetensors#format.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> write(folder, "draws", {"z": torch.eye(2)}, {"state": 2**100, "scores": (1, 2.5)})
        >>> tensors, meta = read(folder, "draws")
        >>> tensors["z"].tolist(), meta["state"] == 2**100, meta["scores"]
        ([[1.0, 0.0], [0.0, 1.0]], True, [1, 2.5])
    """
    arrays, plain = _as_tensors(tensors), as_plain(meta)
    with explained(path), folder(as_path(path)) as directory, locked(directory) as alone:
        previous = _check_destination(directory, overwrite)
        _publish(directory, kind, arrays, plain, previous, alone)


def read(
    path: StrPath, kind: str | None = None, *, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read an artifact back after checking its version, kind, checksums, shapes and dtypes.

    Args:
        path: the folder that was written.
        kind: the kind it has to be; any if None.
        device: where the tensors go.

    Returns:
        The tensors by name, in memory of their own, and the metadata.

    Raises:
        ArtifactError: there is no artifact, or it is of another kind, newer, or damaged.

    Example:
        >>> read("no/such/folder")
        Traceback (most recent call last):
        ...
        subbayes.utils.files.ArtifactError: path: expected an artifact folder, got 'no/such/folder',
        which does not exist. Check the path.
    """
    _check_device(device)
    directory = as_path(path)
    with explained(path, reading=True):
        try:
            tensors, meta = _read(directory, kind)
        except (ArtifactError, OSError):  # a writer may have been at work: look again without one
            with locked(directory, shared=True):
                tensors, meta = _read(directory, kind)
    return {name: tensor.to(device) for name, tensor in tensors.items()}, meta


def is_artifact(path: StrPath) -> bool:
    """Tell whether `path` is a folder with a manifest of this library; `read` checks the rest.

    Example:
        >>> is_artifact("no/such/folder")
        False
    """
    with explained(path, reading=True):
        return _holds_artifact(as_path(path))


def kind_of(path: StrPath) -> str | None:
    """The kind of the artifact at `path`, None where there is none; `read` checks the rest.

    Example:
        >>> kind_of("no/such/folder") is None
        True
    """
    if not is_artifact(path):
        return None
    with explained(path, reading=True):
        kind = _parse(as_path(path)).get("kind")
    return None if kind is None else str(kind)


def fingerprint(tensors: Mapping[str, Tensor | np.ndarray], meta: Mapping[str, Any]) -> str:
    """Hash names, dtypes, shapes, values and metadata, so that equal content has an equal hash.

    The order of the keys, the device and the memory layout do not matter; a tuple equals a list.

    Args:
        tensors: as for `write`.
        meta: as for `write`.

    Returns:
        sha256 as 64 hex digits.

    Raises:
        InputTypeError: as for `write`.

    Example:
        >>> a = fingerprint({"x": np.zeros(2), "y": np.ones(2)}, {"seed": 1})
        >>> a == fingerprint({"y": np.ones(2), "x": np.zeros(2)}, {"seed": np.int64(1)})
        True
        >>> a == fingerprint({"x": np.zeros(2), "y": np.ones(2)}, {"seed": 2})
        False
    """
    digest = hashlib.sha256()
    for piece in _serialised(_as_tensors(tensors)):
        digest.update(piece)
    digest.update(canonical(as_plain(meta)))
    return digest.hexdigest()


# --- tensors as bytes ---------------------------------------------------------------------------


def _as_tensors(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    if not isinstance(tensors, Mapping):
        fail_type("tensors", "a dict of tensors by name", tensors)
    return {_check_name(name): _as_tensor(name, value) for name, value in tensors.items()}


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        fail_type("tensors", "names that are text", name)
    if name == "__metadata__" or not _is_utf8(name):
        refuse("tensors", "a name the safetensors format allows", repr(name), "Rename the tensor")
    return str.__str__(name)


def _is_utf8(text: str) -> bool:
    return text == text.encode("utf-8", "ignore").decode("utf-8")


def _as_tensor(name: str, value: Any) -> Tensor:
    """Give a dense, real tensor; its bytes are still where they were."""
    label = f"tensors[{name!r}]"
    if isinstance(value, np.ndarray):
        value = _from_numpy(label, value)
    if not isinstance(value, Tensor):
        fail_type(label, "a tensor or an array", value, "Put other values into meta")
    layout = str(value.layout).removeprefix("torch.")
    if layout != "strided" or value.is_meta:
        got = "a tensor without data (device meta)" if value.is_meta else f"layout {layout}"
        refuse(label, "a dense tensor", got, "Convert it first")
    if _dtype(value) not in _CODES:
        refuse(label, "a real dtype: " + ", ".join(_CODES), _dtype(value), "Convert it first")
    return value.detach()


def _from_numpy(label: str, array: np.ndarray) -> Tensor:
    native = array.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(np.require(np.asarray(array), native, ["C", "W"]))
    except TypeError:
        refuse(label, "a real dtype: " + ", ".join(_CODES), str(array.dtype), "Convert it first")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _layout(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Order the tensors, widest dtype first, which aligns each on its own size."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _header(tensors: dict[str, Tensor]) -> bytes:
    """Compose the safetensors header: its length, then names, dtypes, shapes, offsets as JSON."""
    entries, start = {}, 0
    for name, tensor in _layout(tensors):
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _CODES[_dtype(tensor)], "shape": list(tensor.shape),
                         "data_offsets": [start, stop]}  # fmt: skip
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _serialised(tensors: dict[str, Tensor]) -> Iterator[bytes]:
    """Give the file in pieces: one small copy each, so that what is hashed is what is written."""
    yield _header(tensors)
    for _, tensor in _layout(tensors):
        if tensor.numel():
            flat = tensor.cpu().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), _PIECE):
                yield flat[start : start + _PIECE].numpy().tobytes()


# --- writing ------------------------------------------------------------------------------------


def _publish(
    directory: Path,
    kind: str,
    tensors: dict[str, Tensor],
    plain: Any,
    previous: str | None,
    alone: bool,
) -> None:
    """Write both files beside the old ones, rename tensors then manifest, then clear up."""
    ours = {previous}
    try:
        digest = hashlib.sha256()
        draft = write_temporary(directory, "tensors", _hashed(_serialised(tensors), digest))
        ours.add(draft.name)
        target = directory / f"tensors-{digest.hexdigest()[:16]}.safetensors"
        text = _manifest(kind, tensors, plain, digest.hexdigest(), draft.stat().st_size)
        manifest = write_temporary(directory, MANIFEST, [text])
        ours |= {manifest.name, target.name}
        rename(draft, target)
        sync_folder(directory)
        rename(manifest, directory / MANIFEST)
        sync_folder(directory)
    finally:
        with suppress(OSError, *_NO_MANIFEST):
            _sweep(directory, os.listdir(directory) if alone else ours)


def _manifest(kind: str, tensors: dict[str, Tensor], plain: Any, sha256: str, size: int) -> bytes:
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "library_version": __version__,
        "tensor_file": {"name": f"tensors-{sha256[:16]}.safetensors", "sha256": sha256,
                        "bytes": size},
        "tensors": {name: _described(tensors[name]) for name in sorted(tensors)},
        "meta_sha256": hashlib.sha256(canonical(plain)).hexdigest(),
        "meta": plain,
    }  # fmt: skip
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": _dtype(tensor), "shape": list(tensor.shape)}


def _check_destination(directory: Path, overwrite: bool) -> str | None:
    """Give the tensor file in use, after making sure that nothing of anybody else's is here."""
    names = os.listdir(directory)
    strangers = sorted(name for name in names if not _is_ours(name))
    if strangers and not _holds_artifact(directory):
        refuse("path", "a new folder, an empty one or an artifact",
               f"{shown(directory)} with other files ({strangers[0]!r})",
               "Choose another path; nothing was written")  # fmt: skip
    if any(not _TEMPORARY.fullmatch(name) for name in names) and not overwrite:
        refuse("path", "a new or an empty folder", f"an artifact at {shown(directory)}",
               "Pass overwrite=True to replace it, or choose another path")  # fmt: skip
    with suppress(*_NO_MANIFEST):
        return _tensor_file_in_use(directory)
    return None


def _holds_artifact(directory: Path) -> bool:
    try:
        return _parse(directory).get("format") == FORMAT
    except (ArtifactError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _is_ours(name: str) -> bool:
    return bool(_TENSOR_FILE.fullmatch(name) or _TEMPORARY.fullmatch(name))


_NO_MANIFEST = (ArtifactError, FileNotFoundError, KeyError, TypeError)


def _tensor_file_in_use(directory: Path) -> str:
    return str(_parse(directory)["tensor_file"]["name"])


def _sweep(directory: Path, names: Iterable[str | None]) -> None:
    """Remove those files of ours that no manifest names; what stays is left to the next writer."""
    keep = None
    with suppress(FileNotFoundError):
        keep = _tensor_file_in_use(directory)
    for name in names:
        if name is not None and _is_ours(name) and name != keep:
            with suppress(OSError):
                os.unlink(directory / name)


def _hashed(pieces: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    for piece in pieces:
        digest.update(piece)
        yield piece


# --- reading ------------------------------------------------------------------------------------


def _read(directory: Path, kind: str | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    manifest = _check_manifest(directory, kind)
    file = directory / manifest.tensor_file
    _check_file(file, manifest)
    return _load(file, manifest), manifest.meta


def _parse(directory: Path) -> dict[str, Any]:
    file = directory / MANIFEST
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        _damaged(file, "JSON", "something else, or a part of it")
    if not isinstance(content, dict):
        _damaged(file, "a JSON object", type(content).__name__)
    return content


@dataclass(frozen=True)
class _Manifest:
    """The part of a manifest that reading needs, checked."""

    tensor_file: str
    sha256: str
    bytes: int
    tensors: dict[str, Any]
    meta: dict[str, Any]


def _check_manifest(directory: Path, kind: str | None) -> _Manifest:
    content = _parse(_check_folder(directory))
    _check_format(directory, content)
    try:
        entry, plain = content["tensor_file"], content["meta"]
        manifest = _Manifest(str(entry["name"]), str(entry["sha256"]), int(entry["bytes"]),
                             dict(content["tensors"]), dict(decode(plain)))  # fmt: skip
        found, checksum = str(content["kind"]), content["meta_sha256"]
    except (KeyError, TypeError, ValueError) as error:
        _damaged(directory / MANIFEST, "all its fields", f"a fault at {error}")
    if kind is not None and found != kind:
        refuse("path", f"an artifact of kind {kind!r}", f"kind {found!r} at {shown(directory)}",
              "Pass the path of the right artifact")  # fmt: skip
    if hashlib.sha256(canonical(plain)).hexdigest() != checksum:
        _damaged(directory / MANIFEST, "meta with its checksum", "altered content")
    if manifest.tensor_file != f"tensors-{manifest.sha256[:16]}.safetensors":
        _damaged(
            directory / MANIFEST, "a tensor file named by its checksum", repr(manifest.tensor_file)
        )
    return manifest


def _check_folder(directory: Path) -> Path:
    fault, remedy = "", "Check the path"
    if not directory.exists():
        fault = "which does not exist"
    elif not directory.is_dir():
        fault, remedy = "which is a file", f"Pass the folder that holds {MANIFEST}"
    elif not (directory / MANIFEST).is_file():
        fault = f"which has no {MANIFEST}"
        remedy = "Check the path, or write it again if its writing was interrupted"
    if fault:
        refuse("path", "an artifact folder", f"{shown(directory)}, {fault}", remedy)
    return directory


def _check_format(directory: Path, content: dict[str, Any]) -> None:
    version = content.get("format_version")
    if content.get("format") != FORMAT:
        refuse("path", "an artifact of subbayes", f"another program's manifest in "
              f"{shown(directory)}", "Check the path")  # fmt: skip
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        _damaged(directory / MANIFEST, "a format version", repr(version))
    if version > FORMAT_VERSION:
        refuse("path", f"an artifact of format version {FORMAT_VERSION} or older",
              f"version {version} at {shown(directory)}, written by subbayes "
              f"{content.get('library_version')}", "Upgrade subbayes")  # fmt: skip


def _check_file(file: Path, manifest: _Manifest) -> None:
    if not file.is_file():
        _damaged(file, "the tensor file", "no such file")
    size = file.stat().st_size
    if size != manifest.bytes:
        _damaged(file, f"{manifest.bytes} bytes", f"{size}")
    with open(file, "rb") as stream:
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()
    if checksum != manifest.sha256:
        _damaged(file, f"sha256 {manifest.sha256[:16]}…", f"{checksum[:16]}… (altered content)")


def _load(file: Path, manifest: _Manifest) -> dict[str, Tensor]:
    try:
        opened = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, RuntimeError) as error:  # torch's word for a file that has just gone
        _damaged(file, "a safetensors file", str(error).splitlines()[0])
    with opened:
        # cloned: what is mapped would change or vanish with the file
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    for name in sorted(tensors.keys() | manifest.tensors.keys()):
        found = _described(tensors[name]) if name in tensors else None
        if found != manifest.tensors.get(name):
            _damaged(file, f"tensor {name!r} with {manifest.tensors.get(name)}", f"{found}")
    return tensors


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        refuse("device", "a device of this machine", repr(str(device)), "Pass 'cpu'")


def _damaged(file: Path, expected: str, got: str) -> NoReturn:
    refuse("path", f"{expected} in {shown(file)}", got,
           "The artifact is damaged: restore it from a copy or write it again")  # fmt: skip
