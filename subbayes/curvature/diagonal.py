r"""The diagonal approximation $\Psi \approx \mathrm{diag}(V^\top V + \lambda I)^{-1}$.

It costs one pass over the data and D numbers. Correlations between weights are ignored, so that
predictive variances are too large where many weights have similar effects.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.ggn_diagonal import squared_column_norms
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision

__all__ = ["Diagonal"]


class Diagonal(Precision):
    """Diagonal approximation of the precision.

    Args:
        V: root of the Gauss-Newton matrix.
        prior_precision: lambda.
        squares: the diagonal of V'V, if it is known.
    """

    form = "diagonal"

    def __init__(
        self, V: Jacobian, prior_precision: float, squares: Float[Tensor, "D"] | None = None
    ) -> None:
        super().__init__(V, prior_precision)
        self.squares = squared_column_norms(V) if squares is None else squares

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

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "s D"]:
        """Independent weights."""
        eps = torch.randn(count, self.size, generator=generator, dtype=torch.float64)
        return (eps.to(self.squares.device) * self.variances().sqrt()).to(self.network.weights)

    def eigenvalues(self) -> Float[Tensor, "D"]:
        """The diagonal of V'V."""
        return self.squares

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> Diagonal:
        """Reuse the diagonal of V'V."""
        return Diagonal(V, prior_precision, factor * self.squares)

    def logdet(self, noise: float = 1.0) -> float:
        """Sum of the logarithms of the diagonal."""
        return float(torch.log(noise * self.squares + self.prior_precision).sum())
