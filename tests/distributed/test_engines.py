"""Every engine: the bits of its draws on many processes, after a resumption and after a kill."""

import json

import pytest

from distributed.engine_cases import ENGINES, MINIBATCHES, SAMPLERS, SIZES
from distributed.launch import WORKER, outputs, results, start

pytestmark = pytest.mark.slow

WITH_ALL_ROWS = [name for name in ENGINES if name not in MINIBATCHES]
SHARES = {  # cut between blocks of 32 rows
    2: {"even": [128, 128], "uneven": [128, 72], "empty shard": [200, 0]},
    4: {"even": [64] * 4, "uneven": [32, 96, 64, 8], "empty shard": [96, 0, 64, 40]},
    8: {"even": [32] * 8, "empty shard": [32, 0, 64, 32, 32, 0, 32, 8]},
}


@pytest.fixture(scope="module")
def alone():
    """Draws of every engine in one process, which has all rows."""
    cases = [["sample", name, size] for name in ENGINES for size in SIZES]
    return results(1, cases)[0]


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_draws_do_not_depend_on_the_number_of_processes(alone, count):
    for found in results(count, [json.loads(case) for case in alone]):
        for case, expected in alone.items():
            assert found[case] == expected, case


@pytest.mark.parametrize("count", SHARES)
def test_draws_do_not_depend_on_who_has_which_rows(alone, count):
    cases = {
        json.dumps(["sample_divided", name, shares]): json.dumps(
            ["sample", name, "even" if sum(shares) == SIZES["even"] else "uneven"]
        )
        for name in WITH_ALL_ROWS
        for shares in SHARES[count].values()
    }
    for found in results(count, list(map(json.loads, cases))):
        for case, whole in cases.items():
            assert found[case]["z"] == alone[whole]["z"], case


def test_effects_do_not_depend_on_the_number_of_processes():
    """Beside networks, groups are sampled in centred coordinates."""
    cases = [
        ["semi_structured", name, formula, deep]
        for name in ("laplace", "nuts", "smc")
        for formula, deep in (("y ~ s(x, k=6) + (1 | g)", True), ("y ~ x + (1 | g)", False))
    ]
    alone = results(1, cases)[0]
    for found in results(3, cases):
        assert found == alone


@pytest.fixture(scope="module")
def undisturbed():
    """Draws of samplers that neither stop nor save."""
    found = results(1, [["stopped", name, "", 0] for name in SAMPLERS])[0]
    return {json.loads(case)[1]: draws for case, draws in found.items()}


def test_samplers_resume_on_other_numbers_of_processes(undisturbed, tmp_path):
    cases = [
        ["stopped", name, str(tmp_path / name), int(0.45 * undisturbed[name]["evaluations"])]
        for name in SAMPLERS
    ]
    for count in (4, 2):
        for found in results(count, cases):
            for case, draws in found.items():
                assert draws["z"] is None, case
                assert draws["resumed"] == (count == 2), case
    for found in results(3, [["stopped", name, str(tmp_path / name), 0] for name in SAMPLERS]):
        for case, draws in found.items():
            assert draws["resumed"], case
            assert draws["z"] == undisturbed[json.loads(case)[1]]["z"], case


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_kill_in_a_save_loses_and_changes_nothing(undisturbed, tmp_path, name):
    folder = tmp_path / "checkpoint"
    for count, save, piece in ((4, 2, 3), (2, 1, 1)):
        case = ["killed_while_saving", name, str(folder), save, piece]
        first, *others = outputs(start(count, [str(WORKER), json.dumps(case)]), 300)
        assert first[0] == -9, first[2]
        assert all("processes: expected answers" in error for _, _, error in others)
        assert (folder / "manifest.json").is_file()
    case = ["stopped", name, str(folder), 0]
    for found in results(3, [case]):
        assert found[json.dumps(case)]["resumed"]
        assert found[json.dumps(case)]["z"] == undisturbed[name]["z"]
