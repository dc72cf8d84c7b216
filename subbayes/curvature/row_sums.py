r"""Sums over the rows of a Jacobian that do not depend on the process that has a row.

Curvature is a sum over rows, as $V^\top V = \sum_n J_n^\top \Lambda_n J_n$, so that processes
compute it together: each takes some blocks of rows, and the sum over blocks is exact (see
`subbayes.distributed.exact_sum`). It has the same bits for every number of processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.artifacts.tensors import fingerprint
from subbayes.curvature.jacobian import Jacobian, RowShare
from subbayes.data.cache import concatenate
from subbayes.data.data import Data
from subbayes.distributed.blocks import Blocks, BlockSize, RowBlock
from subbayes.distributed.devices import check_devices
from subbayes.distributed.divided_rows import SAME_ROWS, agreed_rows
from subbayes.distributed.exact_sum import LIMBS, decode, encode
from subbayes.distributed.processes import current
from subbayes.networks.validation import check_same_outputs
from subbayes.utils.memory import check_memory
from subbayes.utils.progress import estimated_progress
from subbayes.utils.text_table import without_addresses
from subbayes.utils.trees import n_rows, row_kind, take, to_device
from subbayes.utils.types import Inputs, Targets

Terms = tuple[Tensor, ...]
_AT_ONCE = 2**16  # numbers that are encoded together, so that their limbs stay in the cache
SUM_BYTES = 104
"""Memory of each number: its terms, limbs in this process and of all, and the result."""


def share_rows(
    V: Jacobian, data: Data, size: BlockSize | None = None, facts: Mapping[str, Any] | None = None
) -> None:
    """Divide the sums over the rows of a Jacobian among the processes that work together, if any.

    Args:
        V: the Jacobian over the data.
        data: its rows, or those of this process.
        size: of the blocks of a posterior that is known to be the same in all processes; None
            chooses blocks that `V.memory_limit` allows, of at most 4096 rows, and compares network,
            data and facts.
        facts: what else has to be the same, by name.

    Raises:
        InputError: in all processes, if they differ.
    """
    if (processes := current()) is None:
        return
    if size is None:
        network, shares = V.network, data.division.shares if data.division else ()
        on_cpu = network.device.type == "cpu"
        size = BlockSize.of(V.n, V.plan.row_bytes, V.memory_limit, None, shares, on_cpu)
        check_devices(network.device, processes)
        weights = {"weights": network.weights, **network.used_frozen}
        same = {
            "network": fingerprint(weights, {"of": network.architecture}),
            "likelihood": without_addresses(repr(V.likelihood)),
            "memory_limit": [V.memory_limit, size],
            "threads": torch.get_num_threads(),
        }
        remedy = "Give every process the same weights and settings"
        processes.agree({"data": agreed_rows(data)}, SAME_ROWS)
        processes.agree(same | dict(facts or {}), remedy)
        check_same_outputs(network, network.weights, data)
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
    processes = share.processes
    blocks = Blocks.of(share.data, share.size, processes, V.network.device)
    with estimated_progress(V.n, "Jacobian", V.progress, "rows") as report:
        each = (_terms_of(V, of, block, report) for block in blocks.rows())
        first, shapes = processes.in_all(lambda: _first_terms(V, of, each))
        places = np.cumsum([0, *(math.prod(shape) for shape in shapes)])
        exponents = _exponents(first, places) if blocks.own.start == 0 and len(blocks.own) else None
        known = processes.gather(exponents, "data", call="scales of curvature")
        scales = np.repeat(next(one for one in known if one is not None), np.diff(places))

        def own() -> Int[np.ndarray, "4 s"]:
            total = _added(None, np.ldexp(first, -scales))
            for terms, _ in each:
                total = _added(total, np.ldexp(terms, -scales))
            return total

        limbs = processes.in_all(own)
    summed = torch.from_numpy(np.ldexp(decode(processes.sum_over_data(limbs)), scales))
    device = V.network.device
    return tuple(
        part.reshape(shape).to(device)
        for part, shape in zip(summed.split(np.diff(places).tolist()), shapes, strict=True)
    )


def _terms_of(
    V: Jacobian,
    of: Callable[[Jacobian], Terms],
    block: list[RowBlock],
    report: Callable[[float], None],
) -> tuple[Float[np.ndarray, "s"], list[torch.Size]]:
    """The terms of a block as one array, and the shapes of their tensors."""
    total, shapes = np.zeros(()), []
    for start, inputs, y in block:
        found = of(V.at_rows(inputs, y, start))
        total, shapes = total + _flat(found), [part.shape for part in found]
        report(n_rows(inputs))
    return total, shapes


def _first_terms(
    V: Jacobian, of: Callable[[Jacobian], Terms], each: Iterator[tuple[np.ndarray, Any]]
) -> tuple[Float[np.ndarray, "s"], list[torch.Size]]:
    """The terms of the first block of this process; without rows zeros of the same shapes."""
    found = next(each, None)
    if found is not None:
        return found
    like = of(V.at_rows(*share_of(V).data.first()))
    return np.zeros_like(_flat(like)), [part.shape for part in like]


def _exponents(
    terms: Float[np.ndarray, "s"], places: Int[np.ndarray, "ends"]
) -> Int[np.ndarray, "tensors"]:
    """Powers of two of the largest number of each tensor, by which exact sums are scaled.

    They are those of the first block of all rows: the same for every number of processes.
    """
    largest = [
        np.abs(terms[start:stop]).max(initial=0.0) for start, stop in itertools.pairwise(places)
    ]
    return np.array([math.frexp(one)[1] if math.isfinite(one) else 0 for one in largest])


def first_rows(V: Jacobian, most: int) -> tuple[Inputs, Targets | None]:
    """The first rows of a Jacobian; of divided rows some of each process, the same in all."""
    if not V.is_divided:
        return next(V.silent().batches(most))[1:]
    share = share_of(V)
    own, each = None, -(-most // share.processes.count)
    if share.data.n:
        inputs, y = next(share.data.batches(each))
        own = to_device((take(inputs, slice(each)), take(y, slice(each))), torch.device("cpu"))
    found = [part for part in share.processes.gather(own, call="rows") if part is not None]
    alike = [part for part in found if row_kind(part) == row_kind(found[0])]
    return to_device(concatenate(alike), V.network.device)


def share_of(V: Jacobian) -> RowShare:
    """The share of this process, which has to have one."""
    assert V.share is not None
    return V.share


def check_same(V: Jacobian, name: str, tensor: Tensor) -> None:
    """Check that all processes that have different rows of V compute with the same tensor.

    Raises:
        InputError: in all processes, if they do not.
    """
    if V.is_divided:
        remedy = "Make the same calls, with the same inputs, in every process"
        share_of(V).processes.agree({name: fingerprint({name: tensor}, {})}, remedy)


def check_in_all(V: Jacobian, check: Callable[[], Any]) -> None:
    """Make a check whose error in one process, as of its memory, is raised in all that share V."""
    if V.share is None:
        check()
    else:
        V.share.processes.in_all(check)


def _flat(terms: Terms) -> Float[np.ndarray, "s"]:
    return torch.cat([term.detach().double().flatten().cpu() for term in terms]).numpy()


def _added(
    total: Int[np.ndarray, "4 s"] | None, terms: Float[np.ndarray, "s"]
) -> Int[np.ndarray, "4 s"]:
    """An exact sum and one more term of each number."""
    if total is None:
        check_memory(
            "data",
            f"exact sums of {terms.size} numbers, by which processes work together",
            SUM_BYTES * terms.size,
            "Use a form with fewer numbers, as covariance='kfac' or 'diagonal', or a subspace",
        )
        total = np.zeros((LIMBS, terms.size), dtype=np.int64)
    for start in range(0, terms.size, _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        total[:, some] += encode(terms[some])
    return total
