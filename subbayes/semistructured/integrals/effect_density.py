"""The joint density of responses and effects given the networks, and its modes."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.shapes import EffectPoints, NetworkValues
from subbayes.semistructured.predictors import pad_thresholds


class EffectDensity(EffectsLikelihood):
    """The joint density of responses and effects given the networks' contributions.

    Args:
        structured: the structured predictor.
        family: distribution of the response.
        design: the training rows as `Design.rows` has them, in float64; they are not joined.
        offset: their offsets, in float64.
        y: their targets.
    """

    join = False

    def predictors(
        self, zeta: Float[Tensor, "*#S P"], deep: Float[Tensor, "*#S n K"]
    ) -> Float[Tensor, "*_ n C"]:
        """Predictors at coordinates of the effects and contributions of the networks."""
        eta = self.structured(zeta, self.design, self.offset)
        return eta + pad_thresholds(deep, eta)

    def log_joint(
        self, zeta: Float[Tensor, "*#S P"], deep: Float[Tensor, "*#S n K"]
    ) -> Float[Tensor, "*_"]:
        """Log-likelihood plus log prior of the coordinates, up to the prior's constant."""
        prior = 0.5 * zeta.square().sum(-1)
        return self.family.log_prob(self.predictors(zeta, deep), self.y).sum(-1) - prior

    def row_information(self, zeta: EffectPoints, deep: NetworkValues) -> NetworkValues:
        """The squared derivative of each row's log density in each predictor."""
        with torch.no_grad():
            score = self.family.score(self.predictors(zeta, deep), self.y)
        return score[..., : deep.shape[-1]].square()


class ConditionalModes:
    """Modes of the effects given the networks, and curvatures there, by Newton's method."""

    def __init__(self, density: EffectDensity) -> None:
        self.density, self.size = density, density.structured.size
        self.start = density.mode(torch.zeros(self.size, dtype=torch.float64))[0]

    def find(self, deep: NetworkValues) -> tuple[EffectPoints, Float[Tensor, "S P P"]]:
        """The mode, and a factor of the covariance there, for each contribution."""
        found = [self.density.shifted(f).mode(self.start) for f in deep.double()]
        lower = torch.linalg.cholesky(torch.stack([precision.dense() for _, precision in found]))
        eye = torch.eye(self.size, dtype=lower.dtype)
        factor = torch.linalg.solve_triangular(lower, eye, upper=False).mT
        return torch.stack([mode for mode, _ in found]), factor

    def log_joint(self, zeta: Float[Tensor, "S m P"], deep: NetworkValues) -> Float[Tensor, "S m"]:
        """Log-likelihood plus log prior at m coordinates of each contribution."""
        return self.density.log_joint(zeta, deep.unsqueeze(1))

    def complete(
        self, zeta: EffectPoints, deep: NetworkValues, rng: np.random.Generator
    ) -> EffectPoints:
        """All coordinates of the effects, which these are."""
        return zeta
