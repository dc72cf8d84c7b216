"""The tempered posterior of the networks, with the effects integrated out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from subbayes.draws import Draws
from subbayes.priors import Normal
from subbayes.semistructured.integrals.marginalisation import ImportanceSampling
from subbayes.utils.types import Coordinates, LogDensity

EFFECT_BATCH = 64
"""Draws of the networks for which effects are drawn in one call."""


@dataclass(frozen=True)
class TemperedNetworks:
    r"""$p(D \mid \varphi)^{1/T} p(\varphi)$ as a density that samplers accept.

    Attributes:
        contributions: from coordinates (S, k) to the networks' contributions (S, n, K), in float64.
        marginalisation: how the effects are integrated out.
        prior: prior of the coordinates.
        rank: number of coordinates k.
        temperature: T.
        model_fingerprint: a digest of the model.
    """

    contributions: Callable[[Tensor], Tensor]
    marginalisation: ImportanceSampling
    prior: Normal
    rank: int
    temperature: float
    model_fingerprint: str

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """Log p(D | phi) of each, shape (S,)."""
        with torch.no_grad():
            deep = self.contributions(torch.from_numpy(np.ascontiguousarray(z)))
            value = self.marginalisation.log_marginal(deep)
        return np.where(np.isnan(value), -np.inf, value)

    def fingerprint(self) -> str:
        """A digest of the density."""
        return f"{self.model_fingerprint}, effects integrated out, T={self.temperature:g}"

    def check_effects(self, z: Coordinates) -> None:
        """Check that the effects can be integrated out, at coordinates of trained networks.

        Raises:
            InputError: see `ImportanceSampling.check`.
        """
        with torch.no_grad():
            self.marginalisation.check(self.contributions(torch.from_numpy(z.astype(np.float64))))

    def with_effects(self, networks: Draws, seed: int) -> Draws:
        """Add a draw of the effects to each draw of the networks.

        Args:
            networks: draws of this density.
            seed: seed of the effects.

        Returns:
            Draws of networks and effects, with the facts of the marginalisation in `meta`.
        """
        rng = np.random.default_rng([seed, 2])
        flat, parts = networks.flat(), []
        for start in range(0, len(flat), EFFECT_BATCH):
            rows = torch.from_numpy(flat[start : start + EFFECT_BATCH].copy())
            with torch.no_grad():
                parts.append(self.marginalisation.sample(self.contributions(rows), rng))
        zeta = np.concatenate(parts).reshape(*networks.z.shape[:2], -1)
        z = np.concatenate([networks.z, zeta], 2)
        meta = networks.meta | self.marginalisation.facts()
        return replace(networks, z=z, moments=None, meta=meta)
