"""Shapes, dtypes and values of tensors that loaders rely on."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from msgspec import ValidationError

from subbayes.artifacts.arrays import ANY, Array, check_tensors


def test_a_name_of_many_dots_takes_no_memory():
    name = "network." + 20_000 * "."
    rules = {"network.*": ANY, "network.mask.*": ANY, "*": Array("never")}
    tracemalloc.start()
    check_tensors({name: torch.zeros(2)}, rules)
    check_tensors({name: torch.zeros(2)}, {"state.*": ANY, "*": ANY})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_tensors_have_the_rule_of_their_longest_prefix():
    rules = {
        "a.*": Array("one"),
        "a.b.*": Array("two", "two"),
        "a.b.c": Array("three"),
        "d?": Array("four"),
        "*": Array("other", "other", "other"),
    }
    shapes = {"a.x": (1,), "a.b.x": (2, 2), "a.b.x.y": (2, 2), "a.b.c": (3,), "d": (4,)}
    shapes |= {"a": (5, 5, 5), "ab.c": (5, 5, 5), ".x": (5, 5, 5)}
    check_tensors({name: torch.zeros(shape) for name, shape in shapes.items()}, rules)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e5m2])
def test_dtypes_that_torch_does_not_compute_with_are_refused(dtype):
    numbers = torch.zeros(2).to(dtype)
    rule = Array("k") if dtype.is_floating_point else Array("k", dtype="whole", low=0)
    with pytest.raises(ValidationError, match="a dtype that torch computes with, got torch"):
        check_tensors({"a": numbers}, {"a": rule})
    check_tensors({"a": numbers}, {"a": Array(None, dtype="any", finite=False)})


WRONG = {
    "another size": (torch.zeros(2, 3), Array("n", 2), r"shape \(n, 2\) = \(2, 2\), got \(2, 3\)"),
    "fewer dimensions": (torch.zeros(2), Array("n", 2), "shape"),
    "a size of another tensor": (torch.zeros(3), Array("k"), "shape"),
    "whole numbers": (torch.zeros(2).long(), Array("n"), "dtype real"),
    "another dtype": (torch.zeros(2), Array("n", dtype="float64"), "dtype float64"),
    "flags": (torch.zeros(2) > 0, Array("n", dtype="whole"), "dtype whole"),
    "NaN": (torch.tensor([torch.nan]), Array("n"), "finite"),
    "infinite": (torch.tensor([torch.inf]), Array(None, dtype="any"), "finite"),
    "negative": (torch.tensor([-1]), Array("n", dtype="whole", low=0), "numbers from 0"),
    "large": (torch.tensor([-1e9]), Array("n", below=1e9), "numbers from"),
    "none": (torch.zeros(0), Array("n", least=1), "numbers, got none"),
    "none of a large shape": (torch.zeros(0, 2**40), Array(None), "numbers, got none"),
    "another dtype than others": (torch.zeros(2).double(), Array("n", alike="D"), "dtype of D"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case):
    tensor, rule, message = WRONG[case]
    arrays = {"a": Array("k"), "b": Array("D size", alike="D"), "c": rule}
    tensors = {"a": torch.zeros(2), "b": torch.zeros(5), "c": tensor}
    with pytest.raises(ValidationError, match=rf"\AExpected [^\n]*{message}[^\n]* at tensor 'c'\Z"):
        check_tensors(tensors, arrays)
    with pytest.raises(ValidationError, match="Expected a tensor 'b', got none"):
        check_tensors({"a": torch.zeros(2)}, {"a": ANY, "b": ANY, "c?": ANY, "d.*": ANY})
    with pytest.raises(ValidationError, match="Expected no tensor 'x', got one"):
        check_tensors({"x": torch.zeros(2)}, {"y?": ANY})
