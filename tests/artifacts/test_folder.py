"""Round trips of artifacts, interrupted and concurrent writers, full disks, and damaged files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import stat
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from subbayes.artifacts import folder
from subbayes.artifacts import tensors as tensors_module
from subbayes.artifacts.files import (
    ArtifactError,
    atomic_write_bytes,
    atomic_write_text,
    check_writable,
    replace_file,
)
from subbayes.artifacts.folder import delete, is_artifact, manifest_digest, read, write
from subbayes.artifacts.saving import read_checkpoint, rebuild
from subbayes.artifacts.tensors import fingerprint, read_tensors
from subbayes.utils.checks import InputError, InputTypeError

resource = pytest.importorskip("resource", reason="forks and limits need a POSIX system")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
STEPS = ["open", "write", "fsync", "replace", "unlink"]  # system calls of writing


def content(value: int, size: int = 5) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and facts with the same number, so that mixtures are detected."""
    tensors = {"a": torch.full((size,), float(value)), "b": torch.full((2, 3), value)}
    return tensors, {"value": value, "text": "x" * (value % 7)}


def value_at(path: Path) -> int:
    """Read what `content` wrote, and check that it is consistent."""
    tensors, facts, _ = read(path, "test")
    assert tensors["a"].unique().tolist() == [facts["value"]]
    assert tensors["b"].unique().tolist() == [facts["value"]]
    assert facts["text"] == "x" * (facts["value"] % 7)
    return int(facts["value"])


def put(path: Path, value: int, size: int = 5) -> None:
    tensors, meta = content(value, size)
    write(path, "test", tensors, meta, overwrite=True)


def listing(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def assert_tidy(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    assert listing(path) == ["manifest.json", tensor_file_of(manifest)]


def tensor_file_of(manifest: dict[str, Any]) -> str:
    return str(manifest["tensor_file"])


def assert_next_write_is_tidy(path: Path) -> None:
    """The next writer replaces the artifact, and removes the file of the one before."""
    put(path, 3)
    before = set(listing(path))
    put(path, 4)
    assert value_at(path) == 4
    assert len(before ^ set(listing(path))) == 2


def one_line(pattern: str, path: Path | None = None) -> Any:
    """Expect an `ArtifactError` of one line with this pattern, and the path in it."""
    shown = re.escape(repr(str(path))) if path is not None else ""
    return pytest.raises(ArtifactError, match=rf"\A(?=.*{shown})[^\n]*{pattern}[^\n]*\.\Z")


# --- what goes in comes out ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 3, 2)], ids=str)
def test_round_trip_of_every_dtype_and_shape(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
    write(tmp_path / "a", "test", {"x": tensor}, {})
    back = read(tmp_path / "a")[0]["x"]
    assert back.dtype == dtype
    assert back.shape == shape
    assert torch.equal(back, tensor)


def test_safetensors_library_reads_the_tensor_file(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "expanded": torch.tensor([1, 2]).expand(3, 2),
        "strided": torch.arange(10, dtype=torch.float64)[::3],
        "flag": torch.tensor(True),
        "half": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "ünï/cödé": torch.tensor([math.nan, math.inf, -0.0]),
    }
    write(tmp_path, "test", tensors, {})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    file = tmp_path / tensor_file_of(manifest)
    assert manifest["tensors_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    by_library, by_us = load_file(file), read(tmp_path)[0]
    assert by_library.keys() == by_us.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for back in (by_library[name], by_us[name]):
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert bits(back).equal(bits(tensor))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def test_shared_memory_parameters_and_views_are_written(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    weight = torch.nn.Parameter(base.clone())
    tensors = {
        "all": base,
        "tail": base[3:],
        "again": base,
        "weight": weight,
        "neg": torch._neg_view(base),
    }
    write(tmp_path, "test", tensors, {})
    back = read(tmp_path)[0]
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor.detach())
    assert not back["weight"].requires_grad
    back["all"] += 1  # tensors do not share memory
    assert torch.equal(back["tail"], base[3:])
    assert torch.equal(read(tmp_path)[0]["all"], base)


def test_arrays_of_any_layout_are_written_as_tensors(tmp_path: Path) -> None:
    frozen = np.arange(4.0)
    frozen.setflags(write=False)
    arrays = {
        "reversed": np.arange(5)[::-1],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "swapped": np.arange(3, dtype=">f8"),
        "frozen": frozen,
        "scalar": np.array(2.5),
        "flags": np.array([True, False]),
    }
    write(tmp_path, "test", arrays, {})
    back = read(tmp_path)[0]
    for name, value in arrays.items():
        np.testing.assert_array_equal(back[name].numpy(), value)


def test_artifact_without_tensors(tmp_path: Path) -> None:
    write(tmp_path, "test", {}, {"only": "meta"})
    assert read(tmp_path, "test") == ({}, {"only": "meta"}, "test")
    assert_tidy(tmp_path)


def test_tensor_larger_than_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "_PIECE", 1000)
    tensor = torch.arange(12345, dtype=torch.int32)
    write(tmp_path, "test", {"x": tensor, "y": tensor[:250]}, {})
    assert torch.equal(read(tmp_path)[0]["x"], tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    write(tmp_path, "test", {"x": tensor.cuda()}, {})
    back = read(tmp_path, device="cuda")[0]["x"]
    assert back.is_cuda
    assert torch.equal(back.cpu(), tensor)
    assert fingerprint({"x": tensor.cuda()}, {}) == fingerprint({"x": tensor}, {})


LEAVES = (
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(-(2**200), 2**200)
    | st.sampled_from([2**63, -(2**63), math.nan, -0.0, "__float__"])
)  # fmt: skip
KEYS = st.text().filter(lambda key: key != "__float__")
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4)
)


def same(x: Any, y: Any) -> bool:
    """Equal in value, type and order of keys; NaN equals itself."""
    if type(x) is not type(y):
        return False
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[k], y[k]) for k in x)
    if isinstance(x, list):
        return len(x) == len(y) and all(map(same, x, y))
    return repr(x) == repr(y) if isinstance(x, float) else x == y


