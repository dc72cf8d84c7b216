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

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.semistructured.structured_predictor import StructuredPredictor

__all__ = ["BlockFactor", "block_cholesky", "block_solve", "eliminated_groups"]

_LEAST_GROUPS = 4


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
        own, w = blocks, border
        if blocks.shape[1]:
            own = block_cholesky(blocks)
            w = block_solve(own, border)
            flat = w.flatten(1, 2)
            rest = rest - flat.mT @ flat
        factor, failed = torch.linalg.cholesky_ex(rest)
        return cls(own, w, torch.where(failed[:, None, None] > 0, torch.nan, factor))

    def half_log_det(self) -> Float[Tensor, "S"]:
        r"""$\log \det L$."""
        found = self.rest.diagonal(dim1=1, dim2=2).log().sum(1)
        if not self.blocks.shape[1]:
            return found
        return found + self.blocks.diagonal(dim1=2, dim2=3).log().sum((1, 2))

    def forward(
        self, blocks: Float[Tensor, "S J q"], rest: Float[Tensor, "S s"]
    ) -> tuple[Float[Tensor, "S J q"], Float[Tensor, "S s"]]:
        r"""$L^{-1} v$."""
        own = blocks[..., None]
        if blocks.shape[1]:
            own = block_solve(self.blocks, own)
            rest = rest - (self.border.flatten(1, 2).mT @ own.flatten(1, 2))[..., 0]
        solved = torch.linalg.solve_triangular(self.rest, rest[..., None], upper=False)
        return own[..., 0], solved[..., 0]

    def backward(
        self, blocks: Float[Tensor, "S J q"], rest: Float[Tensor, "S s"]
    ) -> tuple[Float[Tensor, "S J q"], Float[Tensor, "S s"]]:
        r"""$L^{-\top} v$."""
        solved = torch.linalg.solve_triangular(self.rest.mT, rest[..., None], upper=True)
        if not blocks.shape[1]:
            return blocks, solved[..., 0]
        right = blocks[..., None] - (self.border.flatten(1, 2) @ solved).reshape(*blocks.shape, 1)
        return block_solve(self.blocks, right, transposed=True)[..., 0], solved[..., 0]


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


def eliminated_groups(
    structured: StructuredPredictor, gram: Float[Tensor, "p p"]
) -> Int[Tensor, "J q"] | None:
    """Columns of the largest term of random effects whose groups share no rows; None without one.

    Args:
        structured: the structured predictor.
        gram: X'X of all columns, whose zeros show which columns share rows.
    """
    terms = [t for t in structured.group_columns() if len(t) >= _LEAST_GROUPS]
    for columns in sorted(terms, key=lambda t: -t.numel()):
        flat = columns.flatten()
        own = gram[flat][:, flat].reshape(*columns.shape, *columns.shape)
        apart = own.abs().sum((1, 3))
        if not bool((apart - torch.diag(apart.diagonal())).any()):
            return columns
    return None
