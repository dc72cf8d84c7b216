r"""Sums over the rows of a Jacobian that do not depend on the process that has a row.

Curvature is a sum over rows, as $V^\top V = \sum_n J_n^\top \Lambda_n J_n$, so that processes
compute it together: each takes some blocks of rows, and the sum over blocks is exact (see
`subbayes.distributed.exact_sum`). It has the same bits for every number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.data.data import Data
from subbayes.distributed.blocks import Blocks, BlockSize
from subbayes.distributed.divided_rows import agreed_rows
from subbayes.distributed.exact_sum import LIMBS, decode, encode
from subbayes.distributed.processes import Processes, current
from subbayes.utils.addresses import without_addresses
from subbayes.utils.artifact import fingerprint
from subbayes.utils.memory import check_memory
from subbayes.utils.progress import estimated_progress
from subbayes.utils.trees import n_rows, take, to_device
from subbayes.utils.types import Inputs, Targets

__all__ = ["RowShare", "Terms", "first_rows", "share_rows", "sum_over_rows"]

Terms = tuple[Tensor, ...]
_AT_ONCE = 2**16  # numbers that are encoded together, so that their limbs stay in the cache
_BYTES = 64  # of a number: its sum in a process and in all, and the terms of a block


@dataclass(frozen=True)
class RowShare:
    """The rows of which this process computes its part of a sum.

    Attributes:
        data: all rows, or those that this process has for itself.
        size: of the blocks of rows.
        processes: all processes.
    """

    data: Data
    size: BlockSize
    processes: Processes


def share_rows(V: Jacobian, data: Data, size: BlockSize | None = None) -> None:
    """Divide the sums over the rows of a Jacobian among the processes that work together, if any.

    Args:
        V: the Jacobian over the data.
        data: its rows, or those of this process.
        size: of the blocks, of a posterior whose parts are the same in all processes; None
            compares the parts, and chooses blocks that `V.memory_limit` allows, of at most 4096
            rows.

    Raises:
        InputError: in all processes, if they have other weights, likelihoods or data.
    """
    if (processes := current()) is None:
        return
    if size is None:
        facts = {
            "data": agreed_rows(data),
            "network": fingerprint({"weights": V.network.weights}, {}),
            "likelihood": without_addresses(repr(V.likelihood)),
        }
        processes.agree(facts, "Give every process the same data and weights")
        shares = data.division.shares if data.division else ()
        on_cpu = V.network.device.type == "cpu"
        size = BlockSize.of(V.n, V.plan.row_bytes, V.memory_limit, None, shares, on_cpu)
    V.share = RowShare(data, size, processes)


def sum_over_rows(V: Jacobian, of: Callable[[Jacobian], Terms]) -> Terms:
    """What a function gives for all rows, if it is a sum over them.

    All processes have to call it, if the rows of V are shared by some.

    Args:
        V: the Jacobian.
        of: from a Jacobian of some rows, tensors whose shapes do not depend on the rows.

    Raises:
        InputError: in all processes, what is raised in one of them; or no memory for the sums.

    Example:
        >>> import subbayes
        >>> from subbayes.curvature.layers import Layers
        >>> network, x = subbayes.Network(torch.nn.Linear(2, 1)), torch.ones(3, 2)
        >>> J = Jacobian.of_inputs(Layers(network, x), x)
        >>> sum_over_rows(J, lambda rows: (rows.gram().sum(),))
        (tensor(27., dtype=torch.float64),)
    """
    share = V.share
    if share is None:
        return of(V)
    found: Terms = ()

    def own() -> Int[np.ndarray, "4 s"]:
        nonlocal found
        total: np.ndarray | None = None
        blocks = Blocks.of(share.data, share.size, share.processes, V.network.device)
        with estimated_progress(V.n, "Jacobian", V.progress, "rows") as report:
            for block in blocks.rows():
                terms: np.ndarray | float = 0.0
                for start, inputs, y in block:
                    found = of(V.at_rows(inputs, y, start))
                    terms = terms + _flat(found)
                    report(n_rows(inputs))
                total = _added(total, np.asarray(terms))
        if total is not None:
            return total
        found = of(V.at_rows(*share.data.first(), 0))  # for the shapes
        return _added(None, np.zeros_like(_flat(found)))

    summed = decode(share.processes.sum_over_data(share.processes.in_all(own)))
    parts = torch.from_numpy(summed).split([part.numel() for part in found])
    device = V.network.device
    return tuple(
        part.reshape(like.shape).to(device) for part, like in zip(parts, found, strict=True)
    )


def first_rows(V: Jacobian, most: int) -> tuple[Inputs, Targets | None]:
    """The first rows of a Jacobian, or of the first process that has any, the same in all."""
    share = V.share
    if share is None or not V.is_divided:
        return next(V.silent().batches(most))[1:]
    own = None
    if share.data.n:
        own = tuple(take(part, slice(most)) for part in next(share.data.batches(most)))
        own = to_device(own, torch.device("cpu"))
    found = next(part for part in share.processes.gather(own, call="rows") if part is not None)
    return tuple(to_device(part, V.network.device) for part in found)


def _flat(terms: Terms) -> Float[np.ndarray, "s"]:
    return torch.cat([term.detach().double().flatten().cpu() for term in terms]).numpy()


def _added(
    total: Int[np.ndarray, "4 s"] | None, terms: Float[np.ndarray, "s"]
) -> Int[np.ndarray, "4 s"]:
    """An exact sum and one more term of each number."""
    if total is None:
        check_memory(
            "data",
            f"exact sums of {terms.size} numbers",
            _BYTES * terms.size,
            "Use a form with fewer numbers, as covariance='diagonal' or a subspace",
        )
        total = np.zeros((LIMBS, terms.size), dtype=np.int64)
    for start in range(0, terms.size, _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        total[:, some] += encode(terms[some])
    return total
