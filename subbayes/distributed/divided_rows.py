"""Rows that each process has for itself: what the processes tell each other about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, device

from subbayes.data.data import Data
from subbayes.data.division import Division
from subbayes.distributed.processes import Processes, current
from subbayes.utils.checks import fail
from subbayes.utils.trees import n_rows, row_kind, take, to_device, tree_map
from subbayes.utils.warning import warn_user

SAME_ROWS = (
    "Give every process the same rows, or pass Data.of(rows, divided=True) if each has its own"
)
"""What to do about different data."""


def exchanged(data: Any) -> Data:
    """Data with the numbers of rows of all processes, if each has rows of its own.

    Args:
        data: rows of this process, `Data.of(rows, divided=True)`; or other data, in any form of
            `Data.of`.

    Raises:
        InputError: in all processes, if their rows have different shapes or dtypes or there are
            none; or a process that has not joined the others.

    Warns:
        UserWarning: two processes with the same rows.
    """
    if not isinstance(data, Data):
        data = Data.of(data)
    if data.division is None or data.division.shares:
        return data
    if (processes := current()) is None:
        expected = "processes that have joined, for sharded data"
        fail("data", expected, "a process that works alone", "Start the program with torchrun")
    own, kind = None, ""  # of a loader without rows
    if data.inputs is not None or data.n:
        own = tuple(to_device(part, device("cpu")) for part in data.first())
        kind = repr(row_kind(_with_one_place(own)))
    parts: list[tuple[int, Any, str]] = processes.gather(
        (data.n, own, kind), call="rows of their own"
    )
    known = {kind: rank for rank, (_, _, kind) in reversed([*enumerate(parts)]) if kind}
    if len(known) > 1:
        (one, first), (other, second) = sorted(known.items(), key=lambda item: item[1])[:2]
        expected = "rows of the same shapes and dtypes in all processes"
        fail("data", expected, f"{other} on rank {second} and {one} on rank {first}")
    shares = tuple(rows for rows, _, _ in parts)
    if not sum(shares):
        fail("data", "at least one row in one of the processes", "empty tables")
    _warn_of_same_rows(data, processes)
    example = next(first for rows, first, _ in parts if rows)
    found = replace(data, division=Division(shares, example))
    if own is not None:
        return found
    return replace(found, inputs=take(example[0], slice(0)), y=take(example[1], slice(0)))


def _warn_of_same_rows(data: Data, processes: Processes) -> None:
    """Warn of the same rows in two processes; of streamed ones the first and their number count."""
    facts = None
    if data.n:
        inputs, y = data.first()
        facts = data.digests() if data.in_memory else [data.n, Data(1, inputs, y).digests()]
    seen: dict[str, int] = {}
    for rank, found in enumerate(processes.gather(facts, call="rows of their own")):
        other = seen.setdefault(repr(found), rank)
        if found is not None and other != rank:
            warn_user(
                f"data: processes {other} and {rank} have the same rows, which count in each of "
                "them; give each process rows of its own, or all rows without divided=True"
            )
            return


def _with_one_place(rows: Any) -> Any:
    """Rows of tokens, masks and labels shortened to one place: they may have other lengths."""

    def first(leaf: Tensor) -> Tensor:
        is_sequence = leaf.ndim > 1 and not leaf.is_floating_point()
        return leaf[:, :1] if is_sequence else leaf

    return tree_map(first, rows)


def every_row(data: Data) -> int:
    """The number of rows of all processes."""
    return data.n if data.division is None else sum(data.division.shares)


def agreed_rows(data: Data) -> list[Any]:
    """What processes with the same data agree on: the number of rows, and digests of all of them.

    Sharded rows are compared by their number and the example of all processes.

    Example:
        >>> import torch
        >>> x = torch.zeros(5, 2)
        >>> agreed_rows(Data.of((x, x[:, 0]))) == agreed_rows(Data.of((x + 1, x[:, 0])))
        False
    """
    if data.division is None:
        return [data.n, data.digests()]
    first = data.first()
    return [every_row(data), Data(n_rows(first[1]), *first).digests()]


def gathered(data: Data, part: Any) -> list[Any]:
    """A value of each process if their rows differ, or that of this one."""
    processes = current()
    return [part] if data.division is None or processes is None else processes.gather(part)
