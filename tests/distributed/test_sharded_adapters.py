"""Adapters whose weights are sharded, against those of one process."""

import json
from importlib.util import find_spec

import pytest

if find_spec("peft") is None:
    pytest.skip("needs peft", allow_module_level=True)

from adapted import ADAPTERS

GRADIENTS = [["sharded_gradients", kind] for kind in ADAPTERS]
GRADIENTS += [["sharded_gradients", "lora", True]]
ROUNDING = {"float64": 1e-12, "float32": 1e-4}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_are_those_of_whole_adapters(two_processes, case):
    for found in two_processes:
        adapters = found[json.dumps(case)]
        for what in ("value", "gradient"):
            assert adapters[what] < ROUNDING[adapters["dtype"]], what
        for what in ("weights", "flags", "methods", "slopes"):
            assert adapters[what], what


def test_outputs_without_gradients_are_refused(two_processes):
    for found in two_processes:
        error = found['["sharded_without_gradients"]']
        assert "module: expected outputs with gradients in its weights, got" in error["error"]
        assert error["weights"]


def test_gradients_of_sixteen_bits_are_added_up_in_float32(one_process, two_processes):
    every = [(one_process, 1e-6), *((found, 2e-2) for found in two_processes)]
    for found, tolerance in every:  # FSDP2 averages those of two in 16 bits
        differences = found['["sharded_sixteen_bits"]']
        assert max(differences.values()) < tolerance, differences


@pytest.mark.slow
def test_adapters_beside_sharded_base_weights(two_processes):
    for found in two_processes:
        adapters = found['["sharded_adapters"]']
        assert len(set(adapters["size"])) == 1
        assert max(adapters["parts"]) < 0.65 * adapters["size"][0]
        assert adapters["draws"] < 1e-12
        assert adapters["predict"] < 1e-12
        assert adapters["weights"]
        assert adapters["described"]
        assert adapters["error"].startswith("model: expected weights in one process")
