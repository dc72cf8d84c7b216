r"""The map from coordinates of the effects to coefficients, for many points at once.

The predictors of a model without networks are $\eta = X B(\zeta) + \mathrm{offset}$. Here is B, the
coefficients by predictor with a last row of constants, shape (p + 1, C), and the adjoint of its
derivative: they do not depend on the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.shapes import ByPredictor, EffectPoints, Groups
from subbayes.regression.terms.group_elimination import GroupedMatrix

_ELEMENTS = 2**20  # of copies of a point at once
_DENSE, _FEW = 256, 0.05  # coordinates, and share of entries, from which on matrices are sparse


def coefficients_and_thresholds(
    structured: StructuredPredictor, zeta: Float[Tensor, "*S P"]
) -> Float[Tensor, "*S m"]:
    """u at each point: the coefficients, then the thresholds."""
    beta = structured.coefficients(zeta)
    if not structured.thresholds:
        return beta
    return torch.cat([beta, structured.threshold_values(zeta)], -1)


class EffectMap:
    """Coefficients by predictor as a function of the coordinates of effects.

    Args:
        structured: the structured predictor.
        groups: columns of the groups whose blocks are kept apart in curvatures.

    Attributes:
        entries: places in B, flattened, of the coefficients and then the thresholds.
        one: the structured predictor with the first of the groups alone, on whose coordinates no
            coefficient of another group depends.
        left: positions of its coordinates in those of all groups.
        kept: positions of its coefficients and thresholds.
        is_affine: whether each coefficient is affine in a coordinate of its own.
    """

    def __init__(self, structured: StructuredPredictor, groups: Groups) -> None:
        self.structured, self.groups = structured, groups
        self.one, self.left = structured, torch.arange(structured.size)
        if len(groups):
            self.one, self.left = structured.with_one_group(int(groups[0, 0]))
        columns, known = structured.placement.shape
        self.shape = columns + 1, known + len(structured.thresholds)
        of_columns = torch.arange(columns) * self.shape[1] + structured.placement.argmax(1)
        thresholds = columns * self.shape[1] + torch.arange(known, self.shape[1])
        self.entries = torch.cat([of_columns, thresholds])
        self.kept = torch.nonzero(~torch.isin(torch.arange(len(self.entries)), groups[1:]))[:, 0]
        self.is_affine = structured.size == columns == len(structured.linear_columns)

    def coefficients(self, zeta: EffectPoints) -> ByPredictor:
        """B at each point: coefficients by predictor, then constants."""
        u = coefficients_and_thresholds(self.structured, zeta)
        empty = u.new_zeros(len(u), math.prod(self.shape))
        return empty.index_copy(1, self.entries, u).unflatten(1, self.shape)

    def curvature(
        self, zeta: Float[Tensor, "P"], cotangent: Float[Tensor, "q C"], inner: GroupedMatrix
    ) -> GroupedMatrix:
        """The negative Hessian in the coordinates.

        Args:
            zeta: the point.
            cotangent: the gradient in B.
            inner: the negative Hessian in the coefficients and then the thresholds.
        """
        groups, few = self.groups, zeta[self.left]
        found, q = GroupedMatrix.zeros(groups, len(zeta), zeta), groups.shape[1]
        others = torch.searchsorted(self.left, found.others)  # coordinates
        outputs, count = self._outputs(few[None])[0], len(self.kept)
        jacobian = self._rows_of_gradients(
            few, len(outputs), lambda at, part: self._outputs(at)[:, part].diagonal()
        )[:, others]
        own = jacobian[torch.searchsorted(self.kept, inner.others)]
        if len(zeta) > _DENSE and float((own != 0).double().mean()) < _FEW:
            pull = own.T.to_sparse()  # each effect has coordinates of its own
            rest = pull @ (pull @ inner.rest.T).T
        else:
            rest = own.T @ inner.rest @ own
        blocks, border, slope = found.blocks, found.border, cotangent.flatten()[self.entries]
        cotangents = slope[self.kept]
        if len(groups):
            first = int(groups[0, 0])
            factor, slopes = outputs[count:].reshape(q, q), jacobian[count:].T.unflatten(1, (q, q))
            moved = torch.einsum("akl,jl->jka", slopes, zeta[groups])
            along = inner.blocks @ moved + inner.border @ own
            blocks, border = factor.T @ inner.blocks @ factor, factor.T @ along
            crossed = (inner.border @ own).flatten(0, 1)
            moved = moved.flatten(0, 1)
            rest = rest + moved.T @ along.flatten(0, 1) + crossed.T @ moved
            border = border - torch.einsum("akl,jk->jla", slopes, slope[groups])
            cotangents[first : first + q] = 0.0  # all groups, in place of the first by itself
            cotangents = torch.cat([cotangents, (slope[groups].T @ zeta[groups]).flatten()])
        if not self.is_affine:
            rest = rest - self._bend(few, cotangents, others)
        return GroupedMatrix(groups, found.others, blocks, border, (rest + rest.T) / 2)

    def _outputs(self, few: Float[Tensor, "c m"]) -> Float[Tensor, "c r"]:
        """Coefficients and thresholds of `one`, and the factor of the effects of a group.

        The factor is the derivative of a group's coefficients in its own coordinates, and the same
        for all groups.
        """
        u = coefficients_and_thresholds(self.one, few)
        if not len(self.groups):
            return u
        factor = self.one.factor_of_groups(int(self.groups[0, 0]), few)
        return torch.cat([u, factor.flatten(1)], 1)

    def _bend(
        self, few: Float[Tensor, "m"], cotangents: Float[Tensor, "r"], chosen: Int[Tensor, "s"]
    ) -> Float[Tensor, "s s"]:
        """The second derivative of the product of the outputs and a vector."""

        def slopes(points: Float[Tensor, "c m"], part: slice) -> Tensor:
            value = (self._outputs(points) @ cotangents).sum()
            (found,) = torch.autograd.grad(value, points, create_graph=True)
            return found[:, chosen[part]].diagonal()

        return self._rows_of_gradients(few, len(chosen), slopes)[:, chosen]

    def _rows_of_gradients(
        self, zeta: Float[Tensor, "P"], count: int, values: Callable[[Tensor, slice], Tensor]
    ) -> Float[Tensor, "m P"]:
        """Gradients of numbers, each a function of its own copy of the point, few at once."""
        found = zeta.new_zeros(count, len(zeta))
        step = max(1, _ELEMENTS // len(zeta))
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            with torch.enable_grad():
                points = zeta.expand(part.stop - start, -1).clone().requires_grad_()
                total = values(points, part).sum()
                if total.requires_grad:
                    found[part] = torch.autograd.grad(total, points)[0]
        return found
