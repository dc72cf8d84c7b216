"""Start the processes of a test, as torchrun does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).parents[2]


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def free_port() -> int:
    """A port that no program uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(
    count: int, words: list[str], stdin: int | None = None, stderr: int | None = subprocess.PIPE
) -> list[subprocess.Popen[str]]:
    """Start processes."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *words],
            env=environment(rank, count, port),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
        )
        for rank in range(count)
    ]


def outputs(processes: list[subprocess.Popen[str]], seconds: float) -> list[tuple[int, str, str]]:
    """Exit codes, standard output and standard error, once all have ended."""
    end = time.monotonic() + seconds

    def read(process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, error = process.communicate(timeout=max(end - time.monotonic(), 1))
        return process.returncode, out, error

    try:
        with ThreadPoolExecutor(len(processes)) as pool:  # together, since full pipes block
            return [*pool.map(read, processes)]
    finally:
        for process in processes:
            process.kill()


def results(count: int, cases: list[list[Any]], seconds: float = 600) -> list[dict[str, Any]]:
    """The results of some cases in each process."""
    words = [str(WORKER), *map(json.dumps, cases)]
    found = []
    for code, out, error in outputs(start(count, words), seconds):
        assert code == 0, error[-3000:]
        found.append(dict(map(json.loads, out.splitlines())))
    return found
