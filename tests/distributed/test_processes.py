"""The same bits for every number of processes; faults, refusals and checkpoints."""

import json
import time

import numpy as np
import pytest

from distributed.engine_cases import SIZES
from distributed.launch import WORKER, outputs, results, start
from subbayes.distributed.blocks import BlockSize, own_blocks
from subbayes.distributed.chain_groups import mesh_shape
from subbayes.distributed.processes import ProcessError, Processes
from subbayes.utils.checks import InputError

QUICK = [
    ["evaluations", "uneven"],
    ["streamed"],
    ["sample", "elliptical-slice", "empty"],
    ["sample", "hmc"],
    ["fitted"],
    ["from_ensemble"],
]
EVERY = [*QUICK, *(["evaluations", size] for size in SIZES if size != "uneven")]
REFUSED = {
    "rows": "data",
    "values": "data",
    "one row of many": "data",
    "streamed": "data",
    "weights": "model",
    "seed": "seed",
    "prior": "settings",
    "engine": "inference",
    "version": "versions",
    "device": "device",
}
REFUSED_POSTERIORS = {
    "data": "data",
    "subspace": "subspace",
    "prior": "posterior",
    "temperature": "posterior",
    "draws": "sampling",
    "seed": "seed",
    "engine": "inference",
    "device": "device",
    "batch size": "block_size",
}


def test_two_processes_have_the_bits_of_one(two_processes, one_process):
    for case in map(json.dumps, QUICK):
        for found in two_processes:
            assert found[case] == one_process[case], case


def test_chains_may_be_divided_in_any_way(two_processes):
    first, second = two_processes
    for case in (["sample", "hmc"], ["sample", "hmc", "even", 1], ["sample", "hmc", "even", 2]):
        assert first[json.dumps(case)] == second[json.dumps(case)] == first['["sample", "hmc"]']


@pytest.mark.parametrize("what", REFUSED)
def test_processes_that_differ_are_refused_in_all(two_processes, what):
    for found in two_processes:
        error = found[json.dumps(["refused", what])]["error"]
        assert error.startswith(f"{REFUSED[what]}: expected the same in all 2 processes, got")
        assert "\n" not in error


@pytest.mark.parametrize("case", [["refused", "attribute"], ["refused_posterior", "attribute"]])
def test_modules_with_other_outputs_are_refused_in_all(two_processes, case):
    for found in two_processes:
        error = found[json.dumps(case)]["error"]
        assert error.startswith(
            "model: expected the same outputs in all 2 processes, got others on rank 1 than on "
            "rank 0, with the same weights. Set what the module keeps beside its parameters"
        )


@pytest.mark.parametrize("what", REFUSED_POSTERIORS)
def test_posteriors_that_differ_are_refused_in_all(two_processes, what):
    for found in two_processes:
        error = found[json.dumps(["refused_posterior", what])]["error"]
        name = REFUSED_POSTERIORS[what]
        assert error.startswith(f"{name}: expected the same in all 2 processes, got another")
        assert "\n" not in error


def test_an_error_of_the_training_is_raised_in_all(two_processes):
    first, second = (found['["one_fails"]']["error"] for found in two_processes)
    assert first == second
    assert first


def test_numbers_of_groups_that_do_not_fit(two_processes):
    for found in two_processes:
        assert "a divisor of 2" in found['["groups", 3]']["error"] or (
            "at most 2" in found['["groups", 3]']["error"]
        )
        assert "at most 2" in found['["groups", 4]']["error"]


@pytest.mark.parametrize("rank", [1, 20])
def test_bytes_of_an_evaluation(two_processes, rank):
    for found in two_processes:
        assert found[json.dumps(["traffic", rank])]["bytes"] <= 4 * (rank + 4) * 8


def test_leaving_ends_the_groups_that_joining_has_made(two_processes):
    for found in two_processes:
        groups = found['["left"]']
        joined = groups["groups"][0]
        assert joined >= 3
        assert groups["groups"] == [joined, 0, joined, 0]
        assert groups["own"]
        assert found['["traffic", 5]']["bytes"] > 0, "the other groups are there"


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others():
    processes = start(2, [str(WORKER), '["killed", 1]'])
    processes[1].wait(timeout=300)
    died = time.monotonic()
    found = outputs(processes, 60)
    assert time.monotonic() - died < 30
    assert found[1][0] == 3
    assert found[0][0] not in (0, 3)
    (line,) = (text for text in found[0][2].splitlines() if "subbayes.ProcessError: " in text)
    assert "processes: expected answers of all 2" in line


