r"""The diagonal of the Gauss-Newton matrix, and the diagonal form of the precision.

The diagonal is the sums of squares of the columns of a Jacobian. For the weight matrix of one layer
it is $\sum_{n,r} [\sum_t g_{nrt} \otimes a_{nt}]^2$ entry by entry, over
rows n, cotangents r and the places t of the layer. With few places the sum over r is computed
first, which leaves one matrix product,

$$ \sum_n \sum_{t \le s} (2 - \delta_{ts}) \Bigl[\sum_r g_{nrt} g_{nrs}\Bigr]
   \otimes (a_{nt} a_{ns}) . $$

Otherwise the gradients are formed in blocks that fit into the cache. Both need no more memory than
the layer itself.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layer_kinds import sum_of_outer_products
from subbayes.curvature.layers import CapturedBatch, LayerGradients
from subbayes.curvature.partial_jacobian import active_cotangents, rows_at_once
from subbayes.curvature.precision import Precision
from subbayes.curvature.row_sums import sum_over_rows
from subbayes.utils.memory import temporary_size

_BLOCK = 2**18
_PAIRS = 2**24


class Diagonal(Precision):
    r"""The diagonal approximation $\Psi \approx \mathrm{diag}(V^\top V + \lambda I)^{-1}$.

    It costs one pass over the data and D numbers. Correlations between weights are ignored, so that
    predictive variances are too large if many weights have similar effects.

    Args:
        V, prior_precision: as for `Precision`.
        squares: the diagonal of V'V, if it is known.
    """

    form = "diagonal"
    stored = ("squares",)

    def __init__(
        self, V: Jacobian, prior_precision: float, squares: Float[Tensor, "D"] | None = None
    ) -> None:
        super().__init__(V, prior_precision)
        if squares is None:
            (squares,) = sum_over_rows(V, lambda rows: (squared_column_norms(rows),))
        self.squares = squares

    def variances(self) -> Float[Tensor, "D"]:
        """The inverse of the diagonal."""
        return 1 / (self.squares + self.prior_precision)

    def solve(self, vectors: Float[Tensor, "s D"]) -> Float[Tensor, "s D"]:
        """Divide by the diagonal."""
        return vectors * self.variances().to(vectors)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """Gram matrix of $J_X$ with weighted columns."""
        sigma = self.jacobian(inputs).gram(scale=self.variances())
        return (sigma + sigma.T) / 2

    def blocks(self, inputs: Any) -> Float[Tensor, "n C C"]:
        """Sums of squares and products of the rows of each input."""
        return self.jacobian(inputs).gram_of_each(self.variances())

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "s D"]:
        """Independent weights."""
        eps = torch.randn(count, self.size, generator=generator, dtype=torch.float64)
        return (eps.to(self.squares.device) * self.variances().sqrt()).to(self.network.weights)

    @override
    def eigenvalues(self) -> Float[Tensor, "D"]:
        return self.squares

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> Diagonal:
        """Reuse the diagonal of V'V."""
        return Diagonal(V, prior_precision, factor * self.squares)

    def logdet(self, noise: float = 1.0) -> float:
        """Sum of the logarithms of the diagonal."""
        return float(torch.log(noise * self.squares + self.prior_precision).sum())


def squared_column_norms(rows: Jacobian) -> Float[Tensor, "D"]:
    r"""Sums of squares of the columns of a Jacobian, in float64, shape (D,).

    For a root V of the Gauss-Newton matrix they are its diagonal. A block of rows is summed in the
    network's dtype, the sum over blocks is in float64.

    Example:
        >>> import subbayes
        >>> from subbayes.curvature.layers import Layers
        >>> network, x = subbayes.Network(torch.nn.Linear(2, 1)), torch.tensor([[3.0, 4.0]])
        >>> squared_column_norms(Jacobian.of_inputs(Layers(network, x), x))
        tensor([ 9., 16.,  1.], dtype=torch.float64)
    """
    total = torch.zeros(rows.size, dtype=torch.float64, device=rows.network.device)
    for _, inputs, y in rows.batches(rows_at_once(rows)):
        batch = rows.plan.capture(inputs)
        root = rows.root(y, batch.outputs)
        _add(batch, active_cotangents(root, batch.outputs), total)
    return total


