r"""Steps of several processes that train one network together, each on its shard of the rows.

Every process has the same weights. In each step it takes some of its rows, and the gradients of the
mean loss are those of the rows of all processes,

$$ \nabla \ell = \frac{1}{\sum_p n_p} \sum_p n_p \nabla \ell_p , $$

so that all of them make the same step, as `DistributedDataParallel` does. Processes that have no
row in a step wait for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor

from subbayes.artifacts.tensors import fingerprint
from subbayes.data.data import Data, join_targets
from subbayes.distributed.divided_rows import exchanged
from subbayes.distributed.processes import Processes, current
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.validation import ignored_label
from subbayes.networks.network import Network
from subbayes.utils.checks import fail
from subbayes.utils.seeding import derive_seed
from subbayes.utils.trees import n_rows, take, to_device
from subbayes.utils.types import Batch, Targets

_OWN_LOOP = (
    "Train a module whose buffers change by the rows of a batch with your own loop, as with "
    "SyncBatchNorm, and pass Training(epochs=0, swa_epochs=0)"
)


def seed_for(seed: int, data: object) -> int:
    """A seed of random numbers, another one in each process if rows are sharded.

    Example:
        >>> seed_for(3, (torch.zeros(2, 1), torch.zeros(2)))
        3
    """
    processes = current()
    if processes is None or not is_divided(data):
        return seed
    return derive_seed(seed, 6, processes.rank)


def is_divided(data: object) -> TypeGuard[Data]:
    """Whether each process has rows of its own.

    Example:
        >>> is_divided(Data.of((torch.zeros(2, 1), torch.zeros(2)), divided=True))
        True
    """
    return isinstance(data, Data) and data.division is not None


@dataclass
class SharedSteps:
    """What processes exchange in training.

    Attributes:
        data: rows of this process.
        processes: all of them.
        rows: number of rows of all processes in the present step.
    """

    data: Data
    processes: Processes
    rows: int = field(default=0)

    @classmethod
    def of(cls, data: object, network: Network) -> SharedSteps | None:
        """For sharded rows; None for other data.

        Raises:
            InputError: in all processes, for a module with BatchNorm, or without any row.
        """
        if not is_divided(data):
            return None
        data, processes = exchanged(data), current()
        assert processes is not None
        if network.has_batchnorm:
            fail(
                "training",
                "a module without BatchNorm for sharded rows",
                "one that normalises the rows of each process for itself",
                _OWN_LOOP,
            )
        return cls(data, processes)

    def every_target(self, own: Targets, likelihood: Likelihood) -> Targets:
        """The targets of all processes, on the CPU."""
        part = to_device(own, torch.device("cpu")) if n_rows(own) else None
        found = self.processes.gather(part, call="targets")
        return join_targets([y for y in found if y is not None], ignored_label(likelihood))

    def in_step(self, own: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of this process, empty in steps in which only other processes have rows."""
        inputs, y = self.data.first()
        empty = take(inputs, slice(0)), take(y, slice(0))
        while True:
            batch = next(own, empty)
            (self.rows,) = self.processes.total(n_rows(batch[1]))
            if self.rows == 0:
                return
            yield batch

    @torch.no_grad()
    def mean(self, parameters: Sequence[Tensor], loss: Tensor, rows: int) -> Tensor:
        """Set the gradients of parameters to those of all rows, and return the mean loss.

        Args:
            parameters: with the gradients of the mean loss of this process.
            loss: the mean loss of this process.
            rows: number of rows of this process.
        """
        parts = [torch.zeros_like(own) if own.grad is None else own.grad for own in parameters]
        first = parts[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        has_gradient = torch.tensor([float(own.grad is not None) for own in parameters])
        parts += [loss, has_gradient.to(first.device)]
        flat = torch.cat([part.to(dtype).reshape(-1) for part in parts]) * rows
        flat = (self.processes.add(flat.cpu()) / self.rows).to(first.device)
        *slopes, mean, used = flat.split([part.numel() for part in parts])
        for own, slope, known in zip(parameters, slopes, used.tolist(), strict=True):
            own.grad = torch.empty_like(own).copy_(slope.reshape(own.shape)) if known else None
        return mean.squeeze()

    def check_same(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Check that all processes train the same module.

        Raises:
            InputError: in all processes, if parameters differ, or buffers that the module changes
                by the rows of its process.
        """
        remedy = "Set OMP_NUM_THREADS=1, and give every process the same module and seed"
        self.processes.agree({"parameters": fingerprint(dict(parameters), {})}, remedy)
        self.processes.agree({"buffers": fingerprint(dict(buffers), {})}, _OWN_LOOP)
