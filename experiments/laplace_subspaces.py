"""Shared code of the experiments on subspaces of linearised Laplace: bases and measures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.subspace_errors import relative_error, trace_criterion
from subbayes.curvature.exact import Primal
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision, cholesky
from subbayes.curvature.subspace_precision import SubspacePrecision, subspace_jacobian
from subbayes.subspace import CoordinateSubspace, DenseSubspace, Subspace
from subbayes.subspaces.optimal import optimal_for

Matrix = Float[Tensor, "m m"]
Spaces = Mapping[str, Subspace]


def low_rank(
    psi: Precision, X: Jacobian, rank: int, covariance: Matrix | None = None
) -> DenseSubspace:
    """Return the optimal subspace with orthonormal vectors, of at most the given rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="rank: lowered")
        space, _ = optimal_for(psi, X, rank, covariance)
    return DenseSubspace(space.shift, torch.linalg.qr(space.basis().T)[0].T.contiguous())


def subspace_jacobians(J: Jacobian, spaces: Spaces) -> dict[str, Float[Tensor, "m k"]]:
    """Return J P of several subspaces, with one pass over the inputs for all dense ones."""
    found = {
        name: subspace_jacobian(J, space)
        for name, space in spaces.items()
        if isinstance(space, CoordinateSubspace)
    }
    dense = {name: space for name, space in spaces.items() if name not in found}
    if dense:
        columns = J.push(torch.cat([space.basis() for space in dense.values()])).T
        sizes = [space.rank for space in dense.values()]
        found |= dict(zip(dense, columns.split(sizes, 1), strict=True))
    return found


def subspace_precisions(psi: Precision, spaces: Spaces) -> dict[str, Float[Tensor, "k k"]]:
    r"""Return the exact $P^\top \Psi^{-1} P$ of several subspaces."""
    if isinstance(psi, Primal):
        inside = {name: SubspacePrecision.of(psi, space) for name, space in spaces.items()}
        return {name: r.matrix + r.prior_precision * r.metric for name, r in inside.items()}
    found = {}
    for name, columns in subspace_jacobians(psi.V, spaces).items():
        space, matrix = spaces[name], columns.T @ columns
        if isinstance(space, CoordinateSubspace):
            matrix.diagonal().add_(psi.prior_precision)
        else:
            basis = space.basis().double()
            matrix += psi.prior_precision * basis @ basis.T
        found[name] = matrix
    return found


def least_errors(full: Matrix, ranks: Sequence[int]) -> dict[str, float]:
    """Return the smallest relative errors (see `eckart_young`) by rank."""
    values = torch.linalg.eigvalsh(full).flip(0)
    return {str(rank): float(values[rank:].norm() / values.norm()) for rank in ranks}


class Judge:
    """Computes relative error, share of the trace and further scores of subspaces.

    Args:
        psi: the exact precision.
        X: Jacobian at the inputs.
        score: returns further measures of a covariance.
    """

    def __init__(
        self, psi: Precision, X: Jacobian, score: Callable[[Matrix], Sequence[float]] = lambda _: ()
    ) -> None:
        self.psi, self.X, self.score = psi, X, score
        self.full = psi.covariance(X)

    def of(self, part: Matrix) -> list[float]:
        """Return the measures of a covariance."""
        return [
            relative_error(part, self.full),
            trace_criterion(part, self.full),
            *self.score(part),
        ]

    def __call__(self, space: Subspace) -> list[float]:
        """Return the measures of a subspace."""
        return self.of(SubspacePrecision.of(self.psi, space).covariance(self.X))

    def leading(self, space: Subspace, ranks: Sequence[int]) -> dict[str, list[float]]:
        """Return the measures of the first vectors of a subspace, by their number."""
        inside = SubspacePrecision.of(self.psi, space)
        return self.nested(
            inside.matrix + inside.prior_precision * inside.metric,
            inside.subspace_jacobian(self.X),
            ranks,
        )

    def nested(
        self, precise: Float[Tensor, "k k"], columns: Float[Tensor, "m k"], ranks: Sequence[int]
    ) -> dict[str, list[float]]:
        """Like `leading`, from the precision of the coordinates and J_X P."""
        return {
            str(rank): self.of(part)
            for rank, part in zip(ranks, _leading(precise, columns, ranks), strict=True)
        }


def _leading(
    precise: Float[Tensor, "k k"], columns: Float[Tensor, "m k"], ranks: Sequence[int]
) -> Iterator[Matrix]:
    for rank in ranks:
        half = torch.linalg.solve_triangular(
            cholesky(precise[:rank, :rank], "subspace"), columns[:, :rank].T, upper=False
        )
        yield half.T @ half
