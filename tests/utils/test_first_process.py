"""Processes other than the first one write no files and say nothing."""

import warnings

import numpy as np
import pytest

from subbayes.artifacts import folder as artifact
from subbayes.artifacts.files import atomic_write_text
from subbayes.utils.progress import progress_bar
from subbayes.utils.warning import is_first_process, set_first_process, warn_user


@pytest.fixture
def second():
    set_first_process(False)
    yield
    set_first_process(True)


@pytest.mark.usefixtures("second")
def test_another_process_is_silent(tmp_path, capsys):
    artifact.write(tmp_path / "model", "example", {"z": np.eye(2)}, {})
    atomic_write_text(tmp_path / "table.csv", "a,b")
    assert list(tmp_path.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_user("y: its scale is unusual")
    with progress_bar(3, "Rows", show=True) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""


def test_another_process_deletes_nothing(tmp_path):
    artifact.write(tmp_path / "model", "example", {"z": np.eye(2)}, {})
    set_first_process(False)
    artifact.delete(tmp_path / "model", "example")
    set_first_process(True)
    assert artifact.is_artifact(tmp_path / "model")
    artifact.delete(tmp_path / "model", "example")
    assert list(tmp_path.iterdir()) == []
    assert is_first_process()
