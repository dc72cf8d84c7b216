"""Training on rows that are divided among processes, against one process with all rows."""

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
from subbayes.training.trainer import TrainableNetwork
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
LINES = [["divided_lines", [70, 130], space] for space in ("pca", "optimal")]


@pytest.fixture(scope="module")
def two_processes():
    """The results of all cases in two processes."""
    return results(2, [*WHOLE, *WEIGHTED, *AVERAGED, *PIECES, *OTHERS, LIMIT, *LINES])


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
            pieces = [order.tensor_split(4) for order in orders]  # 200 rows, 64 in a batch
            for first, second in zip(*pieces, strict=True):
                some = torch.cat([first, shares[0] + second])
                yield x[some], y[some]

    task = ByHand(minibatches, settings)
    run(task, settings.epochs, progress=False)
    return task.weights()[0]


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
