"""Tensors as the bytes of a safetensors file: written and read in pieces.

The file is read and not mapped, because a mapped file that another process cuts short ends the
interpreter. Its sha256 is computed in the same pass.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from subbayes.artifacts.facts import canonical_bytes, encode
from subbayes.artifacts.files import fail_artifact, open_file
from subbayes.utils.checks import fail_type
from subbayes.utils.memory import check_memory

_PIECE = 8 * 2**20  # bytes read, copied, hashed and written at a time
_MOST_HEADER = 100 * 2**20  # bytes, as in the safetensors library
_CODES = {  # torch's name -> the safetensors format's
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in _CODES.items()}
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def fingerprint(tensors: Mapping[str, Tensor | np.ndarray], facts: Mapping[str, Any]) -> str:
    """Hash names, dtypes, shapes, values and facts, so that equal content has an equal hash.

    The order of the keys, the device and the memory layout do not matter; a tuple equals a list.

    Tensors and facts are as for `write`, and so are the errors; the hash has 64 hex digits.

    Example:
        >>> a = fingerprint({"x": np.zeros(2), "y": np.ones(2)}, {"seed": 1})
        >>> a == fingerprint({"y": np.ones(2), "x": np.zeros(2)}, {"seed": np.int64(1)})
        True
        >>> a == fingerprint({"x": np.zeros(2), "y": np.ones(2)}, {"seed": 2})
        False
    """
    digest = hashlib.sha256()
    for _ in add_to_digest(safetensors_pieces(as_tensors(tensors)), digest):
        pass
    digest.update(canonical_bytes(encode(facts)))
    return digest.hexdigest()


def as_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names and values of tensors before writing; arrays become tensors.

    Raises:
        InputTypeError: not a dict of tensors or arrays by name.
        ArtifactError: a name, dtype or layout that safetensors cannot hold.
    """
    return {name: _as_tensor(name, value) for name, value in tensors.items()}


def _as_tensor(name: str, value: Any) -> Tensor:
    """Check that a tensor is dense and real; its values are not copied."""
    label = f"tensors[{name!r}]"
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))
    if not isinstance(value, Tensor):
        fail_type(label, "a tensor or an array of numbers", value, "Put other values into facts")
    if value.layout != torch.strided or _dtype(value) not in _CODES:
        got = f"one of layout {value.layout} and {value.dtype}"
        fail_artifact(label, "a dense tensor of real numbers", got, "Convert it first")
    return value.detach()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _layout(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Order the tensors, widest dtype first, so that each is aligned."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _header(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> bytes:
    """Compose the safetensors header: its length, then names, dtypes, shapes, offsets as JSON."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for name, tensor in _layout(tensors):
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _CODES[_dtype(tensor)], "shape": list(tensor.shape),
                         "data_offsets": [start, stop]}  # fmt: skip
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def safetensors_pieces(
    tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> Iterator[bytes]:
    """Yield the safetensors file in pieces of at most 8 MiB, to limit memory."""
    yield _header(tensors, metadata)
    for _, tensor in _layout(tensors):
        yield from _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> Iterator[bytes]:
    if tensor.numel():
        whole = tensor.cpu().resolve_neg().contiguous()
        # a single number is contiguous with any stride, which `view` does not take
        flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
        for start in range(0, len(flat), _PIECE):
            yield flat[start : start + _PIECE].numpy().tobytes()


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in the header of a file."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Size, _Size]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"unknown dtype {self.dtype[:60]!r}")
        start, stop = self.data_offsets
        if stop - start != math.prod(self.shape) * _DTYPES[self.dtype].itemsize:
            raise ValueError("numbers of another size than the shape")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read the tensors of a file in one pass over all its bytes.

    Returns tensors by name, in the order of their numbers, and the sha256 of the file.

    Raises:
        ValueError: not a safetensors file, or one that has become shorter.
        RuntimeError: a shape that torch does not represent.
        InputError: too little memory.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MOST_HEADER):
            raise ValueError("no header of a safetensors file")
        header = file.read(length)
        try:
            entries = msgspec.json.decode(header, type=dict[str, _Entry])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"a header with {error}") from None
        ordered = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
        ends = [0, *(entry.data_offsets[1] for entry in ordered.values())]
        if [entry.data_offsets[0] for entry in ordered.values()] != ends[:-1]:
            raise ValueError("tensors that do not begin where the one before ends")
        if 8 + length + ends[-1] != size:
            raise ValueError(f"{size} bytes instead of {8 + length + ends[-1]}")
        digest = hashlib.sha256(start + header)
        tensors = {name: _read(file, entry, digest) for name, entry in ordered.items()}
    return tensors, digest.hexdigest()


def _read(file: BufferedReader, entry: _Entry, digest: Any) -> Tensor:
    """The tensor whose numbers begin here in the file."""
    size = entry.data_offsets[1] - entry.data_offsets[0]
    check_memory(
        "path", "the tensors of a file", size, "Free some memory, or check where the file is from"
    )
    values = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    held = values.reshape(-1).view(torch.uint8).numpy() if size else np.empty(0, np.uint8)
    for start in range(0, size, _PIECE):
        part = held[start : start + _PIECE]
        if file.readinto(part.data) < len(part):
            raise ValueError("a file that has become shorter")
        digest.update(part.data)
    return values


def add_to_digest(pieces: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    """Yield the pieces, and add each to a digest."""
    for piece in pieces:
        digest.update(piece)
        yield piece


def add_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors with a prefix and a dot before each name."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors whose names start with a prefix and a dot, without it."""
    start = prefix + "."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
