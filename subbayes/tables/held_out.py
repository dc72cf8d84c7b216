"""Scores of rows that are held out, by which a preset compares networks and posteriors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped

from subbayes.predictions.predictive import Predictive

LOWEST = -1e30
"""The score of a candidate that diverged."""


@dataclass(frozen=True)
class HeldOut:
    """Targets of rows that are held out, and their weights.

    Attributes:
        y: targets.
        weights: of the rows, or None.

    Example:
        >>> held = HeldOut(np.zeros(4), None)
        >>> chains, members = np.array([-1.0, -1.0, -2.0, -2.0]), np.full(4, -2.0)
        >>> held.score(chains), held.gain(chains, members)
        (-1.5, {'gain': 0.5, 'gain_error': 0.25})
    """

    y: Shaped[np.ndarray, "h ..."]
    weights: Float[np.ndarray, "h"] | None

    def terms(self, predictive: Predictive) -> Float[np.ndarray, "h"]:
        """Log predictive densities of the rows."""
        return np.asarray(predictive.log_prob(self.y))

    def score(self, terms: Float[np.ndarray, "h"]) -> float:
        """The mean of log densities, or `LOWEST` where one is not finite."""
        score = float(np.average(terms, weights=self.weights))
        return score if math.isfinite(score) else LOWEST

    def gain(
        self, chains: Float[np.ndarray, "h"], members: Float[np.ndarray, "h"]
    ) -> dict[str, float]:
        """By how much chains score above the members at which they start, and its standard error.

        Zero and 1e30 where a density is not finite.
        """
        with np.errstate(invalid="ignore"):
            change = chains - members
            gain = float(np.average(change, weights=self.weights))
        if not math.isfinite(gain):
            return {"gain": 0.0, "gain_error": -LOWEST}
        shares = np.ones(len(change)) if self.weights is None else self.weights
        error = math.sqrt(float(np.square(shares * (change - gain)).sum())) / float(shares.sum())
        return {"gain": gain, "gain_error": error}
