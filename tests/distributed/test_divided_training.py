"""Training on sharded rows, against one process with all rows."""

import json

import numpy as np
import pytest
import torch

from distributed.launch import results
from distributed.training_cases import STEPS, in_float64, rows, trained
from subbayes import Network
from subbayes.data.data import Data
from subbayes.likelihoods import Gaussian
from subbayes.training.loop import run
from subbayes.training.minibatches import Minibatches
from subbayes.training.trainable import TrainableNetwork
from subbayes.utils.seeding import derive_seed

pytestmark = pytest.mark.slow  # processes that import torch

SHARES = ([100, 100], [70, 130], [0, 200])
WHOLE = [["divided_training", "whole", shares] for shares in SHARES]
WEIGHTED = [["divided_training", "whole", shares, "weights"] for shares in SHARES]
AVERAGED = [["divided_training", "averaging", [70, 130]]]
PIECES = [["divided_training", "minibatches", shares] for shares in SHARES]
OTHERS = [
    ["divided_training", "validation", [70, 130]],
    ["divided_training", "validation", [0, 200]],
    ["divided_training", "minibatches", [70, 130], "loader"],
    ["divided_training", "minibatches", [0, 200], "loader"],
    ["divided_training", "minibatches", [100, 100], "sampler"],
]
LIMIT = ["divided_time_limit", [70, 130]]
UNUSED, TOKENS, ATTEMPTS = ["divided_unused", [70, 130]], ["divided_tokens"], ["divided_attempts"]
FEW = [["divided_few", shares] for shares in ([20, 20], [3, 3], [5, 19])]
MESSAGES = {
    "buffers": "buffers: expected the same in all 2 processes, got another on rank 1 than",
    "body": "parameters: expected the same in all 2 processes, got another on rank 1 than",
    "inputs": "inputs of the subspace: expected the same in all 2 processes, got another",
    "validation alone": "validation: expected all rows in each process, got sharded rows",
    "validation of each": "validation: expected the same in all 2 processes, got another on",
    "loader": "data: expected all rows in each process, got sharded rows",
    "fraction": "validation: expected a fraction that leaves rows on both sides of 200, got 0.0001",
}
LINES = [["divided_lines", [70, 130], space] for space in ("pca", "optimal")]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Two fits with the same checkpoint."""
    return ["divided_resumed", str(tmp_path_factory.mktemp("runs") / "checkpoint")]


@pytest.fixture(scope="module")
def two_processes(resumed):
    """The results of all cases in two processes."""
    cases = [*WHOLE, *WEIGHTED, *AVERAGED, *PIECES, *OTHERS, LIMIT, *LINES]
    return results(2, [*cases, UNUSED, TOKENS, *FEW, resumed, ATTEMPTS])


def close(found, expected):
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(found["noise"], expected["noise"], rtol=1e-7)
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-7, err_msg=name)


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_steps_on_all_rows_are_those_of_one_process(two_processes, case):
    expected = trained(rows(), "whole")
    for found in two_processes:
        assert found[json.dumps(case)]["same"] == 1
        close(found[json.dumps(case)], expected)


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_weights_of_rows_count_as_in_one_process(two_processes, case):
    expected = trained(Data.of(rows()).weighted(torch.arange(200) % 3), "whole", weighted=True)
    for found in two_processes:
        close(found[json.dumps(case)], expected)


@pytest.mark.parametrize("case", AVERAGED, ids=str)
def test_weight_averaging_is_that_of_one_process(two_processes, case):
    for found in two_processes:
        close(found[json.dumps(case)], trained(rows(), "averaging"))


def steps_by_hand(shares):
    """Training of one process on batches that join those of both."""
    settings, (x, y) = STEPS["minibatches"], rows()
    generators = [
        torch.Generator().manual_seed(derive_seed(derive_seed(5, 6, rank), 0)) for rank in (0, 1)
    ]
    minibatches = Minibatches((x, y), Gaussian(), Network(in_float64()), 64, 5)

    class ByHand(TrainableNetwork):
        def batches(self):
            orders = [
                torch.randperm(n, generator=generator)
                for n, generator in zip(shares, generators, strict=True)
            ]
            ends = np.cumsum([64, 64, 64, 8]) / 200  # rows of the batches
            pieces = [
                order.tensor_split(np.floor(len(order) * ends[:-1] + place).astype(int).tolist())
                for order, place in zip(orders, (0.25, 0.75), strict=True)
            ]
            for first, second in zip(*pieces, strict=True):
                some = torch.cat([first, shares[0] + second])
                yield x[some], y[some]

    task = ByHand(minibatches, settings)
    run(task, settings.epochs, progress=False)
    return task.weights()


@pytest.mark.parametrize("case", PIECES, ids=str)
def test_minibatches_are_pieces_of_the_rows_of_each_process(two_processes, case):
    expected = steps_by_hand(case[2])
    for found in two_processes:
        assert found[json.dumps(case)]["same"] == 1
        weights = torch.tensor(found[json.dumps(case)]["weights"], dtype=torch.float64)
        torch.testing.assert_close(weights, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_all_processes_end_with_the_same_weights(two_processes, case):
    for found in two_processes:
        result = found[json.dumps(case)]
        losses = result["history"]["train_loss"]
        assert result["same"] == 1
        assert losses[-1] < losses[0]
        if case[1] == "validation":
            scores = result["history"]["validation_log_likelihood"]
            assert result["best"] == int(np.argmax(scores)) + 1


def test_a_clock_that_is_ahead_stops_all(two_processes):
    for found in two_processes:
        assert found[json.dumps(LIMIT)]["epochs"] == 1


@pytest.mark.parametrize("case", LINES, ids=str)
def test_fit_trains_and_predicts_as_with_all_rows(two_processes, case):
    for found in two_processes:
        model = found[json.dumps(case)]
        assert model["same"] == 1
        assert model["difference"] < 1e-2  # float32 sums of other batches, over 42 steps
        assert model["rank"][0] == model["rank"][1]
        assert model["rmse"][0] == pytest.approx(model["rmse"][1], rel=1e-2)


def test_weights_without_a_gradient_stay_as_they_are(two_processes):
    for found in two_processes:
        assert found[json.dumps(UNUSED)]["weights"] == [[1.0, 1.0]]


def test_texts_of_other_lengths_in_each_process_train_together(two_processes):
    first, second = (found[json.dumps(TOKENS)] for found in two_processes)
    assert first == second
    assert first["loss"][-1] < first["loss"][0]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_batches_and_held_out_rows_have_their_sizes_over_all_processes(two_processes, case):
    n = sum(case[1])
    for found in two_processes:
        few = found[json.dumps(case)]
        assert sum(few["steps"]) == n
        assert len(few["steps"]) == -(-n // 4)
        assert max(few["steps"]) - 4 <= 1
        assert few["held"] == [n - round(0.2 * n), round(0.2 * n)]


def test_a_checkpoint_has_the_training_of_all_processes(two_processes, resumed):
    for found in two_processes:
        first, second = found[json.dumps(resumed)]["draws"]
        assert first == second  # with a time limit, training again would end elsewhere


@pytest.mark.parametrize("what", MESSAGES)
def test_what_processes_cannot_train_together_is_refused_in_all(two_processes, what):
    for found in two_processes:
        assert MESSAGES[what] in found[json.dumps(ATTEMPTS)][what]


def test_a_callback_of_one_process_stops_all(two_processes):
    for found in two_processes:
        assert found[json.dumps(ATTEMPTS)]["callback"] == 3


def test_rows_of_weight_0_in_one_process_leave_training_to_the_others(two_processes):
    for found in two_processes:
        case = found[json.dumps(ATTEMPTS)]["weights"]
        assert case["difference"] < 1e-12
        assert case["value"]
