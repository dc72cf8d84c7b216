r"""The Laplace approximation within a subspace w = ŵ + P z, with the exact Gauss-Newton matrix.

$$ z \sim N\bigl(0, (P^\top \Psi^{-1} P)^{-1}\bigr), \qquad
   \Sigma_{P,X} = J_X P \,(P^\top \Psi^{-1} P)^{-1} P^\top J_X^\top , $$

The products $V P$ and $J_X P$ are streamed over the data; only k x k matrices and the basis are
stored. The covariance of the weights is $\Psi_P = P (P^\top \Psi^{-1} P)^{-1} P^\top \preceq \Psi$.

Source: eq. (13) to (19) of the paper on optimal subspaces; Izmailov et al. (2019).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.exact import Primal, inverse_pays, solved_blocks
from subbayes.curvature.gram import concatenate_rows, push_block
from subbayes.curvature.jacobian import Jacobian, check_covariance_blocks
from subbayes.curvature.many_products import MANY_OUTPUTS, ManyProducts
from subbayes.curvature.partial_jacobian import PartialJacobian
from subbayes.curvature.precision import Precision, cholesky
from subbayes.curvature.row_sums import check_in_all, sum_over_rows
from subbayes.curvature.single_layer import SingleLayer
from subbayes.subspace import CoordinateSubspace, Subspace
from subbayes.utils.memory import check_memory
from subbayes.utils.types import Outputs, Weights, WeightsBatch

_AT_ONCE = 2**22  # entries in float64
_WEIGHTS_AT_ONCE = 2**27  # of vectors of weights
Matrices = tuple[Float[Tensor, "k k"], Float[Tensor, "k k"]]


class SubspacePrecision(Precision):
    """The exact precision restricted to a subspace.

    Args:
        V: root of the Gauss-Newton matrix.
        subspace: a subspace around the network's weights.
        prior_precision: lambda of the prior of the weights.
        matrices: (V P)'(V P) and P'P, if they are known.

    Attributes:
        matrix: (V P)'(V P), shape (k, k).
        metric: P'P, shape (k, k).
        factor: lower factor of the precision of z.
    """

    form = "subspace"
    stored = ("matrix", "metric")

    def __init__(
        self,
        V: Jacobian,
        subspace: Subspace,
        prior_precision: float,
        matrices: Matrices | None = None,
    ) -> None:
        super().__init__(V, prior_precision)
        subspace.check_size(V.size)
        self.subspace = subspace
        if matrices is None:
            check_in_all(V, self._check_memory)
            matrices = all_squared_in_subspace(V, subspace), squared_basis(subspace)
        self.matrix, self.metric = matrices
        self.factor = cholesky(self.matrix + self.prior_precision * self.metric, "subspace")

    def _check_memory(self) -> None:
        rank = self.subspace.rank
        check_memory(
            "subspace",
            f"the {rank} x {rank} covariance of its coordinates",
            24 * rank**2,
            "Lower its rank",
        )

    @classmethod
    def of(cls, psi: Precision, subspace: Subspace) -> SubspacePrecision:
        """The precision within a subspace, reusing the precision of all weights."""
        if not isinstance(psi, Primal):
            return cls(psi.V, subspace, psi.prior_precision)
        if isinstance(subspace, CoordinateSubspace):
            matrix = psi.matrix[subspace.indices[:, None], subspace.indices]
        else:
            basis = subspace.basis().to(psi.matrix)
            matrix = basis @ psi.matrix @ basis.T
        return cls(psi.V, subspace, psi.prior_precision, (matrix, squared_basis(subspace)))

    @property
    def z_covariance(self) -> Float[Tensor, "k k"]:
        """Covariance of the coordinates."""
        return torch.cholesky_inverse(self.factor)

    def subspace_jacobian(self, inputs: Any) -> Float[Tensor, "m k"]:
        """J_X P; the outputs of one input are adjacent."""
        return subspace_jacobian(self.jacobian(inputs), self.subspace)

    def output_draws(
        self, inputs: Any, count: int, generator: torch.Generator
    ) -> tuple[Outputs, Float[Tensor, "s m"]]:
        """Draws of outputs, by products with the basis where there are more draws than vectors."""
        return subspace_outputs(
            self.jacobian(inputs).silent(), self.subspace, self.coordinates(count, generator)
        )

    def _half(self, rows: Float[Tensor, "m k"]) -> Float[Tensor, "k m"]:
        return torch.linalg.solve_triangular(self.factor, rows.T, upper=False)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """Computed from J_X P."""
        half = self._half(self.subspace_jacobian(inputs))
        return half.T @ half

    def blocks(self, inputs: Any) -> Float[Tensor, "n C C"]:
        """Computed from J_X P, some inputs at a time."""
        X = self.jacobian(inputs)
        check_covariance_blocks(X)
        if inverse_pays(X, self.subspace.rank):
            layer = _layer(self.V, self.subspace)
            if layer is not None:
                return layer.blocks(X, self.z_covariance)
        rows = subspace_jacobian_in_chunks(X, self.subspace)
        return torch.cat([solved_blocks(self.factor, some, X.roots) for some in rows])

    def solve(self, vectors: WeightsBatch) -> WeightsBatch:
        """Solve in coordinates and map back to weights."""
        z = torch.cholesky_solve(self.subspace.pull(vectors).T.to(self.factor), self.factor).T
        return self.subspace.push(z.to(vectors))

    def variances(self) -> Weights:
        """Zero for weights outside the subspace."""
        if isinstance(self.subspace, CoordinateSubspace):
            zeros = torch.zeros(self.size, dtype=torch.float64, device=self.factor.device)
            return zeros.scatter(0, self.subspace.indices, self.z_covariance.diagonal())
        return self._half(self.subspace.basis().double().T).square().sum(0)

    def sample(self, count: int, generator: torch.Generator) -> WeightsBatch:
        """Draws of the coordinates, as weights."""
        return self.subspace.push(self.coordinates(count, generator).to(self.network.weights))

    def coordinates(self, count: int, generator: torch.Generator) -> Float[Tensor, "s k"]:
        """Draws of the coordinates."""
        eps = torch.randn(self.subspace.rank, count, generator=generator, dtype=torch.float64)
        return torch.linalg.solve_triangular(
            self.factor.T, eps.to(self.factor.device), upper=True
        ).T

    @cached_property
    def _whitened(self) -> tuple[Float[Tensor, "r"], float]:
        """Eigenvalues of (V P)'(V P) where P'P is the identity, and log det P'P."""
        values, vectors = torch.linalg.eigh(self.metric)
        kept = values > 1e-12 * values[-1]
        whiten = vectors[:, kept] / values[kept].sqrt()
        found = torch.linalg.eigvalsh(whiten.T @ self.matrix @ whiten).clamp_min(0)
        return found, float(values[kept].log().sum())

    def eigenvalues(self) -> Float[Tensor, "r"]:
        """Eigenvalues of the Gauss-Newton matrix within the subspace."""
        return self._whitened[0]

    def logdet(self, noise: float = 1.0) -> float:
        """Log determinant of the precision of the coordinates."""
        values, volume = self._whitened
        return float((noise * values + self.prior_precision).log().sum()) + volume

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> SubspacePrecision:
        """Reuse the k x k matrices, with a new factorisation."""
        matrices = factor * self.matrix, self.metric
        other = SubspacePrecision(V, self.subspace, prior_precision, matrices)
        if "_whitened" in self.__dict__:
            other.__dict__["_whitened"] = self._whitened[0] * factor, self._whitened[1]
        return other


