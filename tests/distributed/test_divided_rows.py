"""Rows that each process has for itself, against the same rows in all processes."""

import json
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed.divided_cases import REFUSED
from distributed.launch import results
from subbayes import InputError, Network, Posterior
from subbayes.data.data import Data
from subbayes.data.division import Division
from subbayes.distributed.blocks import Blocks, BlockSize
from subbayes.distributed.processes import Processes
from subbayes.likelihoods import Gaussian
from subbayes.subspace import FullSubspace

pytestmark = pytest.mark.slow  # two processes that import torch

WHOLE = ["whole_values"]
IN_BLOCKS = [  # cut between two blocks of 32
    ["divided_values", [96, 104]],
    ["divided_values", [0, 200]],
    ["divided_values", [96, 104], [0, 1], True],
]
UNEVEN, EXCHANGED = ["divided_values", [70, 130]], ["divided_values", [130, 70], [1, 0]]
SUM = ["divided_sum", [70, 130]]
CENTRE = ["divided_centre"]
SCORES = [["divided_scores", [70, 130]], ["divided_scores", [0, 200], True]]
WEIGHTS = [["divided_weights", [70, 130]], ["divided_weights", [70, 130], True]]
FITS = [
    ["divided_fit", [50, 150], "elliptical-slice"],
    ["divided_fit", [50, 150], "laplace-linearised"],
    ["divided_fit", [0, 200], "laplace-linearised"],
]
METHODS = ["evidence", "optimal", "subnetwork"]
LAPLACE = [["divided_laplace", [50, 150], method] for method in METHODS]
SAME, LOADED = ["divided_same_rows"], ["divided_loaded", [70, 130]]
BLOCKS = [["divided_linearised", shares] for shares in ([96, 104], [32, 168], [0, 200])]
MESSAGES = {
    "batchnorm": "subspace: expected a centre at the module's weights, for BatchNorm",
    "one divided": "data: expected the same in all 2 processes, got another on rank 1 than on",
    "posterior of one divided": "processes: expected the same call in all 2 processes, got facts",
    "mixed calls": "processes: expected the same call in all 2 processes, got work of the first",
    "shapes": "data: expected rows of the same shapes and dtypes in all processes, got",
    "empty": "data: expected at least one row in one of the processes, got empty tables",
    "epochs": "training: expected Training(epochs=0, swa_epochs=0) for BatchNorm and sharded rows",
    "curve": "subspace: expected a subspace that is a sum over rows or a trajectory for",
    "optimal": "subspace: expected a subspace that is a sum over rows or a trajectory for",
    "predictive": "subspace: expected a subspace that is a sum over rows or a trajectory for",
    "minibatches": "data: expected all rows in each process, got sharded rows",
    "rows": "data: expected all rows in each process, got sharded rows",
    "chain groups": "chain_groups: expected 1 for sharded weights or rows",
    "train": "training: expected a module without BatchNorm for sharded rows",
    "many": "data: expected all rows in each process, got sharded rows",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs with a checkpoint: one that is resumed, and one with another cut."""
    folder = str(tmp_path_factory.mktemp("runs") / "checkpoint")
    return [["divided_run", folder, shares] for shares in ([96, 104], [96, 104], [70, 130])]


@pytest.fixture(scope="module")
def two_processes(runs):
    """The results of all cases in two processes."""
    cases = [WHOLE, *IN_BLOCKS, UNEVEN, EXCHANGED, SUM, *FITS, *BLOCKS, CENTRE, *SCORES]
    cases += [*WEIGHTS, *LAPLACE, SAME, LOADED]
    return results(2, [*cases, *runs[1:], ["divided_refused"]])


@pytest.mark.parametrize("case", IN_BLOCKS)
def test_cuts_between_blocks_have_the_bits_of_all_rows_in_each_process(two_processes, case):
    for found in two_processes:
        values, expected = found[json.dumps(case)], dict(found[json.dumps(WHOLE)])
        if len(case) > 2:
            values.pop("in order"), expected.pop("in order")
        assert values == expected


def test_it_does_not_matter_which_process_has_which_rows(two_processes):
    for found in two_processes:
        one, other = (dict(found[json.dumps(case)]) for case in (UNEVEN, EXCHANGED))
        one.pop("in order"), other.pop("in order")
        assert one == other
        assert one["n"] == 200


def test_the_log_likelihood_is_the_exact_sum_of_the_blocks_of_each_process(two_processes):
    for found in two_processes:
        case = found[json.dumps(SUM)]
        assert len(case["terms"]) == 3 + 5
        assert case["found"] == [math.fsum(terms) for terms in zip(*case["terms"], strict=True)]


@pytest.mark.parametrize("case", FITS)
def test_fit_finds_what_it_finds_with_all_rows(two_processes, case):
    for found in two_processes:
        fit = found[json.dumps(case)]
        assert fit["same"] == 1
        assert fit["draws"] < 1e-3  # float32 sums of other blocks
        assert fit["noise"] < 1e-6


def test_linearised_laplace_has_the_same_bits_for_all_cuts_between_blocks(two_processes):
    for found in two_processes:
        cases = [found[json.dumps(case)] for case in BLOCKS]
        assert len({case["digest"] for case in cases}) == 1
        assert all(case["draws"] < 1e-4 for case in cases)
        assert all(case["evidence"] < 1e-3 for case in cases)


@pytest.mark.parametrize("case", LAPLACE)
def test_linearised_laplace_predicts_what_it_predicts_with_all_rows(two_processes, case):
    for found in two_processes:
        models = found[json.dumps(case)]
        assert models["same"] == 1
        assert models["predictions"] < 1e-3  # float32 sums of other blocks
        assert models["scores"][0] == pytest.approx(models["scores"][1], rel=1e-6)
        assert models["prior"][0] == pytest.approx(models["prior"][1], rel=1e-3)


def test_the_first_process_warns_of_the_same_rows_in_two(two_processes):
    first, second = (found[json.dumps(SAME)] for found in two_processes)
    for name in ("tensors", "loader"):
        assert "data: processes 0 and 1 have the same rows, which count in each" in first[name][0]
    assert first["others"] == []
    assert not any(second.values())


def test_a_loaded_model_takes_the_rows_of_each_process(two_processes):
    for found in two_processes:
        before, after = found[json.dumps(LOADED)]["values"]
        assert before == after


@pytest.mark.parametrize("case", SCORES)
def test_scores_of_divided_rows_are_those_of_all_rows(two_processes, case):
    for found in two_processes:
        scores = found[json.dumps(case)]
        assert {"log_likelihood", "rmse", "crps", "coverage"} <= set(scores["expected"])
        assert scores["found"] == pytest.approx(scores["expected"], rel=1e-6)


@pytest.mark.parametrize("case", WEIGHTS)
def test_weighted_rows_that_are_divided_count_as_in_one_process(two_processes, case):
    for found in two_processes:
        found, expected = found[json.dumps(case)]["found"], found[json.dumps(case)]["expected"]
        assert found["weights"] == expected["weights"] == [i % 4 for i in range(200)]
        assert found["n"] == expected["n"]
        assert found["elpd"] == pytest.approx(expected["elpd"], rel=1e-6)
        assert found["se"] == pytest.approx(expected["se"], rel=1e-6)


def test_fit_in_a_subspace_around_other_weights_needs_no_data_in_one_process(two_processes):
    for found in two_processes:
        fit = found[json.dumps(CENTRE)]
        assert fit["centre"]
        assert fit["draws"] < 1e-3
        assert fit["noise"] < 1e-6


def test_a_checkpoint_belongs_to_its_cut(two_processes, runs):
    for found in two_processes:
        assert "z" in found[json.dumps(runs[1])]
        error = found[json.dumps(runs[2])]["error"]
        assert "one made with the same posterior, got another" in error


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_all_rows_is_refused_in_one_line(two_processes, what):
    for found in two_processes:
        error = found['["divided_refused"]'][what]
        assert MESSAGES[what] in error
        assert "\n" not in error


@pytest.mark.slow
def test_three_processes_one_of_them_without_rows(two_processes):
    uneven, exchanged = (
        ["divided_values", [70, 0, 130]],
        ["divided_values", [130, 70, 0], [1, 2, 0]],
    )
    expected = dict(two_processes[0][json.dumps(UNEVEN)])
    loaders = ["divided_values", [70, 0, 130], [0, 1, 2], True]
    for found in results(3, [uneven, exchanged, loaders, ["divided_sum", [70, 0, 130]]]):
        assert found[json.dumps(uneven)] == expected
        assert found[json.dumps(loaders)] == expected | {"in order": ""}
        rest = dict(found[json.dumps(exchanged)])
        rest.pop("in order")
        assert rest == {name: expected[name] for name in rest}
        case = found['["divided_sum", [70, 0, 130]]']
        assert case["found"] == [math.fsum(terms) for terms in zip(*case["terms"], strict=True)]


# --- without other processes ----------------------------------------------------------------------


def test_data_that_are_divided_need_other_processes():
    x, y = torch.zeros(4, 2), torch.zeros(4)
    network = Network(torch.nn.Linear(2, 1))
    with pytest.raises(InputError, match="data: expected processes that have joined"):
        Posterior(
            network,
            Gaussian(noise=1.0),
            Data.of((x, y), divided=True),
            FullSubspace(network.weights),
        )


def test_a_share_may_be_empty():
    assert Data.of((torch.zeros(0, 2), torch.zeros(0)), divided=True).n == 0
    loader = DataLoader(TensorDataset(torch.zeros(0, 2), torch.zeros(0)))
    assert Data.of(loader, divided=True).n == 0
    with pytest.raises(InputError, match="data: expected at least one row, got an empty loader"):
        Data.of(loader)
    with pytest.raises(InputError, match="data: expected at least one row, got an empty table"):
        Data.of((torch.zeros(0, 2), torch.zeros(0)))


def test_blocks_begin_at_the_first_row_of_each_share():
    shares = (5, 0, 8)
    positions = []
    for rank, rows in enumerate(shares):
        data = Data.of((torch.zeros(rows, 1), torch.zeros(rows)), divided=True)
        example = torch.zeros(2, 1), torch.zeros(2)
        object.__setattr__(data, "division", Division(shares, example))
        processes = Processes(rank, 3)
        processes.highest = lambda *_: [2]  # the blocks of two of them
        blocks = Blocks.of(data, BlockSize(13, 4, 1), processes, torch.device("cpu"), in_step=True)
        positions.append([start for start, *_ in blocks.steps()])
    assert positions == [[0, 4], [-1, -1], [5, 9]]


def test_sums_of_shares_cannot_overflow():
    for shares in ((10**6, 10, 0, 10), (3, 3), (10**7,) * 8):
        size = BlockSize.of(sum(shares), 10**6, 2**25, None, shares)
        assert len(shares) * -(-max(shares) // size.rows) <= 2**12
