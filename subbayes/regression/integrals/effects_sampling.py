"""How a model without networks is sampled if the caller chooses no engine.

- A normal response with one sigma: the coefficients are integrated out, and drawn exactly given
  the other coordinates; see `subbayes.regression.integrals.collapsed_normal`.
- Poisson and Bernoulli responses with effects that vary among groups, and no other scales: the
  former are integrated out by importance sampling; see
  `subbayes.regression.integrals.grouped_importance`.
- Other responses with smooths, effects of groups or horseshoes, or many coefficients: proposals
  from a quadratic log-likelihood, or, of few rows, around the mode given the standard deviations;
  see `subbayes.regression.integrals.corrected_draws`. Where there are
  too many effects of groups for these, they are integrated out as for counts.
- Other models: all coordinates.

All by independent proposals, with more of them for each draw until the effects have mixed; where
these do not fit the posterior, None is returned, and the caller follows gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from subbayes.distributed.processes import current
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.nuts import NUTS
from subbayes.regression.integrals.coefficient_likelihood import CanonicalRows, NormalStatistics
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.corrected_draws import corrected_proposals
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.empirical_bayes import (
    reml_of_collapsed,
    reml_of_rows,
    smoothing_coordinates,
)
from subbayes.regression.integrals.given_coordinates import GivenCoordinates, with_fixed
from subbayes.regression.integrals.grouped_importance import (
    MOST_BESIDE_GROUPS,
    GroupedImportance,
    has_groups,
    proposals_beside_groups,
)
from subbayes.regression.integrals.independence_metropolis import (
    independence_chains,
    mixed_draws,
    proposals_per_draw,
)
from subbayes.regression.integrals.proposals import (
    PILOT,
    Proposals,
    fitted_proposals,
    pilot_generator,
)
from subbayes.regression.questions.summary import examined_names, have_mixed
from subbayes.utils.checks import fail
from subbayes.utils.memory import check_memory
from subbayes.utils.progress import say

_MOST_COORDINATES = 60  # for proposals of all of them at once
_MOST_REPEATS = 120  # proposals for a draw, beside about as many evaluations of gradients of NUTS
_MOST_NUMBERS = 2**26  # of all proposals
_AT_ONCE = 2**18  # coordinates of draws
_PATIENT_PILOT = 25_600  # where the alternative follows gradients for many more evaluations


def draw_effects(
    likelihood: EffectsLikelihood,
    start: Float[np.ndarray, "P"],
    sampling: Sampling,
    smooth: str = "bayes",
) -> Draws | None:
    """Draws of the coordinates of effects; None where another sampler has to be used.

    Args:
        likelihood: the log-likelihood.
        start: the most probable coordinates.
        sampling: draws, chains, seed, thinning and warm-up.
        smooth: "reml" sets the standard deviations of smooths and random effects to the maximum of
            the marginal likelihood; see `subbayes.regression.integrals.empirical_bayes`.
    """
    own = not isinstance(sampling.initial, str) or sampling.checkpoint is not None
    if own or current() is not None:
        return None
    structured = likelihood.map.structured
    count = sampling.chains * sampling.draws
    what = f"{count:,} draws of {structured.size:,} effects"
    check_memory("draws", what, 8 * count * structured.size, "Use fewer draws")
    scales = smoothing_coordinates(structured)
    if smooth == "reml" and not scales:
        fail("smooth", "'bayes' for a formula without smooths and random effects", "'reml'")
    if isinstance(likelihood.rows, NormalStatistics):
        return _collapsed_draws(likelihood, start, sampling, smooth)
    if smooth == "reml":
        return _draws_of_the_others(likelihood, reml_of_rows(likelihood, start), sampling)
    samplers: list[Callable[[], Draws | None]] = []
    others = structured.size - len(structured.design.names) - len(structured.thresholds)
    if others or len(start) > _MOST_COORDINATES:
        samplers.append(lambda: _corrected_draws(likelihood, start, sampling))
        samplers.append(lambda: _corrected_draws(likelihood, start, sampling, conditional=True))
    if has_groups(likelihood):
        samplers.insert(
            0 if are_groups_alone(likelihood) else len(samplers),
            lambda: _grouped_draws(GroupedImportance(likelihood), start, sampling),
        )
    if len(start) <= _MOST_COORDINATES:
        samplers.append(lambda: _draws_around_the_mode(likelihood, start, sampling))
    for sampler in samplers:
        draws = sampler()
        if draws is not None:
            return draws
    return None


def are_groups_alone(likelihood: EffectsLikelihood) -> bool:
    """Whether the effects of one grouping factor are the only ones with a standard deviation.

    Those of counts and of two classes are integrated out first, and the others proposed.
    """
    structured = likelihood.map.structured
    penalised = [term for term in structured.design.terms if term.penalised]
    others = structured.size - len(structured.design.names) - len(structured.thresholds)
    only_scales = others == len(smoothing_coordinates(structured))
    canonical = isinstance(likelihood.rows, CanonicalRows)
    return has_groups(likelihood) and canonical and len(penalised) == 1 and only_scales


def _most_repeats(sampling: Sampling, numbers: int) -> int:
    """The most proposals for a draw, each of some numbers."""
    draws = sampling.chains * sampling.draws * sampling.thin
    return max(1, min(_MOST_REPEATS, _MOST_NUMBERS // (draws * max(1, numbers))))


def _mixing_of(likelihood: EffectsLikelihood) -> Callable[[Draws], bool]:
    """Whether the effects of draws of all coordinates have mixed."""

    def has_mixed(draws: Draws) -> bool:
        structured, zeta = likelihood.map.structured, draws.flat()
        names, among = examined_names(structured, zeta, draws.n_draws)
        shape, effects = draws.z.shape[:2], structured.reported(zeta, names=names)
        return have_mixed({name: v.reshape(shape) for name, v in effects.items()}, among)

    return has_mixed


def _draws_around_the_mode(
    likelihood: EffectsLikelihood, start: Float[np.ndarray, "P"], sampling: Sampling
) -> Draws | None:
    """Draws of all coordinates by independent proposals around the mode, of few or many pilots."""
    mode, precision = likelihood.mode(torch.from_numpy(start.copy()))

    def target(zeta: Float[np.ndarray, "S P"]) -> Float[np.ndarray, "S"]:
        value = likelihood.value(torch.from_numpy(zeta)).numpy()
        return np.asarray(value - 0.5 * np.square(zeta).sum(1))

    most = _most_repeats(sampling, len(start))
    laplace = Proposals.of_precision(mode.numpy(), precision.dense().numpy())
    for pilots, patient in ((PILOT, False), (_PATIENT_PILOT, True)):
        proposals, efficiency = laplace.adapted(target, pilot_generator(), pilots)

        def draw(
            repeats: int, proposals: Proposals = proposals, efficiency: float = efficiency
        ) -> Draws:
            draws = independence_chains(target, proposals, sampling, repeats, efficiency)
            value = draws.stats["log_density"] + 0.5 * np.square(draws.z).sum(2)
            return _with_densities(draws, draws.z, value)

        repeats = proposals_per_draw(efficiency, cheap=patient, patient=patient)
        if not patient and repeats > 1:
            continue
        draws = mixed_draws(draw, _mixing_of(likelihood), repeats, most)
        if draws is not None:
            return draws
    return None


def _collapsed_draws(
    likelihood: EffectsLikelihood, start: Float[np.ndarray, "P"], sampling: Sampling, smooth: str
) -> Draws | None:
    """Draws of h by independent proposals, and of the other coordinates given them."""
    assert isinstance(likelihood.rows, NormalStatistics)
    collapsed = CollapsedNormal(likelihood.map, likelihood.rows)
    at, free = start[collapsed.rest], list(range(len(collapsed.rest)))
    if smooth == "reml":
        at = reml_of_collapsed(collapsed, at)
        fixed = set(smoothing_coordinates(likelihood.map.structured))
        free = [i for i, j in enumerate(collapsed.rest) if j not in fixed]

    def whole(h: Float[np.ndarray, "*S f"]) -> Float[np.ndarray, "*S d"]:
        return with_fixed(at, free, h)

    def target(h: Float[np.ndarray, "S f"]) -> Float[np.ndarray, "S"]:
        return collapsed.log_density(whole(h))

    def draw(repeats: int) -> Draws:
        draws = independence_chains(target, proposals, sampling, repeats, efficiency)
        points, value = whole(draws.z), draws.stats["log_density"].copy()
        zeta, count = np.empty((*value.shape, collapsed.size)), len(collapsed.linear)
        step = max(1, _AT_ONCE // collapsed.size)
        for chain, h in enumerate(points):
            rng = np.random.default_rng([sampling.seed, 12, chain])
            for first in range(0, len(h), step):  # memory for the draws, and for little else
                rows = slice(first, first + step)
                eps = rng.standard_normal((len(h[rows]), count))
                part, log_det = collapsed.with_coefficients(h[rows].copy(), eps)
                zeta[chain, rows] = part
                # the density of h times that of eps, less the priors
                squares = _squared_lengths(part) - _squared_lengths(eps)
                value[chain, rows] += 0.5 * squares - log_det
        draws = replace(draws, meta=draws.meta | {"integrated_out": "coefficients"})
        return _with_densities(draws, zeta, value)

    draws = None
    if len(free) <= _MOST_COORDINATES:
        proposals, efficiency = fitted_proposals(target, at[free])
        repeats, most = proposals_per_draw(efficiency, cheap=True), _most_repeats(sampling, len(at))
        draws = mixed_draws(draw, _mixing_of(likelihood), repeats, most)
    if draws is None and smooth == "reml":
        point = start.copy()
        point[collapsed.rest] = at
        mode = likelihood.mode(torch.from_numpy(point), sorted(fixed))[0]
        return _draws_of_the_others(likelihood, mode.numpy(), sampling)
    return draws


def _corrected_draws(
    likelihood: EffectsLikelihood,
    start: Float[np.ndarray, "P"],
    sampling: Sampling,
    fixed: Collection[int] = (),
    *,
    conditional: bool = False,
) -> Draws | None:
    """Draws by proposals from a quadratic log-likelihood; see `corrected_proposals`."""
    corrected = corrected_proposals(likelihood, start, sampling, fixed, conditional=conditional)
    if corrected is None:
        return None

    def draw(repeats: int) -> Draws:
        draws, zeta, value = corrected.draw(sampling, repeats)
        how = "around their modes" if conditional else "corrected"
        meta = draws.meta | {"integrated_out": f"coefficients, {how}"}
        return _with_densities(replace(draws, meta=meta), zeta, value)

    most = _most_repeats(sampling, len(start))
    return mixed_draws(draw, _mixing_of(likelihood), corrected.repeats, most)


def _draws_of_the_others(
    likelihood: EffectsLikelihood, at: Float[np.ndarray, "P"], sampling: Sampling
) -> Draws:
    """Draws of all coordinates but those of smoothing, from the mode given these."""
    fixed = smoothing_coordinates(likelihood.map.structured)
    found = _corrected_draws(likelihood, at, sampling, fixed)
    if found is None:
        found = _corrected_draws(likelihood, at, sampling, fixed, conditional=True)
    if found is None and has_groups(likelihood, MOST_BESIDE_GROUPS + len(fixed)):
        found = _grouped_draws(GroupedImportance(likelihood), at, sampling, fixed)
    if found is not None:
        return found
    say("few independent proposals would be accepted: sampling by nuts", sampling.progress)
    free = [j for j in range(len(at)) if j not in fixed]
    given = GivenCoordinates(likelihood, at, tuple(free))
    initial = np.tile(at[free], (sampling.chains, 1))
    found = NUTS().run(given, replace(sampling, initial=initial))
    z = with_fixed(at, free, found.z)
    value = likelihood.value(torch.from_numpy(z.reshape(-1, len(at)))).numpy()
    return _with_densities(found, z, value.reshape(z.shape[:2]))


def _grouped_draws(
    grouped: GroupedImportance,
    start: Float[np.ndarray, "P"],
    sampling: Sampling,
    fixed: Collection[int] = (),
) -> Draws | None:
    """Draws of h by independent proposals, and of the effects of groups by their weights.

    Args:
        grouped: the likelihood.
        start: of all coordinates.
        sampling: the settings.
        fixed: positions of coordinates that keep their values.
    """
    at = start[grouped.rest]
    free = [i for i, j in enumerate(grouped.rest) if j not in fixed]

    def whole(h: Float[np.ndarray, "*S f"]) -> Float[np.ndarray, "*S d"]:
        return with_fixed(at, free, h)

    fitted, _, efficiency = proposals_beside_groups(grouped, at[free], whole)

    def draw(repeats: int) -> Draws:
        rngs = [np.random.default_rng([sampling.seed, 13, c]) for c in range(sampling.chains)]
        taken = _TakenGroups(grouped, sampling.chains, sampling.draws)
        draws = independence_chains(
            lambda h: grouped.estimate(whole(h), rngs),
            fitted,
            sampling,
            repeats,
            efficiency,
            take=taken,
            block=max(1, _AT_ONCE // grouped.groups.numel()),
        )
        taken.zeta[..., grouped.rest] = whole(draws.z)
        draws = replace(draws, meta=draws.meta | {"integrated_out": "groups"})
        return _with_densities(draws, taken.zeta, taken.log_likelihood)

    repeats, most = proposals_per_draw(efficiency, cheap=True), _most_repeats(sampling, len(free))
    return mixed_draws(draw, _mixing_of(grouped.likelihood), repeats, most)


class _TakenGroups:
    """The draws' effects of groups, taken from each block of proposals; see `independence_chains`.

    Args:
        grouped: the likelihood.
        chains: number of chains.
        draws: of each chain.

    Attributes:
        zeta: all coordinates, 0 but for those of groups.
        log_likelihood: of all coordinates.
    """

    def __init__(self, grouped: GroupedImportance, chains: int, draws: int) -> None:
        first = int(grouped.groups[0, 0])
        self.grouped, self._columns = grouped, slice(first, first + grouped.groups.numel())
        self.zeta = np.zeros((chains, draws, grouped.size))
        self.log_likelihood = np.zeros((chains, draws))
        self._states = [(np.zeros(grouped.groups.numel()), 0.0)] * chains

    def __call__(
        self,
        which: Int[np.ndarray, "m"],
        points: Int[np.ndarray, "chains m"],
        ends: Int[np.ndarray, "chains"],
    ) -> None:
        """Take the draws of a block."""
        chains = len(self.zeta)
        effects = self.grouped.chosen.numpy().reshape(chains, -1, self.grouped.groups.numel())
        values = self.grouped.log_likelihood.numpy().reshape(chains, -1)
        for chain, state in enumerate(self._states):
            for draw, point in zip(which.tolist(), points[chain].tolist(), strict=True):
                own = state if point < 0 else (effects[chain, point], values[chain, point])
                self.zeta[chain, draw, self._columns], self.log_likelihood[chain, draw] = own
            end = ends[chain]
            if end >= 0:
                self._states[chain] = effects[chain, end].copy(), values[chain, end]


def _with_densities(
    draws: Draws,
    zeta: Float[np.ndarray, "chains draws P"],
    log_likelihood: Float[np.ndarray, "chains draws"],
) -> Draws:
    """Draws of all coordinates with their log-likelihood and log density."""
    prior = -0.5 * (_squared_lengths(zeta) + zeta.shape[2] * math.log(2 * math.pi))
    densities = {"log_density": log_likelihood + prior, "log_likelihood": log_likelihood}
    return replace(draws, z=zeta, stats=draws.stats | densities)


def _squared_lengths(vectors: Float[np.ndarray, "*S p"]) -> Float[np.ndarray, "*S"]:
    return np.einsum("...p,...p->...", vectors, vectors)
