r"""The map from coordinates of the effects to coefficients, for many points at once.

The predictors of a model without networks are $\eta = X B(\zeta) + \mathrm{offset}$. Here is B, the
coefficients by predictor with a last row of constants, shape (p + 1, C), and the adjoint of its
derivative: they do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.tracing.tracer import Tracer
from subbayes.semistructured.structured_predictor import StructuredPredictor

__all__ = ["EffectMap", "coefficients_by_predictor", "placed_by_predictor"]

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

    Attributes:
        affine: the intercepts and the slopes, shapes (p, P), of coefficients that are affine in
            their own coordinates; None for others.
    """

    def __init__(self, structured: StructuredPredictor) -> None:
        self.structured = structured
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
        self,
        zeta: Float[Tensor, "P"],
        cotangent: Float[Tensor, "q C"],
        inner: Float[Tensor, "C C q q"],
    ) -> Float[Tensor, "P P"]:
        """The negative Hessian in the coordinates, from gradient and negative Hessian in B."""
        jacobian = self._jacobian(zeta)  # (q, C, P)
        found = zeta.new_zeros(len(zeta), len(zeta))
        pulls = [each.T for each in jacobian.unbind(1)]
        if len(zeta) > _DENSE and float((jacobian != 0).double().mean()) < _FEW:
            pulls = [pull.to_sparse() for pull in pulls]  # each effect has coordinates of its own
        for a, left in enumerate(pulls):
            for b, right in enumerate(pulls):
                found = found + left @ (right @ inner[a, b].T).T
        return found if self.affine is not None else found - self._bend(zeta, cotangent)

    def _jacobian(self, zeta: Float[Tensor, "P"]) -> Float[Tensor, "q C P"]:
        """The derivative of B, from a copy of the point for each of its entries."""
        shape = self._batched(zeta).shape
        with torch.enable_grad():
            points = zeta.expand(shape.numel(), -1).clone().requires_grad_()
            entries = self._batched(points).flatten(1).diagonal()
            (found,) = torch.autograd.grad(entries.sum(), points)
        return found.reshape(*shape, -1)

    def _bend(self, zeta: Float[Tensor, "P"], cotangent: Float[Tensor, "q C"]) -> Tensor:
        """The second derivative of the product of B and a cotangent."""
        with torch.enable_grad():
            points = zeta.expand(len(zeta), -1).clone().requires_grad_()
            value = (self._batched(points) * cotangent).sum()
            (slope,) = torch.autograd.grad(value, points, create_graph=True)
            (found,) = torch.autograd.grad(slope.diagonal().sum(), points)
        return found
