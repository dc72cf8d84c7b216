"""Processes that are killed at random times, and runs that resume by themselves."""

import json
import os
import subprocess
import sys

import pytest

from distributed.faults import disturbed_run
from distributed.launch import ROOT, WORKER, results


@pytest.mark.slow
def test_kills_at_random_times_change_no_draw(tmp_path):
    found = disturbed_run(tmp_path, kills=5, seed=1)
    assert found["complete"] >= 1
    assert found["resumed"] >= 2


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_resumes_by_itself(tmp_path):
    alone = ["elastic_run", "", str(tmp_path / "alone"), 0, 0]
    expected = results(1, [alone])[0][json.dumps(alone)]
    case = ["elastic_run", str(tmp_path / "checkpoint"), str(tmp_path / "marker"), 1, 90]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    ended = subprocess.run(
        [*command, str(WORKER), json.dumps(case)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (tmp_path / "marker").exists()
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 2
    for _, found in lines:
        assert found["resumed"]
        assert found["evaluations"] < expected["evaluations"]
        assert found["z"] == expected["z"]
