"""Kill random processes of a run with a checkpoint at random times, and resume it on other numbers.

usage: python tests/distributed/faults.py [--kills 30] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from distributed.launch import WORKER, outputs, results, start

MOST = 4  # processes
_AT_START, _BEFORE_SAVES = 0.15, 0.3  # shares of kills before the run begins, and before it saves
_LATEST = 0.3  # seconds after that
_PATIENCE = 60.0  # seconds in which a run saves


def disturbed_run(folder: Path, kills: int, seed: int, say: Any = print) -> dict[str, Any]:
    """A run that is killed and resumed until it has its draws, compared with an undisturbed one.

    Args:
        folder: for the checkpoints.
        kills: number of kills; a run that ends before is begun again in another folder.
        seed: of the numbers of processes, the ranks and the times.
        say: called with a line for each kill.

    Returns:
        The number of kills, of complete runs, and of kills after which a run resumed from draws
        that it had saved.
    """
    rng = random.Random(seed)
    alone = ["faulty_run", ""]
    expected = results(1, [alone])[0][json.dumps(alone)]
    complete, resumed, number = 0, 0, 0
    for kill in range(kills + 1):
        checkpoint = folder / f"run-{number}"
        resumed += checkpoint.is_dir()
        count, last = rng.randint(1, MOST), kill == kills
        case = json.dumps(["faulty_run", str(checkpoint)])
        processes = start(count, [str(WORKER), '["begins"]', case])
        rank, late = rng.randrange(count), rng.random()
        joined, saves = late > _AT_START, rng.randint(1, 3) if late > _BEFORE_SAVES else 0
        if not last:
            if joined:
                _wait_for_line(processes[rank])
                _wait_for_checkpoints(checkpoint, saves, processes[rank])
            time.sleep(rng.uniform(0, _LATEST))
            processes[rank].kill()
            if not joined:  # the others would wait for it; torchrun ends them
                for other in processes:
                    other.kill()
        died = time.monotonic()
        ended = outputs(processes, 300)
        seconds = time.monotonic() - died
        if last or ended[rank][0] == 0:  # it had finished before
            check_draws([one for one in ended if one[0] == 0], expected)
            complete, number = complete + 1, number + 1
        elif seconds > 60:
            raise AssertionError(f"the others took {seconds:.0f} s to end")
        for code, out, error in ended:
            if code == 0:
                check_draws([(code, out, error)], expected)
            elif code > 0 and "ProcessError" not in error:
                raise AssertionError(error[-2000:])
        codes = [code for code, _, _ in ended]
        say(f"kill {kill}: process {rank} of {count}, exit codes {codes}, {seconds:.1f} s")
    return {"kills": kills, "complete": complete, "resumed": resumed}


def check_draws(ended: list[tuple[int, str, str]], expected: dict[str, Any]) -> None:
    """Check that processes that have finished have the draws of the undisturbed run."""
    assert ended
    for _, out, error in ended:
        found = [value for text, value in map(json.loads, out.splitlines()) if "faulty" in text]
        assert found == [expected], (found, expected, error[-500:])


def _wait_for_line(process: subprocess.Popen[str]) -> None:
    """Wait until a process has joined the others, which it says in its first line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith('["[\\"begins') or process.poll() is not None, line


def _wait_for_checkpoints(folder: Path, number: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has saved so many times, or has ended."""
    end, last = time.monotonic() + _PATIENCE, _time_of(folder)
    while number and process.poll() is None and time.monotonic() < end:
        if (latest := _time_of(folder)) != last:
            number, last = number - 1, latest
        time.sleep(0.01)


def _time_of(folder: Path) -> int:
    try:
        return (folder / "manifest.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        print(disturbed_run(folder, options.kills, options.seed))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
