"""The chains of one process, and what it exchanges with those that run the other chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from subbayes.distributed.blocks import BlockSize, own_blocks
from subbayes.distributed.processes import Processes, current
from subbayes.utils.checks import fail

_MOST_STEPS = 32  # between two exchanges of what to do next
_ROUND_SECONDS = 0.1  # of these steps, beside which an exchange takes little

_T = TypeVar("_T")


@dataclass(frozen=True)
class ChainGroups:
    """The chains that this process runs.

    Attributes:
        own: their numbers.
        processes: all processes, or None if this one works on its own.
    """

    own: slice
    processes: Processes | None = None

    def exchange(
        self, signal: int, due: bool, active: bool, seconds: float
    ) -> tuple[int, bool, bool, int]:
        """Agree on what to do next.

        Args:
            signal: number of a signal that this process has received, or 0.
            due: whether a checkpoint is due by the clock of this process; that of the first counts.
            active: whether this process has chains that need more draws.
            seconds: time of a step by the same clock.

        Returns:
            The highest number of a signal, whether a checkpoint is due, whether any chain is
            active, and the number of steps until the next exchange.
        """
        if self.processes is None or self.processes.count == 1:
            return signal, due, active, 1
        first = self.processes.rank == 0
        steps = min(max(int(_ROUND_SECONDS / max(seconds, 1e-9)), 1), _MOST_STEPS)
        found = self.processes.highest(
            signal, int(due and first), int(active), steps if first else 0
        )
        return found[0], bool(found[1]), bool(found[2]), found[3]

    def on_first(self, work: Callable[[], _T]) -> _T:
        """The result of work that only the first process does."""
        return work() if self.processes is None else self.processes.on_first(work)

    def gather(self, part: _T) -> list[_T]:
        """A value of each group of chains, in the order of the chains."""
        return [part] if self.processes is None else self.processes.gather(part, "chains")

    def gather_rows(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays of all chains, along the first axis, from those of each group.

        A group may lack arrays, such as statistics of draws that it has not finished yet; they are
        zeros.
        """
        parts = self.gather((self.own.stop - self.own.start, dict(arrays)))
        if len(parts) == 1:
            return dict(arrays)
        like = {name: array for _, part in parts for name, array in part.items()}
        return {
            name: np.concatenate(
                [
                    part.get(name, np.zeros((chains, *array.shape[1:]), array.dtype))
                    for chains, part in parts
                ]
            )
            for name, array in like.items()
        }


@contextmanager
def divided_chains(density: Any, chains: int, groups: int | None) -> Iterator[ChainGroups]:
    """Divide chains among groups of processes, and the rows of the data within each group.

    Chains that are evaluated together stay in one group, so that their draws have the same bits for
    every division. Densities that are not divided into blocks run all chains in every process, and
    so do those whose weights or rows no group has without the others (`needs_all_processes`).

    Args:
        density: the density, with a `block_size` if it is divided into blocks.
        chains: number of chains.
        groups: number of groups; None chooses it.

    Raises:
        InputError: more groups than there are parts, or a number that does not divide that of the
            processes.
    """
    processes = current()
    size: BlockSize | None = None if processes is None else getattr(density, "block_size", None)
    if processes is None or size is None:
        if groups is not None and groups > 1:
            got = "a density of your own" if processes else "a single process"
            fail("chain_groups", f"1 for {got}", groups, "Leave it out")
        yield ChainGroups(slice(0, chains), processes)
        return
    parts = -(-chains // size.chains)
    if getattr(density, "needs_all_processes", False):
        if groups is not None and groups > 1:
            expected = "1 for sharded weights or rows"
            fail("chain_groups", expected, groups, "Leave it out")
        groups = 1
    if groups is None:
        groups, _ = mesh_shape(processes.count, chains, size.count, size.chains)
    if groups > parts:
        fail(
            "chain_groups",
            f"at most {parts}, since of {chains} chains {size.chains} are evaluated together",
            groups,
            "Run more chains, or leave it out",
        )
    with processes.split(groups):
        own = own_blocks(parts, processes.chain_group, groups)
        stop = min(own.stop * size.chains, chains)
        yield ChainGroups(slice(own.start * size.chains, stop), processes)


def mesh_shape(processes: int, chains: int, blocks: int, chain_block: int) -> tuple[int, int]:
    """The default numbers of groups of chains and of processes in each.

    Chains are evaluated in blocks, which stay together; so do blocks of rows. The shape is the one
    in which the process with the most work has the least; of two such, the one with more groups,
    which exchange nothing while they sample.

    Args:
        processes: number of processes.
        chains: number of chains.
        blocks: number of blocks of rows.
        chain_block: chains that are evaluated together.

    Example:
        >>> mesh_shape(4, chains=8, blocks=64, chain_block=4)
        (2, 2)
        >>> mesh_shape(4, chains=1, blocks=64, chain_block=1)
        (1, 4)
    """
    parts = -(-chains // chain_block)
    shapes = [
        (g, processes // g) for g in range(1, min(parts, processes) + 1) if processes % g == 0
    ]
    return min(shapes, key=lambda s: (-(-parts // s[0]) * -(-blocks // s[1]), -s[0]))
