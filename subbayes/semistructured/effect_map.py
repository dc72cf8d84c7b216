r"""The map from coordinates of the effects to coefficients, for many points at once.

The predictors of a model without networks are $\eta = X B(\zeta) + \mathrm{offset}$. Here is B, the
coefficients by predictor with a last row of constants, shape (p + 1, C), and the adjoint of its
derivative: they do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subbayes.networks.tracing.tracer import Tracer
from subbayes.semistructured.group_elimination import GroupedMatrix
from subbayes.semistructured.structured_predictor import StructuredPredictor

__all__ = ["EffectMap", "coefficients_by_predictor", "placed_by_predictor"]

_ELEMENTS = 2**20  # of copies of a point at once
_DENSE, _FEW = 256, 0.05  # coordinates, and share of entries, from which on matrices are sparse
_TRACED_AFTER = 100  # evaluations, since tracing takes as long as some hundreds


def coefficients_by_predictor(
    structured: StructuredPredictor, zeta: Float[Tensor, "*S P"]
) -> Float[Tensor, "*S q C"]:
    """B at each point, with q = p + 1: coefficients by predictor, then constants."""
    return placed_by_predictor(structured, structured.coefficients(zeta), zeta)


def placed_by_predictor(
    structured: StructuredPredictor, beta: Float[Tensor, "*S p"], zeta: Float[Tensor, "*S P"]
) -> Float[Tensor, "*S q C"]:
    """B of given coefficients, and of thresholds at each point."""
    placed = beta.unsqueeze(-1) * structured.placement
    if not structured.thresholds:
        return nn.functional.pad(placed, (0, 0, 0, 1))
    cuts = structured.threshold_values(zeta)
    whole = nn.functional.pad(placed, (0, cuts.shape[-1], 0, 1))
    below = nn.functional.pad(cuts, (placed.shape[-1], 0)).unsqueeze(-2)
    return whole + nn.functional.pad(below, (0, 0, placed.shape[-2], 0))


class EffectMap:
    """Coefficients by predictor as a function of the coordinates of effects.

    Args:
        structured: the structured predictor.
        groups: columns of the groups whose blocks are kept apart in curvatures.

    Attributes:
        entries: places in B, flattened, of the coefficients and then the thresholds.
        affine: the intercepts and the slopes, shapes (p, P), of coefficients that are affine in
            their own coordinates; None for others.
    """

    def __init__(self, structured: StructuredPredictor, groups: Int[Tensor, "J q"]) -> None:
        self.structured, self.groups = structured, groups
        p, known = structured.placement.shape
        width = known + len(structured.thresholds)
        of_columns = torch.arange(p) * width + structured.placement.argmax(1)
        self.entries = torch.cat([of_columns, p * width + torch.arange(known, width)])
        self.columns = len(structured.design.names)
        self.affine = self._affine_parts()
        self._tracers: dict[str, Tracer] = {}

    def __getstate__(self) -> dict[str, Any]:
        # traced graphs cannot be pickled and are traced again
        return self.__dict__ | {"_tracers": {}}

    def _affine_parts(self) -> tuple[Tensor, Tensor] | None:
        """Intercepts and slopes of the coefficients if each is affine in its own coordinate."""
        structured = self.structured
        if structured.size != self.columns:
            return None
        rng = np.random.default_rng(0)
        points = torch.from_numpy(rng.standard_normal((4, structured.size)))
        with torch.no_grad():
            zero = structured.coefficients(torch.zeros(structured.size, dtype=torch.float64))
            slope = structured.coefficients(torch.ones(structured.size).double()) - zero
            found = structured.coefficients(points)
        expected = zero + slope * points
        size = torch.maximum(zero.abs(), expected.abs().amax(0))  # each coefficient has its units
        agrees = bool(((found - expected).abs() <= 1e-12 * size).all())
        return (zero, slope) if agrees else None

    def _traced(self, name: str, function: Callable[..., Tensor]) -> Tracer:
        if name not in self._tracers:
            self._tracers[name] = Tracer(
                function, "the coefficients", traced_after=_TRACED_AFTER, tolerance=1e-9
            )
        return self._tracers[name]

    def _batched(self, zeta: Tensor) -> Tensor:
        return coefficients_by_predictor(self.structured, zeta)

    def _pulled(self, zeta: Tensor, cotangent: Tensor) -> Tensor:
        with torch.enable_grad():
            at = zeta.detach().requires_grad_()
            return torch.autograd.grad(self._batched(at), at, cotangent)[0]

    def coefficients(self, zeta: Float[Tensor, "S P"]) -> Float[Tensor, "S q C"]:
        """B at each point, with q = p + 1."""
        if self.affine is None:
            found: Tensor = self._traced("map", self._batched)(zeta)
            return found
        zero, slope = self.affine
        placed = (zero + slope * zeta).unsqueeze(-1) * self.structured.placement
        return nn.functional.pad(placed, (0, 0, 0, 1))

    def pull(
        self, zeta: Float[Tensor, "S P"], cotangent: Float[Tensor, "S q C"]
    ) -> Float[Tensor, "S P"]:
        """The gradient in the coordinates, from that in B."""
        if self.affine is None:
            found: Tensor = self._traced("pull", self._pulled)(zeta, cotangent)
            return found
        own = (cotangent[:, :-1] * self.structured.placement).sum(-1)
        return own * self.affine[1]

    def curvature(
        self, zeta: Float[Tensor, "P"], cotangent: Float[Tensor, "q C"], inner: GroupedMatrix
    ) -> GroupedMatrix:
        """The negative Hessian in the coordinates.

        Args:
            zeta: the point.
            cotangent: the gradient in B.
            inner: the negative Hessian in the coefficients and then the thresholds.
        """
        groups = self.groups
        found = GroupedMatrix.zeros(groups, len(zeta), zeta)
        others = found.others  # coordinates
        own = self._jacobian(zeta, inner.others)[:, others]  # of the other coefficients
        if len(zeta) > _DENSE and float((own != 0).double().mean()) < _FEW:
            pull = own.T.to_sparse()  # each effect has coordinates of its own
            rest = pull @ (pull @ inner.rest.T).T
        else:
            rest = own.T @ inner.rest @ own
        blocks, border = found.blocks, found.border
        if len(groups):
            factor, moved = self._of_groups(zeta, others)
            along = inner.blocks @ moved + inner.border @ own
            blocks, border = factor.T @ inner.blocks @ factor, factor.T @ along
            crossed = (inner.border @ own).flatten(0, 1)
            moved = moved.flatten(0, 1)
            rest = rest + moved.T @ along.flatten(0, 1) + crossed.T @ moved
        found = GroupedMatrix(groups, others, blocks, border, rest)
        if self.affine is None:
            bend = self._bend(zeta, cotangent, others)
            found = replace(
                found, border=border - bend[:, groups].permute(1, 2, 0), rest=rest - bend[:, others]
            )
        return replace(found, rest=(found.rest + found.rest.T) / 2)

    def _jacobian(
        self, zeta: Float[Tensor, "P"], entries: Int[Tensor, "m"]
    ) -> Float[Tensor, "m P"]:
        """The derivative of some coefficients and thresholds, from copies of the point."""
        places = self.entries[entries]

        def entries_of(points: Float[Tensor, "m P"], chosen: slice) -> Tensor:
            return self._batched(points).flatten(1)[:, places[chosen]].diagonal()

        return self._rows_of_gradients(zeta, len(entries), entries_of)

    def _of_groups(
        self, zeta: Float[Tensor, "P"], others: Int[Tensor, "s"]
    ) -> tuple[Float[Tensor, "q q"], Float[Tensor, "J q s"]]:
        """Derivatives of the coefficients of groups: in their own coordinates, and in the others.

        A group's coefficients are linear in its own coordinates, by a matrix that is the same for
        all groups.
        """
        groups, structured = self.groups, self.structured
        q = groups.shape[1]
        points = zeta.repeat(q, 1)
        points[:, groups.flatten()] = torch.eye(q, dtype=zeta.dtype).repeat(1, len(groups))
        factor = structured.coefficients(points)[:, groups[0]].T
        moved = zeta.new_zeros(*groups.shape, len(others))
        # J e_j as the gradient of e_j' (J' u) in u: forward mode would import torch._dynamo.
        with torch.enable_grad():
            at = zeta.detach().requires_grad_()
            beta = structured.coefficients(at)
            u = torch.zeros_like(beta, requires_grad=True)
            (pulled,) = torch.autograd.grad(beta, at, u, create_graph=True)
            for j in structured.scale_coordinates(int(groups[0, 0])):
                (slope,) = torch.autograd.grad(pulled[j], u, retain_graph=True)
                moved[..., int(torch.searchsorted(others, j))] = slope[groups]
        return factor, moved

    def _bend(
        self, zeta: Float[Tensor, "P"], cotangent: Float[Tensor, "q C"], chosen: Int[Tensor, "s"]
    ) -> Float[Tensor, "s P"]:
        """Some rows of the second derivative of the product of B and a cotangent."""

        def slopes(points: Float[Tensor, "m P"], part: slice) -> Tensor:
            value = (self._batched(points) * cotangent).sum()
            (slope,) = torch.autograd.grad(value, points, create_graph=True)
            return slope[:, chosen[part]].diagonal()

        return self._rows_of_gradients(zeta, len(chosen), slopes)

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
