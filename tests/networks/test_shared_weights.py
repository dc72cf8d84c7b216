"""Changes of shared weights: what is seen, and what is read to see it."""

import numpy as np
import pytest
import torch
from torch import nn

from subbayes.networks.identity import shared_weights
from subbayes.networks.identity.shared_weights import SharedWeights


def tensors(dtype=torch.float32):
    values = {"a": torch.arange(60_000, dtype=dtype), "b": torch.ones(5, 3, dtype=dtype)}
    return values | {"c": torch.zeros(0), "d": torch.ones(40, 7, dtype=dtype).T}


@pytest.fixture
def reads(monkeypatch):
    """The number of times that checksums are computed."""
    counted = []

    def checksums(values):
        counted.append(len(values))
        return original(values)

    original = shared_weights.checksums
    monkeypatch.setattr(shared_weights, "checksums", checksums)
    return counted


def step_fused(values):
    parameter = nn.Parameter(values["b"])
    parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam([parameter], lr=0.1, fused=True).step()


CHANGES = {
    "one number in place": lambda values: values["a"][12_345].add_(1),
    "a tensor through .data": lambda values: values["d"].data.add_(1),
    "a small tensor through NumPy": lambda values: np.add(
        values["b"].numpy(), 1, out=values["b"].numpy()
    ),
    "a step of a fused optimiser": step_fused,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_named(change):
    values = tensors()
    shared = SharedWeights(values)
    assert shared.changed(values, values) is None
    CHANGES[change](values)
    expected = {"one number in place": "a", "a tensor through .data": "d"}.get(change, "b")
    for _ in range(2):
        assert shared.changed(values, values) == expected
    assert shared.changed(values, [name for name in values if name != expected]) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_one_number_through_data_is_seen_where_every_number_is_read(dtype):
    values = tensors(dtype)
    shared = SharedWeights(values)
    values["a"].data[12_345] += 1
    assert shared.changed(values, values, every_number=True) == (
        None if dtype == torch.bfloat16 else "a"  # rounded off
    )


def test_numbers_are_read_again_only_if_something_was_written(reads):
    values = tensors()
    shared = SharedWeights(values)
    for _ in range(3):
        assert shared.changed(values, values) is None
    assert len(reads) == 1  # when it was made
    values["a"].mul_(1)  # leaves the numbers as they are
    for _ in range(3):
        assert shared.changed(values, values) is None
    assert len(reads) == 2
    assert shared.changed(values, values, every_number=True) is None
    assert len(reads) == 3


def test_inference_tensors_have_no_versions():
    with torch.inference_mode():
        values = tensors()
    shared = SharedWeights(values)
    assert shared.changed(values, values) is None
    with torch.inference_mode():
        values["b"].add_(1)
    assert shared.changed(values, values) == "b"
