"""Linearised Laplace by several processes, against that of one process that works alone."""

import json

import numpy as np
import pytest

from distributed.curvature_cases import CLASSES, FORMS, REFUSED, divided_subspaces, facts, fitted
from distributed.curvature_cases import rows as table
from distributed.launch import results

pytestmark = pytest.mark.slow  # processes that import torch

IN_BLOCKS, UNEVEN, EMPTY = [100, 100], [70, 130], [0, 200]  # blocks of 25 rows
EVERY = [form for form in (*FORMS, *CLASSES) if form != "sampled auto"]
SHARED = {form: ["shared_curvature", form] for form in EVERY}
SAVED = ("primal", "diagonal", "kfac", "low-rank", "subspace", "sampled", "sampled auto")
MESSAGES = {
    "dual": "data: expected all rows in each process, got sharded rows",
    "solver": "solver: expected 'auto' or 'primal' for sharded rows, got 'dual'",
    "weights": "network: expected the same in all 2 processes, got another on rank 1",
    "rows": "data: expected the same in all 2 processes, got another on rank 1",
    "not finite": "prior_precision: expected finite numbers",
    "limit": "memory_limit: expected the same in all 2 processes, got another on rank 1",
    "limit of one": "covariance: expected the same in all 2 processes, got another on rank 1",
    "body": "network: expected the same in all 2 processes, got another on rank 1",
    "engine": "data: expected the same in all 2 processes, got another on rank 1",
    "labels": "y: expected labels",
    "scores": "inputs: expected all rows in each process, for predictions by all processes",
    "predictions": "inputs: expected the same in all 2 processes, got another on rank 1",
    "inputs": "inputs: expected those to be predicted, for sharded rows",
}


def divided(form, shares, streamed=False):
    return ["divided_curvature", form, shares, *([True] if streamed else [])]


SUMS = [form for form in EVERY if form != "dual"]
DIVIDED = [divided(form, shares) for form in SUMS for shares in (IN_BLOCKS, UNEVEN, EMPTY)]
STREAMED = [divided("kfac", UNEVEN, True), divided("subspace", EMPTY, True)]


@pytest.fixture(scope="module")
def two_processes():
    """The results of all cases in two processes."""
    saved = [["saved_curvature", form, UNEVEN] for form in SAVED]
    spaces = [["divided_subspaces", shares] for shares in (UNEVEN, EMPTY)]
    cases = [*SHARED.values(), *DIVIDED, *STREAMED, *saved, *spaces, ["refused_curvature"]]
    return results(2, cases)


@pytest.fixture(scope="module")
def other_numbers():
    """The results of shared rows in other numbers of processes."""
    return {count: results(count, [*SHARED.values()]) for count in (1, 3)}


@pytest.fixture(scope="module")
def alone():
    """What one process finds that has not joined others."""
    return {form: facts(fitted(form, table(form))) for form in EVERY}


def close(found, expected, names):
    """Whether what users read is the same within rounding."""
    for name in names:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(
            found[name], expected[name], rtol=1e-5, atol=1e-7 * scale, err_msg=name
        )


@pytest.mark.parametrize("form", EVERY)
def test_any_number_of_processes_has_the_same_bits(two_processes, other_numbers, form):
    every = [*two_processes, *(found for some in other_numbers.values() for found in some)]
    assert len({found[json.dumps(SHARED[form])]["digest"] for found in every}) == 1


@pytest.mark.parametrize("form", EVERY)
def test_processes_find_what_one_finds_alone(two_processes, alone, form):
    for found in two_processes:
        close(found[json.dumps(SHARED[form])]["facts"], alone[form], alone[form])


@pytest.mark.parametrize("form", SUMS)
@pytest.mark.parametrize("shares", [IN_BLOCKS, UNEVEN, EMPTY], ids=str)
def test_divided_rows_give_what_all_rows_give(two_processes, alone, form, shares):
    found = [one[json.dumps(divided(form, shares))] for one in two_processes]
    assert found[0]["digest"] == found[1]["digest"]
    close(found[0]["facts"], alone[form], alone[form])


@pytest.mark.parametrize("case", STREAMED, ids=str)
def test_divided_rows_are_read_from_a_loader(two_processes, alone, case):
    for found in two_processes:
        close(found[json.dumps(case)]["facts"], alone[case[1]], alone[case[1]])


@pytest.mark.parametrize("form", ["primal", "diagonal", "kfac", "subspace", "subnetwork"])
def test_cuts_between_blocks_have_the_bits_of_all_rows_in_each_process(two_processes, form):
    names = ("covariance", "blocks", "variances")
    for found in two_processes:
        expected = found[json.dumps(SHARED[form])]["facts"]
        for shares in (IN_BLOCKS, EMPTY):
            case = found[json.dumps(divided(form, shares))]["facts"]
            assert all(case[name] == expected[name] for name in names)


@pytest.mark.parametrize("form", SAVED)
def test_a_saved_posterior_takes_the_rows_of_each_process_or_all(two_processes, form):
    for found in two_processes:
        case = found[json.dumps(["saved_curvature", form, UNEVEN])]
        assert set(case["same"]) == {True}
        assert np.abs(case["evidence"]).max() < 1e-8


@pytest.mark.parametrize("shares", [UNEVEN, EMPTY], ids=str)
def test_subspaces_follow_from_divided_rows(two_processes, shares):
    expected = divided_subspaces()
    for found in two_processes:
        case = found[json.dumps(["divided_subspaces", shares])]
        np.testing.assert_allclose(case.pop("optimal"), expected["optimal"], rtol=1e-6, atol=1e-12)
        assert all(case[by] == expected[by] for by in case)


@pytest.mark.parametrize("what", REFUSED)
def test_what_processes_cannot_do_together_is_refused_in_all(two_processes, what):
    for found in two_processes:
        assert MESSAGES[what] in found['["refused_curvature"]'][what]
