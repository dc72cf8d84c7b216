r"""Draws of effects by proposals that are exact where the log-likelihood is quadratic.

With h the coordinates of standard deviations, correlations and the like, and $\zeta_c$ those in
which coefficients are affine, the posterior under a quadratic log-likelihood $\ell_2$ of the
coefficients is known: h has a density in closed form, and

$$ \zeta_c = \tilde\zeta(h) + L(h)^{-\top} \epsilon, \qquad \epsilon \sim N(0, I) $$

(`subbayes.regression.integrals.collapsed_normal`). Proposals of $(h, \epsilon)$ are corrected by
Metropolis-Hastings with the exact density in these coordinates, the log of which differs from that
of the proposals by $\ell - \ell_2$ and by how well h is proposed. Proposals of all coordinates
around a mode would not fit: the scale of the coefficients of a smooth or a group depends on its
standard deviation.

$\ell_2$ is refined by means over its own draws: see `EffectsLikelihood.quadratic`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from subbayes.draws import MAX_PARETO_K, Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.importance_sampling import pareto_k
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.conditional_normal import ConditionalNormal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.given_coordinates import FreeCoordinates
from subbayes.regression.integrals.independence_metropolis import (
    independence_chains,
    proposals_per_draw,
)
from subbayes.regression.integrals.proposals import (
    Distribution,
    fitted_proposals,
    pilot,
    pilot_generator,
    standard_proposals,
)
from subbayes.regression.shapes import ChainDraws, EffectDraws, EffectPoint
from subbayes.utils.types import Coordinates, LogDensity, RowNumbers

__all__ = ["CorrectedProposals", "corrected_proposals"]

_MOST_COORDINATES = 600
_MOST_BESIDE_COEFFICIENTS = 35  # for differences of all pairs of them
_REFINEMENTS, _PATIENCE = 4, 2  # rounds, and those after which a poor one is the last
_POINTS, _FEW_POINTS = 32, 4  # over which slope and curvature are averaged
_OPERATIONS = 2**36  # on the curvature at all of them
_LEAST, _DONE, _GAIN = 0.05, 0.75, 1.1  # efficiencies, and ratio of those of two rounds
_PILOT, _LARGE_PILOT, _SURE = 1600, 6400, 0.5  # draws of the last, more below an efficiency
_LARGE_K, _CHEAP = 0.5, 2**22  # Pareto k that needs more proposals; rows times draws that allow it
_POINTS_AT_ONCE = 4096

_Effects = Callable[[Coordinates], tuple[EffectDraws, LogDensity]]


@dataclass(frozen=True)
class _Approximation:
    """Proposals of (h, epsilon).

    Attributes:
        of_h: of the coordinates h.
        count: of standard normal numbers.
    """

    of_h: Distribution
    count: int

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Float[np.ndarray, "n z"], RowNumbers]:
        """Proposals and their log densities."""
        eps, log_q = standard_proposals(n, self.count, rng)
        h, of_h = self.of_h.draw(n, rng)
        return np.concatenate([h, eps], 1), of_h + log_q


class CorrectedProposals:
    """Proposals of z, such as (h, epsilon), and the exact posterior in these coordinates.

    Args:
        likelihood: the exact log-likelihood.
        distribution: of the proposals.
        effects: from z to the coordinates of effects, and the log determinant of their derivative.

    Attributes:
        efficiency: of the weights of the proposals.
        repeats: number of proposals that a draw begins with.
    """

    def __init__(
        self, likelihood: EffectsLikelihood, distribution: Distribution, effects: _Effects
    ) -> None:
        self.likelihood, self.distribution, self.effects = likelihood, distribution, effects
        self.efficiency, self.repeats = 0.0, 1

    def log_density(self, z: Coordinates) -> LogDensity:
        """The exact log density, up to a constant."""
        parts = []
        for start in range(0, len(z), _POINTS_AT_ONCE):
            zeta, log_det = self.effects(z[start : start + _POINTS_AT_ONCE])
            value = self.likelihood.value(torch.from_numpy(zeta)).numpy()
            parts.append(value - 0.5 * np.square(zeta).sum(1) + log_det)
        return np.concatenate(parts)

    def draw(
        self, sampling: Sampling, repeats: int
    ) -> tuple[Draws, Float[np.ndarray, "chains draws P"], ChainDraws]:
        """Draws, the coordinates of effects there, and their log-likelihood."""
        draws = independence_chains(
            self.log_density, self.distribution, sampling, repeats, self.efficiency
        )
        zeta, log_det = self.effects(draws.flat())
        log_density = draws.stats["log_density"]
        value = log_density.reshape(-1) + 0.5 * np.square(zeta).sum(1) - log_det
        return draws, zeta.reshape(*log_density.shape, -1), value.reshape(log_density.shape)


def corrected_proposals(
    likelihood: EffectsLikelihood,
    start: EffectPoint,
    sampling: Sampling,
    fixed: Collection[int] = (),
    *,
    conditional: bool = False,
) -> CorrectedProposals | None:
    """Proposals of (h, epsilon); None where they do not fit the posterior.

    Args:
        likelihood: the log-likelihood.
        start: the mode.
        sampling: draws, chains and thinning, of which the number of proposals depends.
        fixed: positions of coordinates that keep their values.
        conditional: expand the log-likelihood around the mode given each h, of few rows.
    """
    if len(start) > _MOST_COORDINATES:
        return None
    find = _around_conditional_modes if conditional else _refined
    found = find(likelihood, start, fixed)
    if found is None:
        return None
    target = found.log_density
    _, log_w, efficiency = pilot(found.distribution, target, pilot_generator(1), _PILOT)
    if efficiency < _SURE:
        _, log_w, efficiency = pilot(found.distribution, target, pilot_generator(3), _LARGE_PILOT)
    k = pareto_k(log_w)
    cheap = sampling.chains * sampling.draws * sampling.thin * likelihood.n_rows <= _CHEAP
    if not k <= MAX_PARETO_K:
        return None
    found.efficiency = efficiency
    found.repeats = proposals_per_draw(efficiency, cheap=True, patient=k > _LARGE_K or cheap)
    return found


def _of_normal(
    likelihood: EffectsLikelihood,
    collapsed: CollapsedNormal,
    mode: EffectPoint,
    fixed: Collection[int],
    centre: EffectPoint,
) -> CorrectedProposals | None:
    """Proposals of an approximation near a point; None where it has few or no uses."""
    given = FreeCoordinates.of(mode, collapsed.rest, fixed)
    if not collapsed.linear or len(given.free) > _MOST_BESIDE_COEFFICIENTS:
        return None
    free = len(given.free)
    given.point[given.free] = centre[collapsed.rest][given.free]
    of_h, _ = fitted_proposals(lambda h: collapsed.log_density(given.whole(h)), given.start)

    def effects(z: Coordinates) -> tuple[EffectDraws, LogDensity]:
        return collapsed.with_coefficients(given.whole(z[:, :free]), z[:, free:].copy())

    return CorrectedProposals(likelihood, _Approximation(of_h, len(collapsed.linear)), effects)


def _around_conditional_modes(
    likelihood: EffectsLikelihood, mode: EffectPoint, fixed: Collection[int]
) -> CorrectedProposals | None:
    """The approximation around the mode given each h; None of many rows, or where it has none."""
    if not ConditionalNormal.applies_to(likelihood):
        return None
    try:
        collapsed = ConditionalNormal(likelihood, torch.from_numpy(mode.copy()))
        return _of_normal(likelihood, collapsed, mode, fixed, mode)
    except np.linalg.LinAlgError:  # densities that are not finite
        return None


def _refined(
    likelihood: EffectsLikelihood, mode: EffectPoint, fixed: Collection[int]
) -> CorrectedProposals | None:
    """The approximation whose proposals fit best, in few rounds; None where none does."""
    points = torch.from_numpy(mode[None].copy())
    size = likelihood.map.coefficients(points).numel()
    count = int(np.clip(_OPERATIONS / (likelihood.n_rows * size**2), _FEW_POINTS, _POINTS))
    best, found, rng = 0.0, None, pilot_generator(2)
    for step in range(_REFINEMENTS):
        try:
            collapsed = CollapsedNormal(likelihood.map, likelihood.quadratic(points))
            new = _of_normal(likelihood, collapsed, mode, fixed, points.mean(0).numpy())
        except np.linalg.LinAlgError:  # densities or slopes that are not finite
            break
        if new is None:
            break
        z, _, efficiency = pilot(new.distribution, new.log_density, rng)
        gain = efficiency / best if best else np.inf
        if gain > 1 and efficiency >= _LEAST:
            best, found = efficiency, new
        if best >= _DONE or (best and gain < _GAIN) or (step >= _PATIENCE and not best):
            break
        eps = rng.standard_normal((count, len(collapsed.linear)))  # without long tails
        around = np.concatenate([z[:count, : -eps.shape[1]], eps], 1)
        points = torch.from_numpy(new.effects(around)[0])
    return found
