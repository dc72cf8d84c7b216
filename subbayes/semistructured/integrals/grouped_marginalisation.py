r"""Effects integrated out of counts and binary responses where some vary among groups.

The effects of groups are integrated out given all other coordinates h, with an unbiased estimate
for each group; see `subbayes.regression.integrals.grouped_importance`. h is integrated out by
importance sampling from proposals that are fitted without networks, and moved with the mode of h
given the networks' contributions $f_\varphi$,

$$ p(D \mid \varphi) \approx \frac1m \sum_{i=1}^m
   \frac{\hat p(D, h_i + \delta(\varphi) \mid f_\varphi)}{q(h_i)} . $$

The random numbers are the same for all $\varphi$, so that the density is a deterministic function.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.integrals.coefficient_likelihood import CanonicalRows
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.grouped_importance import (
    GroupedImportance,
    has_groups,
    proposals_beside_groups,
)
from subbayes.regression.integrals.weight_quality import WeightQuality
from subbayes.semistructured.integrals.effect_density import EffectDensity

_MODE_STEPS = 30  # of Newton's method, with the curvature without networks
_LONGEST, _CLOSE = 5.0, 0.05  # step, in standard deviations
_DIFFERENCE = 1e-3  # in standard deviations
_STREAM = 14  # of the random numbers of the density


class GroupedMarginalisation:
    """The likelihood of networks beside effects that vary among groups, without all effects.

    Args:
        likelihood: of the effects, of rows that are not joined; see `likelihood_of`.
        points: number of proposals of h.

    Attributes:
        quality: of the weights of each call of `sample`.
    """

    def __init__(self, likelihood: EffectsLikelihood, points: int) -> None:
        self.grouped, self.points = GroupedImportance(likelihood), points
        self.quality: list[WeightQuality] = []
        zero = torch.zeros(self.grouped.size, dtype=torch.float64)
        at = likelihood.mode(zero)[0].numpy()[self.grouped.rest]
        self.fitted, self._one, _ = proposals_beside_groups(self.grouped, at, lambda h: h)
        self._origin = self._mode(self.grouped)

    @staticmethod
    def likelihood_of(density: EffectDensity) -> EffectsLikelihood | None:
        """The likelihood of the effects without networks; None where groups are not eliminated."""
        likelihood = density.likelihood()
        canonical = isinstance(likelihood.rows, CanonicalRows)
        return likelihood if canonical and has_groups(likelihood) else None

    def _mode(self, own: GroupedImportance) -> Float[np.ndarray, "d"]:
        """About the mode of h, by Newton steps with one curvature."""
        h, factor = self._one.mean, self._one.factor
        steps = _DIFFERENCE * factor.T
        for _ in range(_MODE_STEPS):
            value = own.laplace(np.concatenate([h + steps, h - steps]))
            slope = (value[: len(h)] - value[len(h) :]) / (2 * _DIFFERENCE)
            size = float(np.abs(slope).max())
            h = h + factor @ slope / max(1.0, size / _LONGEST)
            if not size > _CLOSE:
                break
        return np.asarray(h)

    def _weighted(
        self, contributions: Float[Tensor, "n"], rng: np.random.Generator
    ) -> tuple[Float[np.ndarray, "m d"], Tensor, Float[np.ndarray, "m"]]:
        """Proposals of h, of the effects of groups, and their log weights."""
        own = self.grouped.shifted(contributions)
        h, log_q = self.fitted.draw(self.points, rng)
        h = h + self._mode(own) - self._origin
        log_w = own.estimate(h, [rng]) - log_q
        return h, own.chosen, np.where(np.isnan(log_w), -np.inf, log_w)

    def _log_weights(self, deep: Float[Tensor, "S n K"]) -> Float[Tensor, "S m"]:
        """Log weights with the random numbers of the density."""
        rows = [self._weighted(f, np.random.default_rng(_STREAM))[2] for f in deep[..., 0]]
        return torch.from_numpy(np.stack(rows))

    def log_marginal(self, deep: Float[Tensor, "S n K"]) -> Float[np.ndarray, "S"]:
        """Log of the mean weight, up to a constant."""
        log_w = self._log_weights(deep)
        return (log_w.logsumexp(1) - math.log(self.points)).numpy()

    def sample(
        self, deep: Float[Tensor, "S n K"], rng: np.random.Generator
    ) -> Float[np.ndarray, "S P"]:
        """One of new proposals for each contribution, chosen by their weights."""
        zeta, logs = np.zeros((len(deep), self.grouped.size)), []
        for one, contributions in zip(zeta, deep[..., 0], strict=True):
            h, chosen, log_w = self._weighted(contributions, rng)
            i = int((log_w + rng.gumbel(size=self.points)).argmax())
            one[self.grouped.rest] = h[i]
            one[self.grouped.groups.flatten().numpy()] = chosen[i].flatten().numpy()
            logs.append(log_w)
        self.quality.append(WeightQuality.of(torch.from_numpy(np.stack(logs))))
        return zeta

    def check(self, deep: Float[Tensor, "S n K"]) -> None:
        """Check that more than a few proposals count.

        Raises:
            InputError: see `WeightQuality.check`.
        """
        WeightQuality.of(self._log_weights(deep)).check()

    def facts(self) -> dict[str, Any]:
        """The quality of the weights of the draws."""
        return {"closed_form": False} | WeightQuality.joined(self.quality).facts()
