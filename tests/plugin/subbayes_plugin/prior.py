"""The logistic distribution as a prior: `logistic(0, 2)`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from subbayes.regression import EffectPrior


@dataclass(frozen=True, repr=False)
class Logistic(EffectPrior):
    """Effects with the density of m + s log(u / (1 - u)), u uniform."""

    name = "logistic"
    location: float = 0.0
    scale: float = 1.0

    def from_standard(self, zeta):
        """The quantile."""
        odds = torch.special.log_ndtr(zeta) - torch.special.log_ndtr(-zeta)
        return self.location + self.scale * odds
