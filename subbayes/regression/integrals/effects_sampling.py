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
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from subbayes.distributed.processes import current
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.nuts import NUTS
from subbayes.regression.integrals.coefficient_likelihood import CanonicalRows, NormalRows
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.corrected_draws import CorrectedProposals, corrected_proposals
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.empirical_bayes import restricted_maximum, smoothing_coordinates
from subbayes.regression.integrals.given_coordinates import FreeCoordinates, GivenCoordinates
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
from subbayes.regression.mixing import examined_names, mixed_share
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
    structured = likelihood.structured
    count = sampling.chains * sampling.draws
    what = f"{count:,} draws of {structured.size:,} effects"
    check_memory("draws", what, 8 * count * structured.size, "Use fewer draws")
    fixed: list[int] = []
    if smooth == "reml":
        fixed = smoothing_coordinates(structured)
        if not fixed:
            fail("smooth", "'bayes' for a formula without smooths and random effects", "'reml'")
        start = restricted_maximum(likelihood, start)
    for attempt in _attempts(likelihood, start, sampling, fixed):
        draws = None if attempt is None else _until_mixed(likelihood, sampling, attempt)
        if draws is not None:
            return draws
    return _by_nuts(likelihood, start, sampling, fixed) if fixed else None


class _Attempt(NamedTuple):
    """A kind of independent proposals.

    Attributes:
        draw: draws of all coordinates with a number of proposals each.
        repeats: the first number.
        numbers: of each proposal.
    """

    draw: Callable[[int], Draws]
    repeats: int
    numbers: int


def _attempts(
    likelihood: EffectsLikelihood, start: EffectPoint, sampling: Sampling, fixed: Collection[int]
) -> Iterator[_Attempt | None]:
    """Each kind of independent proposals, the best first; None where these do not fit.

    Args:
        likelihood: the log-likelihood.
        start: the most probable coordinates.
        sampling: the settings.
        fixed: positions of coordinates that keep their values.
    """
    if isinstance(likelihood.rows, NormalRows):
        yield _collapsed(likelihood, start, sampling, fixed)
        if not fixed:
            return
        start = likelihood.mode(torch.from_numpy(start.copy()), sorted(fixed))[0].numpy()
    structured = likelihood.structured
    others = structured.size - len(structured.design.names) - len(structured.thresholds)
    groups = has_groups(likelihood, MOST_BESIDE_GROUPS + len(fixed))
    groups_first = not fixed and are_groups_alone(likelihood)
    if groups_first:
        yield _beside_groups(likelihood, start, sampling, fixed)
    if others or len(start) > _MOST_COORDINATES:
        for conditional in (False, True):
            yield _corrected(likelihood, start, sampling, fixed, conditional)
    if groups and not groups_first:
        yield _beside_groups(likelihood, start, sampling, fixed)
    if not fixed and len(start) <= _MOST_COORDINATES:
        yield from _around_the_mode(likelihood, start, sampling)


def are_groups_alone(likelihood: EffectsLikelihood) -> bool:
    """Whether the effects of one grouping factor are the only ones with a standard deviation.

    Those of counts and of two classes are integrated out first, and the others proposed.
    """
    structured = likelihood.structured
    penalised = [term for term in structured.design.terms if term.penalised]
    others = structured.size - len(structured.design.names) - len(structured.thresholds)
    only_scales = others == len(smoothing_coordinates(structured))
    canonical = isinstance(likelihood.rows, CanonicalRows)
    return has_groups(likelihood) and canonical and len(penalised) == 1 and only_scales