@given(meta=st.dictionaries(KEYS, VALUES, max_size=4))
@settings(max_examples=40, deadline=None)
def test_round_trip_of_facts(
    tmp_path_factory: pytest.TempPathFactory, meta: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "metadata"
    write(path, "test", {}, meta, overwrite=True)
    assert same(read(path)[1], meta)

    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((path / "manifest.json").read_text(), parse_constant=strict)


def test_round_trip_of_long_integers(tmp_path: Path) -> None:
    huge = 2**4096 - 1
    write(tmp_path, "test", {}, {"huge": huge, "negative": -huge})
    assert read(tmp_path)[1] == {"huge": huge, "negative": -huge}


def test_facts_of_numpy_and_torch_become_plain(tmp_path: Path) -> None:
    state = np.random.default_rng(1).bit_generator.state
    meta = {
        "state": state,
        "scalars": (
            np.float32(0.5),
            np.int16(-3),
            np.bool_(True),
            np.str_("s"),
            np.uint64(2**64 - 1),
        ),
        "array": np.array([[1, 2], [3, 4]]),
        "strange": np.array([np.nan, np.inf]),
        "tensor": torch.tensor([1.5]),
        "seed": signal.SIGINT,  # an IntEnum
    }
    write(tmp_path, "test", {}, meta)
    back = read(tmp_path)[1]
    assert back["state"] == state
    assert state["state"]["state"] > 2**64
    restored = np.random.default_rng()
    restored.bit_generator.state = back["state"]
    assert restored.random() == np.random.default_rng(1).random()
    assert same(back["scalars"], [0.5, -3, True, "s", 2**64 - 1])
    assert same(back["array"], [[1, 2], [3, 4]])
    assert same(back["strange"], [math.nan, math.inf])
    assert same(back["tensor"], [1.5])
    assert same(back["seed"], 2)


@pytest.mark.parametrize(
    ("meta", "error", "pattern"),
    [
        ({"a": [1, {2}]}, InputTypeError, r"facts\['a'\]\[1\]: expected text, numbers.* got set\."),
        ({"a": {"b": 1j}}, InputTypeError, r"facts\['a'\]\['b'\]: expected .* got complex\."),
        ({"a": b"x"}, InputTypeError, r"facts\['a'\]: expected .* got bytes\."),
        (
            {"a": np.array([1 + 2j])},
            InputTypeError,
            r"facts\['a'\]\[0\]: expected .* got complex\.",
        ),
        ({"a": {1: 2}}, InputTypeError, r"facts\['a'\]: expected keys that are text, got int\."),
    ],
)
def test_facts_that_cannot_be_represented_raise(
    tmp_path: Path, meta: dict[str, Any], error: type[Exception], pattern: str
) -> None:
    with pytest.raises(error, match=pattern):
        write(tmp_path / "a", "test", {}, meta)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("tensor", "pattern"),
    [
        (torch.zeros(2, dtype=torch.complex64), r"tensors\['x'\]: .* real numbers.*complex64\."),
        (torch.eye(2).to_sparse(), r"tensors\['x'\]: expected a dense tensor"),
    ],
    ids=["complex", "sparse"],
)
def test_tensors_that_cannot_be_represented_raise(
    tmp_path: Path, tensor: Any, pattern: str
) -> None:
    with pytest.raises(InputError, match=pattern):
        write(tmp_path / "a", "test", {"x": tensor}, {})
    assert not (tmp_path / "a").exists()


def test_single_numbers_of_any_stride_are_written(tmp_path: Path) -> None:
    """They are contiguous for torch, whose `view` as bytes refuses them."""
    one = torch.arange(6.0).reshape(2, 3)[:1, 1]
    assert one.is_contiguous()
    assert one.stride() == (3,)
    write(tmp_path / "a", "test", {"x": one}, {})
    assert read(tmp_path / "a").tensors["x"].tolist() == [1.0]


def test_fingerprint_depends_on_content_only() -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.arange(3)
    reference = fingerprint({"x": x, "y": y}, {"a": 1, "b": (1.5, None)})
    assert re.fullmatch("[0-9a-f]{64}", reference)
    transposed = x.T.contiguous().T
    assert fingerprint({"y": y, "x": transposed}, {"b": [1.5, None], "a": np.int8(1)}) == reference
    assert fingerprint({"x": x.numpy(), "y": y}, {"a": 1, "b": [1.5, None]}) == reference
    others = [
        fingerprint({"x": x.T, "y": y}, {"a": 1, "b": [1.5, None]}),
        fingerprint({"x": x.reshape(3, 2), "y": y}, {"a": 1, "b": [1.5, None]}),
        fingerprint({"x": x.double(), "y": y}, {"a": 1, "b": [1.5, None]}),
        fingerprint({"z": x, "y": y}, {"a": 1, "b": [1.5, None]}),
        fingerprint({"x": x, "y": y + 1}, {"a": 1, "b": [1.5, None]}),
        fingerprint({"x": x}, {"a": 1, "b": [1.5, None]}),
        fingerprint({"x": x, "y": y}, {"a": 1.0, "b": [1.5, None]}),
        fingerprint({"x": x, "y": y}, {"a": 1, "b": [1.5]}),
    ]
    assert len({reference, *others}) == 9


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    put(tmp_path / "a", 3)
    put(tmp_path / "b", 3)
    manifests = [json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("a", "b")]
    names = [one.pop("tensor_file") for one in manifests]
    digests = [one.pop("manifest_sha256") for one in manifests]
    assert names[0] != names[1]
    assert digests[0] != digests[1]
    assert manifests[0] == manifests[1]
    files = [(tmp_path / n / name).read_bytes() for n, name in zip("ab", names, strict=True)]
    assert files[0] == files[1]


