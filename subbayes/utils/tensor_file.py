"""Tensors as the bytes of a safetensors file in pieces, and their digests."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from subbayes.utils.checks import fail_type
from subbayes.utils.files import fail_artifact, open_file, quoted
from subbayes.utils.memory import available_memory, format_bytes
from subbayes.utils.strict_json import canonical_bytes, encode, is_unicode, parse

__all__ = [
    "DividedTensor",
    "Stored",
    "add_prefix",
    "add_to_digest",
    "as_tensors",
    "dtype_and_shape",
    "dtype_of_code",
    "fingerprint",
    "header_and_order",
    "read_header",
    "read_tensors",
    "safetensors_pieces",
    "strip_prefix",
    "tensors_digest",
    "whole_tensors",
]

_PIECE = 8 * 2**20  # bytes copied, hashed and written at a time
_MOST_HEADER = 100 * 2**20  # bytes, as in the safetensors library
_MOST_DIMENSIONS = 64
_CODES = {  # torch's name -> the safetensors format's
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in _CODES.items()}


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
    """The tensors by name; of those that are divided only dtype and shape, on the device "meta".

    Example:
        >>> whole_tensors({"x": torch.ones(2)})
        {'x': tensor([1., 1.])}
    """
    return {k: t.whole if isinstance(t, DividedTensor) else t for k, t in tensors.items()}


def fingerprint(tensors: Mapping[str, Tensor | np.ndarray], facts: Mapping[str, Any]) -> str:
    """Hash names, dtypes, shapes, values and facts, so that equal content has an equal hash.

    The order of the keys, the device and the memory layout do not matter; a tuple equals a list.

    Args:
        tensors: as for `artifact.write`.
        facts: as for `artifact.write`.

    Returns:
        sha256 as 64 hex digits.

    Raises:
        InputTypeError: as for `artifact.write`.

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


def tensors_digest(tensors: Mapping[str, Stored]) -> str:
    """The sha256 of names, dtypes, shapes and values, as 64 hex digits."""
    digest = hashlib.sha256()
    for piece in safetensors_pieces(tensors):
        digest.update(piece)
    return digest.hexdigest()


