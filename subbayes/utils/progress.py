"""Progress bars, and messages of finished stages."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

from subbayes.utils.warning import is_first_process

STAGE_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar(
    "STAGE_LISTENER", default=None
)
"""Receives a line for each finished stage where no terminal shows progress bars."""

_MIN_SECONDS = 1.0  # shorter stages are not reported
_LONG = 60.0  # seconds from which an estimate is given


def progress_bar(
    total: int | None, what: str, show: bool | None = None, unit: str = "it", delay: float = 0.0
) -> Any:
    """A progress bar on standard error.

    Args:
        total: number of steps; None if it is not known.
        what: what is being done, in a word or two.
        show: True or False; None shows the bar on a terminal, and elsewhere sends a line to
            `STAGE_LISTENER` when the work is done.
        unit: what a step is called.
        delay: seconds until the bar appears.
    """
    listener = STAGE_LISTENER.get()
    if not is_first_process():
        show = False
    if show is None and listener is not None and not sys.stderr.isatty():
        return _ReportedStage(listener, total=total, desc=what, unit=unit)
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        leave=False,
        file=sys.stderr,
        disable=None if show is None else not show,
        mininterval=0.2,
        dynamic_ncols=True,
        delay=delay,
    )


@contextmanager
def estimated_progress(
    total: int, what: str, show: bool | None = None, unit: str = "it"
) -> Iterator[Callable[[float], None]]:
    """A progress bar for work that may take minutes: the first report is followed by an estimate.

    Yields a function that takes the amount of work done since its last call. The bar appears
    after a second; the estimate is one line, and given from one minute on.

    Args:
        total: amount of work.
        what: what is being done, in a word or two.
        show: as for `progress_bar`.
        unit: what the amount is counted in.

    Example:
        >>> with estimated_progress(3, "Rows", show=False) as report:
        ...     report(1)
    """
    began, done = time.perf_counter(), 0.0
    with progress_bar(total, what, show, unit, delay=_MIN_SECONDS) as steps:

        def report(amount: float) -> None:
            nonlocal done
            if done == 0 < amount:
                seconds = (time.perf_counter() - began) * total / amount
                if seconds >= _LONG:
                    say(f"{what}: about {seconds / 60:.0f} min", show)
            steps.update(int(done + amount + 1e-6) - int(done + 1e-6))
            done += amount

        yield report


def say(line: str, show: bool | None) -> None:
    """Print a line on standard error where progress is shown.

    Args:
        line: the text.
        show: as for `progress_bar`.
    """
    listener = STAGE_LISTENER.get()
    if not is_first_process():
        return
    if show is None and listener is not None and not sys.stderr.isatty():
        listener(line)
    elif show or (show is None and sys.stderr.isatty()):
        tqdm.write(line, file=sys.stderr)


class _ReportedStage(tqdm):
    """A hidden bar that reports once that its work is done."""

    def __init__(self, listener: Callable[[str], None], **options: Any) -> None:
        super().__init__(**options, disable=True)
        self.listener: Callable[[str], None] | None = listener
        self.what, self.goal, self.of = options["desc"], options["total"] or 0, options["unit"]
        self.done, self.began = 0, time.perf_counter()

    def update(self, n: float | None = 1) -> bool | None:
        self.done += int(n or 0)
        return None

    def close(self) -> None:
        listener, self.listener = self.listener, None  # it is closed again when it is collected
        seconds = time.perf_counter() - self.began
        if listener and self.done >= self.goal and seconds >= _MIN_SECONDS:
            listener(f"{self.what}: {self.done} {self.of} in {seconds:.1f} s")
