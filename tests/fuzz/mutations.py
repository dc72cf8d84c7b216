"""Damaged artifacts, whose digests do not fit, and forged ones, whose digests do.

A damaged artifact has changed bytes: it has to be refused, or to predict as before. A forged one
has one fact, one tensor or one entry of its manifest replaced by another, and new digests: it has
to be refused in one line, or to give a model that predicts without an error.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from subbayes.artifacts.tensors import safetensors_pieces

__all__ = ["Case", "damages", "forgeries"]

CODE = "__import__('os').system('touch fuzz-was-here')"
DEEP = 500
_VALUES: dict[str, str] = {
    "null": "null",
    "true": "true",
    "false": "false",
    "-1": "-1",
    "0": "0",
    "2**70": str(2**70),
    "2**40": str(2**40),
    "-0.5": "-0.5",
    "1e300": "1e300",
    "1e999": "1e999",
    "NaN": "NaN",
    "inf": '{"__float__": "inf"}',
    "nan": '{"__float__": "nan"}',
    "long int": '{"__int__": "0x' + "f" * 400 + '"}',
    "not an int": '{"__int__": "code"}',
    "text": '"x"',
    "empty text": '""',
    "long text": '"' + "x" * 100_000 + '"',
    "surrogate": '"\\ud800"',
    "code": json.dumps(CODE),
    "list": "[]",
    "list of list": "[[]]",
    "list of a large number": f"[{10**9}]",
    "dict": "{}",
    "formula": '"y ~ s(a, df=1000000000)"',
    "deep": "[" * DEEP + "]" * DEEP,
    "deep dicts": '{"a":' * DEEP + "1" + "}" * DEEP,
    "duplicates": '{"a": 1, "a": 2}',
}
_MARK = "\N{BULLET}here\N{BULLET}"
_DAMAGES = ("flip", "flip", "flip", "set", "cut", "truncate", "repeat", "zero", "swap")


@dataclass(frozen=True)
class Case:
    """A changed artifact.

    Attributes:
        label: the change.
        write: writes the artifact to a path.
        damaged: whether the digests do not fit, so that predictions must not change.
    """

    label: str
    write: Callable[[Path], None]
    damaged: bool = False


# --- damages --------------------------------------------------------------------------------------


def damages(original: Path, rng: random.Random) -> Iterator[Case]:
    """Endless random changes of the bytes of an artifact."""
    files = sorted(original.iterdir())
    while True:
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        header = min(len(data), 600) if rng.random() < 0.5 else len(data)
        at = rng.randrange(header) if header else 0
        size = min(len(data) - at, rng.choice((1, 1, 2, 8, 64, 1000)))
        how = rng.choice(
            ("flip", "flip", "flip", "set", "cut", "truncate", "repeat", "zero", "swap")
        )
        part = data[at : at + size]
        match how:
            case "flip":
                data[at] ^= 1 << rng.randrange(8)
            case "set":
                data[at] = rng.randrange(256)
            case "cut":
                del data[at : at + size]
            case "truncate":
                del data[at:]
            case "repeat":
                data[at:at] = part
            case "zero":
                data[at : at + size] = bytes(size)
            case "swap":
                to = rng.randrange(len(data))
                data[at], data[to] = data[to], data[at]

        def write(path: Path, where: str = file.name, changed: bytes = bytes(data)) -> None:
            shutil.copytree(original, path)
            (path / where).write_bytes(changed)

        yield Case(f"{file.suffix} {how} {size} at {at}", write, damaged=True)


# --- forgeries ------------------------------------------------------------------------------------


def forgeries(original: Path) -> Iterator[Case]:
    """All forgeries of an artifact: each fact and each tensor with each hostile value."""
    manifest, tensors = _parts(original)
    for place in _places(manifest):
        for name, text in _VALUES.items():
            yield Case(
                f"{'/'.join(map(str, place))} = {name}",
                lambda path, place=place, text=text: _write(
                    path, tensors, _replaced(manifest, place, text)
                ),
            )
        yield Case(
            f"{'/'.join(map(str, place))} removed",
            lambda path, place=place: _write(path, tensors, _replaced(manifest, place, None)),
        )
    for name, tensor in tensors.items():
        for label, changed in _changed_tensors(tensor):
            others = {key: value for key, value in tensors.items() if key != name}
            given = others if changed is None else others | {name: changed}
            yield Case(
                f"tensor {name} {label}", lambda path, given=given: _write(path, given, manifest)
            )
    more = tensors | {"network.frozen.more": torch.zeros(3), "z9": torch.zeros(2**10)}
    yield Case("more tensors", lambda path: _write(path, more, manifest))


def _parts(original: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The manifest as JSON has it, and the tensors."""
    manifest = json.loads((original / "manifest.json").read_text())
    (file,) = original.glob("tensors-*.safetensors")
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    return manifest, tensors


