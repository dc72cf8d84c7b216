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
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.regression.integrals.coefficient_likelihood import NormalRows
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.proposals import difference_modes
from subbayes.regression.shapes import EffectPoints, NetworkValues, RestPoints
from subbayes.semistructured.integrals.effect_density import EffectDensity

_MOST = 12  # coordinates h, for differences of all pairs of them


class CollapsedDensity:
    """The density of the coordinates h given the networks' contributions, as `ConditionalModes`.

    Args:
        density: the joint density of responses and effects.
        collapsed: the density of h without networks.
    """

    def __init__(self, density: EffectDensity, collapsed: CollapsedNormal) -> None:
        assert isinstance(collapsed.rows, NormalRows)
        self.collapsed, self.rows = collapsed, collapsed.rows
        self.size = len(collapsed.rest)
        self.start = torch.zeros(self.size, dtype=torch.float64)
        self.start = self.find(torch.zeros(1, *density.offset.shape, dtype=torch.float64))[0][0]

    @staticmethod
    def of(density: EffectDensity) -> CollapsedDensity | None:
        """The density of h; None where coefficients have no closed form, or h is large."""
        if density.design.device.type != "cpu" or not isinstance(density.rows, NormalRows):
            return None
        collapsed = CollapsedNormal(density.map, density.rows)
        if not collapsed.linear or not 0 < len(collapsed.rest) <= _MOST:
            return None
        return CollapsedDensity(density, collapsed)

    def log_joint(self, h: Float[Tensor, "S m d"], deep: NetworkValues) -> Float[Tensor, "S m"]:
        """Log of p(y - f | h) p(h), up to the prior's constant."""
        return self._log_joint(h, self.rows.shifted(deep[..., 0]), torch.arange(len(h)))

    def _log_joint(
        self, h: Float[Tensor, "S m d"], rows: NormalRows, networks: Int[Tensor, "S"]
    ) -> Float[Tensor, "S m"]:
        each = networks.repeat_interleave(h.shape[1])
        size = self.collapsed.at_once()
        values = [
            self.collapsed.log_marginal(part, rows.at_points(own))
            for part, own in zip(h.flatten(0, 1).split(size), each.split(size), strict=True)
        ]
        return torch.cat(values).reshape(h.shape[:2]) - 0.5 * h.square().sum(-1)

    def find(self, deep: NetworkValues) -> tuple[RestPoints, Float[Tensor, "S d d"]]:
        """The mode of h, and a factor of the covariance there, for each contribution."""
        rows = self.rows.shifted(deep[..., 0])

        def targets(
            h: Float[np.ndarray, "S m d"], which: Int[np.ndarray, "S"]
        ) -> Float[np.ndarray, "S m"]:
            return self._log_joint(torch.from_numpy(h), rows, torch.from_numpy(which)).numpy()

        modes, precisions = difference_modes(targets, self.start.repeat(len(deep), 1).numpy())
        factors = np.linalg.cholesky(np.linalg.inv(precisions))
        return torch.from_numpy(modes), torch.from_numpy(factors)

    def complete(
        self, h: RestPoints, deep: NetworkValues, rng: np.random.Generator
    ) -> EffectPoints:
        """All coordinates of the effects, the coefficients drawn exactly given h."""
        eps = torch.from_numpy(rng.standard_normal((len(h), len(self.collapsed.linear))))
        return self.collapsed.coordinates(h, eps, self.rows.shifted(deep[..., 0]))[0]
