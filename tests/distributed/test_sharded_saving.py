"""Artifacts of sharded weights, against those of one process."""

import json

import pytest

from distributed.launch import WORKER, outputs, results, start

KINDS = ["plain", "float32", "trajectory", "frozen", "mlp"]
ROUNDING = {"float32": 1e-6}
MESSAGES = {
    "paths": "path: expected the same in all 2 processes, got another on rank 1 than on rank",
    "not a path": "path: expected a path, got int",
    "taken": "path: expected a new or an empty folder, got an artifact at",
    "not finite": "weights: expected finite numbers, got NaN or infinite ones on rank 1.",
    "disk full": "path: expected free disk space, got No space left on device",
    "disk full in the middle": "path: expected free disk space, got No space left on device",
    "disk full at the end": "path: expected free disk space, got No space left on device",
    "another artifact": "path: expected the same in all 2 processes, got another on rank 1 than",
    "no artifact": "path: expected an artifact, got",
    "another module": "module: expected the saved architecture Residual, with",
    "another dtype": "module: expected weights of torch.float64, as saved, got torch.float32",
    "another kind": "module: expected random directions or a basis, for a sharded module",
    "altered": "path: expected tensors with sha256",
    "endless": "path: expected ",
    "wide": "module: expected subspace.basis of at most ",
    "another shift": "path: expected the same in all 2 processes, got another on rank 1 than on",
    "infinite": "path: subspace.shift: expected finite numbers",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [*KINDS, "pieces"])
def test_loading_gives_the_same_predictions(two_processes, folder, kind):
    check_loaded(two_processes, folder, kind)


def check_loaded(every, folder, kind):
    """What `sharded_saving` has to return in each process."""
    name, more = ("trajectory", [5]) if kind == "pieces" else (kind, [])
    for found in every:
        loaded = found[json.dumps(["sharded_saving", str(folder), name, *more])]
        assert loaded["sharded"], "other bits around the sharded module"
        assert loaded["whole"] < ROUNDING.get(kind, 1e-12)
        assert loaded["density"] < ROUNDING.get(kind, 1e-12)
        assert loaded["weights"], "load has changed the module"
        assert loaded["saved again"]
        assert loaded["files"] == ["manifest.json", "tensors"]
        assert loaded["without a module"] in (None, 26)


def test_the_artifact_is_that_of_one_process(two_processes, one_process, folder):
    check_loaded(two_processes, folder, "plain")
    found = one_process[json.dumps(["whole_saving", str(folder), "plain-"])]
    for same in ("facts", "names", "shift"):
        assert found[same]
        assert all(found[same]), same
    assert found["draws"] < 1e-12


@pytest.mark.parametrize("what", MESSAGES)
def test_errors_of_one_process_are_raised_in_all(two_processes, folder, what):
    for found in two_processes:
        error = found[json.dumps(["sharded_saving_refused", str(folder)])][what]
        assert error.startswith(MESSAGES[what])
        assert "\n" not in error


def test_nothing_is_left_of_what_was_not_saved(two_processes, folder):
    for found in two_processes:
        left = found[json.dumps(["sharded_saving_refused", str(folder)])]["left"]
        assert {name.split("/")[0] for name in left} == {
            "altered",
            "endless",
            "full",
            "infinite",
            "moved",
            "wide",
        }


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_during_a_save(rank, tmp_path):
    path = str(tmp_path / "model")
    case = json.dumps(["save_killed", path, rank])
    ended = outputs(start(2, [str(WORKER), case]), 120)
    assert ended[rank][0] == -9
    assert ended[1 - rank][0] == 1
    (line,) = (text for text in ended[1 - rank][2].splitlines() if "ProcessError: " in text)
    assert "processes: expected answers of all 2" in line
    assert not (tmp_path / "model" / "manifest.json").exists()
    again = ["save_killed", path, -1]
    for found in results(2, [again]):
        files = found[json.dumps(again)]["files"]  # with what the killed one left, for an hour
        assert sorted(set(files)) == ["manifest.json", "tensors"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_other_numbers_of_processes(count, two_processes, folder):
    every = results(count, [["sharded_saving", str(folder), kind] for kind in KINDS])
    for kind in KINDS:
        check_loaded(every, folder, kind)
