"""Progress bars, in one place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

__all__ = ["STAGE_LISTENER", "progress_bar"]

STAGE_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar(
    "STAGE_LISTENER", default=None
)
"""Who hears of finished steps where no terminal shows bars; None: nobody."""

_WORTH_SAYING = 1.0  # seconds


def progress_bar(total: int, what: str, show: bool | None = None, unit: str = "it") -> Any:
    """A progress bar on standard error.

    Args:
        total: number of steps.
        what: what is being done, in a word or two.
        show: True or False; None shows it on a terminal only, and without one says a line when
            the work is done to whom `STAGE_LISTENER` names.
        unit: what a step is called.
    """
    hearer = STAGE_LISTENER.get()
    if show is None and hearer is not None and not sys.stderr.isatty():
        return _Announced(hearer, total=total, desc=what, unit=unit)
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        leave=False,
        file=sys.stderr,
        disable=None if show is None else not show,
        mininterval=0.2,
        dynamic_ncols=True,
    )


class _Announced(tqdm):
    """A silent bar, which says in one line that its work is done."""

    def __init__(self, hearer: Callable[[str], None], **options: Any) -> None:
        super().__init__(**options, disable=True)
        self.hearer, self.what = hearer, options["desc"]
        self.goal, self.of, self.done = options["total"], options["unit"], 0
        self.began = time.perf_counter()

    def update(self, n: float | None = 1) -> bool | None:
        self.done += int(n or 0)
        return None

    def close(self) -> None:
        seconds, hearer = time.perf_counter() - self.began, self.hearer
        self.hearer = _nobody  # closed a second time when it is collected
        if self.done >= self.goal and seconds >= _WORTH_SAYING:
            hearer(f"{self.what}: {self.done} {self.of} in {seconds:.1f} s")


def _nobody(text: str) -> None:
    """Hears nothing."""
