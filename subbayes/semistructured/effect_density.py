"""The joint density of responses and effects given the networks, and its modes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.families import Family
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.semistructured.predictors import pad_thresholds
from subbayes.utils.types import Targets

_MAX_STEPS = 50  # of Newton's method


@dataclass(frozen=True)
class EffectDensity:
    """The joint density of responses and effects given the networks' contributions.

    Attributes:
        structured: the structured predictor.
        family: distribution of the response.
        design: the training rows as `Design.rows` has them, in float64.
        offset: their offsets, in float64.
        y: their targets.
    """

    structured: StructuredPredictor
    family: Family
    design: Float[Tensor, "n w"]
    offset: Float[Tensor, "n K"]
    y: Targets

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

    def row_information(
        self, zeta: Float[Tensor, "S P"], deep: Float[Tensor, "S n K"]
    ) -> Float[Tensor, "S n K"]:
        """The squared derivative of each row's log density in each predictor."""
        with torch.no_grad():
            score = self.family.score(self.predictors(zeta, deep), self.y)
        return score[..., : deep.shape[-1]].square()


class ConditionalModes:
    """Modes of the effects given the networks, and curvatures there, by Newton's method."""

    def __init__(self, density: EffectDensity) -> None:
        self.density, self.size = density, density.structured.size
        self.start = torch.zeros(self.size, dtype=torch.float64)
        without_networks = torch.zeros(1, *density.offset.shape, dtype=torch.float64)
        self.start = self.find(without_networks)[0][0]

    def find(
        self, deep: Float[Tensor, "S n K"]
    ) -> tuple[Float[Tensor, "S P"], Float[Tensor, "S P P"]]:
        """The mode, and a factor of the covariance there, for each contribution."""
        zeta = self.start.expand(len(deep), -1).clone()
        value = self.density.log_joint(zeta, deep)
        for _ in range(_MAX_STEPS):
            slope, curvature = self._derivatives(zeta, deep)
            step = torch.cholesky_solve(
                slope.unsqueeze(-1), torch.linalg.cholesky(_positive_definite(curvature))
            ).squeeze(-1)
            zeta, value, moved = self._damped_step(zeta, value, step, deep)
            if moved < 1e-9:
                break
        precision = torch.linalg.cholesky(_positive_definite(self._derivatives(zeta, deep)[1]))
        factor = torch.linalg.solve_triangular(
            precision, torch.eye(zeta.shape[1], dtype=zeta.dtype), upper=False
        ).mT
        return zeta, factor

    def log_joint(
        self, zeta: Float[Tensor, "S m P"], deep: Float[Tensor, "S n K"]
    ) -> Float[Tensor, "S m"]:
        """Log-likelihood plus log prior at m coordinates of each contribution."""
        return self.density.log_joint(zeta, deep.unsqueeze(1))

    def complete(
        self, zeta: Float[Tensor, "S P"], deep: Float[Tensor, "S n K"], rng: np.random.Generator
    ) -> Float[Tensor, "S P"]:
        """All coordinates of the effects, which these are."""
        return zeta

    def _damped_step(
        self, zeta: Tensor, value: Tensor, step: Tensor, deep: Tensor
    ) -> tuple[Tensor, Tensor, float]:
        """Take a step, halved until it does not lower the density."""
        size = torch.ones(len(zeta), 1, dtype=zeta.dtype)
        for _ in range(30):
            ahead = zeta + size * step
            found = self.density.log_joint(ahead, deep)
            worse = ~(found >= value - 1e-9)
            if not bool(worse.any()):
                break
            size[worse] /= 2
        accepted = torch.where(worse.unsqueeze(-1), zeta, ahead)
        moved = float((accepted - zeta).abs().max())
        return accepted, torch.where(worse, value, found), moved

    def _derivatives(self, zeta: Tensor, deep: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and negative Hessian of the log joint density.

        They follow from the K x K curvatures of the rows in the predictors by the chain rule.
        """
        density = self.density
        eta = density.predictors(zeta, deep).detach()
        score = density.family.score(eta, density.y)
        hessian = _row_curvatures(density.family, eta, density.y)
        linear = density.structured.linear_map
        jacobian = torch.func.vmap(torch.func.jacrev(linear))(zeta)  # (S, p + 1, C, P)
        design, width = density.structured.layout.expand(density.design), score.shape[-1]
        wide = torch.cat([design, torch.ones(len(design), 1, dtype=design.dtype)], 1)
        pulled = torch.einsum("np,snk->spk", wide, score)
        slope = torch.einsum("spkq,spk->sq", jacobian, pulled) - zeta
        curvature = zeta.new_zeros(len(zeta), zeta.shape[1], zeta.shape[1])
        for a in range(width):
            for b in range(width):
                inner = torch.einsum("np,sn,nq->spq", wide, hessian[..., a, b], wide)
                curvature = curvature - torch.einsum(
                    "spi,spq,sqj->sij", jacobian[:, :, a], inner, jacobian[:, :, b]
                )
        bend = torch.func.vmap(
            lambda z, g: torch.func.hessian(lambda at: (linear(at) * g).sum())(z)
        )(zeta, pulled)
        return slope, curvature - bend + torch.eye(zeta.shape[1], dtype=zeta.dtype)


def _row_curvatures(family: Family, eta: Tensor, y: Targets) -> Float[Tensor, "S n C C"]:
    """Second derivatives of each row's log density in its predictors."""
    rows = []
    for k in range(eta.shape[-1]):
        rows.append(torch.func.grad(lambda e, k=k: family.score(e, y)[..., k].sum())(eta))
    return torch.stack(rows, -2)


def _positive_definite(matrix: Float[Tensor, "S P P"]) -> Float[Tensor, "S P P"]:
    """Replace negative eigenvalues of matrices that are not positive definite."""
    _, info = torch.linalg.cholesky_ex(matrix)
    if not bool(info.any()):
        return matrix
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    least = 1e-9 * values.abs().amax(-1, keepdim=True)
    fixed = vectors @ torch.diag_embed(values.abs().maximum(least)) @ vectors.mT
    return torch.where((info > 0)[:, None, None], fixed, matrix)
