r"""Selected columns of the Jacobian, computed layer by layer without forming rows of D numbers.

For the weights S of a subnetwork, the entries $u_n^\top J_{n,S}$ of a layer are sums over its
places t of products of one entry of the inputs and one of the gradient of the outputs,

$$ \Bigl[\sum_t g_{nt} \otimes a_{nt}\Bigr]_{(o, i)} = \sum_t g_{nto}\, a_{nti} , $$

for the pairs (o, i) in S. One forward pass and C backward passes, which stop at the first layer
with a selected weight, give $J_S(x_n)$ in $N C |S|$ numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layer_kinds import right_columns
from subbayes.curvature.layers import CapturedBatch, LayerGradients, Layers, Span
from subbayes.networks.tracing.memory import reuse_memory
from subbayes.utils.checks import fail
from subbayes.utils.memory import temporary_size

_LIMIT = 2**27  # of bytes of activations and gradients
_MOST_ROWS = 32


class PartialJacobian:
    """Selected columns of the Jacobian of a network.

    Args:
        plan: the network's layers.
        indices: distinct positions of the columns in the flat weight vector, shape (k,).

    Raises:
        InputError: positions that the network does not have.

    Example:
        >>> from subbayes import Network
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
            got = f"{int(indices.min())}..{int(indices.max())}" if len(indices) else "none"
            fail("indices", f"positions in 0..{size - 1}", got, "Select them for this network")
        self.plan = plan
        self.indices = indices.to(plan.network.device)
        self._selected = {
            layer.name: (self._within(layer.weight), self._within(layer.bias))
            for layer in plan.layers
        }
        self._layers = tuple(
            layer for layer in plan.layers if any(len(w) for w, _ in self._selected[layer.name])
        )
        self._rest = self.indices[:0]
        if plan.rest:
            self._rest = torch.cat([self._within(span)[0] for span in plan.rest.spans])

    def _within(self, span: Span | None) -> tuple[Int[Tensor, "p"], Int[Tensor, "p"]]:
        """Which selected entries lie in a parameter, and their positions in it, flattened."""
        place = slice(0, 0) if span is None else span.place
        where = ((self.indices >= place.start) & (self.indices < place.stop)).nonzero().flatten()
        inside = self.indices[where] - place.start
        if span is None or span.keep is None:
            return where, inside
        return where, span.keep.to(inside.device)[inside]

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"PartialJacobian({len(self)} of {self.plan.network.size} weights)"

    def gather(
        self, batch: CapturedBatch, cotangents: Float[Tensor, "R N C"]
    ) -> Float[Tensor, "N R k"]:
        """Entries of $u_{rn}^T J_n$ for R cotangents u of each row of a batch."""
        found = batch.outputs.new_zeros(len(batch), len(cotangents), len(self))
        rights: dict[str, Tensor] = {}  # the same for all cotangents
        for r, u in enumerate(cotangents):
            for gradients in batch.pull(u[None], self._layers):
                self._weight_entries(gradients, rights, found[:, r])
                where, inside = self._selected[gradients.layer.name][1]
                if len(where):
                    of_bias = gradients.left[0].to(found).flatten(2).sum(1)  # may have 16 bits
                    found[:, r, where] = of_bias[:, inside]
            if len(self._rest):
                found[:, r, self._rest] = self.plan.row_gradients(
                    batch.inputs, u, self.indices[self._rest]
                ).to(found)
        return found

    def _weight_entries(
        self, gradients: LayerGradients, rights: dict[str, Tensor], out: Float[Tensor, "N k"]
    ) -> None:
        name, left = gradients.layer.name, gradients.left[0]
        where, inside = self._selected[name][0]
        if not len(where):
            return
        if gradients.layer.kind.name == "embedding":
            entry = _embedding_entries(left, gradients.right(slice(None)), inside)
            out[:, where] = entry.to(out)
            return
        # the weight has shape (groups, O, I): each entry is a factor (group, output) on the left,
        # times one (group, input) on the right
        assert gradients.layer.weight is not None
        o = left.shape[3]
        i = gradients.layer.weight.shape.numel() // (left.shape[2] * o)
        if name not in rights:
            rights[name] = right_columns(gradients.right, inside // (o * i) * i + inside % i)
        columns = left.flatten(2).mT.index_select(1, inside // i)
        out[:, where] = (columns * rights[name]).sum(2).to(out)

    def blocks(self, rows: Jacobian) -> Iterator[tuple[slice, Float[Tensor, "n R k"]]]:
        """The selected columns of a Jacobian in blocks: pairs (positions of inputs, entries).

        Rows that are zero for all inputs of a block, as one of a categorical likelihood, are
        omitted.
        """
        reuse_memory()
        most, limit = (temporary_size(s, rows.network.device) for s in (_MOST_ROWS, _LIMIT))
        step = max(1, min(most, limit // rows.row_bytes))
        for place, batch, root in rows.captured(step):
            active = (root != 0).any(0).any(0)  # however small: outputs have scales of their own
            yield place, self.gather(batch, root[:, :, active].permute(2, 0, 1))

    def of(self, inputs: Any) -> Float[Tensor, "N C k"]:
        """The selected columns at inputs in the form the module takes, or a loader of them."""
        return torch.cat([part for _, part in self.blocks(Jacobian.of_inputs(self.plan, inputs))])

    def gram(self, rows: Jacobian) -> Float[Tensor, "k k"]:
        r"""Products of the selected columns of a Jacobian with one another, in float64.

        For a root V of the Gauss-Newton matrix, $\sum_n J_{n,S}^\top \Lambda_n J_{n,S}$.
        """
        total = torch.zeros(len(self), len(self), dtype=torch.float64, device=self.indices.device)
        for _, part in self.blocks(rows):
            flat = part.flatten(0, 1).double()
            total.addmm_(flat.T, flat)
        return total


def _embedding_entries(
    left: Float[Tensor, "N t one e"], index: Tensor, inside: Int[Tensor, "p"]
) -> Float[Tensor, "N p"]:
    """Entries of an embedding: sums of the gradients of the places with their index."""
    width = left.shape[-1]
    hit = index.flatten(2) == inside // width
    return (left.flatten(2)[:, :, inside % width] * hit).sum(1)
