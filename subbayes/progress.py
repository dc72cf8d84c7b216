"""Progress bars, in one place."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

__all__ = ["bar"]


def bar(total: int, what: str, show: bool | None = None, unit: str = "it") -> Any:
    """A progress bar on standard error.

    Args:
        total: number of steps.
        what: what is being done, in a word or two.
        show: True or False; None shows it on a terminal only.
        unit: what a step is called.
    """
    return tqdm(total=total, desc=what, unit=unit, leave=False, file=sys.stderr,
                disable=None if show is None else not show, mininterval=0.2, dynamic_ncols=True)
