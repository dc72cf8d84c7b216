"""Loaders of torch, read in order and without effect on torch's global generator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler

from subbayes.utils.checks import fail
from subbayes.utils.seeding import fork_rng


def iterate_preserving_rng(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a loader without advancing torch's global generator.

    Samplers draw when their first row is read, and datasets whenever one is. Their random numbers
    continue from batch to batch, as if nothing else drew in between.
    """
    with fork_rng(None):
        iterator = iter(loader)
        own = torch.get_rng_state()
    while True:
        with fork_rng(None):
            torch.set_rng_state(own)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            own = torch.get_rng_state()
        yield batch


def sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler of the rows of a loader, which may be that of its batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def sequential_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader that reads each row once, in the order of the dataset or of its own sampler.

    Batch samplers that are no `BatchSampler` of torch are kept.
    """
    sampler, batches = sampler_of(loader), loader.batch_sampler
    drops = isinstance(batches, BatchSampler) and batches.drop_last
    own = not (batches is None or isinstance(batches, BatchSampler))
    if own or not (drops or isinstance(sampler, RandomSampler)):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        sampler = None
    elif isinstance(sampler, RandomSampler):
        sampler = SequentialSampler(sampler.data_source)
    return _loader_of(loader.dataset, loader, sampler)


def _loader_of(dataset: Any, loader: DataLoader[Any], sampler: Any = None) -> DataLoader[Any]:
    """A loader of some rows with the batch size and the settings of another."""
    return DataLoader(
        dataset,
        batch_size=getattr(loader.batch_sampler, "batch_size", loader.batch_size),
        sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )


def without_padding(loader: DataLoader[Any], argument: str) -> DataLoader[Any]:
    """The loader, or one of the rows of this process by a `DistributedSampler`, each once.

    The sampler repeats or drops rows, so that all processes have as many. Rows of a process are
    those of the dataset's order, which are all rows together in any order of the sampler; they are
    shuffled if it shuffles.

    Raises:
        InputError: a sampler of a derived class that repeats rows, or batches of no one size.
    """
    sampler = sampler_of(loader)
    if not isinstance(sampler, DistributedSampler):
        return loader
    rows = len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is not DistributedSampler:
        if sampler.total_size > rows:
            got = f"a {type(sampler).__name__} that repeats rows"
            remedy = f"Use DistributedSampler, or Subset(dataset, range(rank, {rows}, processes))"
            fail(argument, "rows that only one process has", got, remedy)
        return loader
    batches = loader.batch_sampler
    if batches is not None and getattr(batches, "batch_size", loader.batch_size) is None:
        got = f"a {type(batches).__name__} without it"
        fail(argument, "a batch sampler with a batch_size around DistributedSampler", got)
    own = Subset(loader.dataset, range(sampler.rank, rows, sampler.num_replicas))
    return _loader_of(own, loader, RandomSampler(own) if sampler.shuffle and len(own) else None)
