"""A campaign: artifacts of every kind are damaged and forged, and loaded in a child process."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.models import MODELS
from fuzz.mutations import Case, damages, forgeries

__all__ = ["Campaign", "FAILURES", "OUTCOMES"]

OUTCOMES = ("refused", "same", "other", "silent", "raw error", "several lines",
            "memory", "code", "hang", "crash")  # fmt: skip
FAILURES = OUTCOMES[3:]
SECONDS = 20.0  # of processor time that a case may take
_WORKER = Path(__file__).parents[1]  # folder of the package with the worker
# Lightning sets the second to 1 when it is imported, perhaps by an earlier test: torch built with
# CUDA then opens NVIDIA's library at each question for devices, as if an artifact had done so.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}


@dataclass
class Campaign:
    """Cases of each model, and what came of them.

    Attributes:
        folder: for the artifacts; those of an earlier campaign in it are used again.
        names: of models.
        counts: by model, damaged or forged, and outcome.
        failures: model, case, outcome and text of each failure.
    """

    folder: Path
    names: list[str] = field(default_factory=lambda: list(MODELS))
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: list[tuple[str, str, str, str]] = field(default_factory=list)
    accepted: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fits as short as these
            for name in self.names:
                if not self.original(name).exists():
                    MODELS[name].make(self.original(name))
        self.child = _Child(self.folder, self.names)

    def original(self, name: str) -> Path:
        """The artifact of a model."""
        return self.folder / name / name

    def cases(self, rng: random.Random, forged: int, damaged: int) -> Iterator[tuple[str, Case]]:
        """Random cases of all models in turn; all forgeries if there are fewer than `forged`.

        Checkpoints are the user's own, and are damaged but not forged.
        """
        for name in self.names:
            found = [] if MODELS[name].checkpoint else list(forgeries(self.original(name)))
            chosen = found if len(found) <= forged else rng.sample(found, forged)
            endless = damages(self.original(name), rng)
            for case in (*chosen, *(next(endless) for _ in range(damaged))):
                yield name, case

    def run(self, cases: Iterable[tuple[str, Case]]) -> None:
        """Write, load and count each case."""
        place = self.folder / "case"
        for name, case in cases:
            case.write(place / name)
            outcome, text = self.child.load(name, place / name)
            if case.damaged and outcome == "other":
                outcome = "silent"
            self.counts[name, "damaged" if case.damaged else "forged", outcome] += 1
            if outcome in FAILURES:
                self.failures.append((name, case.label, outcome, text))
            elif outcome != "refused":
                self.accepted.append((name, case.label, outcome))
            shutil.rmtree(place)

    def close(self) -> None:
        """End the child."""
        self.child.stop()

    def table(self) -> str:
        """The counts, a row for each model."""
        shown = [o for o in OUTCOMES if any(key[2] == o for key in self.counts)]
        head = f"{'model':24}{'':9}" + "".join(f"{o:>14}" for o in shown)
        lines = [head]
        for name in (*self.names, "all"):
            for how in ("forged", "damaged"):
                found = [
                    sum(n for key, n in self.counts.items()
                        if key[0] in (name, *(self.names if name == "all" else ()))
                        and key[1:] == (how, outcome))
                    for outcome in shown
                ]  # fmt: skip
                lines.append(f"{name:24}{how:9}" + "".join(f"{n:14}" for n in found))
        return "\n".join(lines)


class _Child:
    """A process that loads artifacts; it is started again after a crash or a hang."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names = folder, names
        self._start()

    def _start(self) -> None:
        root = Path(__file__).parents[2]
        paths = [str(_WORKER), str(root), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.worker", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr").open("w"),
            text=True,
            cwd=self.folder,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        outcome, text = self._ask(self.names, 300.0)
        if outcome != "ready":
            raise RuntimeError(
                f"the child did not start: {text}\n{(self.folder / 'stderr').read_text()[-2000:]}"
            )

    def _ask(self, question: object, seconds: float) -> tuple[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline() if self._answers(seconds) else None
        except OSError:
            line = ""
        if line:
            outcome, text = json.loads(line)
            return outcome, text
        if line is None:
            self.stop()
            return "hang", f"more than {seconds:g} s"
        return "crash", f"exit code {self.process.wait()}"

    def _answers(self, seconds: float) -> bool:
        """Whether there is an answer within seconds of processor time, or ten times as long."""
        begun, used = time.monotonic(), self._seconds()
        while time.monotonic() - begun < 10 * seconds and self._seconds() - used < seconds:
            if select.select([self.process.stdout], [], [], 0.5)[0]:
                return True
        return False

    def _seconds(self) -> float:
        """The processor time of the child."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def load(self, name: str, path: Path) -> tuple[str, str]:
        """The outcome of one artifact."""
        outcome, text = self._ask([name, str(path)], SECONDS)
        if outcome in ("hang", "crash"):
            self.stop()
            self._start()
        return outcome, text

    def stop(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
