r"""Selected columns of the Jacobian, computed layer by layer without rows of D numbers.

For the weights S of a subnetwork, the entries $u_n^\top J_{n,S}$ of a layer are sums over its
places t of products of one entry of the inputs and one of the gradient of the outputs,

$$ \Bigl[\sum_t g_{nt} \otimes a_{nt}\Bigr]_{(o, i)} = \sum_t g_{nto}\, a_{nti} , $$

for the pairs (o, i) in S alone. C backward passes through the activations of one forward pass
give all of $J_S(x_n)$, in $N C |S|$ numbers. They stop at the first layer
with a chosen weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layer_kinds import columns
from subbayes.curvature.layers import CapturedBatch, LayerGradients, Layers, Span
from subbayes.networks.network import Network
from subbayes.networks.tracing.memory import reuse_memory
from subbayes.utils.checks import fail

__all__ = ["PartialJacobian", "active_cotangents", "jacobian_at", "rows_at_once"]

_DENSE = 16  # a product of matrices does so many multiplications in the time of one gathered
_LIMIT = 2**26
_MOST_ROWS = 32


@dataclass(frozen=True)
class _Pick:
    """Chosen entries of one layer's weight matrix, by what is multiplied for each.

    Attributes:
        where: their places among all chosen entries.
        left: which gradients of an output (group and output) are needed.
        right: which inputs (group and input) are needed.
        a: for each entry, its place in `left`.
        b: for each entry, its place in `right`.
        dense: all products of `left` and `right` at once cost less than those wanted.
    """

    where: Int[Tensor, "p"]
    left: Int[Tensor, "l"]
    right: Int[Tensor, "r"]
    a: Int[Tensor, "p"]
    b: Int[Tensor, "p"]
    dense: bool


class PartialJacobian:
    """Chosen columns of the Jacobian of a network.

    Args:
        plan: the network's layers.
        indices: the columns' positions in the flat weight vector, distinct, shape (k,).

    Attributes:
        plan: the network's layers.
        indices: positions of the columns.

    Raises:
        InputError: positions that the network does not have.

    Example:
        >>> network = Network(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Tanh()))
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> with torch.no_grad():
        ...     network = network.with_weights(torch.zeros(3))
        >>> PartialJacobian(Layers(network, x), torch.tensor([2, 0])).of(x)
        tensor([[[1., 3.]]])
    """

    def __init__(self, plan: Layers, indices: Int[Tensor, "k"]) -> None:
        size = plan.network.size
        if len(indices) == 0 or int(indices.min()) < 0 or int(indices.max()) >= size:
            fail(
                "indices",
                f"positions in 0..{size - 1}",
                _extent(indices),
                "Select them for this network",
            )
        self.plan = plan
        self.indices = indices.to(plan.network.device)
        self._of_layer = {
            layer.name: tuple(
                None if span is None else self._inside(span) for span in (layer.weight, layer.bias)
            )
            for layer in plan.layers
        }
        self._layers = tuple(
            layer
            for layer in plan.layers
            if any(found is not None and len(found[0]) for found in self._of_layer[layer.name])
        )
        self._rest = (
            torch.cat([self._inside(span)[0] for span in plan.rest.spans])
            if plan.rest
            else self.indices[:0]
        )
        self._picks: dict[str, _Pick] = {}

    def _inside(self, span: Span) -> tuple[Int[Tensor, "p"], Int[Tensor, "p"]]:
        """Which of the chosen entries lie in a parameter, and where in it, flattened."""
        place = span.place
        where = ((self.indices >= place.start) & (self.indices < place.stop)).nonzero().flatten()
        inside = self.indices[where] - place.start
        return where, inside if span.keep is None else span.keep.to(inside.device)[inside]

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"PartialJacobian({len(self)} of {self.plan.network.size} weights)"

    # --- one batch ------------------------------------------------------------------------------

    def gather(
        self, batch: CapturedBatch, cotangents: Float[Tensor, "R N C"]
    ) -> Float[Tensor, "N R k"]:
        """Entries of $u_{rn}^T J_n$ for R cotangents of each row.

        Args:
            batch: the network run on N rows.
            cotangents: u.
        """
        found = batch.outputs.new_zeros(len(batch), len(cotangents), len(self))
        inputs: dict[str, Tensor] = {}
        for r, u in enumerate(cotangents):
            for gradients in batch.pull(u, self._layers) if self._layers else ():
                assert isinstance(gradients, LayerGradients)
                self._of_weight(gradients, inputs, found[:, r])
                self._of_bias(gradients, found[:, r])
            if len(self._rest):
                found[:, r, self._rest] = self.plan.by_rows(
                    batch.inputs, u, self.indices[self._rest]
                )
        return found

    def _of_weight(
        self, gradients: LayerGradients, inputs: dict[str, Tensor], out: Float[Tensor, "N k"]
    ) -> None:
        name, left = gradients.layer.name, gradients.left
        chosen = self._of_layer[name][0]
        if chosen is None or not len(chosen[0]):
            return
        if gradients.layer.kind.name == "embedding":
            out[:, chosen[0]] = _embedding_entries(left, gradients.right(slice(None)), chosen[1])
            return
        if name not in self._picks:
            self._picks[name] = self._pick(gradients, *chosen)
        pick = self._picks[name]
        if name not in inputs:  # the same for all cotangents
            inputs[name] = columns(gradients.right, pick.right)
        out[:, pick.where] = _products(left, inputs[name], pick)

    def _pick(
        self, gradients: LayerGradients, where: Int[Tensor, "p"], inside: Int[Tensor, "p"]
    ) -> _Pick:
        """Entries of a weight of shape (groups, O, I), flattened."""
        assert gradients.layer.weight is not None
        shape, (t, groups, o) = gradients.layer.weight.shape, gradients.left.shape[1:]
        i = shape.numel() // (groups * o)
        left, a = (inside // i).unique(return_inverse=True)
        right, b = (inside // (o * i) * i + inside % i).unique(return_inverse=True)
        if t > 1 and len(left) * len(right) <= _DENSE * len(where):
            return _Pick(where, left, right, a, b, True)
        return _Pick(where, left[a], right[b], a, b, False)

    def _of_bias(self, gradients: LayerGradients, out: Float[Tensor, "N k"]) -> None:
        chosen = self._of_layer[gradients.layer.name][1]
        if chosen is not None and len(chosen[0]):
            out[:, chosen[0]] = gradients.left.flatten(2).sum(1)[:, chosen[1]]

    # --- many -----------------------------------------------------------------------------------

    def blocks(self, rows: Jacobian) -> Iterator[tuple[slice, Float[Tensor, "n R k"]]]:
        r"""Entries of the rows of a Jacobian: of $J_X$, or of a root $\Lambda^{1/2} J$.

        Roots that are zero for all inputs of a block, as one of a categorical likelihood's is,
        are left out.

        Args:
            rows: the Jacobian; pairs (place among its inputs, entries) come back.
        """
        for place, inputs, y in rows.batches(rows_at_once(rows)):
            batch = self.plan.capture(inputs)
            root = rows.root(inputs, y, batch.outputs)
            yield place, self.gather(batch, active_cotangents(root, batch.outputs))

    def of(self, inputs: Any) -> Float[Tensor, "N C k"]:
        """The entries of the Jacobian at some inputs, N C k numbers.

        Args:
            inputs: in the form the module takes, or a loader of them.
        """
        return torch.cat([part for _, part in self.blocks(Jacobian.of_inputs(self.plan, inputs))])

    def gram(self, rows: Jacobian) -> Float[Tensor, "k k"]:
        r"""Products of the chosen columns, $\sum_n J_{n,S}^\top \Lambda_n J_{n,S}$, in float64.

        Args:
            rows: a root of the Gauss-Newton matrix, as `Jacobian.of_data` makes it.
        """
        total = torch.zeros(len(self), len(self), dtype=torch.float64, device=self.indices.device)
        for _, part in self.blocks(rows):
            flat = part.flatten(0, 1).double()
            total.addmm_(flat.T, flat)
        return total


def jacobian_at(network: Network, inputs: Any, indices: Int[Tensor, "k"]) -> Float[Tensor, "N C k"]:
    """Chosen columns of the Jacobian of a network at some inputs.

    Args:
        network: the network f(x; w), at its weights.
        inputs: in the form the module takes.
        indices: positions in the flat weight vector, distinct, shape (k,).

    Raises:
        InputError: positions that the network does not have.

    Example:
        >>> network = Network(torch.nn.Linear(2, 1))
        >>> jacobian_at(network, torch.tensor([[3.0, 4.0]]), torch.tensor([1]))
        tensor([[[4.]]])
    """
    return PartialJacobian(Layers(network, inputs), indices).of(inputs)


def active_cotangents(
    root: Float[Tensor, "n C R"] | None, outputs: Float[Tensor, "n C"]
) -> Float[Tensor, "r n C"]:
    """Cotangents: one per output, or the columns of a root that are not zero."""
    if root is None:
        eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        return eye.unsqueeze(1).expand(-1, len(outputs), -1)
    sizes = root.square().sum((0, 1))
    counts = sizes > 1e-14 * sizes.max()  # below that, the rounding of zero
    return root[:, :, counts].permute(2, 0, 1).to(outputs)


def rows_at_once(rows: Jacobian, limit: int = _LIMIT) -> int:
    """Number of inputs to run at once, from the memory of activations, patches and gradients."""
    reuse_memory()
    _, inputs, _ = next(rows.batches(1))
    batch = rows.plan.capture(inputs)
    gradients = [
        g for g in batch.pull(torch.ones_like(batch.outputs)) if isinstance(g, LayerGradients)
    ]
    held = sum(2 * g.left.nbytes for g in gradients)
    held += sum(g.right(slice(None)).nbytes for g in gradients if g.layer.weight is not None)
    rest = rows.plan.rest
    held += 0 if rest is None else 4 * rest.size * rows.network.weights.element_size()
    return max(1, min(_MOST_ROWS, limit // max(1, held)))


def _extent(indices: Tensor) -> str:
    return f"{int(indices.min())}..{int(indices.max())}" if len(indices) else "none"


def _products(
    left: Float[Tensor, "N t groups o"], right: Float[Tensor, "N r t"], pick: _Pick
) -> Float[Tensor, "N p"]:
    """Sums over places of products of gradients and inputs."""
    chosen = left.flatten(2).mT.index_select(1, pick.left)
    if pick.dense:
        return (chosen @ right.mT)[:, pick.a, pick.b]
    return (chosen * right).sum(2)


def _embedding_entries(
    left: Float[Tensor, "N t one e"], index: Tensor, inside: Int[Tensor, "p"]
) -> Float[Tensor, "N p"]:
    """Entries of an embedding: the gradients of the places that looked up their row."""
    width = left.shape[-1]
    hit = index.flatten(2) == inside // width
    return (left.flatten(2)[:, :, inside % width] * hit).sum(1)
