r"""A normal response beside networks, with its coefficients integrated out in closed form.

Given the coordinates h of sigma and of the standard deviations of smooths and random effects, the
coefficients are integrated out as in `subbayes.semistructured.integrals.collapsed_networks`, and

$$ p(D \mid \varphi) = \int p\bigl(y - f(\varphi) \mid h\bigr)\, p(h)\, dh $$

is an integral over these few coordinates alone, whatever the number of coefficients: by importance
sampling from a t distribution around their mode given the networks.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.integrals.coefficient_likelihood import NormalStatistics
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.proposals import DIFFERENCE, difference_shifts
from subbayes.regression.shapes import EffectPoints, NetworkValues
from subbayes.semistructured.integrals.collapsed_networks import ResponseRows
from subbayes.semistructured.integrals.effect_density import EffectDensity

_MOST = 12  # coordinates h, for differences of all pairs of them
_STEPS = 40  # of Newton's method
_CLOSE = 2e-3  # the last of Newton's steps
_LONGEST = 2.0  # step
_LEAST_CURVATURE = 1e-3
_SHORTER = 0.3  # a step that lowers the density


class CollapsedDensity:
    """The density of the coordinates h given the networks' contributions, as `ConditionalModes`.

    Args:
        density: the joint density of responses and effects.
        collapsed: the density of h without networks.
    """

    def __init__(self, density: EffectDensity, collapsed: CollapsedNormal) -> None:
        assert isinstance(collapsed.rows, NormalStatistics)
        self.collapsed = collapsed
        self.rows = ResponseRows.of(collapsed.rows, density)
        self.size = len(collapsed.rest)
        self._pairs, shifts = difference_shifts(self.size)
        self._shifts = torch.from_numpy(shifts)
        self.start = torch.zeros(self.size, dtype=torch.float64)
        self.start = self.find(torch.zeros(1, *density.offset.shape, dtype=torch.float64))[0][0]

    @staticmethod
    def of(density: EffectDensity) -> CollapsedDensity | None:
        """The density of h; None where coefficients have no closed form, or h is large."""
        if density.design.device.type != "cpu":
            return None
        likelihood = density.likelihood()
        if not isinstance(likelihood.rows, NormalStatistics):
            return None
        collapsed = CollapsedNormal(likelihood.map, likelihood.rows)
        if not collapsed.linear or not 0 < len(collapsed.rest) <= _MOST:
            return None
        return CollapsedDensity(density, collapsed)

    def log_joint(self, h: Float[Tensor, "S m d"], deep: NetworkValues) -> Float[Tensor, "S m"]:
        """Log of p(y - f | h) p(h), up to the prior's constant."""
        return self._log_joint(h, self.rows.beside(deep[..., 0]))

    def _log_joint(self, h: Float[Tensor, "S m d"], rows: NormalStatistics) -> Tensor:
        networks = torch.arange(len(h)).repeat_interleave(h.shape[1])
        points = h.flatten(0, 1)
        size = self.collapsed.at_once
        values = [
            self.collapsed.log_marginal(part, rows.at_points(own))
            for part, own in zip(points.split(size), networks.split(size), strict=True)
        ]
        return torch.cat(values).reshape(h.shape[:2]) - 0.5 * h.square().sum(-1)

    def find(self, deep: NetworkValues) -> tuple[Float[Tensor, "S d"], Float[Tensor, "S d d"]]:
        """The mode of h, and a factor of the covariance there, for each contribution.

        Newton steps with differences; each contribution stops by itself, so that the density does
        not depend on the others.
        """
        rows = self.rows.beside(deep[..., 0])
        mode = self.start.repeat(len(deep), 1)
        step, value = torch.zeros_like(mode), mode.new_full((len(deep),), -torch.inf)
        factor = torch.eye(self.size, dtype=torch.float64).repeat(len(deep), 1, 1)
        active = torch.arange(len(deep))
        for number in range(_STEPS):
            ahead = mode[active] + step[active]
            reached, gradient, precision = self._derivatives(ahead, rows.at_points(active))
            better = reached > value[active]
            last = step[active].abs().amax(1) < _CLOSE
            step[active[~better]] *= _SHORTER
            moved = active[better]
            mode[moved], value[moved] = ahead[better], reached[better]
            values, vectors = torch.linalg.eigh(precision[better])
            values = values.abs().clamp_min(_LEAST_CURVATURE)
            covariance = (vectors / values.unsqueeze(1)) @ vectors.mT
            factor[moved] = torch.linalg.cholesky(covariance)
            newton = (covariance @ gradient[better].unsqueeze(-1)).squeeze(-1)
            longest = newton.abs().amax(1, keepdim=True)
            step[moved] = newton / (longest / _LONGEST).clamp_min(1.0)
            if number and not len(active := active[~last]):
                break
        return mode, factor

    def _derivatives(
        self, at: Float[Tensor, "S d"], rows: NormalStatistics
    ) -> tuple[Float[Tensor, "S"], Float[Tensor, "S d"], Float[Tensor, "S d d"]]:
        """Value, gradient and negative Hessian of the log density, by differences."""
        d = self.size
        value = self._log_joint(at[:, None] + self._shifts, rows)
        centre, ahead, behind = value[:, 0], value[:, 1 : 1 + d], value[:, 1 + d : 1 + 2 * d]
        precision = torch.diag_embed((2 * centre[:, None] - ahead - behind) / DIFFERENCE**2)
        signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
        for k, (i, j) in enumerate(self._pairs):
            corners = value[:, 1 + 2 * d + 4 * k :][:, :4]
            precision[:, i, j] = precision[:, j, i] = -(corners @ signs) / (4 * DIFFERENCE**2)
        return centre, (ahead - behind) / (2 * DIFFERENCE), precision

    def complete(
        self, h: Float[Tensor, "S d"], deep: NetworkValues, rng: np.random.Generator
    ) -> EffectPoints:
        """All coordinates of the effects, the coefficients drawn exactly given h."""
        eps = torch.from_numpy(rng.standard_normal((len(h), len(self.collapsed.linear))))
        return self.collapsed.coordinates(h, eps, self.rows.beside(deep[..., 0]))[0]