def as_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names and values of tensors before writing; arrays become tensors.

    Tensors that are divided among processes stay as they are.

    Raises:
        InputTypeError: not a dict of tensors or arrays by name.
        ArtifactError: a name, dtype or layout that safetensors cannot hold.
    """
    if not isinstance(tensors, Mapping):
        fail_type("tensors", "a dict of tensors by name", tensors)
    return {_check_name(name): _as_tensor(name, value) for name, value in tensors.items()}


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        fail_type("tensors", "names that are text", name)
    if name == "__metadata__" or not is_unicode(name):
        fail_artifact(
            "tensors", "a name the safetensors format allows", repr(name), "Rename the tensor"
        )
    return str.__str__(name)


def _as_tensor(name: str, value: Any) -> Stored:
    """Check that a tensor is dense and real; its values are not copied."""
    label = f"tensors[{name!r}]"
    if isinstance(value, DividedTensor):
        _as_tensor(name, value.part)
        return value
    if isinstance(value, np.ndarray):
        value = _from_numpy(label, value)
    if not isinstance(value, Tensor):
        fail_type(label, "a tensor or an array", value, "Put other values into facts")
    layout = str(value.layout).removeprefix("torch.")
    if layout != "strided" or value.is_meta:
        got = "a tensor without data (device meta)" if value.is_meta else f"layout {layout}"
        fail_artifact(label, "a dense tensor", got, "Convert it first")
    if _dtype(value) not in _CODES:
        fail_artifact(
            label, "a real dtype: " + ", ".join(_CODES), _dtype(value), "Convert it first"
        )
    return value.detach()


def _from_numpy(label: str, array: np.ndarray) -> Tensor:
    native = array.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(np.require(np.asarray(array), native, ["C", "W"]))
    except TypeError:
        fail_artifact(
            label, "a real dtype: " + ", ".join(_CODES), str(array.dtype), "Convert it first"
        )


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
    header, order = header_and_order(whole_tensors(tensors), metadata)
    yield header
    for name in order:
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


def header_and_order(
    tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """The header of the file of some tensors, and the order in which their numbers follow it."""
    return _header(tensors, metadata), [name for name, _ in _layout(tensors)]


def read_header(file: BinaryIO | BytesIO) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the header of an open safetensors file, which then stands at its numbers.

    Returns:
        The checked entries of the tensors by name, in the order of their numbers, and the metadata.

    Raises:
        ValueError: not a safetensors file, or dtypes, shapes or offsets that do not fit it.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _MOST_HEADER):
        raise ValueError("no header of a safetensors file")
    entries = parse(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError("a header that is no JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("metadata that are no texts by name")
    for name, entry in entries.items():
        _check_entry(name, entry)
    ordered = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
    at = 0
    for name, entry in ordered.items():
        if entry["data_offsets"][0] != at:
            raise ValueError(f"tensor {name[:60]!r} does not begin where the one before it ends")
        at = entry["data_offsets"][1]
    if 8 + length + at != size:
        raise ValueError(f"{size} bytes instead of {8 + length + at}")
    return ordered, metadata


def _check_entry(name: str, entry: Any) -> None:
    """Check the entry of a tensor in a header: its dtype, shape and number of bytes."""
    label = f"tensor {name[:60]!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{label} without dtype, shape and offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"{label} of the unknown dtype {str(code)[:60]!r}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{label} with a shape other than at most {_MOST_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{label} without two offsets")
    if offsets[1] - offsets[0] != math.prod(shape) * _DTYPES[code].itemsize:
        raise ValueError(f"{label} with numbers of another size than its shape")


def dtype_of_code(code: str) -> torch.dtype:
    """The dtype that a checked header calls by a code.

    Example:
        >>> dtype_of_code("F32")
        torch.float32
    """
    return _DTYPES[code]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into memory of its own.

    The file is not mapped, because a mapped file that another process cuts short ends the
    interpreter. Its bytes and the tensors are in memory together for a moment.

    Raises:
        ValueError: as for `read_header`, or a file that has become shorter.
        RuntimeError: a shape that torch does not represent.
        ArtifactError: too little memory.
    """
    with open_file(path) as file:
        read_header(file)  # before memory is taken
        size, free = os.fstat(file.fileno()).st_size, available_memory()
        if free is not None and 2 * size > free:  # a file with holes may claim any size
            _fail_of_memory(path, f"{format_bytes(free)} of free memory, twice", size)
        file.seek(0)
        try:
            data = file.read(size + 1)
        except MemoryError:
            _fail_of_memory(path, "memory, twice", size)
    entries, _ = read_header(BytesIO(data))  # of what was read, which may be another file by now
    try:
        tensors = load(data)  # in an order of its own at each call
        del data
        # copies are aligned as other tensors are; products of less aligned ones have other bits
        return {name: tensors.pop(name).clone() for name in entries}
    except (SafetensorError, KeyError) as error:
        raise ValueError(str(error)) from None
    except MemoryError:
        _fail_of_memory(path, "memory, twice", size)


def _fail_of_memory(path: Path, where: str, size: int) -> NoReturn:
    expected, got = f"tensors that fit into {where}", f"{format_bytes(size)} in {quoted(path)}"
    fail_artifact("path", expected, got, "Free some memory, or check where the file is from")


def add_to_digest(pieces: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    """Yield the pieces, and add each to a digest."""
    for piece in pieces:
        digest.update(piece)
        yield piece


def dtype_and_shape(tensor: Stored) -> dict[str, Any]:
    """Dtype and shape, as a manifest lists them."""
    tensor = tensor.whole if isinstance(tensor, DividedTensor) else tensor
    return {"dtype": _dtype(tensor), "shape": list(tensor.shape)}


def add_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors with a prefix and a dot before each name.

    Example:
        >>> add_prefix("state", {"a": 1})
        {'state.a': 1}
    """
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors whose names start with a prefix and a dot, without it.

    Example:
        >>> strip_prefix("state", {"state.a": 1, "z": 2})
        {'a': 1}
    """
    start = prefix + "."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
