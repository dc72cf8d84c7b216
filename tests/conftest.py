"""The same examples in every run: hypothesis draws from a fixed seed and has no clock."""

import math
from collections import Counter, defaultdict
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What `make test` runs of parametrised tests; `make test-all` runs all.

    Of a product of parametrisations each level once, and of tests with the mark `few(n)` n cases.
    """
    functions = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            functions[item.path, item.originalname].append(item)
    for cases in functions.values():
        axes = [[*dict.fromkeys(a)] for a in zip(*(c.callspec._idlist for c in cases), strict=True)]
        quick = [case for case in cases if _is_on_diagonal(axes, case.callspec._idlist)]
        few = cases[0].get_closest_marker("few")
        quick = quick[:: math.ceil(len(quick) / few.args[0])] if few else quick
        for case in set(cases) - set(quick):
            case.add_marker(pytest.mark.slow)


def _is_on_diagonal(axes, levels):
    places = [axis.index(level) for axis, level in zip(axes, levels, strict=True)]
    return all(p == max(places) % len(axis) for p, axis in zip(places, axes, strict=True))


def pytest_runtest_setup():
    _made.clear()


@pytest.fixture
def unchecked():
    """Run as users do, without the shape checks of the tests: the messages are ours then."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def untraced(monkeypatch):
    """Evaluate densities eagerly: tracing one takes as long as some dozen evaluations."""
    monkeypatch.setattr(Tracer, "_replay_for", lambda *_: None)


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
