r"""The sum of a log-likelihood over fixed blocks of rows, divided among processes.

Rows $bB, \dots, (b+1)B - 1$ form block b. The block size B, and the number of points that are
evaluated together, depend on the network, the number of rows and the kind of device alone. Each
block is evaluated in a call of its own, on tensors of its own, so that a block gives the same bits
in every process; the sum over blocks is exact (see `exact_sum`). Rows of a block that batches of a
loader have padded to different lengths are evaluated in one call for each length, and added in
their order. A process holds consecutive blocks, as many as the others or one more; or, of data of
which each process has rows of its own, blocks of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import add
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from subbayes.data.cache import concatenate
from subbayes.data.data import Data
from subbayes.distributed.exact_sum import LIMBS, MOST_TERMS, decode, encode
from subbayes.distributed.processes import Processes
from subbayes.utils.checks import fail
from subbayes.utils.trees import n_rows, row_kind, take, tree_map
from subbayes.utils.types import Batch, Inputs, Targets

_BLOCKS = 16  # unless they would have fewer or more rows than these
_LEAST_ROWS, _MOST_ROWS = 512, 4096  # of fewer rows, gradients of the weights take longer to add up
_MOST_CHAINS = 16
_EVEN = 8  # numbers of blocks that 2, 4 and 8 processes divide evenly: 1, 2, 4, 8, 16, 24, ...
_CALL_BYTES = 3 * 2**20
"""Activations of a call and its gradient. It takes 0.1 ms and on one core 0.07 to 0.25 ms more for
each MiB, so that larger calls gain little. `python -m benchmarks distributed` measures it."""
_ON_DEVICE = 16  # times the bytes on an accelerator, whose calls take as long until it is full
_TOGETHER = 2**13  # terms that are encoded together, by which their arrays stay in the cache
_GRADIENT = 3  # memory of a gradient in that of a value

Evaluate = Callable[[Tensor, Inputs, Any], Tensor]
RowBlock = tuple[int, Inputs, Targets]
"""Position of the first row, inputs and targets of a block, or of rows of it of the same shapes."""
Step = tuple[int, Inputs, Any]
"""Rows of a block, or rows that do not count, with targets of None."""


@runtime_checkable
class HasMode(Protocol):
    """A `Tracer`, as far as it is used here."""

    mode: Any

    def use_eager(self, reason: str) -> None:
        """Evaluate eagerly from now on."""


@dataclass(frozen=True)
class BlockSize:
    """What is evaluated in one call.

    Attributes:
        n: number of rows of all blocks.
        rows: rows of a block B; the last one may have fewer.
        chains: points that are evaluated together.
    """

    n: int
    rows: int
    chains: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.n // self.rows)

    @classmethod
    def of(
        cls,
        n: int,
        row_bytes: int,
        most_bytes: int,
        batch_size: int | None,
        shares: tuple[int, ...] = (),
        on_cpu: bool = True,
    ) -> BlockSize:
        """The size for some data: the smallest with which calls have enough work.

        The number of blocks is 16, or fewer of more rows for small data, or more if they would have
        too many rows. Points are evaluated together, up to 16, if one has less work than a call
        should have.

        Args:
            n: number of rows.
            row_bytes: bytes of activations of a row.
            most_bytes: bytes of activations of a call.
            batch_size: rows of a block that the user has chosen, or None.
            shares: numbers of rows of each process, of sharded data.
            on_cpu: whether the network is on the CPU; other devices need larger calls.

        Raises:
            InputError: blocks so small that there would be more than an exact sum takes.

        Example:
            >>> BlockSize.of(50_000, row_bytes=1000, most_bytes=2**25, batch_size=None)
            BlockSize(n=50000, rows=3125, chains=1)
            >>> BlockSize.of(1000, row_bytes=500, most_bytes=2**25, batch_size=None)
            BlockSize(n=1000, rows=1000, chains=4)
        """
        row, call_bytes = row_bytes * _GRADIENT, _CALL_BYTES * (1 if on_cpu else _ON_DEVICE)
        most_rows, call_rows = max(most_bytes // row, 1), -(-call_bytes // row)
        most_blocks = max(MOST_TERMS // max(len(shares), 1), 1)  # of each share
        least = -(-max(shares, default=n) // most_blocks)
        if batch_size is None:
            rows = max(_rows_of_block(n, min(call_rows, _MOST_ROWS), most_rows), least)
        elif batch_size < least:
            fail("batch_size", f"at least {least} for {n} rows on many processes", batch_size)
        else:
            rows = batch_size
        rows, chains = min(rows, n), 1
        while (
            chains < _MOST_CHAINS and chains * rows < call_rows and 2 * chains * rows <= most_rows
        ):
            chains *= 2
        return cls(n, rows, chains)


@dataclass(frozen=True)
class Blocks:
    """The blocks of rows of one process, and sums over those of all.

    Attributes:
        size: what is evaluated in one call.
        own: numbers of the blocks of this process.
        rows: function that iterates over them: lists of their rows of the same shapes.
        processes: all processes.
        idle: evaluations of rows that do not count, after those of the blocks, so that all
            processes make the same number of them.
        example: the inputs of these rows.
        single: whether one block has all rows, so that its terms are the sums.
    """

    size: BlockSize
    own: range
    rows: Callable[[], Iterator[list[RowBlock]]]
    processes: Processes
    idle: int = 0
    example: Any = None
    single: bool = False

    @classmethod
    def of(
        cls,
        data: Data,
        size: BlockSize,
        processes: Processes,
        device: torch.device,
        in_step: bool = False,
    ) -> Blocks:
        """The blocks of this process.

        Args:
            data: all rows, of which those of this process are copied, or read for each evaluation;
                or rows of this process alone (`Data.division`).
            size: what is evaluated in one call.
            processes: all processes.
            device: where the rows are evaluated.
            in_step: whether all processes have to make the same number of evaluations; then all
                have to call this.
        """
        own, first, last, offset, every = _own_rows(data, size, processes)
        single = every == 1 and not in_step  # shards have parts of the gradient of a block
        idle = 0
        if in_step:
            calls = len(own)
            if not data.in_memory:  # shapes may differ within blocks
                calls = sum(map(len, _read(data, size.rows, first, last)))
            idle = processes.highest(calls)[0] - calls
        example = _copy(data.first()[0], slice(1), device) if in_step else None
        if data.in_memory:
            held = [
                [(offset + start, _copy(data.inputs, rows, device), _copy(data.y, rows, device))]
                for start in range(first, last, size.rows)
                for rows in (slice(start, min(start + size.rows, last)),)
            ]
            return cls(size, own, lambda: iter(held), processes, idle, example, single)

        def streamed() -> Iterator[list[RowBlock]]:
            whole = slice(None)
            for block in _read(data, size.rows, first, last):
                yield [
                    (offset + start, _copy(inputs, whole, device), _copy(y, whole, device))
                    for start, inputs, y in block
                ]

        return cls(size, own, streamed, processes, idle, example, single)

    def steps(self) -> Iterator[Step]:
        """The rows of the blocks, and after them rows that do not count."""
        for block in self._blocks():
            yield from block

    def _blocks(self) -> Iterator[list[Step]]:
        yield from self.rows()
        for _ in range(self.idle):
            yield [(-1, self.example, None)]

    def total(
        self, evaluate: Evaluate, points: Float[Tensor, "chains k"], columns: int, tracer: HasMode
    ) -> Float[np.ndarray, "chains columns"]:
        """Exact sums over all rows of all processes.

        Args:
            evaluate: from some points and a block, numbers of shape (points, columns) in float64;
                targets of None are those of rows that do not count.
            points: coordinates; the same in all processes.
            columns: how many numbers are summed for each point.
            tracer: that of `evaluate`; if it turns eager in one process, because a traced graph
                fails there, it turns eager in all and the sums are evaluated again.
        """
        while True:
            before = tracer.mode
            terms = (
                reduce(add, (self._term(evaluate, points, *step) for step in block))
                for block in self._blocks()
            )
            total = _only if self.single else _summed
            numbers = total((len(points), columns), (term.cpu().numpy() for term in terms))
            failed = tracer.mode == "eager" != before
            message = self.processes.sum_over_data(np.append(numbers.reshape(-1), int(failed)))
            if message[-1] == 0:
                numbers = message[:-1].reshape(numbers.shape)
                return numbers.view(np.float64) if self.single else decode(numbers)
            if tracer.mode != "eager":
                tracer.use_eager("a traced graph failed in another process")

    def _term(
        self, evaluate: Evaluate, points: Tensor, start: int, inputs: Inputs, y: Any
    ) -> Float[Tensor, "chains columns"]:
        """The sums over the rows of a step."""
        return torch.cat([evaluate(part, inputs, y) for _, part in self._parts(points)])

    def pointwise(
        self, evaluate: Evaluate, points: Float[Tensor, "chains k"]
    ) -> Float[np.ndarray, "chains n"]:
        """Numbers of each row of all processes, from an `evaluate` of shape (points, rows)."""
        out = np.zeros((len(points), self.size.n))
        for start, inputs, y in self.steps():
            for chains, part in self._parts(points):
                terms = evaluate(part, inputs, y)
                if y is not None:
                    out[chains, start : start + n_rows(y)] = terms.cpu().numpy()
        # A row is 0 in all processes but one: the sum of its bit patterns is that of this one.
        return self.processes.sum_over_data(out.view(np.int64)).view(np.float64)

    def _parts(self, points: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Points that are evaluated together, in memory of their own: alignment may change bits."""
        for start in range(0, len(points), self.size.chains):
            chains = slice(start, start + self.size.chains)
            yield chains, points[chains].clone()


