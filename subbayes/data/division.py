"""Data of which each of several processes has rows of its own."""

from __future__ import annotations

from dataclasses import dataclass

from subbayes.utils.types import Batch


@dataclass(frozen=True)
class Division:
    """How rows are sharded; empty before they have told each other.

    Attributes:
        shares: number of rows of each process.
        example: the first rows of the first process that has any, which is the same in all.
    """

    shares: tuple[int, ...] = ()
    example: Batch | None = None
