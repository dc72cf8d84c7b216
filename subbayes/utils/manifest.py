"""The manifest of an artifact: its content, its digest, and how it is read and verified.

See `subbayes.utils.artifact` for the format.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from subbayes.utils.files import fail_artifact, open_file, quoted, read_start
from subbayes.utils.strict_json import canonical_bytes, parse
from subbayes.utils.tensor_file import dtype_and_shape, read_header
from subbayes.utils.tensor_parts import fail_of_file
from subbayes.utils.version import __version__

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "MANIFEST",
    "check_manifest",
    "is_tensor_file",
    "manifest_digest",
    "new_tensor_file",
    "manifest_of",
    "raw_manifest",
    "tensor_file_of",
]

FORMAT = "subbayes"
FORMAT_VERSION = 3
MANIFEST = "manifest.json"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_TENSOR_FILE = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_MOST_BYTES = 100 * 2**20  # of a manifest; safetensors has this limit for its own header


def new_tensor_file() -> str:
    """A name that no other writer chooses for the tensors of an artifact."""
    return f"tensors-{secrets.token_hex(8)}.safetensors"


def is_tensor_file(name: str) -> bool:
    """Whether a file has a name that `new_tensor_file` gives."""
    return bool(_TENSOR_FILE.fullmatch(name))


def tensor_file_of(content: dict[str, Any]) -> str | None:
    """The tensor file that a manifest names; None for one that no writer names."""
    name = content.get("tensor_file")
    return name if isinstance(name, str) and is_tensor_file(name) else None


def manifest_of(
    kind: str, tensors: dict[str, Any], plain: Any, sha256: str, file: str | None = None
) -> dict[str, Any]:
    """The entries of the manifest of tensors in a file, with their digest, and of encoded facts."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "library_version": __version__,
        "tensors": {name: dtype_and_shape(tensors[name]) for name in sorted(tensors)},
        "tensors_sha256": sha256,
        "facts": plain,
    } | ({} if file is None else {"tensor_file": file})
    return content | {"manifest_sha256": manifest_digest(content)}


def manifest_digest(content: dict[str, Any]) -> str:
    """The digest of a manifest: of all its entries but the digest itself."""
    entries = {key: value for key, value in content.items() if key != "manifest_sha256"}
    return hashlib.sha256(canonical_bytes(entries)).hexdigest()


def raw_manifest(location: Path) -> dict[str, Any]:
    """The entries of the manifest of a folder or a file, not verified yet."""
    file = location / MANIFEST if location.is_dir() else location
    _check_file(file)
    if file == location:
        return _parsed(file, _embedded(file).encode())
    return _parsed(file, read_start(file, _MOST_BYTES + 1))


def _check_file(file: Path) -> None:
    if file.exists() and not file.is_file():  # a pipe would block, a device would never end
        fail_of_file(file, "a file", "something else")


def _parsed(file: Path, text: bytes) -> dict[str, Any]:
    if len(text) > _MOST_BYTES:
        fail_of_file(file, f"a manifest of at most {_MOST_BYTES} bytes", "more")
    try:
        content = parse(text)
    except ValueError as error:
        fail_of_file(file, "a manifest in JSON", str(error).splitlines()[0])
    if not isinstance(content, dict):
        fail_of_file(file, "a manifest that is a JSON object", type(content).__name__)
    return content


def _embedded(file: Path) -> str:
    """The manifest in the metadata of a safetensors file."""
    found = None
    with suppress(ValueError), open_file(file) as opened:
        found = read_header(opened)[1].get(FORMAT)
    if found is None:
        fail_artifact(
            "path",
            "an artifact",
            f"{quoted(file)}, a file that subbayes did not write",
            f"Check the path; of a folder, pass the folder and not its {MANIFEST}",
        )
    return found


def check_manifest(location: Path, kind: str | None) -> dict[str, Any]:
    """Verify a manifest and return its entries."""
    if not location.exists():
        fail_artifact("path", "an artifact", f"{quoted(location)}, which does not exist",
                      "Check the path")  # fmt: skip
    if location.is_dir() and not (location / MANIFEST).is_file():
        remedy = "Check the path, or write it again if writing was interrupted"
        if (location / "model" / MANIFEST).is_file():  # as `subbayes fit` writes it
            remedy = f"Pass {quoted(location / 'model')}, the model in it"
        fail_artifact("path", "an artifact", f"{quoted(location)}, which has no {MANIFEST}", remedy)
    content = raw_manifest(location)
    _check_version(location, content)
    file = location / MANIFEST if location.is_dir() else location
    fields: dict[str, type] = dict.fromkeys(("kind", "library_version", "tensors_sha256"), str)
    for name, expected in (fields | dict.fromkeys(("tensors", "facts"), dict)).items():
        if not isinstance(content.get(name), expected):
            fail_of_file(file, f"an entry {name!r} of type {expected.__name__} in the manifest",
                     type(content.get(name)).__name__)  # fmt: skip
    if location.is_dir() and tensor_file_of(content) is None:
        fail_of_file(file, "the name of a tensor file under 'tensor_file'", "another")
    if not _SHA256.fullmatch(content["tensors_sha256"]):
        fail_of_file(file, "a digest of 64 hex digits under 'tensors_sha256'", "other text")
    if content.get("manifest_sha256") != manifest_digest(content):
        fail_of_file(file, "a manifest that matches its digest", "altered content")
    if kind is not None and content["kind"] != kind:
        fail_artifact("path", f"an artifact of kind {kind!r}",
                      f"kind {content['kind']!r} at {quoted(location)}",
                      "Pass the path of the right artifact")  # fmt: skip
    return content


def _check_version(location: Path, content: dict[str, Any]) -> None:
    version, written_by = content.get("format_version"), content.get("library_version")
    if content.get("format") != FORMAT:
        fail_artifact("path", "an artifact of subbayes", f"another manifest in {quoted(location)}")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        fail_of_file(location, "a format version", repr(version)[:60])
    if version != FORMAT_VERSION:
        remedy = "Upgrade subbayes" if version > FORMAT_VERSION else "Fit and save it again"
        got = f"version {version} at {quoted(location)}, written by subbayes {written_by}"
        fail_artifact("path", f"an artifact of format version {FORMAT_VERSION}", got, remedy)
