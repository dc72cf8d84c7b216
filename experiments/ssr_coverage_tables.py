"""Tables of `ssr_coverage`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.store import Record


def markdown(records: Sequence[Record]) -> str:
    return str(len(records))


def summary(records: Sequence[Record]) -> Record:
    return {}
