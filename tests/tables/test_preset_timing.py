"""The time of trainings that a preset measures, for trainings of known cost."""

import numpy as np
import pytest

from subbayes import InputError
from subbayes.models.presets import PRESETS
from subbayes.tables import preset_choice, preset_timing
from subbayes.training.many_steps import TRACED_AFTER

BASE, SLOW, TRACING, FAST = 0.5, 0.01, 1.5, 0.002


def cost(epochs, steps):
    """Seconds of a training whose step is traced after the first 50."""
    total = epochs * steps
    slow = min(total, TRACED_AFTER)
    return BASE + slow * SLOW + (total - slow) * FAST + TRACING * (total > TRACED_AFTER)


def measured(monkeypatch, steps, available):
    now, calls = [0.0], []

    def train(epochs):
        now[0] += cost(epochs, steps) + (0 if calls else 100.0)  # the first loads libraries
        calls.append(epochs)

    monkeypatch.setattr(preset_timing.time, "perf_counter", lambda: now[0])
    return preset_timing.training_seconds(train, steps, available), now[0] - 100


@pytest.mark.parametrize("steps", [1, 3, 10, 16, 17, 25, 26, 35, 50, 51, 120])
def test_long_trainings_are_predicted_by_their_traced_steps(steps, monkeypatch):
    (overhead, each), _ = measured(monkeypatch, steps, 100.0)
    assert each == pytest.approx(steps * FAST)
    for epochs in (60, 200, 1000):
        assert overhead + epochs * each == pytest.approx(cost(epochs, steps))


@pytest.mark.parametrize("steps", [1, 3, 10, 16])
def test_little_time_is_not_spent_on_tracing(steps, monkeypatch):
    (overhead, each), spent = measured(monkeypatch, steps, 2.0)
    assert (overhead, each) == pytest.approx((BASE, steps * SLOW))
    assert spent < 3 * (BASE + TRACED_AFTER * SLOW)


def search(n=100):
    found = object.__new__(preset_choice._Search)
    for name, value in {
        "preset": PRESETS["best"],
        "parts": (np.arange(n), np.arange(n // 4)),
    }.items():
        object.__setattr__(found, name, value)
    return found


def test_a_budget_is_refused_if_two_measurements_agree(monkeypatch):
    slow, fast = (20.0, 1.0), (0.1, 0.01)
    results = iter([slow, fast, fast, (20.0, 1.0), (11.0, 0.1)])
    monkeypatch.setattr(preset_choice, "training_seconds", lambda *_: next(results))
    for _ in range(2):  # the first by its second measurement
        assert search()._measure(10.0, 1.0) == fast
    with pytest.raises(
        InputError,
        match=r"budget: expected at least 100 s, of which 12% suffice to train 4 networks for 10 "
        r"epochs on 100 rows, got 10 s",
    ):
        search()._measure(10.0, 1.0)


def test_minibatches_of_an_epoch_are_counted(monkeypatch):
    monkeypatch.setattr(preset_choice, "training_seconds", lambda _, steps, __: (steps, 0.0))
    preset = PRESETS["best"]
    small, large = 1000, 6000
    assert search(small)._measure(1e9, 1.0)[0] == -(-small // preset.training.batch_size)
    assert search(large)._measure(1e9, 1.0)[0] == -(-large // preset.batch_size)
