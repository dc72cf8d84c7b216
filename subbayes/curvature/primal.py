r"""Exact, by the D x D matrix $V^\top V + \lambda I$ itself: for few weights, many observations.

Sums outer products of the rows of V, block by block; three matrices of 8 D^2 bytes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision, cholesky

__all__ = ["Primal"]

_COLUMNS = 2048


class Primal(Precision):
    """The exact precision as a matrix.

    Args:
        V: root of the Gauss-Newton matrix.
        prior_precision: lambda.
        matrix: V'V, if it has been computed already.
    """

    form = "primal"

    def __init__(
        self, V: Jacobian, prior_precision: float, matrix: Float[Tensor, "D D"] | None = None
    ) -> None:
        super().__init__(V, prior_precision)
        self.matrix = _squared(V) if matrix is None else matrix
        shifted = self.matrix.clone()
        shifted.diagonal().add_(self.prior_precision)
        self.factor = cholesky(shifted, "prior_precision")

    def solve(self, vectors: Float[Tensor, "s D"]) -> Float[Tensor, "s D"]:
        """By the Cholesky factor."""
        return torch.cholesky_solve(vectors.T.to(self.factor), self.factor).T.to(vectors)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """By the Cholesky factor."""
        X = self.jacobian(inputs)
        half = torch.cat(
            [
                torch.linalg.solve_triangular(self.factor, rows.T, upper=False)
                for _, rows in X.dense()
            ],
            1,
        )
        return half.T @ half

    def variances(self) -> Float[Tensor, "D"]:
        """The diagonal of the inverse."""
        return torch.cholesky_inverse(self.factor).diagonal().clone()

    @cached_property
    def _eigenvalues(self) -> Float[Tensor, "D"]:
        return torch.linalg.eigvalsh(self.matrix).clamp_min(0)

    def eigenvalues(self) -> Float[Tensor, "D"]:
        """All D eigenvalues."""
        return self._eigenvalues

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> Primal:
        """Reuse V'V; one more factorisation."""
        other = Primal(V, prior_precision, self.matrix if factor == 1 else factor * self.matrix)
        if "_eigenvalues" in self.__dict__:
            other.__dict__["_eigenvalues"] = self._eigenvalues * factor
        return other


def _squared(V: Jacobian) -> Float[Tensor, "D D"]:
    """V'V: columns up to the diagonal alone are multiplied, then mirrored."""
    total = torch.zeros(V.size, V.size, dtype=torch.float64, device=V.network.device)
    for _, rows in V.dense():
        for start in range(0, V.size, _COLUMNS):
            some = slice(start, start + _COLUMNS)
            total[some, : some.stop].addmm_(rows[:, some].T, rows[:, : some.stop])
    for start in range(0, V.size, _COLUMNS):
        some = slice(start, start + _COLUMNS)
        total[:start, some] = total[some, :start].T
    return total
