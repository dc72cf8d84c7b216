r"""The exact precision by the D x D matrix $V^\top V + \lambda I$: for few weights and much data.

It sums outer products of the rows of V, block by block, and stores three matrices of 8 D^2 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.precision import ExactPrecision

__all__ = ["Primal"]

_COLUMNS = 2048


class Primal(ExactPrecision):
    """The exact precision as a matrix; see `ExactPrecision` for its arguments."""

    form = "primal"

    def _product(self) -> Float[Tensor, "D D"]:
        """V'V, computed up to the diagonal and mirrored."""
        V = self.V
        total = torch.zeros(V.size, V.size, dtype=torch.float64, device=V.network.device)
        blocks = [slice(start, start + _COLUMNS) for start in range(0, V.size, _COLUMNS)]
        for _, rows in V.dense():
            for some in blocks:
                total[some, : some.stop].addmm_(rows[:, some].T, rows[:, : some.stop])
        for some in blocks:
            total[: some.start, some] = total[some, : some.start].T
        return total

    def solve(self, vectors: Float[Tensor, "s D"]) -> Float[Tensor, "s D"]:
        """Solve with the Cholesky factor."""
        return torch.cholesky_solve(vectors.T.to(self.factor), self.factor).T.to(vectors)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """Solve with the Cholesky factor."""
        halves = [
            torch.linalg.solve_triangular(self.factor, rows.T, upper=False)
            for _, rows in self.jacobian(inputs).dense()
        ]
        half = torch.cat(halves, 1)
        return half.T @ half

    def variances(self) -> Float[Tensor, "D"]:
        """The diagonal of the inverse."""
        return torch.cholesky_inverse(self.factor).diagonal().clone()
