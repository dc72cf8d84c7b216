"""Weights that `fully_shard` divides among processes, against the same weights in one piece."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from distributed.launch import WORKER, outputs, results, start
from distributed.sharded_cases import REFUSED
from subbayes import InputError
from subbayes.distributed.sharded_weights import (
    ShardLayout,
    _check_backend,
    is_sharded,
    joined_processes,
    without_shards,
)
from subbayes.networks.sharded.network import network_of


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


BASES = [["sharded_basis"]]
VALUES = [["sharded_values", 100], ["sharded_values", 20]]
ROWS = [["sharded_rows_of_each", [70, 30]], slow(["sharded_rows_of_each", [0, 50]])]
FITS = [
    ["sharded_fit", "elliptical-slice", 10],
    ["sharded_fit", "nuts", 3],
    ["sharded_fit", "elliptical-slice", 4, "float32"],
]
SCORES = [
    slow(["sharded_scores", [70, 30]]),
    ["sharded_scores", [0, 50], "noise"],
    slow(["sharded_scores", [40, 20], "loader"]),
]
ROUNDING = {"float64": 1e-12, "float32": 1e-5}
MESSAGES = {
    "sparse": "module: expected weights in one process, got weights sharded by fully_shard.",
    "one process": "model: expected the same in all 2 processes, got another on rank 1 than on",
    "mixed": "module: expected fully_shard of the whole module, got 5 of 7 parameters that are not",
    "two axes": "module: expected a mesh with one axis of all 2 processes, got one of shape (1, 2)",
    "part of the processes": "module: expected a mesh with one axis of all 2 processes, got one of",
    "first version": "(FSDP2), got FullyShardedDataParallel. Use fully_shard instead",
    "network": "module: expected weights in one process, got weights sharded by fully_shard. Use",
    "masks": "parameters: expected names of whole parameters of a sharded module, got masks",
    "epochs": "training: expected Training(epochs=0, swa_epochs=0) for sharded weights, got epochs",
    "pca": "subspace: expected 'random' or a Subspace for sharded weights, got 'pca'",
    "optimal": "subspace: expected 'random' or a Subspace for sharded weights, got 'optimal'",
    "subnetwork": "subspace: expected 'random' or a Subspace for sharded weights, got 'subnetwork'",
    "curve": "subspace: expected 'random' or a Subspace for sharded weights, got 'curve'",
    "full": "subspace: expected 'random' or a Subspace for sharded weights, got 'full'",
    "linearised": "inference: expected an engine that evaluates the posterior alone for sharded",
    "evidence": "prior: expected a scale or a Normal for sharded weights, got 'evidence'",
    "chain groups": "chain_groups: expected 1 for sharded weights or rows",
    "rank": "rank: expected at most 97, the number of weights, got 1000",
    "size": "subspace: expected 97 weights, as the network has, got 3",
    "trajectory": "module: expected weights in one process, got weights sharded by fully_shard",
    "kind": "kind: expected 'gaussian' for sharded weights, got 'sparse'. Leave it out",
    "device": "module: expected weights in one process, got weights sharded by fully_shard",
}


RESTORES = hasattr(FSDPModule, "reset_iter_state")


@pytest.mark.parametrize("case", [*VALUES, *ROWS])
def test_values_and_gradients_are_those_of_whole_weights(two_processes, case):
    for found in two_processes:
        differences = found[json.dumps(case)]
        assert len(differences) >= 6
        assert max(differences.values()) < 1e-13, differences


@pytest.mark.parametrize("case", SCORES)
def test_scores_of_divided_rows_are_those_of_all_rows_and_of_whole_weights(two_processes, case):
    for found in two_processes:
        scores = found[json.dumps(case)]
        assert {"log_likelihood", "rmse", "crps", "coverage"} <= set(scores["whole"])
        assert scores["all rows"] == pytest.approx(scores["whole"], rel=1e-9)
        assert scores["found"] == pytest.approx(scores["whole"], rel=1e-9)


@pytest.mark.parametrize("case", BASES)
def test_the_basis_is_that_of_whole_weights_and_nobody_has_all(two_processes, case):
    for found in two_processes:
        basis = found[json.dumps(case)]
        assert basis["same bits"]
        assert basis["same centre"]
        assert basis["largest part"] < 0.65  # rows of 7, 7, 1 and 5 cannot be halved
        assert max(basis[name] for name in ("project", "project others", "pull")) < 1e-12
    assert len({found[json.dumps(case)]["digest"] for found in two_processes}) == 1


def test_moments_of_a_linear_model_are_exact(two_processes):
    for found in two_processes:
        assert found['["sharded_moments"]']["mean"] < 1e-10
        assert found['["sharded_moments"]']["covariance"] < 1e-10


@pytest.mark.parametrize("case", [slow(FITS[0]), FITS[2]])
def test_fit_returns_the_draws_of_whole_weights(two_processes, case):
    check_fit(two_processes, case)


def check_fit(every, case):
    """What `sharded_fit` has to return in each process."""
    exact = 1e-6 if case[1] == "nuts" else ROUNDING[(*case, "float64")[3]]
    for found in every:
        fit = found[json.dumps(case)]
        assert fit["draws"] < exact
        assert fit["mean"] < max(exact, 1e-6)
        assert fit["noise"] < 1e-6
        assert len(set(fit["processes"])) == 1
        for unchanged in ("weights", "mode", "gradients", "others"):
            assert fit[unchanged], unchanged


@pytest.mark.skipif(not RESTORES, reason="before torch 2.13 FSDP2 cannot begin anew after an error")
def test_a_module_that_fails_is_restored(two_processes):
    for found in two_processes:
        for what, value in found['["sharded_error"]'].items():
            assert value == "a layer fails" if what.endswith("error") else value is True, what


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_all_weights_is_refused_in_one_line(two_processes, what):
    for found in two_processes:
        error = found['["sharded_refused"]'][what]
        assert MESSAGES[what] in error
        assert "\n" not in error


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_other_numbers_of_processes(count, two_processes):
    cases = [*VALUES, *BASES, ["sharded_moments"], *FITS[:2]]
    every = results(count, cases)
    for found in every:
        for case in VALUES:
            assert max(found[json.dumps(case)].values()) < 1e-13
        for case in map(json.dumps, BASES):
            assert found[case]["same bits"]
            assert found[case]["digest"] == two_processes[0][case]["digest"]
        assert max(found['["sharded_moments"]'].values()) < 1e-10
    for case in FITS[:2]:
        check_fit(every, case)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_processes(tmp_path):
    alone = ["sharded_run", str(tmp_path / "alone"), 0]
    expected = torch.tensor(results(1, [alone])[0][json.dumps(alone)]["z"])
    folder = str(tmp_path / "checkpoint")
    stopped = outputs(start(2, [str(WORKER), json.dumps(["sharded_run", folder, 20])]), 120)
    assert 9 in {code for code, _, _ in stopped}, stopped[0][2]
    assert (tmp_path / "checkpoint").is_dir()
    case = ["sharded_run", folder, 0]
    for found in results(3, [case]):
        torch.testing.assert_close(torch.tensor(found[json.dumps(case)]["z"]), expected)


# --- without other processes ----------------------------------------------------------------------


def test_plain_modules_are_not_sharded():
    module = torch.nn.Linear(2, 1)
    assert not is_sharded(module)
    assert not network_of(module).is_sharded


def test_gradients_have_the_dtype_of_the_weights_that_are_added_up():
    layout = ShardLayout(("a", "b"), ((3, 2), (1, 1)), 0, 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        named = {n: torch.nn.Parameter(torch.ones(r, w, dtype=dtype))
                 for n, (r, w) in zip(layout.names, layout.shapes, strict=True)}  # fmt: skip
        named["a"].grad = torch.full((3, 2), 0.5, dtype=dtype)
        found = layout.gradient(named)
        assert found.dtype == layout.flatten(named).dtype
        assert found.tolist() == 6 * [0.5] + [0.0]


def test_a_module_without_shards_shares_tensors_and_nothing_that_changes():
    layer = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(2)), "b": torch.zeros(1)})
    layer.scaling = {"a": 1.0, "b": 2.0}
    module = torch.nn.ModuleDict({"first": layer, "second": layer})
    other = without_shards(module)
    assert repr(other) == repr(module)
    assert other["second"] is other["first"] is not layer
    assert other["first"]["a"] is layer["a"]
    del other["first"]["b"], other["first"].scaling["b"], other["second"]
    assert list(layer) == list(layer.scaling) == ["a", "b"]
    assert list(module) == ["first", "second"]


def test_a_process_that_has_not_joined():
    with pytest.raises(InputError, match="processes: expected joined ones, for weights that are"):
        joined_processes()


@pytest.mark.parametrize(
    ("backends", "device_type", "count", "is_refused"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", 2, True),
        ("cpu:gloo,cuda:gloo", "cuda", 1, False),
        ("cpu:gloo,cuda:gloo", "cpu", 2, False),
        ("cpu:gloo,cuda:nccl", "cuda", 2, False),
    ],
)
def test_gloo_between_weights_on_cuda_devices_is_refused(
    backends, device_type, count, is_refused, monkeypatch
):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda _: backends)
    group = SimpleNamespace(size=lambda: count)
    if not is_refused:
        return _check_backend(device_type, group)
    with pytest.raises(InputError, match="nccl between weights on CUDA devices, got gloo"):
        _check_backend(device_type, group)
