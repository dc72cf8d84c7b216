"""Errors of one line, and shared checks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subbayes.utils import checks
from subbayes.utils.checks import InputError, InputTypeError, is_finite, message

text = st.text(min_size=1, max_size=400)


def test_message_contains_expected_got_and_remedy():
    assert message("rank", "at most 20", "30", "Record more snapshots") == (
        "rank: expected at most 20, got 30. Record more snapshots."
    )
    assert message("rank", "at most 20", "30", "Record more.").endswith(" Record more.")
    assert message("rank", "at most 20", "30") == "rank: expected at most 20, got 30."


@given(text, text, text, st.text(max_size=200))
def test_a_message_is_one_line(argument, expected, got, remedy):
    line = message(argument, expected, got, remedy)
    assert len(line.splitlines()) <= 1
    assert line.endswith(".")


def test_long_values_are_truncated_in_messages():
    line = message("x", "less", repr(np.zeros((50, 50))), "Cut it")
    assert len(line) < 400
    assert line.startswith("x: expected less, got array([[0.,")
    assert line.endswith("Cut it.")
    assert len(message("x", "one of " + "long, " * 5000, "y", "Cut it")) < 700
    assert "/very/long" in message("path", "a file", "/very/long" * 100)


def test_errors_are_builtin_errors():
    with pytest.raises(ValueError, match="x: expected 1, got 2. Do."):
        checks.fail("x", "1", 2, "Do")
    with pytest.raises(TypeError, match="x: expected a list, got dict."):
        checks.fail_type("x", "a list", {})
    assert issubclass(InputError, ValueError)
    assert issubclass(InputTypeError, TypeError)


def test_check_choice():
    checks.check_choice("mode", "a", ("a", "b"))
    with pytest.raises(InputError, match="mode: expected one of 'a', 'b', got 'c'"):
        checks.check_choice("mode", "c", ("a", "b"))
    with pytest.raises(InputError, match="mode: expected one of 'a', 'b', got None"):
        checks.check_choice("mode", None, iter(["a", "b"]))


@pytest.mark.parametrize(
    ("name", "names", "suggestion"),
    [
        ("nutz", ["elliptical-slice", "nuts", "hmc"], "Did you mean 'nuts'?"),
        ("NUTS", ["nuts"], "Did you mean 'nuts'?"),
        ("laplase", ["laplace", "laplace-linearised", "vi"], "Did you mean 'laplace'?"),
        ("abd", ["abc", "abe"], "Did you mean 'abe'?"),
        ("gibbs", ["nuts", "hmc"], ""),
        ("x", [], ""),
        (None, ["none"], ""),
        (3, ["3"], ""),
    ],
)
def test_similar_names_are_suggested(name, names, suggestion):
    assert checks.closest(name, names) == suggestion
    with pytest.raises(InputError) as error:
        checks.check_choice("way", name, names)
    assert str(error.value).endswith(f"got {name!r}." + (suggestion and f" {suggestion}"))


def test_long_text_takes_no_memory_in_messages():
    text = "a " * 2_000_000
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as error:
            checks.check_choice("mode", text, ("a", "b"))
        with pytest.raises(InputError) as other:
            checks.fail(text, text, text, text)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 400
    assert len(str(other.value)) < 1800
    assert len(other.value.argument) <= 200
    assert len(other.value.got) <= 300


@pytest.mark.parametrize("value", [1, 7, np.int64(3), np.uint8(2), 10**30])
def test_check_count(value):
    found = checks.check_count("n", value)
    assert found == value
    assert type(found) is int


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        1.0,
        np.float64(2),
        "3",
        None,
        True,
        np.bool_(True),
        float("nan"),
        [1],
        np.array([1, 2]),
    ],
)
def test_check_count_of_invalid_values(value):
    with pytest.raises(InputError, match="n: expected a whole number of at least 1, got "):
        checks.check_count("n", value)


def test_check_count_with_another_minimum():
    assert checks.check_count("warmup", 0, 0) == 0
    with pytest.raises(InputError, match="warmup: expected a whole number of at least 0, got -1"):
        checks.check_count("warmup", -1, 0)


@pytest.mark.parametrize("value", [1e-149, 1, 2.5, np.float32(0.5), torch.tensor(3.0), "2.5"])
def test_check_positive(value):
    found = checks.check_positive("scale", value)
    assert type(found) is float
    assert found == float(value)


@pytest.mark.parametrize(
    "value", [0, -1.0, float("nan"), float("inf"), "wide", None, [1.0], np.ones(2)]
)
def test_check_positive_of_invalid_values(value):
    with pytest.raises(InputError, match="scale: expected a (finite )?number above 0, got ") as e:
        checks.check_positive("scale", value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_check_finite(make):
    checks.check_finite("x", make([[1.0, 2.0], [3.0, 4.0]]))
    checks.check_finite("x", make([1, 2]))
    checks.check_finite("x", make(1.0))
    checks.check_finite("x", make(np.zeros((0, 3))))
    with pytest.raises(
        InputError,
        match=r"x: expected finite numbers, got 1 NaN or infinite value "
        r"\(first in row 1\). Drop or impute them first",
    ):
        checks.check_finite("x", make([[1.0, 2.0], [np.nan, 4.0]]))
    with pytest.raises(InputError, match=r"got 3 NaN or infinite values \(first in row 0\)"):
        checks.check_finite("x", make([np.inf, np.nan, 0.0, -np.inf]))
    with pytest.raises(InputError, match=r"got 1 NaN or infinite value\."):
        checks.check_finite("x", make(np.nan))


@pytest.mark.parametrize(
    ("entries", "finite"),
    [
        ([1.0, 2.0], True),
        ([], True),
        ([3e38, 3e38], True),
        ([-3e38, -3e38], True),
        ([1.0, torch.nan], False),
        ([torch.inf, -torch.inf], False),
        ([-torch.inf], False),
    ],
)
def test_is_finite_of_values_whose_sum_overflows(entries, finite):
    assert is_finite(torch.tensor(entries)) == finite
    assert is_finite(torch.tensor(entries, requires_grad=True)) == finite


def test_check_same_length():
    checks.check_same_length(["x", "y"], [3, 3])
    with pytest.raises(
        InputError,
        match="x and y: expected the same number of rows, got 3 and 4. "
        "Pass one row of each per observation",
    ):
        checks.check_same_length(["x", "y"], [3, 4])
