"""Encoding of targets: inference of the task, configuration through JSON, errors."""

from __future__ import annotations

import dataclasses
import datetime
import json

import numpy as np
import pandas as pd
import pytest
import torch
from msgspec import ValidationError

from subbayes.artifacts.facts import as_facts
from subbayes.data.targets import Target
from subbayes.utils.checks import InputError


@pytest.mark.parametrize(
    ("y", "task", "classes"),
    [
        (["b", "a", "b"], "classification", ("a", "b")),
        ([True, False, True], "classification", (False, True)),
        (pd.Series(["u", "v"], dtype="category"), "classification", ("u", "v")),
        (np.array([0, 1, 2, 1]), "classification", (0, 1, 2)),
        (np.array([1, 2, 3, 1]), "classification", (1, 2, 3)),
        (np.array([0.0, 1.0, 1.0]), "classification", (0, 1)),
        ([-1, 1, 1], "classification", (-1, 1)),
        (torch.tensor([0, 1, 2]), "classification", (0, 1, 2)),
        (["0", "1", "0"], "classification", ("0", "1")),
        (np.array([0.0, 1.0, 2.0]), "regression", ()),
        (np.array([3, 4, 5]), "regression", ()),
        (np.array([0, 1, 3]), "regression", ()),
        (np.arange(30), "regression", ()),
        (np.array([[0.5], [1.5]]), "regression", ()),
        (["1.5", "2.5", "0.1"], "regression", ()),
        (pd.DataFrame({"y": [0.5, 2.0]}), "regression", ()),
    ],
)
def test_the_task_is_inferred_by_the_rule(y, task, classes):
    target = Target.infer(y)
    assert (target.task, target.classes) == (task, classes)
    assert [type(a) for a in target.classes] == [type(a) for a in classes]


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (np.random.default_rng(0).normal(5, 3, 50), "regression"),
        (np.arange(9), "count"),
        (np.array(["x", "y", "x"]), "classification"),
        (np.array([True, False]), "classification"),
        (np.array([2, 5, 7]), "classification"),
        (np.arange(30) % 3, None),
    ],
)
def test_decode_inverts_encode_also_through_json(y, task):
    target = Target.infer(y, task)
    again = as_facts(json.loads(json.dumps(dataclasses.asdict(target))), Target)
    assert again == target
    codes = again.encode(y)
    assert codes.dtype == (np.float64 if target.task == "regression" else np.int64)
    decoded = again.decode(codes)
    assert decoded.dtype.kind == y.dtype.kind
    if target.task == "regression":
        np.testing.assert_array_equal(codes, y)
    np.testing.assert_array_equal(decoded, y)


def test_tensors_with_a_graph_are_read():
    y = torch.tensor([0.5, 2.5], requires_grad=True)
    np.testing.assert_array_equal(Target.infer(y).encode(y), [0.5, 2.5])


def test_labels_match_across_numeric_dtypes_and_no_decision_is_none():
    target = Target.infer([0, 1, 2])
    np.testing.assert_array_equal(target.encode(np.array([2.0, 0.0])), [2, 0])
    assert Target.infer(["u", "v"]).decode([1, -1]).tolist() == ["v", None]


