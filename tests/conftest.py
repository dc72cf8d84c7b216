"""The same examples in every run: hypothesis draws from a fixed seed and has no clock."""

from collections import Counter
from functools import wraps

import jaxtyping
import pytest
from hypothesis import settings

from subbayes.networks.tracing.tracer import Tracer

settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("fixed")

_CHECKED = 10  # times in each test that each function within a function is made with checks
_made = Counter()


def _checked_at_first(jaxtyped):
    """Leave out checks of functions within functions that a test makes again and again.

    To make the checks takes a millisecond, much longer than most of these functions run, and code
    that makes a function in every call would spend most of the tests' time on them.
    """

    @wraps(jaxtyped)
    def found(*arguments, **options):
        decorate = jaxtyped(*arguments, **options)
        if arguments:
            return decorate

        def chosen(function):
            code = getattr(function, "__code__", None)
            if code is not None and "<locals>" in function.__qualname__:
                _made[code] += 1
                if _made[code] > _CHECKED:
                    return function
            return decorate(function)

        return chosen

    return found


jaxtyping.jaxtyped = _checked_at_first(jaxtyping.jaxtyped)


def pytest_runtest_setup():
    _made.clear()


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