def subspace_outputs(
    J: Jacobian, subspace: Subspace, z: Float[Tensor, "s k"]
) -> tuple[Outputs, Float[Tensor, "s m"]]:
    """Outputs, and the changes J P z of them for s coordinates, without rows of J."""
    products = ManyProducts(J)
    if len(z) > subspace.rank:
        parts = [z.to(part) @ part for part in products.push_blocks(subspace.basis())]
        return products.outputs(), torch.cat(parts, 1)
    each = [
        products.push(subspace.push(some.to(products.device, products.dtype)))
        for some in z.split(max(1, _WEIGHTS_AT_ONCE // J.size))
    ]
    return products.outputs(), torch.cat(each)


def subspace_jacobian(J: Jacobian, subspace: Subspace) -> Float[Tensor, "m k"]:
    """J P: selected columns for coordinate subspaces, products with the basis for others."""
    return torch.cat(list(subspace_jacobian_in_chunks(J, subspace)))


def subspace_jacobian_in_chunks(
    J: Jacobian, subspace: Subspace, most: int | None = None
) -> Iterator[Float[Tensor, "m k"]]:
    """J P in float64, the rows of some inputs at a time.

    Args:
        J: the Jacobian.
        subspace: the subspace with basis P.
        most: entries of a chunk, about; by default 2^22.
    """
    limit = max(1, (_AT_ONCE if most is None else most) // subspace.rank)
    return concatenate_rows(_blocks(J, subspace, max(1, limit // J.roots)), limit)


def _is_for_products(J: Jacobian, subspace: Subspace) -> bool:
    return J.roots > max(MANY_OUTPUTS, subspace.rank)


def _blocks(J: Jacobian, subspace: Subspace, step: int) -> Iterator[Float[Tensor, "m k"]]:
    if _is_for_products(J, subspace):
        yield from (part.T for part in ManyProducts(J).push_blocks(subspace.basis()))
        return
    if isinstance(subspace, CoordinateSubspace):
        for _, part in PartialJacobian(J.plan, subspace.indices).blocks(J):
            yield part.flatten(0, 1).double()
        return
    basis = subspace.basis()
    for _, block in J.blocks(step=min(step, J.step)):
        yield push_block(block, basis).T


def _layer(V: Jacobian, subspace: Subspace) -> SingleLayer | None:
    """The linear layer that a subnetwork lies in, if it is in one, and if it has few outputs."""
    if not isinstance(subspace, CoordinateSubspace) or _is_for_products(V, subspace):
        return None
    return SingleLayer.of(V, subspace.indices)


def squared_in_subspace(V: Jacobian, subspace: Subspace) -> Float[Tensor, "k k"]:
    """(V P)'(V P) in float64, summed over blocks of the data."""
    layer = _layer(V, subspace)
    if layer is not None:
        return layer.squares(V)
    total = torch.zeros(subspace.rank, subspace.rank, dtype=torch.float64, device=V.network.device)
    for rows in _blocks(V, subspace, V.step):
        total.addmm_(rows.T, rows)
    return total


def all_squared_in_subspace(V: Jacobian, subspace: Subspace) -> Float[Tensor, "k k"]:
    """(V P)'(V P) over the rows of all processes, which compute it together."""
    return sum_over_rows(V, lambda rows: (squared_in_subspace(rows, subspace),))[0]


def squared_basis(subspace: Subspace) -> Float[Tensor, "k k"]:
    """P'P in float64.

    Example:
        >>> from subbayes.subspace import DenseSubspace
        >>> squared_basis(DenseSubspace(torch.zeros(2), torch.tensor([[3.0, 4.0]])))
        tensor([[25.]], dtype=torch.float64)
    """
    total = torch.eye(subspace.rank, dtype=torch.float64, device=subspace.shift.device)
    if isinstance(subspace, CoordinateSubspace):
        return total
    basis = subspace.basis()
    total.zero_()
    for part in basis.split(max(1, _AT_ONCE // len(basis)), 1):
        total += part.double() @ part.double().T
    return total