# --- where it may be written --------------------------------------------------------------------


def test_an_artifact_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    write(path, "test", *content(1))
    with one_line("expected a new or an empty folder, .* Pass overwrite=True", path):
        write(path, "test", *content(2))
    assert value_at(path) == 1
    write(path, "test", *content(2), overwrite=True)
    assert value_at(path) == 2
    assert_tidy(path)


def test_other_files_in_the_folder_are_kept(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "tensors-old.safetensors").write_text("mine too")
    put(tmp_path, 2)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "tensors-old.safetensors").read_text() == "mine too"
    assert len(listing(tmp_path)) == 4


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "strangers",
    [{"thesis.tex": "…"}, {"manifest.json": '{"name": "app"}'}, {"manifest.json": "{"},
     {"manifest.json": "[1]"}, {"tensors-0123456789abcdef.safetensors": "", "x.csv": ""}],
    ids=lambda strangers: "+".join(strangers),
)  # fmt: skip
def test_a_folder_with_other_files_is_refused(
    tmp_path: Path, strangers: dict[str, str], overwrite: bool
) -> None:
    for name, text in strangers.items():
        (tmp_path / name).write_text(text)
    with one_line("expected a new folder, an empty one or an artifact, .* Choose", tmp_path):
        write(tmp_path, "test", *content(1), overwrite=overwrite)
    assert {name: (tmp_path / name).read_text() for name in listing(tmp_path)} == strangers


def test_a_path_that_is_or_lies_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path, message in (
        (file, "path: expected a path to write to, got File exists"),
        (file / "below", "path: expected a path to write to"),
    ):
        with one_line(message, path):
            write(path, "test", *content(1), overwrite=True)
    assert file.read_text() == "mine"


def test_a_tensor_file_without_a_manifest_is_left_alone(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "manifest.json").unlink()
    write(tmp_path, "test", *content(2))
    assert value_at(tmp_path) == 2
    assert len(listing(tmp_path)) == 3
    assert_next_write_is_tidy(tmp_path)


def in_child(task: Callable[[], object]) -> str:
    """Run `task` in a forked process and give what it raised as text; empty if nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            task()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


def without_rights(task: Callable[[], object]) -> Callable[[], object]:
    """Drop root permissions, which make every folder writable."""

    def run() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        task()

    return run


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a", 1)
    (tmp_path / "table.csv").write_text("old")
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # parent folders may be unreadable
    modes = {path: path.stat().st_mode for path in (tmp_path / "a", tmp_path)}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222 | 0o555)
    tasks = [
        lambda: put(Path("a"), 2),
        lambda: put(Path("new"), 2),
        lambda: atomic_write_text("table.csv", "new"),
        lambda: atomic_write_text("new.csv", "new"),
    ]
    messages = [in_child(without_rights(task)) for task in tasks]
    for path, mode in modes.items():
        path.chmod(mode)
    for text in messages:
        assert text.startswith("ArtifactError: path: expected a path to write to, got Perm")
    assert value_at(tmp_path / "a") == 1
    assert_tidy(tmp_path / "a")
    assert listing(tmp_path) == ["a", "table.csv"]


# --- what is wrong is said ----------------------------------------------------------------------


def edit(path: Path, change: Callable[[dict[str, Any]], object], seal: bool = False) -> None:
    """Change a manifest; with `seal`, its digest too."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    if seal:
        manifest["manifest_sha256"] = manifest_digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def tensor_file(path: Path) -> Path:
    return next(path.glob("tensors-*.safetensors"))


def truncate(path: Path) -> None:
    os.truncate(tensor_file(path), tensor_file(path).stat().st_size - 1)


def alter(path: Path) -> None:
    data = bytearray(tensor_file(path).read_bytes())
    data[-1] ^= 1
    tensor_file(path).write_bytes(data)


def sealed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda path: edit(path, change, seal=True)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: (path / "manifest.json").write_text(content)


M = "expected the manifest of an artifact in .*"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "expected an artifact, .* which does not exist.* Check"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "has no manifest.json"),
    "not JSON": (text("{"), M + "damaged: write"),
    "not text": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"), M),
    "deep JSON": (text("[" * 10**5), M),
    "infinite": (text('{"a": 1e999}'), M + "out of range"),
    "NaN": (text('{"a": NaN}'), M + "malformed"),
    "a list": (text("[]"), "an artifact of subbayes, got another manifest"),
    "foreign": (lambda p: edit(p, lambda m: m.update(format="x"), True), "an artifact of subbayes"),
    "newer": (lambda p: edit(p, lambda m: m.update(format_version=99, library_version="7.0")),
              "format version 4, got version 99 .* subbayes 7.0. Upgrade subbayes"),
    "older": (lambda p: edit(p, lambda m: m.update(format_version=1)),
              "format version 4, got version 1 .* Fit and save it again"),
    "no version": (lambda p: edit(p, lambda m: m.update(format_version="1")), M + "format_version"),
    "no field": (sealed(lambda m: m.pop("tensors_sha256")), M + "tensors_sha256"),
    "odd field": (sealed(lambda m: m.update(facts=3)), M + "got `int` - at `..facts"),
    "surrogate": (sealed(lambda m: m["facts"].update(x="\ud800")), M),
    "surrogate key": (sealed(lambda m: m["facts"].update({"\ud800": 1})), M),
    "odd float": (sealed(lambda m: m["facts"].update(x={"__float__": "1"})), "facts that subbayes"),
    "facts altered": (lambda p: edit(p, lambda m: m["facts"].update(value=9)), M + "altered"),
    "kind altered": (lambda p: edit(p, lambda m: m.update(kind="other")), M + "altered content"),
    "file missing": (lambda p: tensor_file(p).unlink(), "expected the tensor file .* no such file"),
    "file truncated": (truncate, "expected a safetensors file in .* damaged"),
    "file altered": (alter, "expected tensors with sha256 .*altered content"),
    "file elsewhere": (sealed(lambda m: m.update(tensor_file="../outside")), M + "regex"),
    "another digest": (sealed(lambda m: m.update(tensors_sha256="../outside")), M + "regex"),
    "not safetensors": (lambda p: tensor_file(p).write_bytes(b"rubbish"), "a safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_errors_of_damaged_artifacts_name_the_path(tmp_path: Path, case: str) -> None:
    path = tmp_path / "a"
    put(path, 1)
    harm, pattern = DAMAGE[case]
    harm(path)
    with pytest.raises(ArtifactError, match=rf"\Apath: [^\n]*{pattern}[^\n]*\.\Z") as caught:
        read(path, "test")
    assert str(path) in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_file_or_another_kind_of_artifact_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    with one_line("of kind 'draws', got kind 'test' at .* right artifact", tmp_path / "a"):
        read(tmp_path / "a", "draws")
    file = tmp_path / "a" / "manifest.json"
    with one_line("manifest.json., a file. Pass the folder of the artifact", file):
        read(file)
    with pytest.raises(InputError, match="device: expected a device of this machine, got 'cuda:99"):
        read(tmp_path / "a", device="cuda:99")


def test_artifact_without_permission_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a", 1)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").chmod(0)
    text = in_child(without_rights(lambda: read("a")))
    (tmp_path / "a").chmod(0o755)
    assert re.match("ArtifactError: path: expected a path to read, got Perm.* 'a'", text)


