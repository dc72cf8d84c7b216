"""Reading the tensors of an artifact, or parts of them, and comparing them with their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor

from subbayes.utils.checks import InputError
from subbayes.utils.files import fail_artifact, open_file, quoted
from subbayes.utils.memory import check_memory
from subbayes.utils.tensor_file import (
    DividedTensor,
    Stored,
    dtype_and_shape,
    dtype_of_code,
    header_and_order,
    read_header,
    read_tensors,
    tensors_digest,
)

__all__ = ["Kept", "fail_of_file", "read_parts", "read_verified"]

Kept = Callable[[str, tuple[int, ...]], Sequence[slice] | None]
"""The increasing ranges of the flat tensor of some name and shape that are kept; None for all."""
_PIECE = 8 * 2**20  # bytes read at a time


def read_verified(
    file: Path, kept: Kept | None, layouts: Mapping[str, Any], sha256: str
) -> dict[str, Stored]:
    """Read tensors or parts of them, whose dtypes, shapes and values have to be those expected.

    Args:
        file: a safetensors file.
        kept: which parts to keep; None for all.
        layouts: the result of `dtype_and_shape` for each tensor.
        sha256: the result of `tensors_digest`.

    Raises:
        ArtifactError: another file.
    """
    try:
        if kept is None:
            tensors: dict[str, Stored] = {**read_tensors(file)}
            digest = tensors_digest(tensors)
        else:
            tensors, digest = read_parts(file, kept)
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError, OverflowError, KeyError) as error:
        fail_of_file(file, "a safetensors file", str(error).splitlines()[0])
    for name in sorted(tensors.keys() | layouts.keys()):
        shown = dtype_and_shape(tensors[name]) if name in tensors else None
        if shown != layouts.get(name):
            fail_of_file(file, f"tensor {name!r} with {layouts.get(name)}", f"{shown}")
    if digest != sha256:
        fail_of_file(
            file, f"tensors with sha256 {sha256[:16]}…", f"{digest[:16]}… (altered content)"
        )
    return tensors


def fail_of_file(file: Path, expected: str, got: str) -> NoReturn:
    """Raise `ArtifactError` for a file of an artifact that is not as it was written."""
    remedy = "The artifact is damaged: restore it from a copy or write it again"
    fail_artifact("path", f"{expected} in {quoted(file)}", got, remedy)


def read_parts(path: Path, kept: Kept) -> tuple[dict[str, Stored], str]:
    """Read the parts of the tensors of a file that are kept, in one pass over all its numbers.

    Args:
        path: the file.
        kept: says which numbers of each tensor are kept.

    Returns:
        Tensors by name, and the digest of all of them, as `tensors_digest` has it.

    Raises:
        ValueError: as for `tensor_file.read_header`, or a file that has become shorter.
        InputError: what `kept` raises, or too little memory.
    """
    with open_file(path) as file:
        entries, _ = read_header(file)
        begin = file.tell()
        wholes = {name: _whole(entry) for name, entry in entries.items()}
        ranges = {name: kept(name, tuple(whole.shape)) for name, whole in wholes.items()}
        found: dict[str, Stored] = {}
        header, order = header_and_order(wholes)
        digest = hashlib.sha256(header)
        for name in order:
            file.seek(begin + entries[name]["data_offsets"][0])
            whole, own = wholes[name], ranges[name]
            parts = [slice(0, whole.numel())] if own is None else own
            values = _read(file, whole, parts, digest)
            found[name] = (
                values.reshape(whole.shape) if own is None else DividedTensor(whole, values)
            )
    source = digest.hexdigest()
    for name, held in found.items():
        if isinstance(held, DividedTensor):
            found[name] = replace(held, source=source)
    return {name: found[name] for name in entries}, source


def _whole(entry: dict[str, Any]) -> Tensor:
    return torch.empty(entry["shape"], dtype=dtype_of_code(entry["dtype"]), device="meta")


def _read(file: BinaryIO, whole: Tensor, parts: Sequence[slice], digest: Any) -> Tensor:
    """The numbers in some ranges of the tensor that begins here in the file."""
    size = whole.element_size()
    count = sum(part.stop - part.start for part in parts)
    check_memory("path", "the part of the tensors that this process holds", count * size,
                 "Start more processes")  # fmt: skip
    values = torch.empty(count, dtype=whole.dtype)
    into = values.view(torch.uint8).numpy() if count else np.empty(0, np.uint8)
    starts = np.array([part.start for part in parts], dtype=np.int64) * size
    stops = np.array([part.stop for part in parts], dtype=np.int64) * size
    places = np.cumsum(stops - starts) - (stops - starts)
    for at, piece in _pieces(file, whole.numel() * size):
        digest.update(piece)
        low, high = np.maximum(starts, at), np.minimum(stops, at + len(piece))
        for i in np.flatnonzero(low < high):
            place = places[i] + low[i] - starts[i]
            some = np.frombuffer(piece, np.uint8)[low[i] - at : high[i] - at]
            into[place : place + len(some)] = some
    return values


def _pieces(file: BinaryIO, count: int) -> Iterator[tuple[int, bytes]]:
    for at in range(0, count, _PIECE):
        piece = file.read(min(_PIECE, count - at))
        if len(piece) < min(_PIECE, count - at):
            raise ValueError("a file that has become shorter")
        yield at, piece
