r"""The diagonal of the Gauss-Newton matrix, and the diagonal form of the precision.

The diagonal is the sums of squares of the columns of a Jacobian, whose rows are formed for one
layer and a few inputs at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import slices
from subbayes.curvature.precision import Precision
from subbayes.curvature.row_sums import sum_over_rows
from subbayes.utils.memory import temporary_size
from subbayes.utils.types import Weights, WeightsBatch

_NUMBERS = 2**20  # of gradients that are formed at once
_BYTES = 2**26  # of the gradients of a block of rows


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

    def __init__(self, V: Jacobian, prior_precision: float, squares: Weights | None = None) -> None:
        super().__init__(V, prior_precision)
        if squares is None:
            (squares,) = sum_over_rows(V, lambda rows: (squared_column_norms(rows),))
        self.squares = squares

    def variances(self) -> Weights:
        """The inverse of the diagonal."""
        return 1 / (self.squares + self.prior_precision)

    def solve(self, vectors: WeightsBatch) -> WeightsBatch:
        """Divide by the diagonal."""
        return vectors * self.variances().to(vectors)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """Gram matrix of $J_X$ with weighted columns."""
        sigma = self.jacobian(inputs).gram(scale=self.variances())
        return (sigma + sigma.T) / 2

    def blocks(self, inputs: Any) -> Float[Tensor, "n C C"]:
        """Sums of squares and products of the rows of each input."""
        return self.jacobian(inputs).gram_of_each(self.variances())

    def sample(self, count: int, generator: torch.Generator) -> WeightsBatch:
        """Independent weights."""
        eps = torch.randn(count, self.size, generator=generator, dtype=torch.float64)
        return (eps.to(self.squares.device) * self.variances().sqrt()).to(self.network.weights)

    @override
    def eigenvalues(self) -> Weights:
        return self.squares

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> Diagonal:
        """Reuse the diagonal of V'V."""
        return Diagonal(V, prior_precision, factor * self.squares)

    def logdet(self, noise: float = 1.0) -> float:
        """Sum of the logarithms of the diagonal."""
        return float(torch.log(noise * self.squares + self.prior_precision).sum())


def squared_column_norms(rows: Jacobian) -> Weights:
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
    most = temporary_size(_NUMBERS, rows.network.device)
    step = min(rows.step, temporary_size(_BYTES, rows.network.device) // rows.row_bytes)
    for _, part in rows.blocks(step=max(1, step)):
        for piece in part.pieces:
            for some in slices(part.n, most // (part.roots * piece.layer.size)):
                for place, columns in piece.parts(some):
                    total[place] += columns.square().sum((0, 1))
    return total
