"""What holds for every test, those in docstrings too."""

import gc
import importlib
import os
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

collect_ignore = [] if find_spec("botorch") else ["subbayes/botorch.py"]


def pytest_configure(config):
    # Two processes of many threads each are slower than two of one; sums come out the same too.
    torch.set_num_threads(1)
    # What tests write need not survive a power cut, and checkpoints at each step wait for the disk.
    os.fsync = lambda descriptor: None


def pytest_collection_finish():
    # The collected tests are a million objects, which each full collection of garbage would visit.
    gc.freeze()


def pytest_collect_file(file_path):
    # pytest imports a module with examples itself, a second time if the package imports it too:
    # then functions of the package are not those of the module that a test patches.
    root = Path(__file__).parent
    if file_path.suffix == ".py" and file_path.is_relative_to(root / "subbayes"):
        parts = file_path.relative_to(root).with_suffix("").parts
        if parts[-1] not in ("__init__", "__main__"):
            importlib.import_module(".".join(parts))


@pytest.fixture(autouse=True)
def examples_write_elsewhere(request, tmp_path_factory, monkeypatch):
    """An example in a docstring runs in a folder of its own, with the same random numbers."""
    if isinstance(request.node, pytest.DoctestItem):
        torch.manual_seed(0)
        monkeypatch.chdir(tmp_path_factory.mktemp("example"))


@pytest.fixture(autouse=True)
def global_state_is_left_alone():
    """The library has no business with torch's global switches."""
    before = _switches()
    yield
    assert _switches() == before


def _switches():
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "validation": torch.distributions.Distribution._validate_args,
    }
