"""Names of benchmarks."""

import importlib

import pytest

from benchmarks.__main__ import names


@pytest.mark.parametrize("name", names())
def test_every_benchmark_can_be_run(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").run)