def _add(
    batch: CapturedBatch, cotangents: Float[Tensor, "R N C"], total: Float[Tensor, "D"]
) -> None:
    """Add the squares of one batch, after as many backward passes as there are cotangents."""
    sums: dict[str, _Squares] = {}
    for u in cotangents[:, None]:
        for gradients in batch.pull(u):
            name = gradients.layer.name
            sums.setdefault(name, _Squares(gradients, len(cotangents))).add(gradients.left[0])
        for others in batch.pull_others(u):
            for place, part in others.parts():
                total[place] += part[0].square().sum(0)
    for found in sums.values():
        for place, part in found.parts():
            total[place] += part[0]


class _Squares:
    """Sums of squares of one layer's gradients, over rows and cotangents."""

    def __init__(self, first: LayerGradients, cotangents: int) -> None:
        self.first, self.layer, self.cotangents = first, first.layer, cotangents
        groups, o = first.left.shape[3:]
        self.bias = first.left.new_zeros(groups * o)
        self.embeds = self.layer.kind.name == "embedding"
        self.whole: Tensor | None = None
        self.pairs: Tensor | None = None

    def _begin(self, left: Float[Tensor, "n t groups o"]) -> None:
        assert self.layer.weight is not None
        n, t, groups, o = left.shape
        if self.embeds:
            self.whole = left.new_zeros(self.layer.weight.shape[0], o)
            return
        self.right = self.first.right(slice(None))
        i = self.right.shape[-1]
        self.whole = left.new_zeros(groups, o, i)
        most = temporary_size(_PAIRS, left.device)
        few = t + 1 <= 4 * self.cotangents and n * t * t * groups * (o + i) <= most
        if few and o * i > 1:
            self.t, self.s = torch.triu_indices(t, t, device=left.device)
            self.pairs = left.new_zeros(n, len(self.t), groups, o)

    def add(self, left: Float[Tensor, "n t groups o"]) -> None:
        """Add the squares for one cotangent of each row."""
        if self.layer.bias is not None:
            self.bias += left.flatten(2).sum(1).square().sum(0)
        if self.layer.weight is None:
            return
        if self.whole is None:
            self._begin(left)
        assert self.whole is not None
        if self.embeds:
            self.whole += _embedding_squares(left, self.first.right(slice(None)), len(self.whole))
        elif self.pairs is not None:
            self.pairs.addcmul_(left[:, self.t], left[:, self.s])
        elif left.shape[-1] == self.right.shape[-1] == 1:
            self.whole += (
                sum_of_outer_products(left, self.right).square().sum(0).reshape(self.whole.shape)
            )
        else:
            self._formed(left)

    def _formed(self, left: Float[Tensor, "n t groups o"]) -> None:
        """Form the gradients, in blocks of rows that fit into a CPU's cache."""
        assert self.whole is not None
        step = max(1, temporary_size(_BLOCK, left.device) // self.whole.numel())
        for start in range(0, len(left), step):
            some = slice(start, start + step)
            formed = left[some].permute(0, 2, 3, 1) @ self.right[some].permute(0, 2, 1, 3)
            if len(formed) == 1:
                self.whole.addcmul_(formed[0], formed[0])
            else:
                self.whole += formed.square_().sum(0)

    def parts(self) -> list[tuple[slice, Float[Tensor, "one p"]]]:
        """Pairs (place in the flat vector, sums of squares (1, size))."""
        whole = self.whole if self.pairs is None else self._from_pairs()
        sums = (whole, self.bias)
        return [
            (span.place, span.selected(values.reshape(1, -1)))
            for span, values in zip((self.layer.weight, self.layer.bias), sums, strict=True)
            if span is not None and values is not None
        ]

    def _from_pairs(self) -> Float[Tensor, "groups o i"]:
        assert self.pairs is not None
        twice = torch.where(self.t == self.s, 1, 2).to(self.pairs).reshape(1, -1, 1, 1)
        both = self.right[:, self.t] * self.right[:, self.s] * twice
        return torch.einsum("npgo,npgi->goi", self.pairs, both)


def _embedding_squares(
    left: Float[Tensor, "n t one e"], index: Tensor, size: int
) -> Float[Tensor, "size e"]:
    """Sums of squares for an embedding: places with the same index are added first."""
    total = left.new_zeros(size + 1, left.shape[-1])  # the last is for padding, index -1
    for g, places in zip(left[:, :, 0], index[:, :, 0, 0], strict=True):
        rows, inverse = places.unique(return_inverse=True)
        sums = g.new_zeros(len(rows), g.shape[-1]).index_add_(0, inverse, g)
        total[rows] += sums.square()
    return total[:size]
