"""How a model without networks is sampled if the caller chooses no engine.

- A normal response with one sigma: the coefficients are integrated out, and drawn exactly given
  the other coordinates; see `subbayes.regression.integrals.collapsed_normal`.
- Poisson and Bernoulli responses with effects that vary among groups, and no other scales: the
  former are integrated out by importance sampling; see
  `subbayes.regression.integrals.grouped_importance`.
- Other responses with smooths, effects of groups or horseshoes, or many coefficients: proposals
  from a quadratic log-likelihood, or, of few rows, around the mode given the standard deviations;
  see `subbayes.regression.integrals.corrected_draws`.
- Other models: all coordinates.

All by independent proposals, with more of them for each draw until the effects have mixed; where
these do not fit the posterior, None is returned, and the caller follows gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float

from subbayes.distributed.processes import current
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.nuts import NUTS
from subbayes.regression.integrals.coefficient_likelihood import CanonicalRows, NormalStatistics
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.corrected_draws import CorrectedProposals, corrected_proposals
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
from subbayes.regression.mixing import examined_names, have_mixed
from subbayes.regression.shapes import ChainDraws, EffectPoint
from subbayes.utils.checks import fail
from subbayes.utils.memory import check_memory
from subbayes.utils.progress import say
from subbayes.utils.types import Coordinates, LogDensity

_MOST_COORDINATES = 60  # for proposals of all of them at once
_MOST_REPEATS = 120  # proposals for a draw, beside about as many evaluations of gradients of NUTS
_MOST_NUMBERS = 2**26  # of all proposals
_AT_ONCE = 2**18  # coordinates of draws
_PATIENT_PILOT = 25_600  # where the alternative follows gradients for many more evaluations


def draw_effects(
    likelihood: EffectsLikelihood, start: EffectPoint, sampling: Sampling, smooth: str = "bayes"
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
    attempts = _attempts(likelihood, start, sampling)
    return next((draws for draws in attempts if draws is not None), None)


def _attempts(
    likelihood: EffectsLikelihood,
    start: EffectPoint,
    sampling: Sampling,
    fixed: Collection[int] = (),
) -> Iterator[Draws | None]:
    """Draws by each kind of independent proposals, the best first; None where these do not fit.

    Args:
        likelihood: the log-likelihood.
        start: the most probable coordinates.
        sampling: the settings.
        fixed: positions of coordinates that keep their values.
    """
    structured = likelihood.map.structured
    others = structured.size - len(structured.design.names) - len(structured.thresholds)
    groups = has_groups(likelihood, MOST_BESIDE_GROUPS + len(fixed))
    groups_first = not fixed and are_groups_alone(likelihood)
    if groups_first:
        yield _grouped_draws(GroupedImportance(likelihood), start, sampling)
    if others or len(start) > _MOST_COORDINATES:
        yield _corrected_draws(likelihood, start, sampling, fixed)
        yield _corrected_draws(likelihood, start, sampling, fixed, conditional=True)
    if groups and not groups_first:
        yield _grouped_draws(GroupedImportance(likelihood), start, sampling, fixed)
    if not fixed and len(start) <= _MOST_COORDINATES:
        yield _draws_around_the_mode(likelihood, start, sampling)


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


def _until_mixed(
    likelihood: EffectsLikelihood,
    sampling: Sampling,
    draw: Callable[[int], Draws],
    repeats: int,
    numbers: int,
) -> Draws | None:
    """Draws with enough proposals each that the effects have mixed; None if there would be many.

    Args:
        likelihood: the log-likelihood.
        sampling: the settings.
        draw: draws of all coordinates with a number of proposals each.
        repeats: the first number.
        numbers: of each proposal.
    """
    structured = likelihood.map.structured

    def has_mixed(draws: Draws) -> bool:
        zeta = draws.flat()
        names, among = examined_names(structured, zeta, draws.n_draws)
        shape, effects = draws.z.shape[:2], structured.reported(zeta, names=names)
        return have_mixed({name: v.reshape(shape) for name, v in effects.items()}, among)

    count = sampling.chains * sampling.draws * sampling.thin
    most = max(1, min(_MOST_REPEATS, _MOST_NUMBERS // (count * max(1, numbers))))
    return mixed_draws(draw, has_mixed, repeats, most)


def _draws_around_the_mode(
    likelihood: EffectsLikelihood, start: EffectPoint, sampling: Sampling
) -> Draws | None:
    """Draws of all coordinates by independent proposals around the mode, of few or many pilots."""
    mode, precision = likelihood.mode(torch.from_numpy(start.copy()))
    laplace = Proposals.of_precision(mode.numpy(), precision.dense().numpy())
    own = CorrectedProposals(likelihood, laplace, lambda zeta: (zeta, np.zeros(len(zeta))))
    for pilots, patient in ((PILOT, False), (_PATIENT_PILOT, True)):
        own.distribution, efficiency = laplace.adapted(own.log_density, pilot_generator(), pilots)
        own.efficiency = efficiency
        own.repeats = proposals_per_draw(efficiency, cheap=patient, patient=patient)
        if not patient and own.repeats > 1:
            continue
        draws = _proposed(own, start, sampling)
        if draws is not None:
            return draws
    return None


def _collapsed_draws(
    likelihood: EffectsLikelihood, start: EffectPoint, sampling: Sampling, smooth: str
) -> Draws | None:
    """Draws of h by independent proposals, and of the other coordinates given them."""
    assert isinstance(likelihood.rows, NormalStatistics)
    collapsed = CollapsedNormal(likelihood.map, likelihood.rows)
    at, free = start[collapsed.rest], list(range(len(collapsed.rest)))
    if smooth == "reml":
        at = reml_of_collapsed(collapsed, at)
        fixed = set(smoothing_coordinates(likelihood.map.structured))
        free = [i for i, j in enumerate(collapsed.rest) if j not in fixed]
    whole = partial(with_fixed, at, free)

    def target(h: Coordinates) -> LogDensity:
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
        return _with_densities(draws, zeta, value, "coefficients")

    draws = None
    if len(free) <= _MOST_COORDINATES:
        proposals, efficiency = fitted_proposals(target, at[free])
        repeats = proposals_per_draw(efficiency, cheap=True)
        draws = _until_mixed(likelihood, sampling, draw, repeats, len(at))
    if draws is None and smooth == "reml":
        point = start.copy()
        point[collapsed.rest] = at
        mode = likelihood.mode(torch.from_numpy(point), sorted(fixed))[0]
        return _draws_of_the_others(likelihood, mode.numpy(), sampling)
    return draws


def _corrected_draws(
    likelihood: EffectsLikelihood,
    start: EffectPoint,
    sampling: Sampling,
    fixed: Collection[int] = (),
    *,
    conditional: bool = False,
) -> Draws | None:
    """Draws by proposals from a quadratic log-likelihood; see `corrected_proposals`."""
    corrected = corrected_proposals(likelihood, start, sampling, fixed, conditional=conditional)
    if corrected is None:
        return None
    how = "around their modes" if conditional else "corrected"
    return _proposed(corrected, start, sampling, f"coefficients, {how}")


def _proposed(
    proposals: CorrectedProposals,
    start: EffectPoint,
    sampling: Sampling,
    integrated_out: str | None = None,
) -> Draws | None:
    """Draws of all coordinates by proposals; None if there would be many of them."""

    def draw(repeats: int) -> Draws:
        return _with_densities(*proposals.draw(sampling, repeats), integrated_out)

    return _until_mixed(proposals.likelihood, sampling, draw, proposals.repeats, len(start))


def _draws_of_the_others(
    likelihood: EffectsLikelihood, at: EffectPoint, sampling: Sampling
) -> Draws:
    """Draws of all coordinates but those of smoothing, from the mode given these."""
    fixed = smoothing_coordinates(likelihood.map.structured)
    for draws in _attempts(likelihood, at, sampling, fixed):
        if draws is not None:
            return draws
    say("few independent proposals would be accepted: sampling by nuts", sampling.progress)
    free = [j for j in range(len(at)) if j not in fixed]
    given = GivenCoordinates(likelihood, at, tuple(free))
    initial = np.tile(at[free], (sampling.chains, 1))
    found = NUTS().run(given, replace(sampling, initial=initial))
    z = with_fixed(at, free, found.z)
    value = likelihood.value(torch.from_numpy(z.reshape(-1, len(at)))).numpy()
    return _with_densities(found, z, value.reshape(z.shape[:2]))


def _grouped_draws(
    grouped: GroupedImportance, start: EffectPoint, sampling: Sampling, fixed: Collection[int] = ()
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
    whole = partial(with_fixed, at, free)
    fitted, efficiency = proposals_beside_groups(grouped, at[free], whole)
    first, size = int(grouped.groups[0, 0]), grouped.groups.numel()

    def draw(repeats: int) -> Draws:
        rngs = [np.random.default_rng([sampling.seed, 13, c]) for c in range(sampling.chains)]
        shape = sampling.chains, sampling.draws
        zeta, log_likelihood = np.zeros((*shape, grouped.size)), np.zeros(shape)
        draws = independence_chains(
            lambda h: grouped.estimate(whole(h), rngs),
            fitted,
            sampling,
            repeats,
            efficiency,
            lambda: (grouped.chosen.numpy(), grouped.log_likelihood.numpy()),
            (zeta[..., first : first + size], log_likelihood),
            block=max(1, _AT_ONCE // size),
        )
        zeta[..., grouped.rest] = whole(draws.z)
        return _with_densities(draws, zeta, log_likelihood, "groups")

    repeats = proposals_per_draw(efficiency, cheap=True)
    return _until_mixed(grouped.likelihood, sampling, draw, repeats, len(free))


def _with_densities(
    draws: Draws,
    zeta: Float[np.ndarray, "chains draws P"],
    log_likelihood: ChainDraws,
    integrated_out: str | None = None,
) -> Draws:
    """Draws of all coordinates with their log-likelihood and log density."""
    prior = -0.5 * (_squared_lengths(zeta) + zeta.shape[2] * math.log(2 * math.pi))
    densities = {"log_density": log_likelihood + prior, "log_likelihood": log_likelihood}
    facts = {} if integrated_out is None else {"integrated_out": integrated_out}
    return replace(draws, z=zeta, stats=draws.stats | densities, meta=draws.meta | facts)


def _squared_lengths(vectors: Float[np.ndarray, "*S p"]) -> Float[np.ndarray, "*S"]:
    return np.einsum("...p,...p->...", vectors, vectors)
