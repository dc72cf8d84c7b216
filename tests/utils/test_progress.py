"""Reports of finished stages without a terminal."""

from __future__ import annotations

import pytest

from subbayes.utils import progress
from subbayes.utils.progress import STAGE_LISTENER, progress_bar


@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(progress, "_MIN_SECONDS", 0.0)
    lines: list[str] = []
    token = STAGE_LISTENER.set(lines.append)
    yield lines
    STAGE_LISTENER.reset(token)


def work(total, steps, show=None):
    with progress_bar(total, "Training", show, "epochs") as shown:
        for _ in range(steps):
            shown.set_postfix(loss=1.0)
            shown.update()


def test_a_finished_stage_is_reported_once(heard):
    work(3, 3)
    assert len(heard) == 1
    assert heard[0].startswith("Training: 3 epochs in 0.")


def test_unfinished_hidden_and_short_stages_are_not_reported(heard, monkeypatch):
    work(3, 2)
    work(3, 3, show=False)
    monkeypatch.setattr(progress, "_MIN_SECONDS", 60.0)
    work(3, 3)
    assert heard == []


def test_nothing_is_reported_without_a_listener(capsys):
    work(3, 3)
    assert capsys.readouterr() == ("", "")