def test_is_artifact_reads_only_the_manifest(tmp_path: Path) -> None:
    assert not is_artifact(tmp_path)
    put(tmp_path, 1)
    assert is_artifact(tmp_path)
    assert not is_artifact(tmp_path / "manifest.json")
    alter(tmp_path)
    assert is_artifact(tmp_path)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    put(tmp_path, 4)
    assert value_at(tmp_path) == 4


# --- a full disk --------------------------------------------------------------------------------


class Faults:
    """Counts the system calls of writing, and calls a function at the n-th."""

    def __init__(self, at: int = 0, happen: Callable[[], object] = int, after: bool = False):
        self.at, self.happen, self.after, self.calls = at, happen, after, list[str]()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Faults:
        for name in STEPS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))
        return self

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            mine = len(self.calls) == self.at
            if mine and not self.after:
                self.happen()
            try:
                return call(*args, **kwargs)
            finally:
                if mine and self.after:
                    self.happen()

        return wrapped

    @property
    def hit(self) -> str:
        return self.calls[self.at - 1] if self.at <= len(self.calls) else ""


def raising(error: BaseException) -> Callable[[], None]:
    def happen() -> None:
        raise error

    return happen


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


SITUATIONS = {"new": None, "replaced": 1, "same again": 2}


def arrange(path: Path, earlier: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if earlier is not None:
        put(path, earlier)


def moments(path: Path, earlier: int | None) -> range:
    """Number the system calls that writing 2 takes in this situation."""
    arrange(path, earlier)
    with pytest.MonkeyPatch.context() as monkeypatch:
        faults = Faults().install(monkeypatch)
        put(path, 2)
    assert set(faults.calls) <= set(STEPS)
    assert faults.calls.count("replace") == 1
    return range(1, len(faults.calls) + 1)


def value_or_none(path: Path) -> int | None:
    return value_at(path) if is_artifact(path) else None


@pytest.mark.parametrize("earlier", SITUATIONS.values(), ids=SITUATIONS)
def test_full_disk_at_any_call_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int | None
) -> None:
    path = tmp_path / "made" / "here"
    for at in moments(path, earlier):
        arrange(path, earlier)
        raised = ""
        with monkeypatch.context() as patch:
            faults = Faults(at, raising(no_space())).install(patch)
            try:
                put(path, 2)
            except ArtifactError as error:
                raised = str(error)
        if raised:
            assert re.match(r"path: expected free disk space, got No space left on device", raised)
            assert str(path) in raised
        if faults.hit == "write":
            assert raised
        assert value_or_none(path) in ({earlier, 2} if raised else {2})
        if faults.hit in ("write", "replace") and is_artifact(path):
            assert_tidy(path)
        assert_next_write_is_tidy(path)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("earlier", SITUATIONS.values(), ids=SITUATIONS)
def test_interrupt_at_any_call_leaves_old_or_new(
    tmp_path: Path, earlier: int | None, after: bool
) -> None:
    path = tmp_path / "a"
    for at in moments(path, earlier):
        arrange(path, earlier)
        with pytest.MonkeyPatch.context() as patch:
            Faults(at, raising(KeyboardInterrupt()), after).install(patch)
            with pytest.raises(KeyboardInterrupt):
                put(path, 2)
        assert value_or_none(path) in {earlier, 2}
        assert_next_write_is_tidy(path)


