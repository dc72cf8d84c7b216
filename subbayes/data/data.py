"""Inputs and targets in a fixed order, in memory or streamed from a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from subbayes.data.arrays import (
    check_finite_targets,
    is_list_of_dicts,
    join_dicts,
    to_inputs,
    to_targets,
    to_tensor,
)
from subbayes.data.cache import CACHED_BYTES, BatchCache, concatenate
from subbayes.data.class_weights import class_weights
from subbayes.data.digests import batch_digests
from subbayes.data.division import Division
from subbayes.data.loaders import (
    iterate_preserving_rng,
    sampler_of,
    sequential_loader,
    without_padding,
)
from subbayes.utils.checks import (
    InputTypeError,
    check_count,
    check_finite,
    check_same_length,
    fail,
    fail_type,
)
from subbayes.utils.seeding import fork_rng, give_way
from subbayes.utils.trees import leaves, n_rows, named_leaves, row_kind, take, to_device, tree_map
from subbayes.utils.types import Batch, Inputs, Targets


def check_rows(parts: Mapping[str, Inputs | Targets]) -> None:
    """Check that all tensors have finite numbers and one row per observation.

    Raises:
        InputError: no tensors, scalars, different lengths, NaN or infinite values.
    """
    named: list[tuple[str, Tensor]] = []
    for name, part in parts.items():
        if isinstance(part, Tensor):
            named.append((name, part))
            continue
        if not part:
            fail(name, "at least one tensor", "an empty collection")
        quote = repr if isinstance(part, dict) else str
        named += [(f"{name}[{quote(key)}]", tensor) for key, tensor in named_leaves(part).items()]
    for name, tensor in named:
        if tensor.ndim == 0:
            fail(name, "tensors with one row per observation", "a scalar")
        check_same_length([named[0][0], name], [len(named[0][1]), len(tensor)])
    for name, tensor in named:
        of_targets = name.partition("[")[0].endswith("targets")
        (check_finite_targets if of_targets else check_finite)(name, tensor)


def _check_pair(inputs: Inputs, y: Targets, argument: str) -> None:
    check_rows({f"{argument} inputs": inputs, f"{argument} targets": y})


@dataclass(frozen=True)
class Data:
    """Pairs (inputs, targets) in a fixed order, in memory or streamed from a loader.

    Use `Data.of` to create one. Inputs are a tensor, a tuple or a dict of tensors; targets are a
    tensor, or a tuple of tensors such as (y, noise scale).

    Attributes:
        n: number of observations N.
        inputs: all inputs, or None if streamed.
        y: all targets, or None if streamed.
        loader: the loader in dataset order, or None if in memory.
        source: the `DataLoader` or `Dataset` that was given, whose own order training follows.
        has_weights: whether the last of the targets are weights of the rows.
        division: how rows are sharded; None if each process has all of them.
    """

    n: int
    inputs: Inputs | None = None
    y: Targets | None = None
    loader: Iterable[Any] | None = None
    source: DataLoader[Any] | Dataset[Any] | None = None
    has_weights: bool = False
    division: Division | None = None

    @classmethod
    def of(
        cls,
        data: Any,
        argument: str = "data",
        memory_limit: int = CACHED_BYTES,
        *,
        divided: bool = False,
    ) -> Data:
        """Convert observations to `Data`.

        A `DataLoader` that shuffles or drops rows is replaced by one that reads each row of its
        dataset once, in order, so that sums over it are sums over the data. Its rows, which have to
        be the same in each pass, are kept in memory if they fit; training still uses its order.

        Args:
            data: a pair (inputs, y); a dict with "labels", as for the models of transformers, or a
                list of such rows; a `DataLoader`, a `Dataset` or `Data`.
            argument: name of the argument in errors.
            memory_limit: bytes of the rows of a loader to keep in memory, a fourth of the free
                memory at most; above it they are read again at each evaluation, with a warning
                unless it is 0.
            divided: whether each of several processes has rows of its own, or none, instead of all
                rows; see the guide to many processes. Of a loader with torch's
                `DistributedSampler` each row is read by one process, without those that it repeats.

        Raises:
            InputError: different numbers of rows, NaN or infinite values, no rows, or a loader
                with different values in each pass.
            InputTypeError: another type.

        Example:
            >>> data = Data.of((torch.zeros(5, 2), torch.zeros(5)))
            >>> data.n, [len(y) for _, y in data.batches(2)]
            (5, [2, 2, 1])
        """
        division = Division() if divided else None
        if divided and isinstance(data, DataLoader):
            data = without_padding(data, argument)
        if isinstance(data, (DataLoader, Dataset)):
            data = cls._streamed(data, argument, memory_limit, divided)
        if isinstance(data, Data):
            if data.division is not None and not divided:
                remedy = "Use fit, train, linearised_laplace or a Posterior"
                fail(argument, "all rows in each process", "sharded rows", remedy)
            return replace(data, division=division) if divided else data
        if is_list_of_dicts(data):
            data = join_dicts(data, argument)
        if isinstance(data, Mapping) and "labels" in data:
            data = without_labels(data), data["labels"]
        if not (isinstance(data, (tuple, list)) and len(data) == 2):
            either = ", a dict with 'labels'" if isinstance(data, Mapping) else ""
            fail_type(argument, f"a pair (inputs, y){either}, a DataLoader or a Dataset", data)
        inputs, y = data
        inputs = to_inputs(inputs, f"{argument} inputs")
        targets = to_targets(y, f"{argument} targets")
        _check_pair(inputs, targets, argument)
        if n_rows(targets) == 0 and not divided:
            fail(argument, "at least one row", "an empty table")
        return cls(n=n_rows(targets), inputs=inputs, y=targets, division=division)

    @classmethod
    def _streamed(cls, source: Any, argument: str, memory_limit: int, may_be_empty: bool) -> Data:
        loaded = source if isinstance(source, DataLoader) else DataLoader(source, batch_size=256)
        loader = sequential_loader(loaded)
        count, cache = 0, BatchCache(check_count("memory_limit", memory_limit, 0))
        with fork_rng(None):
            for batch in loader:
                inputs, y = as_pair(batch, argument)
                _check_pair(inputs, y, argument)
                count += n_rows(y)
                if n_rows(y):
                    cache.add((inputs, y))
                give_way()
            if count == 0:
                if may_be_empty:
                    return cls(n=0)
                fail(argument, "at least one row", "an empty loader")
            _check_repeatable(loader, argument)
        if (rows := cache.joined()) is not None:
            return cls(n=count, inputs=rows[0], y=rows[1], source=source)
        if memory_limit and cache.loader() is None:
            cache.warn(argument)
        return cls(n=count, loader=cache.loader() or loader, source=source)

    def __repr__(self) -> str:
        return f"Data(n={self.n}, {'in memory' if self.in_memory else 'streamed'})"

    @property
    def in_memory(self) -> bool:
        """Whether all rows are in memory."""
        return self.loader is None

    def batches(self, batch_size: int | None = None) -> Iterator[Batch]:
        """Iterate once over the data in order.

        Args:
            batch_size: rows per batch for data in memory, by default all; a loader has its own
                batch size.
        """
        if self.loader is not None:
            for batch in iterate_preserving_rng(self.loader):
                yield as_pair(batch, "data")
            return
        size = self.n if batch_size is None else check_count("batch_size", batch_size)
        if size >= self.n and self.inputs is not None and self.y is not None:
            yield self.inputs, self.y
            return
        for start in range(0, self.n, size):
            rows = slice(start, start + size)
            yield take(self.inputs, rows), take(self.y, rows)

    def first(self) -> Batch:
        """At most two rows, for their shapes and dtypes; the same in all processes."""
        if self.division is not None and self.division.example is not None:
            return self.division.example
        inputs, y = next(iter(self.batches(2)))
        return take(inputs, slice(2)), take(y, slice(2))

    def targets(self) -> Targets:
        """All targets, on the CPU if they are streamed; those of `first` if there are none."""
        if not self.n:
            return self.first()[1]
        if self.y is not None:
            return self.y
        return join_targets([tree_map(Tensor.cpu, y) for _, y in self.batches()])

    def digests(self) -> dict[str, str]:
        """A digest of each tensor over all rows; a loader is read for them once."""
        return self._digests_of_loader if self.loader is not None else self._digests()

    @cached_property
    def _digests_of_loader(self) -> dict[str, str]:
        return self._digests()

    def _digests(self) -> dict[str, str]:
        return batch_digests(
            (kind, named_leaves(part))
            for pair in self.batches(4096)
            for kind, part in zip(("inputs", "targets"), pair, strict=True)
        )

    def to(self, device: torch.device) -> Data:
        """The data with its tensors on `device`; streamed batches are not moved."""
        if not self.in_memory:
            return self
        return replace(self, inputs=to_device(self.inputs, device), y=to_device(self.y, device))

    def rows(self, index: Tensor) -> Data:
        """The given rows, in memory.

        Raises:
            InputError: if the data are streamed, or sharded.
        """
        if self.division is not None:
            fail("data", "all rows in each process", "sharded rows")
        if not self.in_memory:
            fail("data", "tensors in memory", "a loader", "Pass a loader of these rows instead")
        inputs, y = take(self.inputs, index), take(self.y, index)
        return replace(self, n=len(index), inputs=inputs, y=y, source=None)

    @cached_property
    def counted(self) -> Data:
        """The data without rows of weight 0, on which nothing depends; the same if streamed."""
        if not (self.in_memory and self.has_weights) or self.division is not None:
            return self
        assert isinstance(self.y, tuple)
        positive = self.y[-1] > 0
        return self if bool(positive.all()) else self.rows(positive.nonzero().squeeze(1))

    def weighted(self, weights: Any) -> Data:
        r"""The data with weights $a_n$ that multiply the log-likelihood of each row.

        `fit` uses them with any likelihood; `train` and `Posterior` with `Weighted(likelihood)`.

        Args:
            weights: one number of at least 0 for each row, shape (N,); or, for class labels, a
                dict with the weight of each class, or "balanced" for
                $a_n = N / (K \, N_{y_n})$ with $N_k$ rows of class k.

        Raises:
            InputError: data with weights, streamed data, a wrong number of weights, weights that
                are negative or all 0, or a class without a weight.

        Example:
            >>> data = Data.of((torch.zeros(3, 2), torch.tensor([0, 0, 1])))
            >>> data.weighted({0: 1.0, 1: 2.0}).y[1]
            tensor([1., 1., 2.], dtype=torch.float64)
            >>> data.weighted("balanced").y[1]
            tensor([0.7500, 0.7500, 1.5000], dtype=torch.float64)
        """
        if self.y is None or self.has_weights:
            got = "weights already" if self.has_weights else "a loader"
            fail("data", "rows in memory, without weights", got, "Pass all rows as tensors")
        if isinstance(weights, str) and self.division is not None:
            got = f"{weights!r} for sharded rows"
            fail("weights", "numbers, or a dict of them", got, "Count the rows of all processes")
        if isinstance(weights, (str, Mapping)):
            weights = class_weights(self.y, weights)
        a = to_tensor("weights", weights, keep_double=True).to(leaves(self.y)[0].device)
        if not a.is_floating_point():
            a = a.double()
        check_weights(a, whole=self.division is None)
        check_same_length(["data", "weights"], [self.n, len(a)])
        targets = self.y if isinstance(self.y, tuple) else (self.y,)
        return replace(self, y=(*targets, a), source=None, has_weights=True)


def check_weights(weights: Tensor, *, whole: bool = True) -> None:
    """Check that weights are finite numbers of at least 0, one a row, of which one is above 0.

    Args:
        weights: one for each row.
        whole: whether these are all rows; of some all weights may be 0.

    Raises:
        InputError: other weights.
    """
    expected = "one finite number of at least 0 for each row"
    if weights.ndim != 1:
        fail("weights", expected, f"shape {tuple(weights.shape)}", "Pass weights of shape (N,)")
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        fail("weights", expected, f"{float(weights[row]):g}", "Correct or drop it", row=row)
    if whole and not bool((weights > 0).any()):
        fail("weights", "a weight above 0", "zeros only")


def batch_sizes(n: int, size: int) -> list[int]:
    """Sizes of batches; a last batch of one row is joined to the one before.

    Example:
        >>> batch_sizes(10, 4), batch_sizes(9, 4)
        ([4, 4, 2], [4, 5])
    """
    sizes = [min(size, n - start) for start in range(0, n, size)]
    if len(sizes) > 1 and sizes[-1] == 1 < size:
        sizes[-2:] = [size + 1]
    return sizes


def split_batches(
    batches: Iterable[tuple[Inputs, Targets | None]], size: int, device: torch.device
) -> Iterator[tuple[Inputs, Any]]:
    """Batches on a device, in parts of at most `size` rows, since those of a loader may be larger.

    Example:
        >>> data = Data.of((torch.zeros(5, 2), torch.zeros(5)))
        >>> [len(y) for _, y in split_batches(data.batches(), 2, torch.device("cpu"))]
        [2, 2, 1]
    """
    for inputs, y in batches:
        for start in range(0, n_rows(inputs), size):
            rows = slice(start, start + size)
            part = to_device(take(inputs, rows), device)
            yield part, None if y is None else to_device(take(y, rows), device)


def join_batches(
    batches: Iterable[tuple[Inputs, Targets | None]], size: int
) -> Iterator[tuple[Inputs, Any]]:
    """Consecutive batches of rows of the same shape, concatenated to at most `size` rows.

    Example:
        >>> data = Data.of((torch.zeros(5, 2), torch.zeros(5)))
        >>> [len(y) for _, y in join_batches(data.batches(1), 2)]
        [2, 2, 1]
    """
    waiting: list[tuple[Inputs, Any]] = []
    rows, kind = 0, None
    for batch in batches:
        own = row_kind(batch)
        if waiting and (rows + n_rows(batch[0]) > size or own != kind):
            yield concatenate(waiting)
            waiting, rows = [], 0
        waiting.append(batch)
        rows, kind = rows + n_rows(batch[0]), own
    if waiting:
        yield concatenate(waiting)


def join_targets(parts: Sequence[Targets], ignored: int = -100) -> Targets:
    """The targets of all batches; labels of sequences of other lengths are padded.

    Args:
        parts: targets of each batch.
        ignored: the label of padding.

    Example:
        >>> join_targets([torch.tensor([[1, 2]]), torch.tensor([[3]])])
        tensor([[   1,    2],
                [   3, -100]])
    """
    columns = zip(*[y if isinstance(y, tuple) else (y,) for y in parts], strict=True)
    joined = tuple(_joined(column, ignored) for column in columns)
    return joined[0] if len(joined) == 1 else joined


def _joined(column: Sequence[Tensor], ignored: int) -> Tensor:
    labels = all(t.ndim == 2 and not t.is_floating_point() for t in column)
    if labels and len({t.shape[1] for t in column}) > 1:
        longest = max(t.shape[1] for t in column)
        missing = [longest - t.shape[1] for t in column]
        pad = torch.nn.functional.pad
        column = [pad(t, (0, n), value=ignored) for t, n in zip(column, missing, strict=True)]
    return torch.cat(list(column))


def as_pair(batch: Any, argument: str) -> Batch:
    """A batch of a loader as (inputs, targets); the targets of a dict are its "labels"."""
    if isinstance(batch, Mapping) and "labels" in batch:
        batch = without_labels(batch), batch["labels"]
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        expected, got = "a pair (inputs, y)", type(batch).__name__
        if isinstance(batch, Mapping):
            expected += ", or a dict with 'labels'"
            got += f" with {', '.join(map(repr, list(batch)[:8])) or 'no keys'}"
        remedy = "Set a collate_fn that returns one"
        if isinstance(batch, Mapping) and (near := {"label", "y", "target"} & set(batch)):
            remedy = f"Rename {min(near)!r} to 'labels'"
        raise InputTypeError(f"{argument} batch", expected, got, remedy)
    x, y = batch
    inputs = to_inputs(tuple(x) if isinstance(x, list) else x, f"{argument} inputs")
    targets = to_targets(tuple(y) if isinstance(y, list) else y, f"{argument} targets")
    return inputs, targets


def without_labels(batch: Any) -> Any:
    """A dict without its "labels"; other batches unchanged."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: value for name, value in batch.items() if name != "labels"}


def _check_repeatable(loader: DataLoader[Any], argument: str) -> None:
    """Check that two passes give the same data, which a log density requires."""
    first, second = next(iter(loader), None), next(iter(loader), None)
    if first is None or second is None:
        fail(argument, "a loader that can be read again", "one that is exhausted after a pass")
    pairs = zip(*(sum(map(leaves, as_pair(b, argument)), []) for b in (first, second)), strict=True)
    if not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
        fail(
            argument,
            "the same rows at each pass",
            "other values in the second pass",
            _remedy_of_order(loader),
        )


def _remedy_of_order(loader: DataLoader[Any]) -> str:
    """What to change in a loader whose passes differ."""
    if isinstance(sampler_of(loader), WeightedRandomSampler):
        return "Leave out the sampler and pass Data.of((inputs, y)).weighted(weights)"
    return "Turn off shuffling and random augmentation for inference"
