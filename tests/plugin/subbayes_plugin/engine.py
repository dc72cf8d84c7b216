"""Random-walk Metropolis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from subbayes.draws import Draws
from subbayes.inference.engine import Engine


@dataclass(frozen=True)
class RandomWalk(Engine):
    """Random-walk Metropolis from draws of the prior.

    Attributes:
        scale: standard deviation of the proposals.
    """

    name: ClassVar[str] = "random-walk"
    label: ClassVar[str] = "random walk"
    scale: float = 0.5

    @classmethod
    def warnings(cls, draws):
        """Steps that no chain of a random walk should rely on."""
        return (
            ["a random walk needs thousands of draws: raise draws=..."]
            if draws.n_draws < 1000
            else []
        )

    def run(self, posterior, sampling):
        """Draw from a posterior."""
        rng = np.random.default_rng(sampling.seed)
        z = self.scale * rng.standard_normal((sampling.chains, posterior.rank))
        height, kept = posterior.value(z), []
        for _ in range(200 + sampling.draws):
            proposal = z + self.scale * rng.standard_normal(z.shape)
            value = posterior.value(proposal)
            accepted = np.log(rng.random(len(z))) < value - height
            z = np.where(accepted[:, None], proposal, z)
            height = np.where(accepted, value, height)
            kept.append(z)
        return Draws(
            np.stack(kept[200:], axis=1), engine=self.name, temperature=posterior.temperature
        )