@pytest.mark.slow
def test_a_run_resumes_on_other_numbers_of_processes(tmp_path):
    (alone,) = results(1, [["resumed", "", 0]])
    expected = alone['["resumed", "", 0]']
    folder = str(tmp_path / "checkpoint")
    for count, stop in ((4, 150), (2, 120)):
        stopped = outputs(start(count, [str(WORKER), json.dumps(["resumed", folder, stop])]), 300)
        codes = {code for code, _, _ in stopped}  # 1 of those that wait for one that has stopped
        assert 9 in codes, stopped[0][2]
        assert codes <= {1, 9}, stopped[0][2]
        assert (tmp_path / "checkpoint").is_dir()
    case = ["resumed", folder, 0]
    for found in results(3, [case]):
        assert found[json.dumps(case)] == expected


@pytest.mark.slow
def test_a_checkpoint_of_another_density_is_refused_in_all(tmp_path):
    case = ["forged", str(tmp_path)]
    for found in results(2, [case]):
        error = found[json.dumps(case)]["error"]
        assert error.startswith("checkpoint: expected one of the same density")
        assert "\n" not in error


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_more_processes_have_the_bits_of_one(count, one_process):
    cases = [["fitted", "", "loo"], *EVERY]
    for found in results(count, cases):
        for case in map(json.dumps, cases):
            assert found[case] == one_process[case], case


# --- without other processes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT: expected the variables that"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK, MASTER_ADDR, MASTER_PORT: expected"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: expected a whole number, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected a number below WORLD_SIZE, 2, got 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: expected a whole number of at least 1"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "99999999"},
            "MASTER_PORT: expected a port of at most 65535, got 99999999. Start the program with",
        ),
    ],
)
def test_variables_that_are_wrong(monkeypatch, variables, message):
    from subbayes import InputError
    from subbayes.distributed import join

    complete = len(variables) >= 2 and all(variables.values())
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if complete else {}
    for name, value in (address | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        join(required=False)
    monkeypatch.setenv("SUBBAYES_DISTRIBUTED", "0")
    assert join(required=False) is None


def test_errors_of_exchanges_are_of_one_line_with_their_reason():
    processes = Processes(1, 2)
    with pytest.raises(ProcessError) as caught, processes._reachable():
        raise RuntimeError("Timed out waiting 5000ms\nfor recv operation to finish")
    assert caught.value.argument == "processes"
    reason = "waited: Timed out waiting 5000ms for recv operation to finish. See the first"
    assert reason in str(caught.value)


def test_numbers_that_are_nan_agree(monkeypatch):
    gathered = [{"prior": float("nan"), "seed": 0}, {"prior": float("nan"), "seed": 1}]
    processes = Processes(0, 2)
    monkeypatch.setattr(processes, "gather", lambda *_, **__: gathered)
    with pytest.raises(InputError, match="^seed: expected the same in all 2 processes"):
        processes.agree(gathered[0], "Give every process the same")


def test_blocks_do_not_depend_on_the_number_of_processes():
    for blocks in (1, 5, 64):
        for processes in (1, 2, 3, 8):
            parts = [own_blocks(blocks, rank, processes) for rank in range(processes)]
            assert [b for part in parts for b in part] == list(range(blocks))
            assert np.ptp([len(part) for part in parts]) <= 1


def test_block_sizes_are_bounded_by_memory_and_by_exact_sums():
    size = BlockSize.of(10**6, row_bytes=10**6, most_bytes=2**25, batch_size=None)
    assert size.count <= 2**12
    assert size.chains == 1
    assert BlockSize.of(10, 100, 2**25, None).rows == 10
    for most in (2**20, 2**24):
        size = BlockSize.of(10**5, 1000, most, None)
        assert 3000 * size.rows * size.chains <= most
    with pytest.raises(ValueError, match="batch_size: expected at least 25 for 100000 rows"):
        BlockSize.of(100_000, 100, 2**25, 1)


@pytest.mark.parametrize("n", [60, 1000, 5000, 30_000, 200_000])
@pytest.mark.parametrize("row_bytes", [80, 1000, 8000])
def test_calls_have_enough_work_and_blocks_divide_evenly(n, row_bytes):
    size = BlockSize.of(n, row_bytes, 2**25, None)
    work = 3 * row_bytes * size.rows
    assert size.count in (1, 2, 4) or size.count % 8 == 0
    assert size.count < 2 or size.rows >= 512
    assert work * size.chains >= 3 * 2**20 or size.chains == 16
    assert size.chains == 1 or work * size.chains // 2 < 3 * 2**20
    if n >= 16 * max(512, 2**20 / row_bytes):
        assert size.count >= 16


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("chains", [1, 4, 8, 30])
@pytest.mark.parametrize("blocks", [1, 3, 32])
def test_the_default_mesh_has_the_least_work(processes, chains, blocks):
    groups, within = mesh_shape(processes, chains, blocks, 4)
    assert groups * within == processes

    def work(g: int) -> int:
        return max(len(own_blocks(-(-chains // 4), r, g)) for r in range(g)) * max(
            len(own_blocks(blocks, r, processes // g)) for r in range(processes // g)
        )

    possible = [g for g in range(1, processes + 1) if processes % g == 0 and g <= -(-chains // 4)]
    assert work(groups) == min(map(work, possible))
