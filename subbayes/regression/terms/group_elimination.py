r"""Precision matrices of effects that vary among groups, factorised group by group.

The effects $u_j \in R^q$ of one grouping factor share no rows, so that their precision is block
diagonal. Ordered with these blocks E first and all other coordinates R last,

$$ P = \begin{pmatrix} P_E & P_{ER} \\ P_{RE} & P_R \end{pmatrix} = L L^\top, \qquad
   L = \begin{pmatrix} L_E & 0 \\ W^\top & L_R \end{pmatrix}, \qquad
   W = L_E^{-1} P_{ER}, \quad L_R L_R^\top = P_R - W^\top W , $$

which costs J (q^3 + q s^2) + s^3 operations for J groups and s other coordinates instead of
(J q + s)^3 (Bates et al. 2015, "Fitting linear mixed-effects models using lme4", section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.regression.shapes import Groups, PointValues

__all__ = ["BlockFactor", "GroupedMatrix", "block_cholesky", "block_solve", "eliminated_groups"]

_LEAST_GROUPS = 4
_LEAST_EIGENVALUE = 1e-9  # of a precision, relative to the largest
_ROUNDING = 1e-13  # of eigenvalues
_CLOSE = 1e-10  # of entries
_MOST_DENSE = 600  # rows


@dataclass(frozen=True)
class GroupedMatrix:
    r"""A symmetric matrix with no entries between the effects of different groups: P above.

    Attributes:
        groups: positions of the effects of each group; of no groups, shape (0, 1).
        others: all other positions, in order.
        blocks: $P_E$.
        border: $P_{ER}$.
        rest: $P_R$.
    """

    groups: Groups
    others: Int[Tensor, "s"]
    blocks: Float[Tensor, "J q q"]
    border: Float[Tensor, "J q s"]
    rest: Float[Tensor, "s s"]

    @classmethod
    def zeros(cls, groups: Groups, size: int, like: Tensor) -> GroupedMatrix:
        """A matrix of zeros, with the dtype of another."""
        alone = torch.ones(size, dtype=torch.bool)
        alone[groups.flatten()] = False
        others = torch.nonzero(alone)[:, 0]
        j, q = groups.shape
        s = len(others)
        shapes = (j, q, q), (j, q, s), (s, s)
        return cls(groups, others, *(like.new_zeros(shape) for shape in shapes))

    @classmethod
    def of_dense(cls, matrix: Float[Tensor, "m m"], groups: Groups) -> GroupedMatrix:
        """A matrix that is given with all its entries."""
        found = cls.zeros(groups, len(matrix), matrix)
        others = found.others
        return replace(
            found,
            blocks=matrix[groups[:, :, None], groups[:, None, :]],
            border=matrix[groups[:, :, None], others],
            rest=matrix[others][:, others],
        )

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.groups.numel() + len(self.others)

    def dense(self) -> Float[Tensor, "m m"]:
        """The matrix with all its entries."""
        groups, others = self.groups, self.others
        found = self.rest.new_zeros(self.size, self.size)
        found[groups[:, :, None], groups[:, None, :]] = self.blocks
        found[groups[:, :, None], others] = self.border
        found[others[:, None], groups.flatten()] = self.border.flatten(0, 1).T
        found[others[:, None], others] = self.rest
        return found

    def _with_parts(self, function: Callable[..., Tensor], *others: GroupedMatrix) -> GroupedMatrix:
        parts = {
            name: function(*(getattr(matrix, name) for matrix in (self, *others)))
            for name in ("blocks", "border", "rest")
        }
        return replace(self, **parts)

    def __add__(self, other: GroupedMatrix) -> GroupedMatrix:
        """The sum with a matrix of the same groups."""
        return self._with_parts(torch.add, other)

    def scaled(self, factor: float) -> GroupedMatrix:
        """The product with a number."""
        return self._with_parts(lambda part: part * factor)

    def plus_identity(self) -> GroupedMatrix:
        """The sum with the identity."""
        one_group = torch.eye(self.groups.shape[1], dtype=self.rest.dtype)
        others = torch.eye(len(self.others), dtype=self.rest.dtype)
        return replace(self, blocks=self.blocks + one_group, rest=self.rest + others)

    def without(self, positions: Sequence[int]) -> GroupedMatrix:
        """The matrix with zeros in some rows and columns, which are not those of groups."""
        kept = (~torch.isin(self.others, torch.tensor(positions, dtype=torch.long))).to(self.rest)
        return replace(self, border=self.border * kept, rest=self.rest * kept * kept[:, None])

    def times(self, vectors: Float[Tensor, "*S m"]) -> Float[Tensor, "*S m"]:
        """The product with each vector."""
        if not len(self.groups):
            return vectors @ self.rest
        rest, flat = vectors[..., self.others], vectors[..., self.groups.flatten()]
        groups = flat.unflatten(-1, self.groups.shape)
        border = self.border.flatten(0, 1)
        found = torch.empty_like(vectors)
        found[..., self.others] = rest @ self.rest + flat @ border
        own = torch.einsum("...jq,jqr->...jr", groups, self.blocks).flatten(-2)
        found[..., self.groups.flatten()] = own + rest @ border.T
        return found

    def is_finite(self) -> bool:
        """Whether all entries are finite."""
        return all(bool(m.isfinite().all()) for m in (self.blocks, self.border, self.rest))

    def factorised(self) -> BlockFactor:
        """The factor L, for vectors of this one matrix; NaN if it is not positive definite."""
        return BlockFactor.of(self.blocks[None], self.border[None], self.rest[None])

    def solve(self, right: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        """The product of the inverse with a vector."""
        factor = self.factorised()
        groups, rest = right[self.groups], right[self.others]
        groups, rest = factor.backward(*factor.forward(groups[None], rest[None]))
        found = torch.empty_like(right)
        found[self.groups], found[self.others] = groups[0], rest[0]
        return found

    def positive_definite(self) -> GroupedMatrix:
        """The matrix with eigenvalues made positive, of blocks and of what they leave of the rest.

        A positive definite matrix stays as it is.
        """
        if not self.is_finite() or self.factorised().is_finite():
            return self
        blocks = _with_eigenvalues(self.blocks, flipped=True)
        solved = torch.linalg.solve(blocks, self.border)
        inner = self.border.flatten(0, 1).T @ solved.flatten(0, 1)
        rest = _with_eigenvalues(self.rest - inner, flipped=True) + inner
        return replace(self, blocks=blocks, rest=rest)

    def without_negative(self) -> GroupedMatrix:
        """The matrix with negative eigenvalues set to 0.

        Groups of a large matrix are kept apart: the eigenvalues are those of the blocks and of what
        they leave of the rest. A small one has no groups then, as no entries are 0.

        Raises:
            LinAlgError: a matrix that is not finite.
        """
        if not self.is_finite():
            raise np.linalg.LinAlgError("a curvature that is not finite")
        if not len(self.groups):
            return replace(self, rest=_with_eigenvalues(self.rest))
        blocks = _with_eigenvalues(self.blocks)
        inverse = torch.linalg.pinv(blocks, hermitian=True)
        border = blocks @ (inverse @ self.border)  # without what a positive matrix cannot have
        inner = border.flatten(0, 1).T @ (inverse @ border).flatten(0, 1)
        rest = _with_eigenvalues(self.rest - inner) + inner
        found = replace(self, blocks=blocks, border=border, rest=rest)
        if self.size > _MOST_DENSE:
            return found
        dense, changed = self.dense(), found.dense()
        if float((changed - dense).abs().max()) <= _CLOSE * float(changed.abs().max()):
            return found
        return GroupedMatrix.of_dense(_with_eigenvalues(dense), self.groups[:0])


def _with_eigenvalues(
    matrix: Float[Tensor, "*S m m"], flipped: bool = False
) -> Float[Tensor, "*S m m"]:
    """Symmetric matrices without negative eigenvalues; those that have none stay as they are.

    Args:
        matrix: the matrices.
        flipped: change the sign of negative eigenvalues, and enlarge those close to 0, instead of
            setting them to 0.
    """
    if not matrix.numel():
        return matrix
    matrix = (matrix + matrix.mT) / 2
    values, vectors = torch.linalg.eigh(matrix)
    changed = values.clamp_min(0)
    if flipped:
        size = values.abs()
        changed = size.maximum(_LEAST_EIGENVALUE * size.amax(-1, keepdim=True))
    rounding = _ROUNDING * values.shape[-1] * values.abs().amax(-1, keepdim=True)
    kept = ((changed - values).abs() <= rounding).all(-1)[..., None, None]
    return torch.where(kept, matrix, (vectors * changed.unsqueeze(-2)) @ vectors.mT)


@dataclass(frozen=True)
class BlockFactor:
    """The factor L of a batch of precision matrices.

    Attributes:
        blocks: L_E.
        border: W.
        rest: L_R.
    """

    blocks: Float[Tensor, "S J q q"]
    border: Float[Tensor, "S J q s"]
    rest: Float[Tensor, "S s s"]

    @classmethod
    def of(
        cls,
        blocks: Float[Tensor, "S J q q"],
        border: Float[Tensor, "S J q s"],
        rest: Float[Tensor, "S s s"],
    ) -> BlockFactor:
        """The factor of the matrix with P_E, P_ER and P_R; NaN if not positive definite."""
        own = block_cholesky(blocks)
        w = block_solve(own, border)
        flat = w.flatten(1, 2)
        factor, failed = torch.linalg.cholesky_ex(rest - flat.mT @ flat)
        return cls(own, w, torch.where(failed[:, None, None] > 0, torch.nan, factor))

    def is_finite(self) -> bool:
        """Whether the matrices were positive definite."""
        return bool(self.rest.isfinite().all()) and bool(self.blocks.isfinite().all())

    def half_log_det(self, counts: Float[Tensor, "J"] | None = None) -> PointValues:
        r"""$\log \det L$, with so many blocks as each, by default one."""
        of_blocks = self.blocks.diagonal(dim1=2, dim2=3).log().sum(2)
        of_blocks = of_blocks.sum(1) if counts is None else of_blocks @ counts
        return self.rest.diagonal(dim1=1, dim2=2).log().sum(1) + of_blocks

    def forward(
        self, blocks: Float[Tensor, "S J q"], rest: Float[Tensor, "S s"]
    ) -> tuple[Float[Tensor, "S J q"], Float[Tensor, "S s"]]:
        r"""$L^{-1} v$."""
        own = block_solve(self.blocks, blocks[..., None])
        right = rest[..., None] - self.border.flatten(1, 2).mT @ own.flatten(1, 2)
        solved = torch.linalg.solve_triangular(self.rest, right, upper=False)
        return own[..., 0], solved[..., 0]

    def backward_rest(self, rest: Float[Tensor, "S s"]) -> Float[Tensor, "S s"]:
        r"""The last part of $L^{-\top} v$, which does not depend on the first."""
        return torch.linalg.solve_triangular(self.rest.mT, rest[..., None], upper=True)[..., 0]

    def backward(
        self, blocks: Float[Tensor, "S J q"], rest: Float[Tensor, "S s"]
    ) -> tuple[Float[Tensor, "S J q"], Float[Tensor, "S s"]]:
        r"""$L^{-\top} v$."""
        solved = self.backward_rest(rest)
        moved = self.border.flatten(1, 2) @ solved[..., None]
        right = blocks[..., None] - moved.reshape(*blocks.shape, 1)
        return block_solve(self.blocks, right, transposed=True)[..., 0], solved


def block_cholesky(matrix: Float[Tensor, "*S q q"]) -> Float[Tensor, "*S q q"]:
    """Cholesky factors of many small matrices, column by column; NaN if not positive definite."""
    q = matrix.shape[-1]
    if q == 1:
        return matrix.sqrt()
    rest, columns = matrix, []
    for i in range(q):
        column = rest[..., i] / rest[..., i, i].sqrt().unsqueeze(-1)
        rest = rest - column.unsqueeze(-1) * column.unsqueeze(-2)
        column = torch.cat([torch.zeros_like(column[..., :i]), column[..., i:]], -1)
        columns.append(column)
    return torch.stack(columns, -1)


def block_solve(
    factor: Float[Tensor, "*S q q"], right: Float[Tensor, "*S q m"], *, transposed: bool = False
) -> Float[Tensor, "*S q m"]:
    """Solve with many small lower triangular matrices, or with their transposes."""
    q = factor.shape[-1]
    if q == 1:
        return right / factor
    found: list[Tensor] = [right[..., :0, :]] * q
    for i in reversed(range(q)) if transposed else range(q):
        value = right[..., i, :]
        for j in range(i + 1, q) if transposed else range(i):
            entry = factor[..., j, i] if transposed else factor[..., i, j]
            value = value - entry.unsqueeze(-1) * found[j]
        found[i] = value / factor[..., i, i].unsqueeze(-1)
    return torch.stack(found, -2)


def eliminated_groups(terms: Sequence[Int[Tensor, "_ _"]]) -> Groups:
    """Columns of the largest of some terms of random effects; none if all have few groups.

    A row has one group of a term, so that no two groups share rows. Only one term is eliminated:
    between the groups of another one, crossed with it, there are entries then.

    Args:
        terms: columns by group and effect; see `StructuredPredictor.group_columns`.
    """
    many = [columns for columns in terms if len(columns) >= _LEAST_GROUPS]
    none = torch.zeros(0, 1, dtype=torch.long)
    return max(many, key=lambda columns: columns.numel(), default=none)
