"""Whether the chains of effects have mixed, and warnings where they have not."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from scipy.special import fdtri

from subbayes import diagnostics
from subbayes.draws import round_up
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.shapes import ChainDraws, EffectDraws

MOST_OF_GROUPS = 200
"""Effects of groups whose chains are examined, of more those whose half chains differ most."""

_LEAST_ESS = 100  # of a chain
_ROWS = 50  # of draws at once
_ALMOST = 0.99  # share of chains with enough draws whose R-hat is too large
_BY_CHANCE = 0.01  # probability of a warning of R-hat where chains agree
_OTHER_SAMPLER = {"elliptical-slice": " or follow gradients (inference='nuts')"}


def half_chain_spread(draws: Float[np.ndarray, "S p"], length: int) -> Float[np.ndarray, "p"]:
    """The variance of the means of half chains relative to the variance within them.

    It costs a few operations a number, where R-hat sorts all draws of an effect.

    Args:
        draws: of all chains, one chain after the other.
        length: draws of each chain.

    Example:
        >>> draws = np.random.default_rng(0).normal(size=(400, 3))
        >>> draws[:200, 1] += 1.0
        >>> int(half_chain_spread(draws, 200).argmax())
        1
    """
    half = max(1, length // 2)
    starts = [c * length + k * half for c in range(len(draws) // length) for k in range(2)]
    means, within = [], np.zeros(draws.shape[1])
    for start in starts:
        own = draws[start : start + half]
        means.append(own.mean(0))
        for part in np.array_split(own, max(1, len(own) // _ROWS)):  # little memory
            within += np.square(part - means[-1]).sum(0)
    return np.asarray(np.var(means, axis=0) / np.maximum(within, 1e-300))


def rhat_limits(
    draws: Float[np.ndarray, "chains draws p"], among: int | None = None
) -> Float[np.ndarray, "p"]:
    r"""The R-hat of each of p effects above which chains disagree by more than chance.

    Where chains agree, $B / W$ of 2 chains with n effective draws in each half has an F
    distribution, so that $\hat R^2 = 1 + (F - 1) / n$ is above 1.01 by chance for some of many
    effects. The limits are exceeded by one of them, or by its folded draws, in 1 % of fits. The
    effective draws are those of each chain by itself, which does not depend on the others. Limits
    are at least 1.01 and at most 1.05.

    Args:
        draws: of p effects.
        among: number of effects that these were chosen from; by default p.

    Example:
        >>> draws = np.random.default_rng(0).normal(size=(2, 300, 10))
        >>> float(rhat_limits(draws).max().round(3))
        1.021
    """
    chains, length, effects = draws.shape
    halves = 2 * chains
    ess = sum(np.asarray(diagnostics.ess_bulk(draws[[chain]])) for chain in range(chains))
    n = np.clip(np.nan_to_num(ess, nan=np.inf), _LEAST_ESS * chains, length * chains) / halves
    ratio = fdtri(halves - 1, halves * (n - 1), 1 - _BY_CHANCE / (2 * (among or effects)))
    limits: np.ndarray = np.clip(np.sqrt(1 + (ratio - 1) / n), 1.01, 1.05)
    return limits


def examined_names(
    structured: StructuredPredictor, zeta: EffectDraws, length: int
) -> tuple[list[str], int]:
    """Names of the effects whose chains are examined, and the number of all effects.

    Of the effects of many groups they are those whose half chains differ most.

    Args:
        structured: the structured predictor.
        zeta: coordinates of the effects, one chain after the other.
        length: draws of each chain.
    """
    design, names = structured.design, list(structured.reported(zeta[:1]))
    random = design.columns_of_groups
    if len(random) <= MOST_OF_GROUPS:
        return names, len(names)
    spread = half_chain_spread(zeta[:, : len(design.names)], length)[random]
    left_out = {design.names[random[i]] for i in np.argsort(spread)[:-MOST_OF_GROUPS]}
    return [name for name in names if name not in left_out], len(names)


def mixing_warnings(
    effects: Mapping[str, ChainDraws], sampler: str = "", among: int | None = None
) -> list[str]:
    """Problems of the chains of the effects, with a remedy; empty if there are none.

    R-hat must be below 1.01, or what is above it by chance (see `rhat_limits`), and the bulk and
    tail effective sample sizes at least 100 per chain (Vehtari et al. 2021).

    Args:
        effects: draws by name.
        sampler: name of the sampler, for the remedy.
        among: number of effects that these were chosen from; by default all.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500))
        >>> mixing_warnings({"age": x})
        []
        >>> mixing_warnings({"age": x, "bmi": x.cumsum(1)})[0][:38]
        "effects have not mixed: R-hat of 'bmi'"
    """
    if not effects:
        return []
    chains, draws = next(iter(effects.values())).shape
    if draws < 4:
        return ["fewer than 4 draws per chain: run longer (draws=...)"]
    enough = _LEAST_ESS * chains
    problems, least = _mixing_problems(effects, enough, among)
    if not problems:
        return []
    about = round_up(draws * max(2.0, enough / least))
    follow = _OTHER_SAMPLER.get(sampler, "")
    return [
        f"effects have not mixed: {' and '.join(problems)}; run longer (draws=..., about "
        f"{about}){follow}"
    ]


def mixed_share(effects: Mapping[str, ChainDraws], among: int | None = None) -> float:
    r"""The share of the effective draws that `mixing_warnings` asks for; 1 where chains have mixed.

    It is 1 too where chains are too short to tell, and below 1 where R-hat is too large.

    Chains of less than 200 draws hardly reach an effective sample size of 100 whatever the sampler.
    Of many effects some fall below it by chance, so that the size that is asked for is at most the
    one below which about 1 % of fits with N independent draws have one of p effects: by simulation
    $\log(\mathrm{ESS} / N)$ has mean $-0.07$, standard deviation $s = 2.8 / \sqrt N$, and a lower
    tail of $P(\cdot < -0.07 - (4 + x) s) \approx 0.01\, e^{-x}$.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500))
        >>> mixed_share({"age": x}), mixed_share({"age": x, "bmi": x.cumsum(1)}) < 0.1
        (1.0, True)
    """
    if not effects:
        return 1.0
    chains, draws = next(iter(effects.values())).shape
    total, looks = chains * draws, 2 * (among or len(effects))  # bulk and tail of each effect
    by_chance = total * math.exp(-0.07 - 2.8 * (4 + math.log(looks)) / math.sqrt(total))
    enough = min(_LEAST_ESS * chains, math.floor(by_chance))
    if draws < 2 * _LEAST_ESS:
        return 1.0
    problems, least = _mixing_problems(effects, enough, among)
    return min(least / enough, _ALMOST) if problems else 1.0


def _mixing_problems(
    effects: Mapping[str, ChainDraws], enough: int, among: int | None
) -> tuple[list[str], float]:
    """What chains do not reach, and the least effective sample size.

    Args:
        effects: draws.
        enough: effective sample size that is asked for.
        among: number of effects that these were chosen from.
    """
    names, stacked = list(effects), np.stack(list(effects.values()), -1)
    rhat, problems, least = np.asarray(diagnostics.rhat(stacked)), [], np.inf
    worst = np.where(np.isnan(rhat), 1, rhat)
    if worst.max() > 1.01:
        limits = np.floor(rhat_limits(stacked, among) * 1e3) / 1e3
        worst = np.where(worst > limits, worst, 1)
    if worst.max() > 1.01:
        place = int(worst.argmax())
        high = np.ceil(worst[place] * 1e3) / 1e3  # so that it is shown above the limit
        problems.append(f"R-hat of {names[place]!r} is {high:.3f}, above {limits[place]:.4g}")
    for kind, size in (("bulk", diagnostics.ess_bulk), ("tail", diagnostics.ess_tail)):
        ess = np.asarray(size(stacked))
        known = np.where(np.isnan(ess), np.inf, ess)
        least, before = min(least, float(known.min())), least
        if known.min() < enough <= before:  # one of both is enough
            name = names[int(known.argmin())]
            problems.append(
                f"the {kind} effective sample size of {name!r} is {known.min():.0f}, below {enough}"
            )
    return problems, least