@pytest.mark.parametrize(
    ("y", "task", "pattern"),
    [
        ([], None, "y: expected targets, got none"),
        ([1.0], None, "at least 2 targets"),
        ([1.0, None], None, r"no missing targets, got 1 of 2 missing \(first in row 1\)"),
        ([1.0, np.inf], None, "finite numbers in the target, got 1 infinite value"),
        ([2.5, 2.5], None, "targets that vary.*got values from 2.5 to 2.5"),
        (["u", "u"], None, "at least 2 classes, got 'u' alone"),
        (["u", "v", "w", 1], None, "labels of one type, got int and str"),
        (np.ones((3, 2, 2)), None, r"one target per row, shape \(n,\), got shape \(3, 2, 2\)"),
        (np.ones((3, 2)) / 2, "classification", "labels 0 and 1 in several columns, got 0.5"),
        (np.ones((3, 2)) / 2, "count", "counts: whole numbers of at least 0, got 0.5"),
        (np.full((3, 2), np.inf), None, "finite numbers"),
        ([["a", "b"], ["c", "d"]], None, "numbers in several columns"),
        ([0.5, 1.5], "classification", "labels that are text, whole numbers or booleans, got 0.5"),
        ([datetime.date(2020, 1, 1)] * 2, "classification", "booleans, got a date"),
        (pd.date_range("2020", periods=3), None, "the target, got dates"),
        (
            ["1", "2", "x"],
            None,
            r"numbers in the target, got 'x' in 1 of 3 rows \(first in row \d\). "
            "Correct them, or use task='class",
        ),
        ([0, 2**63], "classification", r"y: expected labels of at most 64 bits, got 9.223e\+18"),
        (["a", "b"], "regression", "numbers in the target, got 'a', 'b'"),
        ([0, 2, -1], "count", "whole numbers of at least 0, got -1 .first in row 2"),
        ([0, 2.5], "count", "got 2.5 .first in row 1"),
        ([0, 1], "ranking", "task: expected one of 'regression', 'classification', 'count'"),
        (
            [f"name {i}" for i in range(30)],
            None,
            "classes that recur, got a different label in each",
        ),
    ],
)
def test_unusable_targets(y, task, pattern):
    with pytest.raises(InputError, match=pattern) as error:
        Target.infer(y, task)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("y", "new", "expected", "got"),
    [
        (["1", "2"] * 3, [1, 2], "text, as in training", "numbers such as 1"),
        ([1, 2] * 3, ["2", "1"], "numbers, as in training", "text such as '2'"),
        ([True, False] * 3, ["True"], "booleans, as in training", "text such as 'True'"),
    ],
    ids=str,
)
def test_labels_of_another_kind_are_named(y, new, expected, got):
    with pytest.raises(InputError) as refused:
        Target.infer(y).encode(new)
    assert (refused.value.argument, refused.value.expected) == ("y", expected)
    assert (refused.value.got, refused.value.remedy[:13]) == (got, "Convert it to")


def test_counts_that_are_nearly_whole_are_shown_with_their_digits():
    with pytest.raises(InputError) as refused:
        Target("count").encode([1.0, 3.000000003])
    assert (refused.value.got, refused.value.row) == ("3.000000003", 1)


def test_unknown_labels_raise_with_the_classes():
    target = Target.infer(["cat", "dog", "cat"])
    with pytest.raises(
        InputError,
        match=r"^y: expected only the classes 'cat', 'dog', got 'cow', "
        r"'hen' in 3 of 4 rows\. Correct those labels",
    ):
        target.encode(["cow", "hen", "cow", "cat"])
    with pytest.raises(InputError, match="class indices from 0 to 1, or -1, got 2"):
        target.decode([0, 2])
    with pytest.raises(InputError, match="counts: whole numbers"):
        Target("count").encode([-3])


def test_a_damaged_target_configuration_raises():
    good = dataclasses.asdict(Target.infer(["u", "v"]))
    for damage in (
        {},
        {**good, "task": "rank"},
        {**good, "classes": [[1]]},
        {**good, "classes": 3},
    ):
        with pytest.raises(ValidationError):
            as_facts(damage, Target)


def test_whole_numbers_of_64_bits_are_decoded_exactly():
    target = Target.infer([0, 2**63 - 1, 2**63 - 2] * 2, "classification")
    assert target.decode([1, 2, 0]).tolist() == [2**63 - 2, 2**63 - 1, 0]


def test_several_columns_may_lack_entries():
    y = np.array([[1.0, np.nan], [0.0, 1.0], [np.nan, np.nan]])
    for task in (None, "classification", "count"):
        target = Target.infer(y, task)
        assert (target.task, target.columns, target.classes) == (task or "regression", 2, ())
        np.testing.assert_array_equal(target.encode(pd.DataFrame(y)), y)
        with pytest.raises(InputError) as error:
            target.encode(y[:, 0])
        assert error.value.argument == "y"