def test_limit_of_file_sizes(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    (tmp_path / "table.csv").write_text("old")

    def limited(task: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
            task()

        return run

    for task in (
        lambda: put(tmp_path / "a", 2, size=10_000),
        lambda: put(tmp_path / "new", 2, size=10_000),
        lambda: atomic_write_bytes(tmp_path / "table.csv", b"x" * 10_000),
        lambda: atomic_write_bytes(tmp_path / "new.csv", b"x" * 10_000),
    ):
        text = in_child(limited(task))
        assert re.match("ArtifactError: path: expected a path to write to, got File", text)
    assert value_at(tmp_path / "a") == 1
    assert_tidy(tmp_path / "a")
    assert listing(tmp_path) == ["a", "table.csv"]
    assert (tmp_path / "table.csv").read_text() == "old"


# --- killed, and more than one at a time --------------------------------------------------------


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.few(1)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("earlier", SITUATIONS.values(), ids=SITUATIONS)
def test_kill_at_any_call_leaves_old_or_new(
    tmp_path: Path, earlier: int | None, after: bool
) -> None:
    path = tmp_path / "a"
    seen = set()
    for at in moments(path, earlier):
        arrange(path, earlier)

        def task(at: int = at) -> None:
            Faults(at, kill_self, after).install(pytest.MonkeyPatch())
            put(path, 2)
            raise AssertionError("survived")

        assert in_child(task) == ""
        seen.add(value_or_none(path))
        assert_next_write_is_tidy(path)
    assert seen == {earlier, 2}


def test_a_first_write_that_was_killed_is_repeated_without_overwriting(tmp_path: Path) -> None:
    path = tmp_path / "a"
    unfinished = 0
    for at in moments(path, None):
        arrange(path, None)

        def task(at: int = at) -> None:
            Faults(at, kill_self, False).install(pytest.MonkeyPatch())
            put(path, 2)

        assert in_child(task) == ""
        if value_or_none(path) == 2:
            with one_line("Pass overwrite=True", path):
                write(path, "test", *content(3))
            continue
        unfinished += any(name.startswith("tensors-") for name in os.listdir(path))
        folder.check_destination(path)
        write(path, "test", *content(3))
        assert value_at(path) == 3
        assert_next_write_is_tidy(path)
    assert unfinished


def test_what_a_killed_check_of_a_folder_left_does_not_occupy_it(tmp_path: Path) -> None:
    (tmp_path / ".check.0123456789abcdef.subbayes-tmp").write_bytes(b"")
    write(tmp_path, "test", *content(1))
    assert value_at(tmp_path) == 1
    assert_next_write_is_tidy(tmp_path)


def write_forever(path: Path, start: int) -> None:
    value = start
    while True:
        value += 1
        put(path, value, size=1 + value % 5 * 30_000)


def fork_forever(path: Path, start: int) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            write_forever(path, start)
        finally:
            os._exit(1)
    return child


@pytest.mark.slow
def test_kills_at_random_moments_leave_a_readable_artifact(tmp_path: Path) -> None:
    chance = random.Random(0)
    path, start = tmp_path / "a", time.perf_counter()
    put(path, 0, size=90_000)
    duration = time.perf_counter() - start
    values = [0]
    for _ in range(30):
        child = fork_forever(path, values[-1])
        time.sleep(0.005 + 4 * duration * chance.random())
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        values.append(value_at(path))
    assert values == sorted(values)
    assert values[-1] > 0
    assert_next_write_is_tidy(path)


def test_concurrent_reader_sees_a_consistent_state(tmp_path: Path) -> None:
    path, values = tmp_path / "a", [0]
    put(path, 0)
    child = fork_forever(path, 0)
    try:
        while values[-1] < 60 and len(values) < 5000:
            values.append(value_at(path))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert values == sorted(values)
    assert values[-1] > 0


@pytest.mark.parametrize(
    ("module", "stage"), [(folder, "_verified_manifest"), (folder, "_check_version")]
)
def test_artifact_replaced_during_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, stage: str
) -> None:
    put(tmp_path, 1)
    check, calls = getattr(module, stage), list[int]()

    def check_then_replace(*args: Any) -> Any:
        result = check(*args)
        calls.append(1)
        if len(calls) == 1:
            put(tmp_path, 2)
        return result

    monkeypatch.setattr(module, stage, check_then_replace)
    assert value_at(tmp_path) == 2
    assert len(calls) > 1


def test_file_cut_short_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1, size=100_000)
    real = tensors_module._read

    def after_truncating(*args: Any) -> Any:
        os.truncate(tensor_file(tmp_path), 4096)
        return real(*args)

    def task() -> None:  # a mapped file would end the process
        monkeypatch.setattr(tensors_module, "_read", after_truncating)
        read(tmp_path)

    assert "damaged" in in_child(task)


def entry(dtype: Any, shape: Any, stop: Any, start: Any = 0) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}}


@pytest.mark.parametrize(
    ("header", "size", "pattern"),
    [
        (entry("C64", [1], 8), 8, "unknown dtype 'C64'"),
        (entry("F6_E2M3", [4], 3), 3, "unknown dtype 'F6_E2M3'"),
        (entry([], [4], 4), 4, "at `..*dtype"),
        (entry("U8", [2**63, 0], 0), 0, "at `..*shape"),
        (entry("U8", [1] * 65, 1), 1, "at `..*shape"),
        (entry("U8", [-1], 0), 0, "at `..*shape"),
        (entry("F32", [2], 4), 4, "another size"),
        (entry("U8", [4], True), 4, "at `..*data_offsets"),
        (entry("U8", [4], 8, 4), 8, "do not begin"),
        (entry("U8", [4], 4), 5, "bytes instead of"),
        ({"x": 3}, 0, "a header with"),
        ({"__metadata__": {"a": 1}}, 0, "a header with"),
        ([], 0, "a header with"),
    ],
)
def test_headers_that_do_not_fit_their_file(
    tmp_path: Path, header: Any, size: int, pattern: str
) -> None:
    put(tmp_path, 1)
    head = json.dumps(header).encode()
    tensor_file(tmp_path).write_bytes(struct.pack("<Q", len(head)) + head + bytes(size))
    with one_line(pattern):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["estimator", "semi-structured-model", "data-frame-model"])
def test_content_that_does_not_fit_raises_one_line(kind: str) -> None:
    with one_line(
        f"path: expected content of the kind {kind}, got 'here', which does not fit: Vali"
    ):
        rebuild(kind, {}, {}, {}, "here")
    with one_line(f"path: expected content of the kind {kind}, got content that does not fit: Val"):
        rebuild(kind, {}, {}, {})