class BlockSums(torch.autograd.Function):
    """The first of the columns of sums at points, whose gradient is in the others.

    `BlockSums.apply(points, sums)` takes points (chains, k) and a function from arrays of this
    shape to arrays (chains, 1 + k); its result (chains,) can be differentiated once.
    """

    @staticmethod
    def forward(
        ctx: Any, points: Tensor, sums: Callable[[np.ndarray], np.ndarray]
    ) -> Float[Tensor, "chains"]:
        """The sums."""
        found = torch.from_numpy(sums(points.detach().cpu().numpy())).to(points.device)
        ctx.save_for_backward(found[:, 1:].to(points.dtype))
        return found[:, 0]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        """The gradient of what follows."""
        (slope,) = ctx.saved_tensors
        return outer[0][:, None].to(slope.dtype) * slope, None


def _rows_of_block(n: int, call_rows: int, most_rows: int) -> int:
    """Rows of blocks of n rows, at most `most_rows` and with about `call_rows` or more."""
    most = min(n // max(call_rows, _LEAST_ROWS), _BLOCKS)
    fewest = -(-n // min(_MOST_ROWS, most_rows))
    count = 2 ** (max(most, 1).bit_length() - 1)
    if fewest > count:
        count = -(-fewest // _EVEN) * _EVEN if fewest > _EVEN else 2 ** (fewest - 1).bit_length()
    return -(-n // count)


def _summed(
    shape: tuple[int, int], terms: Iterator[Float[np.ndarray, "chains columns"]]
) -> Int[np.ndarray, "4 chains columns"]:
    """The exact sum of the terms of some blocks."""
    limbs = np.zeros((LIMBS, *shape), dtype=np.int64)
    waiting: list[np.ndarray] = []
    for term in terms:
        waiting.append(term)
        if len(waiting) * term.size >= _TOGETHER:
            limbs += encode(np.stack(waiting)).sum(1)
            waiting.clear()
    if waiting:
        limbs += encode(np.stack(waiting)).sum(1)
    return limbs


def _only(
    shape: tuple[int, int], terms: Iterator[Float[np.ndarray, "chains columns"]]
) -> Int[np.ndarray, "chains columns"]:
    """The bit patterns of the terms of the only block, or zeros in a process that has none."""
    found = list(terms)
    if not found:
        return np.zeros(shape, dtype=np.int64)
    return np.ascontiguousarray(found[0], dtype=np.float64).view(np.int64)


def own_blocks(blocks: int, rank: int, processes: int) -> range:
    """The numbers of the blocks of a process.

    Example:
        >>> [own_blocks(5, rank, 3) for rank in range(3)]
        [range(0, 2), range(2, 4), range(4, 5)]
        >>> own_blocks(1, 1, 2)
        range(1, 1)
    """
    each, more = divmod(blocks, processes)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _own_rows(
    data: Data, size: BlockSize, processes: Processes
) -> tuple[range, int, int, int, int]:
    """The blocks of a process.

    Returns:
        Their numbers, the first and the end of their rows within the data, the position of the
        data's first row among all, and the number of all blocks.
    """
    if data.division is None:
        count = size.count
        own = own_blocks(count, processes.data_rank, processes.data_processes)
        last = min(own.stop * size.rows, data.n)
        return own, min(own.start * size.rows, last), last, 0, count
    shares, rank = data.division.shares, processes.rank
    blocks = [-(-rows // size.rows) for rows in shares]
    start = sum(blocks[:rank])
    return (range(start, start + blocks[rank]), 0, data.n, sum(shares[:rank]), sum(blocks))


def _copy(values: Any, rows: slice, device: torch.device) -> Any:
    """Rows in memory of their own."""
    return tree_map(lambda tensor: tensor[rows].to(device, copy=True).contiguous(), values)


def _read(data: Data, size: int, first: int, last: int) -> Iterator[list[RowBlock]]:
    """Blocks of a loader; batches without rows of them are not read if the dataset is in order."""
    if first >= last:
        return
    loader: Any = data.loader
    each = _size_of_batches(loader, data.n)
    if each is None:
        yield from _cut(data.batches(), size, 0, first, last)
        return
    rows = range(first // each * each, min(-(-last // each) * each, data.n))
    part = DataLoader(
        Subset(loader.dataset, rows),
        batch_size=each,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
    )
    batches = _of_these_rows(Data(n=len(rows), loader=part).batches(), rows, each)
    yield from _cut(batches, size, rows.start, first, last)


def _size_of_batches(loader: Any, n: int) -> int | None:
    """Rows of each batch of a loader whose n rows are those of its dataset, in order; or None.

    There are other numbers of rows than in the dataset if `collate_fn` leaves out or repeats some.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = loader.sampler
    in_order = isinstance(sampler, SequentialSampler) and len(sampler) == n
    return loader.batch_size if in_order else None


def _of_these_rows(batches: Iterator[Batch], rows: range, each: int) -> Iterator[Batch]:
    """Batches of the given rows of a dataset, each of which has to have one row for one of them."""
    for start, (inputs, y) in zip(rows[::each], batches, strict=True):
        expected, found = min(each, rows.stop - start), n_rows(y)
        if found != expected:
            _fail_of_rows(f"a batch of {expected} rows from row {start}", f"one of {found}")
        yield inputs, y


def _fail_of_rows(expected: str, got: str) -> NoReturn:
    remedy = "Let the dataset, not collate_fn, leave out or repeat rows"
    fail("data", expected, got, remedy)


def _cut(
    batches: Iterator[Batch], size: int, at: int, first: int, last: int
) -> Iterator[list[RowBlock]]:
    """Blocks from batches of any size that begin at row `at`, of the rows first to last - 1."""
    waiting: list[tuple[Inputs, Any]] = []
    held, start = 0, first
    for inputs, y in batches:
        begin, at = at, at + n_rows(y)
        low, high = max(first, begin), min(last, at)
        while low < high:
            stop = min(high, start + size)
            rows = slice(low - begin, stop - begin)
            waiting.append((take(inputs, rows), take(y, rows)))
            held, low = held + stop - low, stop
            if held == min(size, last - start):
                yield list(_of_same_shapes(waiting, start))
                waiting, held, start = [], 0, start + size
        if at >= last:
            return
    _fail_of_rows(f"at least {last} rows in each pass", f"{at}")


def _of_same_shapes(batches: list[tuple[Inputs, Any]], start: int) -> Iterator[RowBlock]:
    """Joined batches, as far as rows that follow each other have the same shapes."""
    for _, some in groupby(batches, row_kind):
        inputs, y = concatenate(list(some))
        yield start, inputs, y
        start += n_rows(y)
