r"""Products with the Jacobian of a network over a set of inputs.

The rows are $r_n^\top J_n$ for the columns r of a matrix $R_n$ (C x R) of each input: the identity
for $J_X$; for V a root of the likelihood's curvature, $\Lambda_n = R_n R_n^\top$, so that
$V^\top V = \sum_n J_n^\top \Lambda_n J_n$ is the Gauss-Newton matrix. The rows of one input are
adjacent. Products stream over blocks of inputs, without storing rows x D numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.gram import (
    Block,
    block,
    gram,
    gram_of_each,
    pull_block,
    push_block,
    split_columns,
)
from subbayes.curvature.layers import CapturedBatch, Layers
from subbayes.data.data import Data, join_batches, split_batches
from subbayes.distributed.blocks import BlockSize
from subbayes.distributed.processes import Processes
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.curvature_blocks import SoftmaxBlocks, root_of
from subbayes.networks.network import Network
from subbayes.predictions.averaging import input_batches
from subbayes.utils.checks import fail
from subbayes.utils.memory import available_memory, check_memory
from subbayes.utils.progress import estimated_progress
from subbayes.utils.trees import n_rows, take, to_device, tree_map
from subbayes.utils.types import Inputs, Outputs, Targets, WeightsBatch

MEMORY_LIMIT = 2**28
_MANY = 4  # with more vectors per row of an input, dense rows cost less than backward passes
_SHARED_BLOCKS = 16  # of a Gram matrix, of which processes compute some
_MEMORY_SHARE = 8  # part of the free memory for one block of a Gram matrix: one eighth

Pairs = Callable[[], Iterator[tuple[Inputs, Targets | None]]]


@dataclass(frozen=True)
class UnavailableRows:
    """What a file says of the rows of a Jacobian, which it does not have.

    Attributes:
        example: inputs of their shapes and dtypes.
        digest: of the first row.
    """

    example: Inputs
    digest: str


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


class Jacobian:
    """A Jacobian given by its products; see `Jacobian.of_inputs` and `Jacobian.of_data`.

    Attributes:
        plan: the network's layers.
        n: number of inputs N.
        roots: rows per input R.
        memory_limit: bytes of gradients in memory at once.
        unavailable: of a loaded posterior without data; else None.
        offset: position of the first input among all, of a Jacobian of some of the rows.
        share: what this process computes of sums over rows; None if it works alone. See
            `row_sums`.
        progress: show progress bars of passes over the inputs; None shows them on a terminal.

    Example:
        >>> network = Network(torch.nn.Linear(2, 1))
        >>> J = Jacobian.of_inputs(Layers(network, torch.zeros(1, 2)), torch.tensor([[3.0, 4.0]]))
        >>> J.pull(torch.ones(1, 1))
        tensor([[3., 4., 1.]])
        >>> J.gram(), J.push(torch.eye(3)).T
        (tensor([[26.]], dtype=torch.float64), tensor([[3., 4., 1.]], dtype=torch.float64))
    """

    def __init__(
        self, plan: Layers, pairs: Pairs, n: int, likelihood: Likelihood | None, memory_limit: int
    ) -> None:
        self.plan, self._pairs, self.n, self.likelihood = plan, pairs, n, likelihood
        self.memory_limit = memory_limit
        self.unavailable: UnavailableRows | None = None
        self.offset = 0
        self.share: RowShare | None = None
        self.progress: bool | None = False
        self._outputs: dict[int, Tensor] = {}
        inputs, y = next(iter(pairs()))
        self._first = _two_rows(inputs), None if y is None else _two_rows(y)
        self.roots = self.network.check(self.first()[0])
        rest = 0 if plan.rest is None else 8 * plan.rest.size * self.roots
        self.row_bytes = 2 * plan.row_bytes + self.roots * plan.gradient_bytes + rest
        self.step = max(1, memory_limit // self.row_bytes)

    @classmethod
    def of_inputs(cls, plan: Layers, inputs: Any, memory_limit: int = MEMORY_LIMIT) -> Jacobian:
        """J_X: one row for each output of inputs in the form the module takes, or a loader."""
        return cls.of_batches(plan, list(input_batches(inputs, plan.network)), memory_limit)

    @classmethod
    def of_batches(
        cls, plan: Layers, batches: Sequence[Inputs], memory_limit: int = MEMORY_LIMIT
    ) -> Jacobian:
        """J_X of inputs that are in memory, as batches of rows in the form the module takes."""
        return cls(
            plan,
            lambda: ((batch, None) for batch in batches),
            sum(map(n_rows, batches)),
            None,
            memory_limit,
        )

    @classmethod
    def of_data(
        cls, plan: Layers, likelihood: Likelihood, data: Data, memory_limit: int = MEMORY_LIMIT
    ) -> Jacobian:
        """V, the root of the Gauss-Newton matrix over the data.

        All sharded rows count as its rows; products that need them in one process raise an error.
        """
        if data.division is None:
            return cls(plan, data.batches, data.n, likelihood, memory_limit)
        n = sum(data.division.shares)
        found = cls(plan, lambda: iter([data.first()]), n, likelihood, memory_limit)
        found._pairs = _rows_of_others
        return found

    @classmethod
    def without_data(
        cls, plan: Layers, rows: UnavailableRows, likelihood: Likelihood, n: int, memory_limit: int
    ) -> Jacobian:
        """V of n unavailable rows: it has sizes, and its products raise."""
        found = cls(plan, lambda: iter([(rows.example, None)]), n, likelihood, memory_limit)
        found._pairs, found.unavailable = _no_data, rows
        return found

    def at_rows(self, inputs: Inputs, y: Targets | None, offset: int = 0) -> Jacobian:
        """The same Jacobian at other rows, of which the first one has a position among all."""
        pairs, likelihood = (lambda: iter([(inputs, y)])), self.likelihood
        found = Jacobian(self.plan, pairs, n_rows(inputs), likelihood, self.memory_limit)
        found.offset = offset
        return found

    def with_likelihood(self, likelihood: Likelihood) -> Jacobian:
        """The root of the Gauss-Newton matrix of another likelihood over the same rows."""
        found = copy(self)
        found.likelihood = likelihood
        return found

    def output_jacobian(self) -> Jacobian:
        """The Jacobian of the outputs at the same inputs, without the likelihood's curvature."""
        found = Jacobian(self.plan, self._pairs, self.n, None, self.memory_limit)
        found.progress = self.progress
        return found

    @property
    def is_divided(self) -> bool:
        """Whether each process has rows of its own, so that none has all."""
        return self.share is not None and self.share.data.division is not None

    def first(self) -> tuple[Inputs, Targets | None]:
        """At most two rows, on the network's device; the same in all processes."""
        inputs, y = self._first
        device = self.network.device
        return to_device(inputs, device), None if y is None else to_device(y, device)

    def pairs(self) -> Iterator[tuple[Inputs, Targets | None]]:
        """The inputs and targets, batch by batch."""
        return iter(self._pairs())

    @property
    def network(self) -> Network:
        """The network at whose weights the Jacobian is taken."""
        return self.plan.network

    @property
    def size(self) -> int:
        """Number of columns D."""
        return self.network.size

    @property
    def rows(self) -> int:
        """Number of rows N R."""
        return self.n * self.roots

    def __repr__(self) -> str:
        return f"Jacobian(rows={self.rows}, size={self.size})"

    # --- blocks of inputs ---------------------------------------------------------------------

    def batches(self, step: int | None = None) -> Iterator[tuple[slice, Inputs, Targets | None]]:
        """Blocks of inputs with their positions, on the network's device."""
        size, done = self.step if step is None else step, 0
        joined = join_batches(self._pairs(), size)
        with estimated_progress(self.n, "Jacobian", self.progress, "rows") as report:
            for inputs, y in split_batches(joined, size, self.network.device):
                self.network.check(inputs)
                yield slice(done, done + n_rows(inputs)), inputs, y
                done += n_rows(inputs)
                report(n_rows(inputs))

    def silent(self) -> Jacobian:
        """The same Jacobian without progress bars."""
        found = copy(self)
        found.progress = False
        return found

    def root(
        self, y: Targets | None, outputs: Float[Tensor, "n C"]
    ) -> Float[Tensor, "n C R"] | None:
        """The columns r of each input of a block; None for identity matrices."""
        return None if self.likelihood is None else curvature_root(self.likelihood, outputs, y)

    def captured(
        self, step: int | None = None, first: int = 0
    ) -> Iterator[tuple[slice, CapturedBatch, Float[Tensor, "n C R"]]]:
        """Batches with the inputs of the layers, starting at a given input, and their roots."""
        for place, inputs, y in self.batches(step):
            if place.start >= first:
                batch = self.plan.capture(inputs)
                self._outputs[place.start] = batch.outputs
                root = self.root(y, batch.outputs)
                if root is None:
                    root = torch.eye(self.roots).expand(len(batch), -1, -1)
                yield place, batch, root.to(batch.outputs)

    def blocks(self, first: int = 0, step: int | None = None) -> Iterator[tuple[slice, Block]]:
        """Blocks of rows with their positions among all rows, starting at a given row."""
        for place, batch, root in self.captured(step, first // self.roots):
            yield slice(place.start * self.roots, place.stop * self.roots), block(batch, root)

    def _gram_step(self) -> int:
        """Inputs per block of a Gram matrix, whose cost falls with the number of blocks."""
        free = available_memory()
        room = 0
        if free is not None and self.memory_limit == MEMORY_LIMIT:
            room = free // _MEMORY_SHARE
        return max(self.step, room // self.row_bytes)

    def dense(self, most: int = 2**26) -> Iterator[tuple[slice, Float[Tensor, "m D"]]]:
        """Dense rows in float64, at most `most` bytes at once, and at least those of one input."""
        step = max(1, most // (8 * self.size * self.roots))
        for place, part in self.blocks():
            for start in range(0, part.n, step):
                rows = part.dense(slice(start, start + step), self.size)
                first = place.start + start * self.roots
                yield slice(first, first + len(rows)), rows

    def columns(self, most: int = 2**26) -> Iterator[tuple[list[slice], Float[Tensor, "m p"]]]:
        """Blocks of columns in float64 with their positions; stores the factors of all rows."""
        check_memory(
            "data",
            f"the gradients of {self.n} rows",
            self.n * self.row_bytes,
            "Use fewer rows, or the diagonal form",
        )
        parts = [part for _, part in self.blocks()]
        for pieces in zip(*(part.pieces for part in parts), strict=True):
            for cuts in zip(
                *(split_columns(p, most // (8 * self.rows)) for p in pieces), strict=True
            ):
                dense = [cut.dense(slice(None)).transpose(0, 1).flatten(0, 1) for _, cut in cuts]
                yield cuts[0][0], torch.cat(dense)

    def outputs(self) -> Outputs:
        """The network's outputs at all inputs."""
        known, done = [], 0
        while done in self._outputs:  # by the blocks of a product
            known.append(self._outputs[done])
            done += len(known[-1])
        if done == self.n:
            return torch.cat(known)
        with torch.no_grad():
            return torch.cat(
                [self.network(self.network.weights, inputs) for _, inputs, _ in self.batches()]
            )

    # --- products -------------------------------------------------------------------------------

    def gram(
        self,
        other: Jacobian | None = None,
        scale: Float[Tensor, "p"] | None = None,
        change: Callable[[Block], Block] = lambda part: part,
    ) -> Float[Tensor, "m l"]:
        """The Gram matrix J diag(scale) J', or with another Jacobian of the network, in float64.

        Args:
            other: the second Jacobian; by default J itself.
            scale: weights of the columns; by default 1.
            change: applied to blocks of rows first, as a change of basis of the columns.
        """
        if other is None:
            return self._own_gram(self._gram_step(), scale, change)
        to, written = other.silent(), 0
        step, their_step = self._gram_step(), to._gram_step()  # once: they take free memory
        total = torch.zeros(self.rows, to.rows, dtype=torch.float64, device=self.network.device)
        with estimated_progress(self.n * to.n, "Gram matrix", self.progress, "pairs") as report:
            for mine, part in self.silent().blocks(0, step):
                left = change(part)
                for theirs, right in to.blocks(0, their_step):
                    total[mine, theirs] = gram(left, change(right), scale, report)
                    written += left.n * right.n
        assert written == self.n * to.n, "blocks that do not cover the Gram matrix"
        return total

    def _own_gram(
        self,
        step: int,
        scale: Float[Tensor, "p"] | None = None,
        change: Callable[[Block], Block] = lambda part: part,
        taken: Callable[[int], bool] = lambda number: True,
    ) -> Float[Tensor, "m m"]:
        """The Gram matrix of the rows, or the parts of some blocks and zeros elsewhere.

        Args:
            step: inputs of a block.
            scale: as for `gram`.
            change: as for `gram`.
            taken: whether to compute the products of a block, by its number, with itself and with
                the blocks after it.
        """
        rows, size, seen = self.silent(), self.n, 0
        total = torch.zeros(self.rows, self.rows, dtype=torch.float64, device=self.network.device)
        with estimated_progress(size**2, "Gram matrix", self.progress, "pairs") as report:
            for number, (mine, part) in enumerate(rows.blocks(0, step)):
                seen += part.n
                if not taken(number):
                    continue
                left, written = change(part), seen
                total[mine, mine] = gram(left, left, scale, report)
                for theirs, right in rows.blocks(mine.stop, step):
                    found = gram(left, change(right), scale, report)
                    total[mine, theirs], total[theirs, mine] = found, found.T
                    written += right.n
                    report(left.n * right.n)
                assert written == size, "blocks that do not cover the Gram matrix"
        assert seen == size, "blocks that do not cover the rows"
        return total

    def shared_gram(self) -> Float[Tensor, "m m"]:
        """The Gram matrix, of which processes that work together compute parts each.

        All of them have to call this.
        """
        share = self.share
        if share is None:
            return self.gram()
        processes, step = share.processes, min(self.step, -(-self.n // _SHARED_BLOCKS))
        last = -(-self.n // step) - 1

        def taken(number: int) -> bool:  # the first has many blocks after it, the last has none
            return min(number, last - number) % processes.count == processes.rank

        own = processes.in_all(lambda: self._own_gram(step, taken=taken)).cpu().numpy()
        bits = processes.sum_over_all(own.view(np.int64))  # zeros but in one process
        return torch.from_numpy(bits.view(np.float64)).to(self.network.device)

    def gram_of_each(
        self, scale: Float[Tensor, "p"], change: Callable[[Block], Block] = lambda part: part
    ) -> Float[Tensor, "N R R"]:
        """The blocks of `gram` on the diagonal: products of the rows of each input."""
        return torch.cat([gram_of_each(change(part), scale) for _, part in self.blocks()])

    def push(self, basis: Float[Tensor, "k D"]) -> Float[Tensor, "k m"]:
        """Products of all rows with k vectors, in float64; computed in the vectors' dtype."""
        total = torch.zeros(len(basis), self.rows, dtype=torch.float64, device=self.network.device)
        for rows, part in self.blocks():
            total[:, rows] = push_block(part, basis)
        return total

    def pull(
        self, cotangents: Float[Tensor, "s m"], onto: WeightsBatch | None = None
    ) -> WeightsBatch:
        """Combinations of all rows with s vectors of coefficients, added to `onto` in place.

        They have the dtype of the network, or are computed in float64 if `onto` has it.
        """
        total = onto
        if total is None:
            total = self.network.weights.new_zeros(len(cotangents), self.size)
        if len(cotangents) > _MANY * self.roots or total.dtype != self.network.dtype:
            for rows, part in self.blocks():
                some = cotangents[:, rows].to(total.device)
                pull_block(part, some.reshape(len(some), -1, self.roots), total)
            return total
        for place, batch, root in self.captured():
            some = cotangents[:, place.start * self.roots : place.stop * self.roots]
            u = some.reshape(len(cotangents), -1, self.roots).to(batch.outputs)
            u = torch.einsum("ncr,snr->snc", root, u) if self.likelihood else u
            for row, one in enumerate(u):
                total[row] += batch.vjp(one)
        return total


def _no_data() -> Iterator[tuple[Inputs, Targets | None]]:
    fail("data", "the training data, over which this is a sum", "none", "Pass load(path, data=...)")


def _two_rows(part: Any) -> Any:
    return tree_map(Tensor.clone, take(part, slice(2)))


def _rows_of_others() -> Iterator[tuple[Inputs, Targets | None]]:
    fail(
        "data",
        "all rows in each process",
        "sharded rows",
        "Use what is a sum over rows: covariance='primal', 'diagonal', 'kfac', 'low-rank' or "
        "'sampled', or a subspace that is given",
    )


def check_covariance_memory(outputs: int) -> None:
    """Check that a joint covariance of outputs fits into memory."""
    check_memory(
        "inputs",
        f"the covariance of {outputs} outputs",
        24 * outputs**2,
        "Pass fewer inputs at once, or predict row by row",
    )


def check_covariance_blocks(X: Jacobian) -> None:
    """Check that a covariance of the outputs of each input fits into memory."""
    check_memory(
        "inputs",
        f"the covariances of {X.roots} outputs of {X.n} rows",
        24 * X.n * X.roots**2,
        "Predict by draws (method='monte-carlo'), or pass fewer inputs at once",
    )


def curvature_root(
    likelihood: Likelihood, outputs: Float[Tensor, "n C"], y: Targets | None
) -> Float[Tensor, "n C C"]:
    r"""A root R of the curvature of the likelihood, $\Lambda = R R^\top$, for each row.

    Raises:
        InputError: a curvature that is not finite, or not positive semi-definite.
    """
    blocks = likelihood.for_targets(y).curvature_blocks(outputs.double())
    if isinstance(blocks, SoftmaxBlocks) and blocks.probabilities.shape[-2] == 1:
        return blocks.triangular_root().squeeze(-3)
    return root_of(likelihood.for_targets(y).curvature(outputs.double()))
