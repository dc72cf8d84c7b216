r"""BatchNorm statistics of a data set, from batches of it.

In training mode a BatchNorm layer normalises by the mean $m_b$ and the variance $v_b$ of the $c_b$
values that a channel has in batch b. Its statistics for all batches are pooled by the law of total
variance (Chan et al. 1979), so that they are those of one batch of all rows,

$$ m = \frac{1}{c} \sum_b c_b m_b, \qquad
   v = \frac{1}{c - 1} \sum_b \bigl[ (c_b - 1) v_b + c_b (m_b - m)^2 \bigr], \qquad
   c = \sum_b c_b , $$

for every layer whose inputs do not depend on another BatchNorm layer. Layers after another one get
values that are normalised by their batch; batches of many rows in random order keep these close to
those of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from subbayes.data.cache import concatenate
from subbayes.data.data import Data, batch_sizes, join_batches
from subbayes.utils.checks import fail
from subbayes.utils.trees import n_rows, row_kind, take, to_device
from subbayes.utils.types import Inputs

_ROWS, _BYTES = 1024, 2**30  # of a batch: rows, and activations of the rows


RowBytes = Callable[[Inputs], int]


def statistics_batches(
    row_bytes: RowBytes, device: torch.device, data: Data | Iterable[tuple[Inputs, Any]]
) -> Iterator[Inputs]:
    """Inputs on the device of a network, in large batches.

    Batches have about 1024 rows, and fewer if their activations exceed 1 GiB. Rows in memory come
    in a random order with a fixed seed, because neighbouring rows may be alike; those of a loader
    in its order. Rows of weight 0 are left out.

    Args:
        row_bytes: `bytes_per_row` of the network whose statistics are re-estimated.
        device: that of the network.
        data: the rows, or pairs (inputs, anything), read once.

    Example:
        >>> from subbayes import Network
        >>> network = Network(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
        >>> data = Data.of((torch.zeros(2049, 2), torch.zeros(2049)))
        >>> known = network.bytes_per_row, network.device
        >>> [len(inputs) for inputs in statistics_batches(*known, data)]
        [1024, 1025]
        >>> pairs = [(torch.zeros(1, 2), None)] * 1500
        >>> [len(inputs) for inputs in statistics_batches(*known, pairs)]
        [1024, 476]
    """
    if not (isinstance(data, Data) and data.in_memory):
        for inputs in _rebatched(row_bytes, device, _counted_inputs(data)):
            yield to_device(inputs, device)
        return
    rows = data.counted
    size = _rows_at_once(row_bytes, device, rows.inputs)
    if size >= rows.n:
        yield to_device(rows.inputs, device)
        return
    order = torch.randperm(rows.n, generator=torch.Generator().manual_seed(0))
    for some in order.split(batch_sizes(rows.n, size)):
        yield to_device(take(rows.inputs, some), device)


def _counted_inputs(data: Data | Iterable[tuple[Inputs, Any]]) -> Iterator[Inputs]:
    """The inputs of rows of a weight above 0, without empty batches."""
    weighted = isinstance(data, Data) and data.has_weights
    for inputs, y in data.batches() if isinstance(data, Data) else data:
        some = take(inputs, y[-1] > 0) if weighted else inputs
        if n_rows(some):
            yield some


def _rebatched(
    row_bytes: RowBytes, device: torch.device, inputs: Iterator[Inputs]
) -> Iterator[Inputs]:
    first = next(inputs, None)
    if first is None:
        return
    size = _rows_at_once(row_bytes, device, first)
    joined = join_batches(((part, None) for part in chain([first], inputs)), size)
    held, _ = next(joined)
    for batch, _ in joined:
        if n_rows(batch) == 1 and row_kind(batch) == row_kind(held):
            held = concatenate([held, batch])  # a row alone has no variance
            continue
        yield from _split(held, size)
        held = batch
    yield from _split(held, size)


def _split(inputs: Inputs, size: int) -> Iterator[Inputs]:
    for rows in torch.arange(n_rows(inputs)).split(batch_sizes(n_rows(inputs), size)):
        yield take(inputs, rows)


def _rows_at_once(row_bytes: RowBytes, device: torch.device, inputs: Any) -> int:
    row = row_bytes(to_device(take(inputs, slice(1)), device))
    return min(_ROWS, max(2, _BYTES // row))


def collect_statistics(
    module: nn.Module,
    norms: Sequence[Any],
    calls: Iterable[tuple[tuple[Tensor, ...], dict[str, Tensor]]],
) -> None:
    """Set the statistics of BatchNorm layers to those of all batches.

    A last row on its own is left out where torch needs more values for a variance.

    Args:
        module: the module, in evaluation mode; the mode of the layers is changed.
        norms: its BatchNorm layers.
        calls: positional and keyword arguments of the module for each batch.

    Raises:
        InputError: no batch, or one of a single row.

    Example:
        >>> norm, x = nn.BatchNorm1d(1), torch.tensor([[0.0], [1.0], [8.0], [9.0]])
        >>> collect_statistics(norm, [norm], [((part,), {}) for part in x.split(2)])
        >>> norm.running_mean, norm.running_var
        (tensor([4.5000]), tensor([21.6667]))
    """
    found = [_Moments(norm) for norm in norms]
    seen, refused = 0, None
    with torch.no_grad():
        for args, kwargs in calls:
            rows = n_rows(args or kwargs)
            try:
                module(*args, **kwargs)
                seen += rows
            except ValueError as error:
                if rows > 1:  # BatchNorm refuses a single row
                    raise
                refused = error
        if not seen:
            got = "no rows" if refused is None else "1 row"
            remedy = "Pass all training rows"
            fail("data", "at least 2 rows for BatchNorm statistics", got, remedy, refused)
        for moments in found:
            moments.store()


class _Moments:
    """Mean and sum of squared deviations of each channel of a BatchNorm layer over its calls."""

    def __init__(self, norm: Any) -> None:
        norm.reset_running_stats()
        norm.train()
        norm.momentum = 1.0  # the statistics after a call are those of its batch
        self.norm, self.count = norm, 0
        dtype = torch.promote_types(norm.running_mean.dtype, torch.float32)
        self.mean = torch.zeros_like(norm.running_mean, dtype=dtype)
        self.squares = torch.zeros_like(self.mean)
        self.hook = norm.register_forward_hook(self._add)

    def _add(self, norm: Any, _: Any, output: Tensor) -> None:
        count = output.numel() // norm.num_features
        share = count / (self.count + count)
        difference = norm.running_mean.to(self.mean) - self.mean
        self.squares += (count - 1) * norm.running_var.to(self.mean)
        self.squares += self.count * share * difference.square()
        self.mean += share * difference
        self.count += count

    def store(self) -> None:
        self.hook.remove()
        if self.count:
            self.norm.running_mean.copy_(self.mean)
            self.norm.running_var.copy_(self.squares / (self.count - 1))
