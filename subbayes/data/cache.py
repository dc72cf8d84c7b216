"""Batches of a loader, kept in memory if they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from subbayes.utils.memory import available_memory, format_bytes
from subbayes.utils.trees import row_kind, tensors_of, with_tensors
from subbayes.utils.warning import warn_user

CACHED_BYTES = 2**30
"""Bytes of the rows of a loader that are kept in memory by default."""


class BatchCache:
    """Batches that are kept as long as they fit into memory.

    Args:
        limit: bytes; a fourth of the free memory at most, since they are joined in the end.

    Example:
        >>> cache = BatchCache(1000)
        >>> for n in (3, 2):
        ...     cache.add((torch.zeros(n, 4), torch.zeros(n)))
        >>> [part.shape for part in cache.joined()]
        [torch.Size([5, 4]), torch.Size([5])]
    """

    def __init__(self, limit: int) -> None:
        free = available_memory()
        self.limit = limit if free is None else min(limit, free // 4)
        self.size, self.batches = 0, []  # type: tuple[int, list[Any] | None]

    def add(self, batch: Any) -> None:
        """Keep a batch, or give up all if it does not fit."""
        self.size += sum(tensor.nbytes for tensor in tensors_of(batch))
        if self.size > self.limit:
            self.batches = None
        elif self.batches is not None:
            self.batches.append(batch)

    def joined(self) -> Any:
        """All batches as one; None if rows differ in shape or type, or do not fit."""
        if self.batches is None or not self.batches:
            return None
        first, *rest = map(row_kind, self.batches)
        return None if any(kind != first for kind in rest) else concatenate(self.batches)

    def loader(self) -> DataLoader[Any] | None:
        """A loader of the batches as they came; None if they do not fit."""
        if self.batches is None:
            return None
        return DataLoader(self.batches, batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]

    def warn(self, argument: str) -> None:
        """Say that the rows are read again at each evaluation."""
        warn_user(
            f"{argument}: {format_bytes(self.size)} of rows are above memory_limit, "
            f"{format_bytes(self.limit)}, and are read again at each evaluation; raise it by "
            "Data.of(data, memory_limit=...), or pass 0 to accept this"
        )


def concatenate(batches: Sequence[Any]) -> Any:
    """Batches of the same structure as one."""
    if len(batches) == 1:
        return batches[0]
    columns = zip(*map(tensors_of, batches), strict=True)
    return with_tensors(batches[0], map(torch.cat, columns))


def _as_it_is(batch: Any) -> Any:
    return batch
