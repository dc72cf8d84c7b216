"""The log-likelihood and the mode of a model without networks, in the coordinates of effects."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.families import Family
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.integrals.coefficient_likelihood import (
    CoefficientLikelihood,
    QuadraticRows,
    coefficient_likelihood,
)
from subbayes.regression.integrals.effect_map import EffectMap
from subbayes.regression.shapes import EffectPoints, PointValues, RowPredictors, StoredRows
from subbayes.regression.terms.group_elimination import GroupedMatrix, eliminated_groups
from subbayes.utils.types import Targets

_MAX_STEPS = 100  # of Newton's method
_HALVINGS = 30
_CLOSE = 1e-9  # in standard deviations of the prior


class EffectsLikelihood:
    """The log-likelihood of a model without networks as a function of the coordinates of effects.

    Args:
        structured: the structured predictor.
        family: distribution of the response.
        design: the training rows, as `Design.rows` has them.
        offset: their offsets.
        y: their targets.

    Attributes:
        join: whether equal rows may be one row.
    """

    join: ClassVar[bool] = True

    def __init__(
        self,
        structured: StructuredPredictor,
        family: Family,
        design: StoredRows,
        offset: RowPredictors,
        y: Targets,
    ) -> None:
        groups = eliminated_groups(structured.group_columns())
        self.map, self.n_rows = EffectMap(structured, groups), len(design)
        self.structured, self.family, self.design = structured, family, design
        self.offset, self.y = offset, y
        self._rows_of = partial(coefficient_likelihood, family, structured.layout, groups, design)
        self.rows: CoefficientLikelihood = self._rows_of(offset, y, join=self.join)

    def shifted(self, contributions: RowPredictors) -> EffectsLikelihood:
        """The likelihood beside something that is added to the predictors of the rows."""
        found = copy.copy(self)
        found.rows = self._rows_of(self.offset + contributions, self.y, join=False)
        return found

    def value(self, zeta: EffectPoints) -> PointValues:
        """The log-likelihood at each point."""
        with torch.no_grad():
            return self.rows.value(self.map.coefficients(zeta))

    def value_and_grad(self, zeta: EffectPoints) -> tuple[PointValues, EffectPoints]:
        """The log-likelihood and its gradient."""
        if self.map.is_affine:  # without autograd, whose overhead is that of a few hundred rows
            with torch.no_grad():
                value, slope = self.rows.value_and_grad(self.map.coefficients(zeta))
                return value, self.structured.scaled(slope)
        with torch.enable_grad():
            points = zeta.detach().requires_grad_()
            b = self.map.coefficients(points)
        with torch.no_grad():
            value, slope = self.rows.value_and_grad(b.detach())
        return value, torch.autograd.grad(b, points, slope)[0]

    def curvature(self, zeta: Float[Tensor, "P"]) -> GroupedMatrix:
        """The negative Hessian at one point."""
        with torch.no_grad():
            b = self.map.coefficients(zeta[None])
            _, slope = self.rows.value_and_grad(b)
            inner = self.rows.curvature(b[0])
            return self.map.curvature(zeta, slope[0], inner)

    def quadratic(self, points: EffectPoints) -> QuadraticRows:
        """A quadratic approximation around one point, or the mean of many.

        Slope and curvature are means over the points: means over a distribution close to the
        posterior make the best normal approximation of it (Opper and Archambeau 2009, "The
        variational Gaussian approximation revisited", eq. 16).

        Raises:
            LinAlgError: a curvature that is not finite.
        """
        entries, b = self.map.entries, self.map.coefficients(points)
        with torch.no_grad():
            value, slope = self.rows.value_and_grad(b)
            hessian = self.rows.curvature(b[0])
            for one in b[1:]:
                hessian = hessian + self.rows.curvature(one)
        return QuadraticRows(
            entries,
            # with negative eigenvalues it would not be a density for large standard deviations
            hessian.scaled(1 / len(b)).without_negative(),
            b.flatten(1)[:, entries].mean(0),
            slope.flatten(1)[:, entries].mean(0),
            torch.zeros((), dtype=torch.float64),
            float(value.mean()),
            torch.zeros(len(entries), dtype=torch.float64),
        )

    def mode(
        self, start: Float[Tensor, "P"], fixed: Sequence[int] = ()
    ) -> tuple[Float[Tensor, "P"], GroupedMatrix]:
        """The most probable coordinates under standard normal priors, and the precision there.

        Newton steps, halved until they do not lower the density. Where it is not concave, the
        eigenvalues of the precision are made positive. The groups of one factor are eliminated
        block by block, so that a step takes time linear in them.

        Args:
            start: where Newton's method starts.
            fixed: positions of coordinates that keep their values; their precision is 1.
        """
        zeta, value = start, self._log_density(start)
        precision, still = self._precision(zeta, fixed), list(fixed)
        for _ in range(_MAX_STEPS):
            gradient = self.value_and_grad(zeta[None])[1][0] - zeta
            gradient[still] = 0.0
            step = precision.solve(gradient)
            for _ in range(_HALVINGS):
                ahead = zeta + step
                found = self._log_density(ahead)
                if found >= value - 1e-12 * abs(value):
                    break
                step = step / 2
            else:
                break
            curved = self._precision(ahead, fixed)
            if not curved.is_finite():  # the density flattens out beyond the numbers
                break
            zeta, value, precision = ahead, found, curved
            if float(step.abs().max()) < _CLOSE:
                break
        return zeta, precision

    def _log_density(self, zeta: Tensor) -> float:
        value = float(self.value(zeta[None])) - 0.5 * float(zeta.square().sum())
        return value if value == value else -float("inf")

    def _precision(self, zeta: Tensor, fixed: Sequence[int]) -> GroupedMatrix:
        return self.curvature(zeta).without(fixed).plus_identity().positive_definite()
