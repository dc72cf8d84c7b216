"""The same examples in every run: hypothesis draws from a fixed seed and has no clock."""

import jaxtyping
import pytest
from hypothesis import settings

settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("fixed")


@pytest.fixture
def unchecked():
    """Run as users do, without the shape checks of the tests: the messages are ours then."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