def _places(manifest: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Paths of all entries; of long lists, the first and the last item."""

    def walk(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if place:
            yield place
        if isinstance(value, dict):
            for key in value:
                yield from walk(value[key], (*place, key))
        if isinstance(value, list):
            for i in sorted({0, len(value) - 1}) if value else ():
                yield from walk(value[i], (*place, i))

    yield from walk(manifest, ())


def _replaced(manifest: dict[str, Any], place: tuple[Any, ...], text: str | None) -> Any:
    """The manifest with one entry replaced by JSON text, or removed; the text of it all."""
    made = json.loads(json.dumps(manifest))
    owner = made
    for key in place[:-1]:
        owner = owner[key]
    if text is None:
        del owner[place[-1]]
        return made, None, place
    owner[place[-1]] = _MARK
    return made, text, place


def _write(path: Path, tensors: dict[str, Tensor], forged: Any) -> None:
    """Write a manifest and tensors with digests that fit, where the manifest leaves that to us."""
    made, text, place = forged if isinstance(forged, tuple) else (forged, None, ("",))
    made = json.loads(json.dumps(made))
    digest = hashlib.sha256(b"".join(safetensors_pieces(tensors))).hexdigest()
    if place[0] != "tensors_sha256":
        made["tensors_sha256"] = digest
    if place[0] != "manifest_sha256":
        made["manifest_sha256"] = _digest(made, text)
    whole = json.dumps(made, ensure_ascii=False)
    if text is not None:
        whole = whole.replace(json.dumps(_MARK, ensure_ascii=False), text)
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(whole, encoding="utf-8")
    named = made["tensor_file"] if place[0] != "tensor_file" else "tensors-" + "0" * 16
    (path / named).with_suffix(".safetensors").write_bytes(b"".join(safetensors_pieces(tensors)))


def _digest(made: dict[str, Any], text: str | None) -> str:
    """The digest of a manifest, as a forger without scruples composes it."""
    content = {key: value for key, value in made.items() if key != "manifest_sha256"}
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    if text is not None:
        if "{" not in text and not text.startswith("[["):
            text = json.dumps(json.loads(text))
        elif text.startswith(('{"__', '{"a":1', "{}")):
            text = json.dumps(json.loads(text), separators=(",", ":"))
        plain = plain.replace(json.dumps(_MARK), text)
    return hashlib.sha256(plain.encode()).hexdigest()


def _changed_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    yield "removed", None
    for dtype in ("float64", "float32", "float16", "int64", "uint8", "bool"):
        if str(tensor.dtype) != f"torch.{dtype}":
            yield f"as {dtype}", tensor.to(getattr(torch, dtype))
    yield "with a dimension more", tensor[None]
    yield "flat", tensor.reshape(-1)
    yield "without numbers", tensor.reshape(-1)[:0]
    yield "without numbers, of a large shape", torch.zeros(0, 2**40, dtype=tensor.dtype)
    if tensor.ndim > 1:
        large = (2**20,) * (tensor.ndim - 1)
        yield "without numbers, in its dimensions", torch.zeros((*large, 0), dtype=tensor.dtype)
    yield "zeros", torch.zeros_like(tensor)
    if tensor.ndim:
        yield "a row more", torch.cat([tensor, tensor[-1:]])
        yield "a row less", tensor[:-1]
        yield "a column less", tensor[..., :-1]
    if tensor.ndim > 1:
        yield "transposed", tensor.transpose(0, -1).contiguous()
    if not tensor.numel():
        return
    numbers = (
        (float("nan"), float("inf"), 1e30, -1.0)
        if tensor.is_floating_point()
        else (True, False)
        if tensor.dtype == torch.bool
        else (torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max, 100)
    )
    for number in numbers:
        for at in (0, -1):
            changed = tensor.clone()
            changed.view(-1)[at] = number
            yield f"[{at}] = {number}", changed
    if not tensor.is_floating_point() and tensor.dtype != torch.bool:
        yield "+ 100", tensor + 100
        yield "reversed", tensor.flip(0) if tensor.ndim else tensor
