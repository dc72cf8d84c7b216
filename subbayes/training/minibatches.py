"""Minibatches of data in memory, reshuffled in each epoch, or of a loader in its own order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from subbayes.data.data import Data, as_pair, batch_sizes, check_rows
from subbayes.data.division import Division
from subbayes.distributed.divided_rows import exchanged
from subbayes.distributed.processes import current
from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.likelihoods.base import target_values
from subbayes.likelihoods.target_parts import has_weights, mean_weight, split_targets
from subbayes.likelihoods.validation import checked_targets, join_checked_targets, sized_likelihood
from subbayes.networks.network import Network
from subbayes.networks.validation import check_gradients, check_rows_and_targets, warn_of_units
from subbayes.training.configuration import Training
from subbayes.training.shared_steps import SharedSteps, is_divided, seed_for
from subbayes.utils.checks import fail
from subbayes.utils.seeding import derive_seed
from subbayes.utils.trees import leaves, n_rows, take, to_device, tree_map
from subbayes.utils.types import Batch, Targets
from subbayes.utils.warning import warn_user

_SOME_ROWS = 1000


def split_validation(
    data: Any, training: Training, validation: Any, seed: int
) -> tuple[Any, Data | None]:
    """Training and validation data; by default the latter are a fraction of the former."""
    fraction = training.validation
    if training.patience is not None and fraction is None and validation is None:
        fail(
            "patience",
            "validation data to watch",
            "validation=None",
            "Pass validation=0.1 or held-out data",
        )
    if validation is not None:
        return data, _held_out(validation, data)
    if fraction is None:
        return data, None
    streamed = isinstance(data, (DataLoader, Dataset))
    whole = None if streamed else data if is_divided(data) else Data.of(data)
    if whole is None or not whole.in_memory:
        fail(
            "validation",
            "held-out data, since the data are streamed",
            fraction,
            "Pass a loader of held-out rows",
        )
    # of sharded rows each process holds out its share of those that are held out in all
    counted = replace(whole, division=None).counted
    processes = None if whole.division is None else current()
    shares = [counted.n] if processes is None else processes.gather(counted.n, call="training")
    total, before = sum(shares), sum(shares[: processes.rank]) if processes else 0
    n = round(total * fraction)
    if not 0 < n < total:
        fail("validation", f"a fraction that leaves rows on both sides of {total}", fraction)
    n = (before + counted.n) * n // total - before * n // total
    training_rows = held_out = counted
    if counted.n:
        training_rows, held_out = _split(counted, n, derive_seed(seed_for(seed, data), 1))
    if whole.division is not None:
        training_rows, held_out = (
            exchanged(replace(part, division=Division())) for part in (training_rows, held_out)
        )
    return training_rows, held_out


def _split(whole: Data, n: int, seed: int) -> tuple[Data, Data]:
    """The other rows, and n random rows."""
    order = torch.randperm(whole.n, generator=torch.Generator().manual_seed(seed))
    order = order.to(leaves(whole.targets())[0].device)
    return whole.rows(order[n:].sort().values), whole.rows(order[:n].sort().values)


def _held_out(validation: Any, data: Any) -> Data:
    """Held-out data, sharded or the same in all processes."""
    held_out = Data.of(
        validation, "validation", divided=is_divided(data) and is_divided(validation)
    )
    processes = current()
    if held_out.division is None and is_divided(data) and processes is not None:
        remedy = "Pass Data.of(rows, divided=True) if each process has others"
        processes.agree({"validation": held_out.digests()}, remedy)
    return exchanged(held_out)


class Minibatches:
    """Minibatches on the device of a network, with targets in standardised units.

    Empty batches of a loader are skipped.

    Args:
        data: as for `train`.
        likelihood: p(y | f), or its name as for `fit`.
        network: the network, with which the data are checked.
        batch_size: rows per step; None uses all rows.
        seed: seed of the shuffling.
        divided: take sharded rows; the processes then make each step together.

    Attributes:
        n: number of rows, of all processes.
        shared: what these processes exchange; None if this one has all rows.
        mean_weight: of the rows, 1 without weights.
        memory: the data with prepared targets, or None if they are streamed.
        initial_parameters: unconstrained parameters of the likelihood, from the targets.
    """

    def __init__(
        self,
        data: Any,
        likelihood: str | Likelihood,
        network: Network,
        batch_size: int | None,
        seed: int,
        *,
        divided: bool = False,
    ) -> None:
        likelihood = as_likelihood(likelihood)
        self.shared = SharedSteps.of(data, network) if divided else None
        if is_divided(data) and not divided:
            Data.of(data)  # an error
        if torch.is_inference_mode_enabled():
            fail(
                "data",
                "a call that may compute gradients",
                "one in torch.inference_mode()",
                "Train outside of it",
            )
        self.device, self.dtype = network.device, network.dtype
        self.network, self.likelihood = network, likelihood
        own_seed = derive_seed(seed_for(seed, data), 0)
        self.generator = torch.Generator().manual_seed(own_seed)
        self.batch_size = batch_size
        self.has_batchnorm = network.has_batchnorm
        self.loader = _as_loader(data, batch_size, self.generator)
        self.memory: Data | None = None
        self.batch: Batch | None = None  # of the loader, with the most rows
        if self.loader is None:
            own = data if self.shared is None else replace(self.shared.data, division=None)
            whole = Data.of(own)
            if has_weights(likelihood, whole.targets()):
                whole = replace(whole, has_weights=True)
            whole = whole.counted.to(self.device)
            first, targets = whole.first(), whole.targets()
            if whole.n:
                targets = checked_targets(likelihood, whole)
            self.memory = Data(whole.n, whole.inputs, self.prepare_targets(targets))
        else:
            first, targets = _read_targets(self.loader, likelihood)
            targets = take(targets, _counted(likelihood, targets))
        if self.shared is not None:
            first, targets = self.shared.data.first(), self.shared.every_target(targets, likelihood)
        self.n = n_rows(targets)
        inputs, _ = to_device(first, self.device)
        self._rows = n_rows(inputs)
        self.mean_weight = mean_weight(likelihood, targets)
        few, y = to_device(take(first, slice(2)), self.device)
        _, sized = check_rows_and_targets(network, likelihood, few, y, targets)
        check_gradients(network, few)
        warn_of_no_spread(likelihood, self.n, targets)
        self.likelihood = likelihood = sized
        warn_of_units(network, likelihood, inputs, targets)
        self.initial_parameters = likelihood.init_parameters(targets).to(self.device, self.dtype)
        if self.has_batchnorm and self.n == 1:
            fail("data", "at least 2 rows for BatchNorm", "1 row")
        if self.has_batchnorm and batch_size == 1 and self.memory is not None:
            fail("batch_size", "at least 2 for a module with BatchNorm", 1)

    def check_held_out(self, data: Data | None) -> None:
        """Check held-out data as the training data are checked."""
        if data is not None:
            targets = checked_targets(self.likelihood, data)
            self.likelihood.check_targets(targets)
            inputs, y = to_device(data.first(), self.device)
            sized_likelihood(self.likelihood, self.network.check(inputs), y, targets)

    def prepare_targets(self, y: Targets) -> Targets:
        """Targets in standardised units, and in the dtype and on the device of the network."""
        return tree_map(
            lambda t: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype),
            self.likelihood.standardize(y),
        )

    def shuffled(self) -> Iterator[Batch]:
        """The batches of one epoch: reshuffled, or in the loader's own order."""
        if self.shared is not None and self.memory is not None:
            yield from self._in_pieces()
        elif self.memory is None:
            yield from self._large_enough()
        elif self.batch_size is None or self.batch_size >= self.n:
            assert self.memory.inputs is not None
            assert self.memory.y is not None
            yield self.memory.inputs, self.memory.y
        else:
            order = torch.randperm(self.n, generator=self.generator).to(self.device)
            for rows in order.split(batch_sizes(self.n, self.batch_size)):
                yield take(self.memory.inputs, rows), take(self.memory.y, rows)

    def n_batches_of(self, rows: int) -> int:
        """Number of batches with this number of rows in an epoch; approximate for a loader."""
        if self.memory is None:
            return max(1, self.n // max(rows, 1))
        return batch_sizes(self.n, self.batch_size or self.n).count(rows)

    @property
    def n_batches(self) -> int:
        """Number of batches in an epoch; approximate for a loader."""
        if self.memory is None:
            return -(-self.n // self._rows)
        return len(batch_sizes(self.n, self.batch_size or self.n))

    def some_rows(self) -> Batch | None:
        """At most 1000 rows in memory, evenly spaced, or a batch of the loader, if it was read."""
        if self.memory is None:
            return self.batch
        if not self.memory.n:  # other processes have rows
            return None
        rows = torch.arange(0, self.memory.n, -(-self.memory.n // _SOME_ROWS), device=self.device)
        return take(self.memory.inputs, rows), take(self.memory.y, rows)

    def for_statistics(self) -> Data | Iterator[Batch]:
        """The rows that BatchNorm statistics are re-estimated on."""
        return self._read() if self.memory is None else self.memory

    def _in_pieces(self) -> Iterator[Batch]:
        """The rows of this process for each batch of all rows: its share of the batch.

        Shares are rounded at other places in each process, so that batches have their size.
        """
        assert self.memory is not None
        assert self.shared is not None
        order = torch.randperm(self.memory.n, generator=self.generator).to(self.device)
        ends = np.cumsum([0, *batch_sizes(self.n, self.batch_size or self.n)]) / self.n
        place = (self.shared.processes.rank + 0.5) / self.shared.processes.count
        cuts = np.floor(self.memory.n * ends + place).astype(int)
        cuts[0], cuts[-1] = 0, self.memory.n
        for start, stop in itertools.pairwise(cuts.tolist()):
            rows = order[start:stop]
            yield take(self.memory.inputs, rows), take(self.memory.y, rows)

    def _large_enough(self) -> Iterator[Batch]:
        """The batches of the loader that have rows, with BatchNorm two or more."""
        least, any_left = 2 if self.has_batchnorm else 1, False
        for batch in self._read():
            if n_rows(batch[1]) >= least:
                any_left = True
                yield batch
        if not any_left and self.shared is None:
            expected = "batches of at least 2 rows for a module with BatchNorm"
            fail("data", expected, "batches of one row", "Raise the batch_size of the loader")

    def _read(self) -> Iterator[Batch]:
        """The batches of the loader, without rows of weight 0."""
        assert self.loader is not None
        for batch in self.loader:
            inputs, y = as_pair(batch, "data")
            rows = _counted(self.likelihood, y)
            inputs = to_device(take(inputs, rows), self.device)
            y = self.prepare_targets(take(y, rows))
            if self.batch is None or n_rows(y) >= n_rows(self.batch[1]):
                self.batch = inputs, y
            yield inputs, y


def warn_of_no_spread(likelihood: Likelihood, n: int, targets: Targets) -> None:
    """Warn of parameters of a likelihood that are learned from one row, or from equal targets.

    Args:
        likelihood: p(y | f) before its parameters are learned.
        n: number of rows.
        targets: targets of these rows, or of some of them if other processes hold the others.
    """
    if likelihood.is_complete or not n:
        return
    y = target_values(targets)
    if n == 1:
        got = "1 row has"
    elif len(y) == n and bool((y == y[:1]).all()):
        got = f"{n} equal targets have"
    else:
        return
    warn_user(
        f"data: {type(likelihood.unweighted).__name__} learns parameters, such as its noise, "
        f"which {got} no spread to estimate from; intervals mean nothing. Pass targets that vary, "
        "or a likelihood with their values, such as Gaussian(noise=0.1)"
    )


def _as_loader(
    data: Any, batch_size: int | None, generator: torch.Generator
) -> Iterable[Any] | None:
    """The loader of streamed data, with its own shuffling, or None for data in memory."""
    if isinstance(data, Data) and data.source is not None:
        data = data.source
    if isinstance(data, DataLoader):
        return data
    if isinstance(data, Dataset):
        return DataLoader(
            data,
            batch_size=batch_size or 2**62,
            shuffle=not isinstance(data, IterableDataset),
            generator=generator,
        )
    return data.loader if isinstance(data, Data) else None


def _counted(likelihood: Likelihood, y: Targets) -> slice | Tensor:
    """The rows of a weight above 0."""
    weights = split_targets(y, has_weights(likelihood, y)).weights
    return slice(None) if weights is None else weights > 0


def _read_targets(loader: Iterable[Any], likelihood: Likelihood) -> tuple[Batch, Targets]:
    """The first batch that is not empty, and the targets of all batches of a loader."""
    first: list[Batch] = []

    def checked() -> Iterator[Batch]:
        for batch in loader:
            inputs, y = as_pair(batch, "data")
            check_rows({"data inputs": inputs, "data targets": y})
            if n_rows(inputs) and not first:
                first.append((inputs, y))
            yield inputs, y

    targets = join_checked_targets(likelihood, checked())
    if not first:
        fail("data", "at least one row", "an empty loader")
    return first[0], targets
