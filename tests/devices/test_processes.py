"""Processes that share a CUDA device, and weights that `fully_shard` has there."""

import pytest
import torch
from distributed.engine_cases import ENGINES
from distributed.launch import results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [["sample", name, "uneven", None, "cuda"] for name in ENGINES]


@pytest.fixture(scope="module")
def alone():
    """Draws of every engine in one process."""
    return results(1, CASES)[0]


@pytest.mark.parametrize("count", [2, 4])
def test_draws_do_not_depend_on_the_number_of_processes(alone, count):
    for found in results(count, CASES):
        assert found == alone


@pytest.mark.parametrize("n", [100, 20])
def test_sharded_weights_have_the_values_of_whole_ones_on_the_cpu(n):
    """One process, as `nccl` takes no second one on the same device."""
    (found,) = results(1, [["sharded_values", n, "cuda"]])
    (differences,) = found.values()
    assert len(differences) >= 6
    assert max(differences.values()) < 1e-12, differences
