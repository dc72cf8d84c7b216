r"""Effects that vary among groups, integrated out of responses that are not normal.

Let $\zeta_j$ be the standard normal coordinates of the effects of group j and h all other
coordinates. Given h, groups are independent,

$$ p(D \mid h) = \prod_j \int p(D_j \mid \zeta_j, h)\, N(\zeta_j; 0, I)\, d\zeta_j , $$

and each integral is estimated without bias by draws around the mode $\hat\zeta_j(h)$, with the
curvature there, of the mixture of `standard_proposals`: as pairs $\pm\varepsilon$, whose weights
differ in opposite directions where the density is skewed. The estimate takes the place of the
density of h in Metropolis-Hastings, and one draw of each group is chosen by the weights, so that
the draws of all coordinates are exact (Andrieu, Doucet and Holenstein 2010, "Particle Markov chain
Monte Carlo methods", section 4.4).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from subbayes.semistructured.coefficient_likelihood import CanonicalRows
from subbayes.semistructured.effects_likelihood import EffectsLikelihood
from subbayes.semistructured.group_elimination import block_cholesky, block_solve, eliminated_groups
from subbayes.semistructured.proposals import (
    MIDDLE_PILOT,
    Distribution,
    Proposals,
    laplace_proposals,
    mixture_around,
    pilot_generator,
    standard_proposals,
)

__all__ = ["MOST_BESIDE_GROUPS", "GroupedImportance", "proposals_beside_groups"]

MOST_BESIDE_GROUPS = 30
"""Coordinates h, for differences of all pairs of them."""

_ELEMENTS = 2**21  # rows times points at once
_LEAST_REPEATS = 0.5  # share of different loadings below which rows are joined
_PAIRS = 2  # of draws of each group
_STEPS = 25  # of Newton's method
_FEW_STEPS = 3
_CLOSE = 1e-9  # in standard deviations of the prior
_LONGEST = 1.0  # step
_STEP = 1e-4  # of differences
_FURTHEST = 2.0  # from the mode at the point near the posterior


class GroupedImportance:
    """The likelihood of the coordinates h with the effects of groups integrated out.

    Args:
        likelihood: of Poisson or Bernoulli responses.

    Attributes:
        groups: columns of the effects of each group, (J, q).
        rest: positions of the coordinates h.
        chosen: coordinates of the groups at the points of the last call of `estimate`.
    """

    def __init__(self, likelihood: EffectsLikelihood) -> None:
        rows = likelihood.rows
        assert isinstance(rows, CanonicalRows)
        groups = self.groups_of(likelihood)
        assert groups is not None
        self.likelihood, self.rows, self.groups = likelihood, rows, groups
        self.structured = likelihood.map.structured
        self.size = self.structured.size
        taken = set(groups.flatten().tolist())
        self.rest = [j for j in range(self.size) if j not in taken]
        others = [j for j in range(len(self.structured.design.names)) if j not in taken]
        own = rows.design[:, groups.flatten()].reshape(len(rows.design), *groups.shape)
        codes = own.abs().sum(2).argmax(1)
        order = codes.argsort(stable=True)
        self._codes = codes[order]
        self._loadings = own[torch.arange(len(own)), codes][order]
        self._others, self._design = others, rows.design[order][:, others]
        self._order, self._constant = order, rows.constant
        self._offset = None if rows.offset is None else rows.offset[order, None]
        self._weights = None if rows.weights is None else rows.weights[order, None]
        self._response = rows.response[order]
        self._cells = self._join() if rows.label == "poisson" else None
        self._fixed = rows.statistic[others]
        self._tangent: tuple[Tensor, Tensor, Tensor] | None = None
        self.chosen = torch.zeros(0, *groups.shape, dtype=torch.float64)

    @staticmethod
    def groups_of(likelihood: EffectsLikelihood) -> Tensor | None:
        """Columns of the groups that can be integrated out; None if there are none."""
        if not isinstance(likelihood.rows, CanonicalRows):
            return None
        design = likelihood.rows.design
        return eliminated_groups(likelihood.map.structured, design.abs().T @ design.abs())

    def shifted(self, contributions: Float[Tensor, "n"]) -> GroupedImportance:
        """The likelihood with something added to the predictor of each row, of rows not joined."""
        found, own = copy.copy(self), contributions[self._order, None]
        found._offset = own if self._offset is None else self._offset + own
        found._constant = self._constant + float(self.rows.response @ contributions)
        return found

    def _join(self) -> Int[Tensor, "n"] | None:
        """Join counts with equal loadings in a group, and return the cell of each row.

        The sum of exp(eta + v'u) over the rows of a cell is exp(v'u) times that of exp(eta).
        """
        keys = torch.cat([self._codes[:, None].double(), self._loadings], 1)
        cells, place = torch.unique(keys, dim=0, return_inverse=True)
        if len(cells) > _LEAST_REPEATS * len(keys):
            return None
        self._response = self._response.new_zeros(len(cells)).index_add_(0, place, self._response)
        self._codes, self._loadings = cells[:, 0].long(), cells[:, 1:]
        return place

    # --- rows given h -----------------------------------------------------------------------

    def _given(self, h: Float[Tensor, "S d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Predictors without the groups, derivatives in their coordinates, and linear terms."""
        zeta = h.new_zeros(len(h), self.size)
        zeta[:, self.rest] = h
        level = self.structured.coefficients(zeta)[:, self._others]
        q, first = self.groups.shape[1], self.groups[0]
        factor = []
        for k in range(q):
            one = zeta.clone()
            one[:, first[k]] = 1.0
            factor.append(self.structured.coefficients(one)[:, first])
        eta = self._design @ level.T
        if self._offset is not None:
            eta += self._offset
        if self._cells is not None:
            mean = eta.exp_() if self._weights is None else eta.exp_() * self._weights
            eta = mean.new_zeros(len(self._codes), len(h)).index_add_(0, self._cells, mean).log_()
        slopes = torch.stack([self._loadings @ part.T for part in factor])  # (q, rows, S)
        return eta, slopes, level @ self._fixed + self._constant

    def _summed(self, values: Float[Tensor, "n S"]) -> Float[Tensor, "J S"]:
        """Sums over the rows of each group."""
        found = values.new_zeros(len(self.groups), values.shape[1])
        return found.index_add_(0, self._codes, values)

    def _predictor(self, eta: Tensor, slopes: Tensor, zeta: Float[Tensor, "q J S"]) -> Tensor:
        """Predictors of rows, or of cells of joined rows: the logarithms of their summed means."""
        for part, own in zip(slopes, zeta, strict=True):
            eta = torch.addcmul(eta, part, own[self._codes])
        return eta

    def _group_values(
        self, eta: Tensor, slopes: Tensor, zeta: Float[Tensor, "q J S"], pulled: Tensor
    ) -> Float[Tensor, "J S"]:
        """Log of likelihood times prior of each group, without terms linear in other effects."""
        eta_of = self._predictor(eta, slopes, zeta)
        cumulant = eta_of.exp_() if self.rows.label == "poisson" else F.softplus(eta_of)
        if self._weights is not None and self._cells is None:
            cumulant = cumulant * self._weights
        value = -self._summed(cumulant) - 0.5 * zeta.square().sum(0)
        return value + (pulled * zeta).sum(0)

    def _pulled(self, slopes: Tensor) -> Float[Tensor, "q J S"]:
        """The derivative of the terms that are linear in the predictors."""
        return torch.stack([self._summed(self._response[:, None] * part) for part in slopes])

    def _derivatives(
        self, eta: Tensor, slopes: Tensor, zeta: Float[Tensor, "q J S"], pulled: Tensor
    ) -> tuple[Float[Tensor, "q J S"], Float[Tensor, "J S q q"]]:
        """The gradient of each group's value, and its negative Hessian."""
        eta_of = self._predictor(eta, slopes, zeta)
        if self.rows.label == "poisson":
            mean = variance = eta_of.exp_()
        else:
            mean = eta_of.sigmoid()
            variance = mean * (1 - mean)
        if self._weights is not None and self._cells is None:
            mean, variance = mean * self._weights, variance * self._weights
        gradient = pulled - torch.stack([self._summed(mean * part) for part in slopes]) - zeta
        q = len(slopes)
        hessian = zeta.new_zeros(*zeta.shape[1:], q, q)
        for i in range(q):
            weighted = variance * slopes[i]
            for j in range(i + 1):
                hessian[..., i, j] = self._summed(weighted * slopes[j])
                hessian[..., j, i] = hessian[..., i, j]
        hessian.diagonal(dim1=2, dim2=3).add_(1.0)
        return gradient, hessian

    def _modes(
        self, h: Tensor, eta: Tensor, slopes: Tensor, pulled: Tensor, steps: int = _STEPS
    ) -> tuple[Float[Tensor, "q J S"], Float[Tensor, "J S q q"]]:
        """Modes of all groups, and Cholesky factors of their precisions.

        A few steps, as many for all points whatever the others are, are enough for proposals, whose
        distribution may then depend on h alone.
        """
        zeta = self._guess(h)
        for _ in range(steps):
            gradient, hessian = self._derivatives(eta, slopes, zeta, pulled)
            factor = block_cholesky(hessian)
            right = gradient.permute(1, 2, 0).unsqueeze(-1)
            step = block_solve(factor, block_solve(factor, right), transposed=True)[..., 0]
            size = step.abs().amax(-1, keepdim=True)
            step = step / (size / _LONGEST).clamp_min(1.0)
            zeta = zeta + step.permute(2, 0, 1)
            if steps == _STEPS and not float(size.max()) > _CLOSE:
                break
        return zeta, factor

    def _guess(self, h: Float[Tensor, "S d"]) -> Float[Tensor, "q J S"]:
        """Where Newton's method starts: the tangent at a point near the posterior, or 0."""
        groups, q = self.groups.shape
        if self._tangent is None:
            return h.new_zeros(q, groups, len(h))
        centre, mode, slope = self._tangent
        moved = ((h - centre) @ slope).clamp(-_FURTHEST, _FURTHEST)
        return (mode + moved).T.reshape(q, groups, -1)

    def start_near(self, h: Float[np.ndarray, "d"]) -> None:
        """Set the point near the posterior, which has no influence on the distribution of draws."""
        points = torch.from_numpy(np.concatenate([h[None], h + _STEP * np.eye(len(h))]))
        with torch.no_grad():
            eta, slopes, _ = self._given(points)
            modes, _ = self._modes(points, eta, slopes, self._pulled(slopes))
        flat = modes.flatten(0, 1).T
        self._tangent = points[0], flat[0], (flat[1:] - flat[0]) / _STEP

    # --- densities --------------------------------------------------------------------------

    def _parts(self, h: Float[np.ndarray, "S d"]) -> tuple[Tensor, ...]:
        return torch.from_numpy(h).split(max(1, _ELEMENTS // max(1, len(self._design))))

    def laplace(self, h: Float[np.ndarray, "S d"]) -> Float[np.ndarray, "S"]:
        """The Laplace approximation of log p(D, h), a smooth function."""
        found = []
        with torch.no_grad():
            for part in self._parts(h):
                eta, slopes, linear = self._given(part)
                pulled = self._pulled(slopes)
                zeta, factor = self._modes(part, eta, slopes, pulled)
                log_det = factor.diagonal(dim1=2, dim2=3).log().sum((0, 2))
                value = self._group_values(eta, slopes, zeta, pulled).sum(0) - log_det
                found.append(value + linear - 0.5 * part.square().sum(1))
        return torch.cat(found).numpy()

    def estimate(
        self, h: Float[np.ndarray, "S d"], rngs: Sequence[np.random.Generator]
    ) -> Float[np.ndarray, "S"]:
        """The logarithm of an unbiased estimate of p(D, h), up to a constant.

        Args:
            h: points, an equal number for each generator.
            rngs: generators, which have the numbers of their own points.
        """
        per = len(h) // len(rngs)
        parts = [self._estimates(h[i * per :][:per], rng) for i, rng in enumerate(rngs)]
        self.chosen = torch.cat([chosen for _, chosen in parts])
        return np.concatenate([value for value, _ in parts])

    def _estimates(
        self, h: Float[np.ndarray, "S d"], rng: np.random.Generator
    ) -> tuple[Float[np.ndarray, "S"], Float[Tensor, "S J q"]]:
        values, chosen = [], []
        with torch.no_grad():
            for part in self._parts(h):
                value, zeta = self._estimate(part, rng)
                values.append(value.numpy())
                chosen.append(zeta)
        return np.concatenate(values), torch.cat(chosen)

    def _estimate(self, h: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        (groups, q), points = self.groups.shape, len(h)
        eta, slopes, linear = self._given(h)
        pulled = self._pulled(slopes)
        mode, factor = self._modes(h, eta, slopes, pulled, _FEW_STEPS)
        log_det = factor.diagonal(dim1=2, dim2=3).log().sum(-1)
        best = mode
        log_sum = mode.new_full((groups, points), -math.inf)
        for _ in range(_PAIRS):
            eps, log_q = standard_proposals(groups * points, q, rng)
            noise = torch.from_numpy(eps).reshape(groups, points, q, 1)
            shift = block_solve(factor, noise, transposed=True)[..., 0].permute(2, 0, 1)
            log_proposal = torch.from_numpy(log_q).reshape(groups, points) + log_det
            for sign in (1.0, -1.0):
                zeta = mode + sign * shift
                log_w = self._group_values(eta, slopes, zeta, pulled) - log_proposal
                log_sum = torch.logaddexp(log_sum, log_w)
                u = torch.from_numpy(rng.random((groups, points)))
                best = torch.where(u.log() < log_w - log_sum, zeta, best)
        value = log_sum.sum(0) + linear - 0.5 * h.square().sum(1)
        return value, best.permute(2, 1, 0)


def proposals_beside_groups(
    grouped: GroupedImportance,
    at: Float[np.ndarray, "f"],
    whole: Callable[[Float[np.ndarray, "*S f"]], Float[np.ndarray, "*S d"]],
) -> tuple[Distribution, Proposals, float]:
    """Proposals of coordinates h, which `grouped` starts near to from now on.

    Args:
        grouped: the likelihood of h.
        at: where the mode is looked for.
        whole: all coordinates h from those that are proposed.

    Returns:
        The proposals, the component they were fitted from, and the efficiency of their weights.
    """
    proposals = laplace_proposals(lambda h: grouped.laplace(whole(h)), at)
    grouped.start_near(whole(proposals.mean))
    pilot = [pilot_generator()]

    def estimate(h: Float[np.ndarray, "S f"]) -> Float[np.ndarray, "S"]:
        return grouped.estimate(whole(h), pilot)

    one, efficiency = proposals.adapted(estimate, pilot[0])
    fitted: Distribution = one
    if one.has_large_weights(estimate):
        fitted, efficiency = mixture_around(one, efficiency, estimate, pilot[0], MIDDLE_PILOT)
    return fitted, one, efficiency
