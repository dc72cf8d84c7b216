"""The same examples in every run: hypothesis draws from a fixed seed and has no clock."""

import jaxtyping
import pytest
from hypothesis import settings

from subbayes.networks.tracing.tracer import Tracer

settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("fixed")


@pytest.fixture
def unchecked():
    """Run as users do, without the shape checks of the tests: the messages are ours then."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def steps(monkeypatch):
    """How training steps are evaluated, if they may be traced: from the second one on."""
    found = []

    class Recorded(Tracer):
        def __call__(self, *arguments):
            result = super().__call__(*arguments)
            found.append(self.status)
            return result

    monkeypatch.setattr("subbayes.training.traced_steps.Tracer", Recorded)
    monkeypatch.setattr("subbayes.training.traced_steps._TRACED_AFTER", 1)
    monkeypatch.setattr("subbayes.training.traced_steps._LEAST_STEPS", 0)
    return found
