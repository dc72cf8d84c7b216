"""The devices that the tests of this folder run on: those there are, else a pretended one."""

import warnings

import pytest
import torch

from .pretended import pretended_device


@pytest.fixture
def device():
    """A CUDA device; without one, a pretended device that refuses mixtures with the CPU."""
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
        return
    with pretended_device() as pretended:
        yield pretended


@pytest.fixture(autouse=True)
def no_fallback():
    """Mixtures of devices must not hide in fallbacks from vectorised or traced evaluation."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(failed|evaluating them|one by one).*")
        yield
