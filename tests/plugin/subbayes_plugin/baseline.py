"""The trained network with weights of one decimal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subbayes.baselines.ensemble import WeightSamples
from subbayes.comparison.methods import ComparedMethod


@dataclass(frozen=True)
class Rounded(ComparedMethod):
    """The trained network with rounded weights.

    Attributes:
        digits: decimals that are kept.
    """

    key: ClassVar[str] = "rounded"
    label: ClassVar[str] = "rounded weights"
    digits: int = 1

    def fit_model(self, setup):
        """Round the weights of the shared training."""
        network = setup.trained.network
        weights = network.weights.round(decimals=self.digits)[None]
        return WeightSamples(network, weights, setup.trained.likelihood, "rounded")