def _until_mixed(
    likelihood: EffectsLikelihood, sampling: Sampling, attempt: _Attempt
) -> Draws | None:
    """Draws with enough proposals each that the effects have mixed; None if there would be many."""
    structured = likelihood.structured

    def share(draws: Draws) -> float:
        zeta = draws.flat()
        names, among = examined_names(structured, zeta, draws.n_draws)
        shape, effects = draws.z.shape[:2], structured.reported(zeta, names=names)
        return mixed_share({name: v.reshape(shape) for name, v in effects.items()}, among)

    count = sampling.chains * sampling.draws * sampling.thin
    most = max(1, min(_MOST_REPEATS, _MOST_NUMBERS // (count * max(1, attempt.numbers))))
    return mixed_draws(attempt.draw, share, attempt.repeats, most)


def _around_the_mode(
    likelihood: EffectsLikelihood, start: EffectPoint, sampling: Sampling
) -> Iterator[_Attempt]:
    """Proposals of all coordinates around the mode, of few or many pilots."""
    mode, precision = likelihood.mode(torch.from_numpy(start.copy()))
    laplace = Proposals.of_precision(mode.numpy(), precision.dense().numpy())
    own = CorrectedProposals(likelihood, laplace, lambda zeta: (zeta, np.zeros(len(zeta))))
    for pilots, patient in ((PILOT, False), (_PATIENT_PILOT, True)):
        own.distribution, own.efficiency = laplace.adapted(
            own.log_density, pilot_generator(), pilots
        )
        own.repeats = proposals_per_draw(own.efficiency, cheap=patient, patient=patient)
        if patient or own.repeats == 1:
            yield _proposed(own, sampling, len(start))


def _collapsed(
    likelihood: EffectsLikelihood, start: EffectPoint, sampling: Sampling, fixed: Collection[int]
) -> _Attempt | None:
    """Proposals of h, and draws of the other coordinates given them."""
    assert isinstance(likelihood.rows, NormalRows)
    collapsed = CollapsedNormal(likelihood.map, likelihood.rows)
    given = FreeCoordinates.of(start, collapsed.rest, fixed)
    if len(given.free) > _MOST_COORDINATES:
        return None

    def target(h: Coordinates) -> LogDensity:
        return collapsed.log_density(given.whole(h))

    proposals, efficiency = fitted_proposals(target, given.start)

    def draw(repeats: int) -> Draws:
        draws = independence_chains(target, proposals, sampling, repeats, efficiency)
        points, value = given.whole(draws.z), draws.stats["log_density"].copy()
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

    return _Attempt(draw, proposals_per_draw(efficiency, cheap=True), len(collapsed.rest))


def _corrected(
    likelihood: EffectsLikelihood,
    start: EffectPoint,
    sampling: Sampling,
    fixed: Collection[int],
    conditional: bool,
) -> _Attempt | None:
    """Proposals from a quadratic log-likelihood; see `corrected_proposals`."""
    corrected = corrected_proposals(likelihood, start, sampling, fixed, conditional=conditional)
    if corrected is None:
        return None
    how = "around their modes" if conditional else "corrected"
    return _proposed(corrected, sampling, len(start), f"coefficients, {how}")


def _proposed(
    proposals: CorrectedProposals, sampling: Sampling, size: int, integrated_out: str | None = None
) -> _Attempt:
    """Proposals of as many numbers as there are coordinates."""

    def draw(repeats: int) -> Draws:
        return _with_densities(*proposals.draw(sampling, repeats), integrated_out)

    return _Attempt(draw, proposals.repeats, size)


def _by_nuts(
    likelihood: EffectsLikelihood, start: EffectPoint, sampling: Sampling, fixed: Collection[int]
) -> Draws:
    """Draws of all coordinates but those that keep their values, from the mode given these."""
    say("few independent proposals would be accepted: sampling by nuts", sampling.progress)
    mode = likelihood.mode(torch.from_numpy(start.copy()), sorted(fixed))[0].numpy()
    given = FreeCoordinates.of(mode, range(len(mode)), fixed)
    initial = np.tile(given.start, (sampling.chains, 1))
    density = GivenCoordinates(likelihood, given)
    found = NUTS().run(density, replace(sampling, initial=initial))
    value = density.log_likelihood(found.flat())
    return _with_densities(found, given.whole(found.z), value.reshape(found.z.shape[:2]))


def _beside_groups(
    likelihood: EffectsLikelihood, start: EffectPoint, sampling: Sampling, fixed: Collection[int]
) -> _Attempt:
    """Proposals of h, and draws of the effects of groups by their weights."""
    grouped = GroupedImportance(likelihood)
    given = FreeCoordinates.of(start, grouped.rest, fixed)
    fitted, efficiency = proposals_beside_groups(grouped, given)
    first, size = int(grouped.groups[0, 0]), grouped.groups.numel()

    def draw(repeats: int) -> Draws:
        rngs = [np.random.default_rng([sampling.seed, 13, c]) for c in range(sampling.chains)]
        shape = sampling.chains, sampling.draws
        zeta, log_likelihood = np.zeros((*shape, grouped.size)), np.zeros(shape)
        draws = independence_chains(
            lambda h: grouped.estimate(given.whole(h), rngs),
            fitted,
            sampling,
            repeats,
            efficiency,
            lambda: (grouped.chosen.numpy(), grouped.log_likelihood.numpy()),
            (zeta[..., first : first + size], log_likelihood),
            block=max(1, _AT_ONCE // size),
        )
        zeta[..., grouped.rest] = given.whole(draws.z)
        return _with_densities(draws, zeta, log_likelihood, "groups")

    return _Attempt(draw, proposals_per_draw(efficiency, cheap=True), len(given.free))


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
