r"""Products of the rows of a Jacobian in the weights of one linear layer, as of a last layer.

Rows are $g_{nr} \otimes \phi_n$ for gradients g of the layer's outputs (the columns of a root, if
the layer is the last one) and its inputs $\phi_n$ with a 1 appended for the bias, so that for C
outputs

$$ V^\top V = \sum_n \Bigl[\sum_r g_{nr} g_{nr}^\top\Bigr] \otimes \phi_n \phi_n^\top , \qquad
   [J_n \Psi J_n^\top]_{rs} = \sum_{cd} g_{nrc} (\phi_n^\top \Psi_{cd} \phi_n) g_{nsd} $$

cost a C-th of products of dense rows. Layers with several places t are sums over pairs of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layer

_AT_ONCE = 2**22  # entries of a temporary tensor
_SHARE = 2  # the layer is at most this many times larger than the selection


@dataclass(frozen=True)
class SingleLayer:
    """One linear layer that has all selected columns of a Jacobian.

    Attributes:
        layer: the layer.
        shape: its outputs, and its inputs with that of the bias.
        where: positions of the selected columns in the flattened matrix of this shape.

    Example:
        >>> from subbayes import Network
        >>> from subbayes.curvature.layers import Layers
        >>> network, x = Network(torch.nn.Linear(2, 1)), torch.tensor([[3.0, 4.0]])
        >>> J = Jacobian.of_inputs(Layers(network, x), x)
        >>> SingleLayer.of(J).squares(J)[0]
        tensor([ 9., 12.,  3.], dtype=torch.float64)
    """

    layer: Layer
    shape: tuple[int, int]
    where: Int[Tensor, "k"]

    @classmethod
    def of(cls, J: Jacobian, indices: Int[Tensor, "k"] | None = None) -> SingleLayer | None:
        """The layer of the selected columns, by default of all; None if there is no such layer.

        A layer with several places at the first input, or many more weights, does not qualify.
        """
        chosen = torch.arange(J.size) if indices is None else indices.cpu()
        for layer in J.plan.layers:
            if not (layer.is_matrix and layer.kind.name == "linear"):
                continue
            if J.plan.places.get(layer.name) != 1:
                continue
            places = torch.cat([torch.arange(s.place.start, s.place.stop) for s in layer.spans])
            if len(places) > _SHARE * len(chosen) or not bool(torch.isin(chosen, places).all()):
                continue
            assert layer.weight is not None
            outputs, inputs = layer.weight.shape
            matrix = places[: outputs * inputs].reshape(outputs, inputs)
            if layer.bias is not None:
                matrix = torch.cat([matrix, places[outputs * inputs :, None]], 1)
            order = torch.empty(J.size, dtype=torch.long)
            order[matrix.flatten()] = torch.arange(len(places))
            return cls(layer, (outputs, matrix.shape[1]), order[chosen].to(J.network.device))
        return None

    def _factors(self, J: Jacobian) -> Iterator[tuple[Tensor, Tensor]]:
        """g (R, n, t, o) and (a, 1) (n, t, i) of some inputs at a time."""
        for _, batch, root in J.captured():
            (gradients,) = batch.pull(root.permute(2, 0, 1), (self.layer,))
            left = gradients.left[:, :, :, 0].double()
            right = gradients.right(slice(None))[:, :, 0].double()
            if self.layer.bias is not None:
                right = F.pad(right, (0, 1), value=1.0)
            each = left.shape[2] * self.shape[0] * max(self.shape[1], left.shape[2] * self.shape[0])
            step = max(1, _AT_ONCE // each)
            yield from zip(left.split(step, 1), right.split(step), strict=True)

    def squares(self, V: Jacobian) -> Float[Tensor, "k k"]:
        """V'V in the selected columns, in float64."""
        outputs, inputs = self.shape
        total = torch.zeros(outputs, inputs, outputs, inputs, dtype=torch.float64)
        total = total.to(self.where.device)
        for left, a in self._factors(V):
            for o in range(outputs):
                weights = torch.einsum("rnt,rnsp->ntsp", left[..., o], left[..., : o + 1])
                rows = torch.einsum("ntsp,nsi->ntpi", weights, a).flatten(0, 1)
                total[o, :, : o + 1] += (a.flatten(0, 1).T @ rows.flatten(1)).unflatten(
                    1, (o + 1, -1)
                )
        for o in range(outputs):
            total[:o, :, o] = total[o, :, :o].permute(1, 2, 0)
        return total.reshape(outputs * inputs, -1)[self.where[:, None], self.where]

    def blocks(self, X: Jacobian, psi: Float[Tensor, "k k"]) -> Float[Tensor, "n C C"]:
        """Covariances of the outputs of each input, for a covariance of the selected weights."""
        outputs, inputs = self.shape
        whole = psi.new_zeros(outputs * inputs, outputs * inputs)
        whole[self.where[:, None], self.where] = psi
        whole, found = whole.reshape(outputs, inputs, outputs, inputs), []
        for left, a in self._factors(X):
            R, n = left.shape[:2]
            total = psi.new_zeros(n, R, R)
            for o in range(outputs):
                rows = (a @ whole[o, :, : o + 1].flatten(1)).unflatten(2, (o + 1, -1))
                inner = torch.einsum("ntpi,nsi->ntsp", rows, a)
                inner[..., :o] *= 2  # and those with both outputs exchanged
                total += torch.einsum("rnt,ntsp,qnsp->nrq", left[..., o], inner, left[..., : o + 1])
            found.append((total + total.mT) / 2)
        return torch.cat(found)
