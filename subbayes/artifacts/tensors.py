"""Tensors as the bytes of a safetensors file: written in pieces, read whole or in parts.

The file is read and not mapped, because a mapped file that another process cuts short ends the
interpreter. Its sha256 is computed in the same pass.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import torch
from torch import Tensor

from subbayes.artifacts.facts import canonical_bytes, encode
from subbayes.artifacts.files import fail_artifact, open_file
from subbayes.utils.checks import fail_type
from subbayes.utils.memory import check_memory

Kept = Callable[[str, tuple[int, ...]], Sequence[slice] | None]
"""The increasing ranges of the flat tensor of some name and shape that are kept; None for all."""

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


@dataclass(frozen=True)
class DividedTensor:
    """A tensor of a file of which this process holds a part, and no process all.

    Attributes:
        whole: dtype and shape of the whole, on the device "meta".
        part: what this process holds.
        pieces: makes the numbers of the whole in order, in flat pieces, to write them; None for a
            tensor that was read.
        source: digest of all tensors of the file that it was read from.
    """

    whole: Tensor
    part: Tensor
    pieces: Callable[[], Iterator[Tensor]] | None = None
    source: str = ""

    def to(self, device: torch.device | str) -> DividedTensor:
        """The same tensor with its part on another device."""
        return replace(self, part=self.part.to(device))


Stored = Tensor | DividedTensor


def whole_tensors(tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The tensors by name; of sharded ones only dtype and shape, on the device "meta"."""
    return {k: t.whole if isinstance(t, DividedTensor) else t for k, t in tensors.items()}


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

    Sharded tensors stay as they are.

    Raises:
        InputTypeError: not a dict of tensors or arrays by name.
        ArtifactError: a name, dtype or layout that safetensors cannot hold.
    """
    return {name: _as_tensor(name, value) for name, value in tensors.items()}


def _as_tensor(name: str, value: Any) -> Stored:
    """Check that a tensor is dense and real; its values are not copied."""
    label = f"tensors[{name!r}]"
    if isinstance(value, DividedTensor):
        _as_tensor(name, value.part)
        return value
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


def _layout(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Order the tensors, widest dtype first, so that each is aligned."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _header(tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> bytes:
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
    tensors: Mapping[str, Stored], metadata: dict[str, str] | None = None
) -> Iterator[bytes]:
    """Yield the safetensors file in pieces of at most 8 MiB, to limit memory."""
    whole = whole_tensors(tensors)
    yield _header(whole, metadata)
    for name, _ in _layout(whole):
        tensor = tensors[name]
        if isinstance(tensor, DividedTensor):
            assert tensor.pieces is not None
            for piece in tensor.pieces():
                yield from _bytes_of(piece)
        else:
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


def read_tensors(path: Path, kept: Kept | None = None) -> tuple[dict[str, Stored], str]:
    """Read the tensors of a file, or parts of them, in one pass over all its bytes.

    `kept` says which numbers of each tensor are kept. Returns tensors by name, in the order of
    their numbers, and the sha256 of the file.

    Raises:
        ValueError: not a safetensors file, or one that has become shorter.
        RuntimeError: a shape that torch does not represent.
        InputError: what `kept` raises, or too little memory.
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
        tensors = {name: _read(file, name, entry, kept, digest) for name, entry in ordered.items()}
    sha256 = digest.hexdigest()
    for name, held in tensors.items():
        if isinstance(held, DividedTensor):
            tensors[name] = replace(held, source=sha256)
    return tensors, sha256


def _read(file: BinaryIO, name: str, entry: _Entry, kept: Kept | None, digest: Any) -> Stored:
    """The tensor whose numbers begin here in the file, or the ranges of them that are kept."""
    whole = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device="meta")
    ranges = None if kept is None else kept(name, tuple(entry.shape))
    parts = [slice(0, whole.numel())] if ranges is None else ranges
    size, count = whole.element_size(), sum(part.stop - part.start for part in parts)
    check_memory("path", "the tensors that this process holds", count * size,
                 "Free some memory, or check where the file is from")  # fmt: skip
    values = torch.empty(count, dtype=whole.dtype)
    held = values.view(torch.uint8).numpy() if count else np.empty(0, np.uint8)
    starts = np.array([part.start for part in parts], dtype=np.int64) * size
    stops = np.array([part.stop for part in parts], dtype=np.int64) * size
    places = np.cumsum(stops - starts) - (stops - starts)
    for begin in range(0, whole.numel() * size, _PIECE):
        piece = file.read(min(_PIECE, whole.numel() * size - begin))
        if len(piece) < min(_PIECE, whole.numel() * size - begin):
            raise ValueError("a file that has become shorter")
        digest.update(piece)
        low, high = np.maximum(starts, begin), np.minimum(stops, begin + len(piece))
        for i in np.flatnonzero(low < high):
            place = places[i] + low[i] - starts[i]
            numbers = np.frombuffer(piece, np.uint8)[low[i] - begin : high[i] - begin]
            held[place : place + len(numbers)] = numbers
    return values.reshape(whole.shape) if ranges is None else DividedTensor(whole, values)


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
