"""Parts of the tensors of a file, against the whole tensors."""

import numpy as np
import pytest
import torch

from subbayes import InputError
from subbayes.artifacts import folder as artifact
from subbayes.artifacts import tensors as tensors_module
from subbayes.artifacts.tensors import DividedTensor


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(7, 11, generator=generator, dtype=torch.float64),
        "half": torch.randn(23, generator=generator).bfloat16(),
        "flags": torch.rand(5, generator=generator) > 0.5,
        "none": torch.zeros(0, 3),
        "number": torch.tensor(3),
    }


def ranges(name, shape, rng):
    ends = np.sort(rng.integers(0, np.prod(shape, dtype=int) + 1, size=6)).tolist()
    return [slice(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True)]


@pytest.mark.parametrize("piece", [7, 64, 2**20])
def test_parts_are_those_of_the_whole(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(tensors_module, "_PIECE", piece)
    whole, rng = tensors(), np.random.default_rng(1)
    artifact.write(tmp_path, "example", whole, {})
    own = {name: ranges(name, t.shape, rng) for name, t in whole.items()} | {"flags": None}
    found = artifact.read(tmp_path, kept=lambda facts: lambda name, shape: own[name]).tensors
    assert torch.equal(found["flags"], whole["flags"])
    for name, parts in own.items():
        if parts is not None:
            assert isinstance(found[name], DividedTensor)
            assert (found[name].whole.shape, found[name].whole.dtype) == (
                whole[name].shape,
                whole[name].dtype,
            )
            expected = torch.cat([whole[name].reshape(-1)[part] for part in parts])
            assert torch.equal(found[name].part, expected)


@pytest.mark.parametrize("at", [-1, -40, -300])
def test_a_changed_number_that_is_not_kept_is_noticed(tmp_path, at):
    artifact.write(tmp_path, "example", tensors(), {})
    (file,) = tmp_path.glob("tensors-*")
    numbers = bytearray(file.read_bytes())
    numbers[at] ^= 1
    file.write_bytes(numbers)
    with pytest.raises(InputError, match="path: expected tensors with sha256"):
        artifact.read(tmp_path, kept=lambda facts: lambda name, shape: [])


def test_a_file_that_is_too_short(tmp_path):
    artifact.write(tmp_path, "example", tensors(), {})
    (file,) = tmp_path.glob("tensors-*")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InputError, match="path: expected a safetensors file"):
        artifact.read(tmp_path, kept=lambda facts: lambda name, shape: [])


def test_a_tensor_written_in_pieces_is_that_of_one_piece(tmp_path):
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    pieces = DividedTensor(whole.to("meta"), whole[:2], lambda: iter(whole.reshape(-1).split(7)))
    for folder, tensor in (("one", whole), ("other", pieces)):
        artifact.write(tmp_path / folder, "example", {"x": tensor, "y": torch.ones(2)}, {})
    (first,), (second,) = ((tmp_path / name).glob("tensors-*") for name in ("one", "other"))
    assert first.read_bytes() == second.read_bytes()