def test_tensors_do_not_depend_on_the_file_after_reading(tmp_path: Path) -> None:
    put(tmp_path, 1, size=100_000)

    def task() -> None:
        tensors = read(tmp_path)[0]
        os.truncate(tensor_file(tmp_path), 0)
        raise ValueError(tensors["a"].sum().item())  # mapped memory would crash the process

    assert in_child(task) == "ValueError: 100000.0"


def test_concurrent_threads_do_not_mix_artifacts(tmp_path: Path) -> None:
    path, faults = tmp_path / "a", list[BaseException]()
    put(path, 0)

    def work(writer: int) -> None:
        try:
            for step in range(8):
                put(path, 100 * writer + step, size=1000 * writer)
                value_at(path)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert value_at(path) in {107, 207, 307, 407}
    assert_next_write_is_tidy(path)


def test_concurrent_processes_do_not_mix_artifacts(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def work(writer: int) -> None:
        for step in range(15):
            put(path, 100 * writer + step, size=1000 * writer)
            value_at(path)

    children = []
    for writer in (1, 2, 3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(writer)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert value_at(path) in {114, 214, 314}
    assert_next_write_is_tidy(path)


def test_a_held_lock_on_the_folder_delays_no_writer(tmp_path: Path) -> None:
    """As of `flock FOLDER subbayes predict --out FOLDER/p.csv`, or of a backup."""
    put(tmp_path, 1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        def task() -> None:
            put(tmp_path, 2)
            value_at(tmp_path)
            atomic_write_text(tmp_path / "p.csv", "new")
            delete(tmp_path, "test")
            raise ValueError("done")

        assert in_child(task) == "ValueError: done"  # which an alarm would end
    finally:
        os.close(descriptor)
    assert (tmp_path / "p.csv").read_text() == "new"


def test_two_writers_of_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"

    def work(letter: str) -> None:
        for _ in range(50):
            replace_file(file, (letter.encode() * 1000 for _ in range(20)))

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_text() in ("a" * 20_000, "b" * 20_000)
    assert listing(tmp_path) == ["p.csv"]


# --- single files -------------------------------------------------------------------------------


def test_atomic_write_text_creates_the_folder_and_keeps_the_mode(tmp_path: Path) -> None:
    file = tmp_path / "new" / "table.csv"
    atomic_write_text(file, "größe\r\n1\n")
    assert file.read_bytes() == "größe\r\n1\n".encode()
    file.chmod(0o640)
    atomic_write_text(str(file), "")
    assert file.read_bytes() == b""
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert listing(file.parent) == ["table.csv"]


def test_new_files_have_the_default_mode(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    atomic_write_text(tmp_path / "b", "")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_atomic_write_follows_links(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_atomic_write_does_not_replace_devices(tmp_path: Path) -> None:
    with one_line("expected free disk space, got No space left on device", Path("/dev/full")):
        atomic_write_text("/dev/full", "text")
    atomic_write_text("/dev/null", "text")
    for device in ("/dev/full", "/dev/null"):
        assert stat.S_ISCHR(os.stat(device).st_mode)
    (tmp_path / "link").symlink_to("/dev/full")
    with one_line("expected free disk space"):
        atomic_write_bytes(tmp_path / "link", b"text")
    assert listing(tmp_path) == ["link"]


def test_full_disk_at_any_call_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hit = []
    for at in range(1, 5):
        (tmp_path / "a").write_text("old")
        with monkeypatch.context() as patch:
            faults = Faults(at, raising(no_space())).install(patch)
            with one_line("expected free disk space", tmp_path / "a"):
                atomic_write_text(tmp_path / "a", "new")
        hit.append(faults.hit)
        assert (tmp_path / "a").read_text() == "old"
        assert listing(tmp_path) == ["a"]
    assert hit == STEPS[:4]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def task() -> None:
        Faults(3, kill_self).install(pytest.MonkeyPatch())  # between write and rename
        atomic_write_text(tmp_path / "a", "new")

    assert in_child(task) == ""
    assert (tmp_path / "a").read_text() == "old"
    atomic_write_text(tmp_path / "a", "newer")
    assert (tmp_path / "a").read_text() == "newer"


def test_pipes_and_files_with_holes_in_the_folder_are_not_read(tmp_path: Path) -> None:
    put(tmp_path, 1)
    os.mkfifo(tmp_path / "tensors-0123456789abcdef.safetensors")  # opening it would block
    with (tmp_path / "tensors-1123456789abcdef.safetensors").open("wb") as file:
        file.truncate(2**40)  # reading it would take hours
    put(tmp_path, 2)
    assert value_at(tmp_path) == 2


# --- other content ------------------------------------------------------------------------------


def test_swapped_names_in_the_header_are_detected(tmp_path: Path) -> None:
    write(tmp_path, "test", {"ab": torch.zeros(3), "ba": torch.ones(3)}, {})
    file = tensor_file(tmp_path)
    header, size = file.read_bytes(), struct.unpack("<Q", file.read_bytes()[:8])[0]
    entries = json.loads(header[8 : 8 + size])
    entries["ab"], entries["ba"] = entries["ba"], entries["ab"]
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(size)
    file.write_bytes(header[:8] + text + header[8 + size :])
    with one_line("expected tensors with sha256 .*altered content", file):
        read(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "tensors-*"])
def test_every_changed_byte_is_detected(tmp_path: Path, name: str) -> None:
    put(tmp_path, 1)
    (file,) = tmp_path.glob(name)
    data = file.read_bytes()
    for at in range(0, len(data), 3):
        changed = bytearray(data)
        changed[at] ^= 1
        file.write_bytes(changed)
        try:
            found = read(tmp_path, "test")
        except ArtifactError:
            continue
        original = content(1)  # a space in the manifest, say
        assert found.facts == original[1]
        assert all(torch.equal(found.tensors[name], t) for name, t in original[0].items())


@pytest.mark.parametrize(("version", "remedy"), [(3, "Fit and save it again"), (5, "Upgrade")])
def test_other_formats_are_refused(tmp_path: Path, version: int, remedy: str) -> None:
    put(tmp_path, 1)
    file = tmp_path / "manifest.json"
    content = json.loads(file.read_text()) | {"format_version": version}
    file.write_text(json.dumps(content))
    with one_line(f"format version 4, got version {version} .* {remedy}", tmp_path):
        read(tmp_path)


# --- deleting -----------------------------------------------------------------------------------


SIMILAR = [
    "tensors-0123456789ABCDEF.safetensors",
    "tensors-0123456789abcdef.safetensors.bak",
    "tensors.safetensors",
    ".manifest.json.0123.subbayes-tmp",
    ".other.0123456789abcdef.subbayes-tmp",
    "manifest.json.0123456789abcdef.subbayes-tmp",
    "manifest.json.1",
    "manifest.json~",
]


def test_files_of_similar_names_survive(tmp_path: Path) -> None:
    path = tmp_path / "run"
    put(path, 1)
    for name in SIMILAR:
        (path / name).write_text("mine")
    linked = tmp_path / "linked"
    linked.write_text("mine")
    (path / ".other.fedcba9876543210.subbayes-tmp").symlink_to(linked)
    for name in os.listdir(path):
        os.utime(path / name, (0, 0))
    put(path, 2)
    assert value_at(path) == 2
    (path / ".manifest.json.0123456789abcdef.subbayes-tmp").write_text("of a killed writer")
    delete(path, "test")
    assert listing(path) == sorted([*SIMILAR, ".other.fedcba9876543210.subbayes-tmp"])
    assert {(path / name).read_text() for name in SIMILAR} == {"mine"}
    assert linked.read_text() == "mine"


def test_delete_removes_only_the_artifact(tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(path, 1)
    delete(path, "other")
    assert value_at(path) == 1
    (path / ".manifest.json.0123456789abcdef.subbayes-tmp").write_text("a killed writer's")
    (path / "notes.txt").write_text("mine")
    delete(path, "test")
    assert listing(path) == ["notes.txt"]
    (path / "notes.txt").unlink()
    put(path, 1)
    delete(path, "test")
    assert not path.exists()
    delete(path, "test")
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "app"}')
    (path / "tensors-0123456789abcdef.safetensors").write_text("mine")
    delete(path, "test")
    assert len(listing(path)) == 2


def test_delete_leaves_a_folder_in_place_of_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(path, 1)
    (file,) = path.glob("tensors-*")
    file.unlink()
    file.mkdir()
    (file / "notes.txt").write_text("mine")
    delete(path, "test")
    assert listing(path) == [file.name]
    assert (file / "notes.txt").read_text() == "mine"


def test_delete_does_not_follow_links(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    put(elsewhere, 1)
    link.symlink_to(elsewhere)
    delete(link, "test")
    assert value_at(elsewhere) == 1
    assert link.is_symlink()


@pytest.mark.parametrize("size", [10**13, 2**31])
def test_files_that_do_not_fit_into_memory_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A file with holes claims any size and takes little of the disk."""
    path = tmp_path / "a"
    put(path, 1)
    (file,) = path.glob("tensors-*")
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"x": entry}).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + size)
    monkeypatch.setattr("subbayes.utils.memory.available_memory", lambda: 2**31 - 1)
    with pytest.raises(
        InputError, match="path: expected the tensors .* to fit into 2.0 GiB"
    ) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_atomic_write_of_an_invalid_path_or_text_raises(tmp_path: Path) -> None:
    with one_line("path: expected a path to write to, got Is a directory at", tmp_path):
        atomic_write_text(tmp_path, "text")
    assert listing(tmp_path) == []


# --- hostile files ------------------------------------------------------------------------------


def forge(path: Path, text: str) -> None:
    """Replace the facts in a manifest by JSON text."""
    file = path / "manifest.json"
    content = json.loads(file.read_text()) | {"facts": "HERE"}
    file.write_text(json.dumps(content).replace('"HERE"', text))


@pytest.mark.parametrize("depth", [5000, 10**5])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused_in_one_line(
    tmp_path: Path, depth: int, start: str, end: str
) -> None:
    put(tmp_path, 1)
    forge(tmp_path, start * depth + "1" + end * depth)
    with one_line("the manifest of an artifact"):
        read(tmp_path)


def test_facts_of_the_largest_depth_are_read(tmp_path: Path) -> None:
    facts: Any = {"a": 2**100}
    for _ in range(62):
        facts = {"a": facts}
    write(tmp_path, "test", {}, facts)
    assert read(tmp_path)[1] == facts


def test_pipes_and_huge_manifests_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    manifest = tmp_path / "a" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    for use in (read, is_artifact):
        with one_line("a path to read, got Not a file"):
            use(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    with one_line("pipe., a file"):
        read(tmp_path / "pipe")
    manifest.unlink()
    with manifest.open("wb") as file:
        file.truncate(2**40)  # a sparse file
    with one_line("the manifest of an artifact .* got more than"):
        read(tmp_path / "a")


def test_pipes_that_take_the_place_of_a_file_are_not_waited_for(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    for file in list((tmp_path / "a").iterdir()):
        kept = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with one_line("a path to read, got Not a file at"):
            read(tmp_path / "a")
        file.unlink()
        file.write_bytes(kept)
    assert read(tmp_path / "a")


@pytest.mark.parametrize("change", ["shorter", "longer", "other", "empty"])
def test_tensors_that_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What was read is compared with the digest, not what was there before."""
    write(tmp_path / "a", "test", {"z": torch.zeros(10**5)}, {})  # more than a buffer
    (file,) = (tmp_path / "a").glob("tensors-*")
    data = file.read_bytes()
    save_file({"x": torch.zeros([1] * 70)}, tmp_path / "other")
    later = {
        "shorter": data[:-1],
        "longer": data + b"0" * 4096,
        "other": (tmp_path / "other").read_bytes(),
        "empty": b"",
    }[change]

    def meanwhile() -> None:
        with file.open("r+b") as opened:  # in place: the file that is open changes
            opened.truncate(len(later))
            opened.write(later)

    sha256 = read_tensors(file)[1]
    real = tensors_module._read
    monkeypatch.setattr(tensors_module, "_read", lambda *args: (meanwhile(), real(*args))[1])
    with suppress(ValueError):  # a file that has become shorter
        assert read_tensors(file)[1] != sha256 or change == "longer"


def test_links_in_a_folder_are_followed_to_files_alone(tmp_path: Path) -> None:
    """As in caches of downloaded models, whose files are links to their contents."""
    put(tmp_path / "a", 1)
    (tmp_path / "blobs").mkdir()
    for i, file in enumerate(list((tmp_path / "a").iterdir())):
        file.rename(tmp_path / "blobs" / str(i))
        file.symlink_to(f"../blobs/{i}")
    assert read(tmp_path / "a")
    for file in (tmp_path / "a").iterdir():
        target = os.readlink(file)
        for other in ("/dev/zero", "/proc/self/mem", "..", "nowhere", file.name, "/etc/passwd"):
            file.unlink()
            file.symlink_to(other)
            with one_line("path: expected") as caught:
                read(tmp_path / "a")
            assert "root:" not in str(caught.value)
        file.unlink()
        file.symlink_to(target)
    assert read(tmp_path / "a")


def test_digests_are_hex_digits(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    file = tmp_path / "a" / "manifest.json"
    content = json.loads(file.read_text()) | {"tensors_sha256": "../../../../x"}
    content["manifest_sha256"] = manifest_digest(content)
    file.write_text(json.dumps(content))
    with one_line("the manifest of an artifact"):
        read(tmp_path / "a")


@pytest.mark.parametrize("name", ["important.txt", "../outside.txt", {"name": "important.txt"}])
def test_files_that_a_manifest_names_are_not_removed(tmp_path: Path, name: Any) -> None:
    place = tmp_path / "a"
    place.mkdir()
    for file in (place / "important.txt", tmp_path / "outside.txt"):
        file.write_text("mine")
    old = {"format": "subbayes", "format_version": 4, "kind": "test", "tensor_file": name}
    (place / "manifest.json").write_text(json.dumps(old))
    with suppress(ArtifactError):
        put(place, 1)
    with suppress(ArtifactError):
        write(place, "test", {"z": torch.eye(2)}, {}, overwrite=True)
    delete(place, "test")
    for file in (place / "important.txt", tmp_path / "outside.txt"):
        assert file.read_text() == "mine"


@pytest.mark.slow
def test_a_manifest_of_very_many_values_is_refused_before_it_is_built(tmp_path):
    place = tmp_path / "many"
    write(place, "example", {}, {"values": []})
    manifest = place / "manifest.json"
    text = manifest.read_text().replace('"values": []', '"values": [' + "[]," * 2_000_000 + "[]]")
    manifest.write_text(text)
    tracemalloc.start()
    with pytest.raises(InputError, match="artifact .* got more than 1048576 values"):
        read(place)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(text)
    with pytest.raises(InputError, match="facts: expected what a manifest can hold, got more than"):
        write(tmp_path / "written", "example", {}, {"values": [0] * 2**20 + [1, 2]})


def test_a_folder_is_checked_before_a_long_computation(tmp_path):
    check_writable("out", tmp_path / "new" / "run")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ArtifactError, match="out: expected a path to write to, got Not a dir"):
        check_writable("out", tmp_path / "file" / "run")
    with pytest.raises(ArtifactError, match="checkpoint: expected a path"):
        read_checkpoint(tmp_path / "file" / "run", "sampling-checkpoint")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("manifest.json", "no JSON", "the manifest of an artifact .*got"),
        ("manifest.json", "", "the manifest of an artifact"),
        ("manifest.json", "[1]", "an artifact of subbayes"),
        ("manifest.json", '{"name": "app"}', "an artifact of subbayes"),
        ("thesis.tex", "…", "a new folder, an empty one or an artifact"),
        ("tensors-0123456789abcdef.safetensors", "", None),
    ],
)
def test_what_no_checkpoint_can_replace_is_refused_before_the_run(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    if message is None:  # a checkpoint may replace what the writer of one left
        assert read_checkpoint(tmp_path, "sampling-checkpoint") is None
    else:
        with pytest.raises(InputError, match=rf"\Acheckpoint: expected {message}[^\n]*Delete it"):
            read_checkpoint(tmp_path, "sampling-checkpoint")
    assert (tmp_path / name).read_text() == text
    assert listing(tmp_path) == [name]


def test_a_file_made_meanwhile_is_kept(tmp_path):
    target = tmp_path / "table.csv"

    def pieces():
        yield b"ours"
        target.write_text("theirs")

    with pytest.raises(ArtifactError, match="expected a new file, got an existing one"):
        replace_file(target, pieces(), overwrite=False)
    assert target.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["table.csv"]
    replace_file(tmp_path / "other.csv", [b"ours"], overwrite=False)
    assert (tmp_path / "other.csv").read_bytes() == b"ours"
    replace_file(target, [b"ours"])
    assert target.read_bytes() == b"ours"


def test_a_link_to_nothing_is_an_existing_file(tmp_path):
    link = tmp_path / "table.csv"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="expected a new file, got an existing one"):
        atomic_write_text(link, "ours", overwrite=False)
    assert os.listdir(tmp_path) == ["table.csv"]
    atomic_write_text(link, "ours")  # links are followed
    assert (tmp_path / "elsewhere").read_text() == "ours"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le"])
def test_manifests_of_other_encodings_are_refused(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a"
    put(path, 1)
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_text().encode(encoding))
    with pytest.raises(ArtifactError, match="manifest"):
        read(path)
