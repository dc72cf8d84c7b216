"""The processes that run one program together, as `torchrun` starts them.

Every process runs the same program with the same seeds. What they compute apart (sums over blocks
of rows, draws of chains) is combined by collectives of `torch.distributed` on the CPU, so that all
of them continue with the same numbers. The processes form a `DeviceMesh` with two axes: "chains",
groups of processes that run different chains, and "data", the processes of a group, which hold
different rows.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from subbayes.distributed.rendezvous import session_store
from subbayes.utils.checks import InputError, InputTypeError, check_count, error_text, fail
from subbayes.utils.warning import set_first_process

SWITCH = "SUBBAYES_DISTRIBUTED"
"""The environment variable that, set to 0, makes each process work on its own."""

AXES = ("chains", "data")
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAST_PORT = 2**16 - 1
_TIMEOUT = 300.0
_PATIENCE = timedelta(days=30)  # for the others while the first process trains
_T = TypeVar("_T")


class ProcessError(InputError):
    """Another process of the same program has stopped or cannot be reached."""

    __module__ = "subbayes"


@dataclass
class Processes:
    """All processes of the program.

    Attributes:
        rank: number of this process, from 0; the first one writes files and prints.
        count: number of processes.
        traffic: bytes that this process has passed to sums over data so far.
        reductions: number of those sums.
    """

    rank: int = 0
    count: int = 1
    timeout: float = _TIMEOUT
    traffic: int = 0
    reductions: int = 0
    _groups: dict[str, Any] = field(default_factory=dict)
    _meshes: dict[int, DeviceMesh] = field(default_factory=dict)
    _restore: list[Callable[[], Any]] = field(default_factory=list)

    # --- the mesh -------------------------------------------------------------------------------

    @property
    def chain_groups(self) -> int:
        """Number of groups of processes that run different chains."""
        return min(_CHAIN_GROUPS.get(), self.count)

    @property
    def data_processes(self) -> int:
        """Number of processes of a group, which hold different rows."""
        return self.count // self.chain_groups

    @property
    def chain_group(self) -> int:
        """Number of the group of this process."""
        return self.rank // self.data_processes

    @property
    def data_rank(self) -> int:
        """Number of this process within its group."""
        return self.rank % self.data_processes

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh with the axes "chains" and "data", or None for a single process."""
        if self.count == 1:
            return None
        groups = self.chain_groups
        if groups not in self._meshes:
            ranks = torch.arange(self.count).reshape(groups, -1)
            own = [self._own_group(ranks.T.tolist()), self._own_group(ranks.tolist())]
            self._meshes[groups] = DeviceMesh.from_group(
                own, "cpu", mesh=ranks, mesh_dim_names=AXES
            )
        return self._meshes[groups]

    def _own_group(self, lists: list[list[int]]) -> Any:
        """Make a group of each list of ranks, and return the one of this process."""
        own = None
        self.highest(0)  # fails at once if a process has ended, for which new groups would wait
        for ranks in lists:
            group = self._new_group(ranks, timedelta(seconds=self.timeout))
            own = group if self.rank in ranks else own
        return own

    def _new_group(self, ranks: list[int], timeout: timedelta) -> Any:
        with self._reachable():
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
        self._restore.append(partial(_end_group, group))
        return group

    @contextmanager
    def split(self, chain_groups: int) -> Iterator[None]:
        """Within, the processes form so many groups.

        Raises:
            InputError: a number that does not divide the number of processes.
        """
        check_count("chain_groups", chain_groups)
        if self.count % chain_groups:
            fail(
                "chain_groups",
                f"a divisor of {self.count}, the number of processes",
                chain_groups,
                "Start another number of processes, or leave it out",
            )
        before = _CHAIN_GROUPS.set(chain_groups)
        try:
            _ = self.mesh  # made by all processes at the same time
            yield
        finally:
            _CHAIN_GROUPS.reset(before)

    # --- collectives ----------------------------------------------------------------------------

    def sum_over_data(self, numbers: Int[np.ndarray, "*S"]) -> Int[np.ndarray, "*S"]:
        """Sum whole numbers over the processes of a group."""
        self.traffic += numbers.nbytes
        self.reductions += 1
        if self.data_processes == 1:
            return numbers
        return self._reduce(numbers, self.mesh.get_group("data"), dist.ReduceOp.SUM)  # type: ignore[union-attr]

    def highest(self, *numbers: int) -> list[int]:
        """The highest value of each number over all processes."""
        if self.count == 1:
            return list(numbers)
        given = np.array(numbers, dtype=np.int64)
        return list(self._reduce(given, self._group("all"), dist.ReduceOp.MAX).tolist())

    def total(self, *numbers: int) -> list[int]:
        """The sum of each whole number over all processes."""
        return list(self.sum_over_all(np.array(numbers, dtype=np.int64)).tolist())

    def sum_over_all(self, numbers: Int[np.ndarray, "*S"]) -> Int[np.ndarray, "*S"]:
        """Sum whole numbers over all processes."""
        self.traffic += numbers.nbytes
        self.reductions += 1
        if self.count == 1:
            return numbers
        return self._reduce(numbers, self._group("all"), dist.ReduceOp.SUM)

    def add(self, numbers: Tensor) -> Tensor:
        """The sum of a tensor on the CPU over all processes, with rounding, the same in all."""
        if self.count > 1:
            with self._reachable():
                dist.all_reduce(numbers, group=self._group("all"))
        return numbers

    def _reduce(self, numbers: np.ndarray, group: Any, operation: Any) -> np.ndarray:
        tensor = torch.from_numpy(np.array(numbers, dtype=np.int64))
        with self._reachable():
            dist.all_reduce(tensor, op=operation, group=group)
        return tensor.numpy()

    def gather(self, part: _T, axis: str | None = None, call: str = "other values") -> list[_T]:
        """A value of each process along an axis of the mesh, in order; without one, of all.

        Args:
            part: the value of this process.
            axis: "chains" or "data".
            call: what is exchanged, in words.

        Raises:
            InputError: in all processes, if one of them exchanges something else.
        """
        members = {"chains": self.chain_groups, "data": self.data_processes}.get(
            axis or "", self.count
        )
        if members == 1:
            return [part]
        found: list[Any] = [(call, part)] * members
        group = self._group("patient") if axis is None else self.mesh.get_group(axis)  # type: ignore[union-attr]
        with self._reachable():
            dist.all_gather_object(found, (call, part), group=group)
        for other, _ in found:
            if other != found[0][0]:
                expected = f"the same call in all {self.count} processes"
                remedy = "Make the same calls, with data of the same kind, in every process"
                fail("processes", expected, f"{found[0][0]} and {other}", remedy)
        return [value for _, value in found]

    def on_first(self, work: Callable[[], _T]) -> _T:
        """Do work in the first process while the others wait, and return its result in all.

        The work is done alone: within, `current` returns None. An error is raised in all of them.
        """
        if self.count == 1:
            with _alone():
                return work()
        self.gather(None, call="work of the first process")
        outcome: list[Any] = [None]
        if self.rank == 0:
            try:
                with _alone():
                    outcome = [(work(), None)]
            except Exception as error:
                outcome = [(None, _portable(error))]
                self._broadcast(outcome)
                raise
        self._broadcast(outcome)
        found, problem = outcome[0]
        if problem is not None:
            raise problem
        return found

    def in_all(self, work: Callable[[], _T]) -> _T:
        """Do work without exchanges in every process; an error in one is raised in all."""
        found, problem = None, None
        try:
            found = work()
        except Exception as error:
            problem = error
        self.raise_any(problem)
        return found  # type: ignore[return-value]

    def raise_any(self, problem: Exception | None) -> None:
        """Raise the error of this process, if it has one, or the first error of the others."""
        own = None if problem is None else _portable(problem, self.rank)
        errors = [error for error in self.gather(own) if error is not None]
        if errors:
            raise problem or errors[0]

    def _broadcast(self, content: list[Any]) -> None:
        with self._reachable():
            dist.broadcast_object_list(content, src=0, group=self._group("patient"))

    def agree(self, facts: Mapping[str, Any], remedy: str) -> None:
        """Check that facts are the same in all processes.

        Args:
            facts: values by name.
            remedy: how to make them the same.

        Raises:
            InputError: in all processes, if one differs in any of them.
        """
        for rank, other in enumerate(every := self.gather(dict(facts), call="facts to compare")):
            for name in every[0] | other:
                if repr(other.get(name)) != repr(every[0].get(name)):  # NaN is the same as NaN
                    expected = f"the same in all {self.count} processes"
                    fail(name, expected, f"another on rank {rank} than on rank 0", remedy)

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            timeout = _PATIENCE if name == "patient" else timedelta(seconds=self.timeout)
            self._groups[name] = self._new_group(list(range(self.count)), timeout)
        return self._groups[name]

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn the errors of collectives into one line."""
        try:
            yield
        except RuntimeError as error:
            raise ProcessError(
                "processes",
                f"answers of all {self.count}",
                f"none from another one, for which rank {self.rank} waited: {error_text(error)}",
                "See the first error of the others; an interrupted run with checkpoint= resumes",
            ) from error


def _portable(error: Exception, rank: int = 0) -> Exception:
    """An error that can be pickled, with the same line."""
    if isinstance(error, (InputError, InputTypeError)):
        return error
    who = f"rank {rank}" if rank else "the first process"
    return InputError(f"{who} stopped ({type(error).__name__}: {error_text(error)})")


_CHAIN_GROUPS: ContextVar[int] = ContextVar("_CHAIN_GROUPS", default=1)
_IS_ALONE: ContextVar[bool] = ContextVar("_IS_ALONE", default=False)
_current: Processes | None = None


@contextmanager
def _alone() -> Iterator[None]:
    """Within, this process computes what no other one takes part in."""
    before = _IS_ALONE.set(True)
    try:
        yield
    finally:
        _IS_ALONE.reset(before)


def current() -> Processes | None:
    """The processes that this one has joined and computes with, or None.

    Example:
        >>> current() is None
        True
    """
    return None if _IS_ALONE.get() else _current


def join(*, required: bool = True, timeout: float = _TIMEOUT) -> Processes | None:
    """Join the processes that `torchrun` has started, or a process group that exists.

    `fit` and the command line do this themselves. From then on this process evaluates posteriors
    in blocks with exact sums, so that the results are the same for every number of processes, and
    only the first one writes files, shows progress and warns. Unless `OMP_NUM_THREADS` is set, each
    process uses one thread, as `torchrun` itself decides for several processes.

    Args:
        required: join a program of a single process that was not started by `torchrun` too, which
            then gives the same results as many; otherwise it is left alone.
        timeout: seconds after which a process that does not answer counts as lost.

    Returns:
        The processes, or None if this one is left alone.

    Raises:
        InputError: some of torchrun's variables without the others, or processes that cannot be
            reached.

    Example:
        >>> join(required=False) is None
        True
    """
    global _current
    if _current is not None or os.environ.get(SWITCH) == "0":
        return _current
    group = dist.is_available() and dist.is_initialized()
    rank, count = (dist.get_rank(), dist.get_world_size()) if group else _launched()
    if count == 0 and not required:
        return None
    processes = Processes(rank, max(count, 1), timeout)
    if count > 1 and not group:
        _initialise(processes)
    if not os.environ.get("OMP_NUM_THREADS"):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        processes._restore.append(lambda: torch.set_num_threads(threads))
    if count > 1:  # at once: a group waits for all of its members, as long as its timeout
        for name in ("all", "patient"):
            processes._group(name)
    set_first_process(rank == 0)
    _current = processes
    return processes


def on_first(work: Callable[[], _T]) -> _T:
    """The result of work that only the first of the processes does; see `Processes.on_first`."""
    return work() if _current is None else _current.on_first(work)


def leave() -> None:
    """Undo `join`: end the process groups that it made, and restore the number of threads."""
    global _current
    processes, _current = _current, None
    set_first_process(True)
    for restore in processes._restore if processes else []:
        restore()


def _launched() -> tuple[int, int]:
    """The rank and the number of processes by torchrun's variables; (0, 0) without them."""
    given = {name: os.environ.get(name, "") for name in _REQUIRED}
    if not (given["RANK"] or given["WORLD_SIZE"]):
        return 0, 0
    absent = [name for name, value in given.items() if not value]
    remedy = f"Start the program with torchrun, or set {SWITCH}=0 to work alone"
    if absent:
        fail(", ".join(absent), "the variables that torchrun sets", "none", remedy)
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not given[name].isdecimal():
            fail(name, "a whole number", repr(given[name]), remedy)
        numbers[name] = int(given[name])
    rank, count = numbers["RANK"], numbers["WORLD_SIZE"]
    if not count:
        fail("WORLD_SIZE", "a whole number of at least 1", count, remedy)
    if numbers["MASTER_PORT"] > _LAST_PORT:
        fail("MASTER_PORT", f"a port of at most {_LAST_PORT}", numbers["MASTER_PORT"], remedy)
    if not rank < count:
        fail("RANK", f"a number below WORLD_SIZE, {count}", rank, remedy)
    return rank, count


def _initialise(processes: Processes) -> None:
    """Make the process group."""
    if not dist.is_available():
        fail("torch", "a build with torch.distributed", "one without", "Install another build")
    limit = timedelta(seconds=processes.timeout)
    with processes._reachable():
        store, *_ = next(rendezvous("env://", processes.rank, processes.count, timeout=limit))
        store.set_timeout(limit)
        store = session_store(store, processes.rank, processes.count, processes.timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl"
            if torch.cuda.is_available() and dist.is_nccl_available()
            else "gloo",
            store=store,
            rank=processes.rank,
            world_size=processes.count,
            timeout=limit,
        )
    processes._restore.append(_end_group)
    atexit.register(_end_group)


def _end_group(group: Any = None) -> None:
    """End a group, or all of them; one that the program has ended itself is left."""
    with suppress(ValueError):
        if dist.is_initialized():
            dist.destroy_process_group(group)
