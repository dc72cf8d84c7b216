"""The summary table of effects, and warnings of chains that have not mixed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import fdtri

from subbayes import diagnostics
from subbayes.diagnostics.convergence import hdi
from subbayes.draws import Draws, round_up
from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.shapes import ChainDraws, EffectDraws
from subbayes.utils.text_table import printable

MOST_OF_GROUPS = 200
"""Effects of groups whose chains are examined, of more those whose half chains differ most."""

_LEAST_ESS = 100  # of a chain
_ROWS = 50  # of draws at once
_BY_CHANCE = 0.01  # probability of a warning of R-hat where chains agree


def central(draws: Float[np.ndarray, "S m"], level: float) -> dict[str, Float[np.ndarray, "m"]]:
    """Mean, standard deviation and central interval of each column of draws.

    Example:
        >>> sorted(central(np.zeros((10, 1)), 0.9))
        ['5%', '95%', 'mean', 'sd']
    """
    tail = (1 - level) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    return {
        "mean": draws.mean(0),
        "sd": (draws - draws[:1]).std(0, ddof=1),  # 0, not a rounding error, of what is constant
        f"{100 * tail:g}%": low,
        f"{100 * (1 - tail):g}%": high,
    }


def beside_statistics(
    values: dict[str, np.ndarray], statistics: dict[str, np.ndarray]
) -> pd.DataFrame:
    """A table of values of columns of the data, and of statistics, whose names they do not take.

    Example:
        >>> beside_statistics({"sd": np.ones(1)}, {"sd": np.zeros(1)}).columns.tolist()
        ['sd (data)', 'sd']
    """
    own = {f"{name} (data)" if name in statistics else name: v for name, v in values.items()}
    return pd.DataFrame({**own, **statistics})


def summary_table(
    effects: Mapping[str, ChainDraws],
    level: float = 0.95,
    sampled: Mapping[str, ChainDraws] | None = None,
) -> pd.DataFrame:
    """Mean, sd, highest-density interval, probability of direction and diagnostics by effect.

    Args:
        effects: draws.
        level: level of the intervals.
        sampled: what the chains have sampled, for the diagnostics, if it is not the effects.
    """
    percent = f"{100 * level:g}%"
    rows = {}
    for name, values in effects.items():
        flat = values.reshape(-1)
        low, high = hdi(flat, level)
        stacked = (sampled or effects)[name][..., None]
        rows[name] = {
            "mean": flat.mean(),
            "sd": pd.Series(flat - flat[:1]).std(),  # NaN of one draw
            f"hdi {percent} low": low,
            f"hdi {percent} high": high,
            "direction": max((flat > 0).mean(), (flat < 0).mean()),
            "rhat": float(np.asarray(diagnostics.rhat(stacked))[0]),
            "ess_bulk": float(np.asarray(diagnostics.ess_bulk(stacked))[0]),
            "ess_tail": float(np.asarray(diagnostics.ess_tail(stacked))[0]),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("effect")


def scales_of(names: Iterable[str], family: Family) -> dict[str, str]:
    """The scale of each reported effect: a parameter, or a function of it; "" without a scale.

    Correlations, parts of simplexes and length scales are not on the scale of a predictor.

    Args:
        names: names of effects.
        family: distribution of the response.

    Example:
        >>> from subbayes.likelihoods.families import NormalFamily
        >>> scales_of(["x", "sigma", "sigma.x", "cor(Intercept, x | g)"], NormalFamily())
        {'x': 'mu', 'sigma': 'sigma', 'sigma.x': 'log(sigma)', 'cor(Intercept, x | g)': ''}
    """
    location, *others = family.parameters
    found = {}
    for name in names:
        inner = name.removeprefix("sd(")
        own = [p for p in family.parameters if inner.startswith(f"{p}.")]
        if name.startswith(("cor(", "simplex(", "length(")):
            found[name] = ""
        elif name in family.formula_parameters[1:]:
            found[name] = name
        else:
            threshold = name if name in others else location
            found[name] = family.predictor_scale(own[0] if own else threshold)
    return found


def in_order(names: Iterable[str], design: Design, groups: bool = True) -> list[str]:
    """Names of effects with those of groups last, or without them.

    Args:
        names: names of effects.
        design: columns of the formula.
        groups: whether to include effects of groups.
    """
    of_groups = {design.names[i] for i in design.columns_of_groups}
    chosen = [name for name in names if groups or name not in of_groups]
    return sorted(chosen, key=lambda name: name in of_groups)


def summary_text(table: pd.DataFrame, most: int | None = None) -> str:
    """A summary table as text with few digits.

    Args:
        table: of `summary_table`.
        most: number of rows, of more the first and last ones are shown; by default all.

    Example:
        >>> table = summary_table({"x": np.random.default_rng(0).normal(size=(2, 50))})
        >>> summary_text(table).splitlines()[-1].split()[0]
        'x'
    """
    rounded = table.round({"rhat": 3, "ess_bulk": 0, "ess_tail": 0}).astype(
        {"ess_bulk": "Int64", "ess_tail": "Int64"}, errors="ignore"
    )
    return str(rounded.to_string(float_format=lambda value: f"{value:.4g}", max_rows=most))


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


def have_mixed(effects: Mapping[str, ChainDraws], among: int | None = None) -> bool:
    r"""Whether chains have mixed as well as `mixing_warnings` asks, or are too short for it.

    Chains of less than 200 draws hardly reach an effective sample size of 100 whatever the sampler.
    Of many effects some fall below it by chance, so that the size that is asked for is at most the
    one below which about 1 % of fits with N independent draws have one of p effects: by simulation
    $\log(\mathrm{ESS} / N)$ has mean $-0.07$, standard deviation $s = 2.8 / \sqrt N$, and a lower
    tail of $P(\cdot < -0.07 - (4 + x) s) \approx 0.01\, e^{-x}$.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(4, 500))
        >>> have_mixed({"age": x}), have_mixed({"age": x, "bmi": x.cumsum(1)})
        (True, False)
    """
    if not effects:
        return True
    chains, draws = next(iter(effects.values())).shape
    total, looks = chains * draws, 2 * (among or len(effects))  # bulk and tail of each effect
    by_chance = total * math.exp(-0.07 - 2.8 * (4 + math.log(looks)) / math.sqrt(total))
    enough = min(_LEAST_ESS * chains, math.floor(by_chance))
    return draws < 2 * _LEAST_ESS or not _mixing_problems(effects, enough, among)[0]


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


_OTHER_SAMPLER = {"elliptical-slice": " or follow gradients (inference='nuts')"}

_INTEGRATED_OUT = {
    "coefficients": ", the coefficients integrated out",
    "coefficients, corrected": ", the coefficients proposed from a quadratic log-likelihood",
    "coefficients, around their modes": ", the coefficients proposed around their modes",
    "groups": ", the effects of groups integrated out by importance sampling",
}


def describe_draws(draws: Draws) -> str:
    """How effects were sampled, in words.

    Example:
        >>> describe_draws(Draws(np.zeros((2, 5, 1)), engine="nuts"))
        'nuts, 2 chains of 5 draws'
    """
    found = f"{draws.engine or 'unknown sampler'}, {draws.n_chains} chains of {draws.n_draws} draws"
    found += _INTEGRATED_OUT.get(str(draws.meta.get("integrated_out")), "")
    efficiency = draws.meta.get("efficiency")
    if isinstance(efficiency, float) and math.isfinite(efficiency):
        found += f" ({100 * efficiency:.3g} % of proposals count)"
    size, proposals = (draws.meta.get(n) for n in ("effective_proposals", "proposals"))
    if isinstance(size, float) and isinstance(proposals, int):
        found += ", the effects integrated out by importance sampling"
        found += f" (in the median {size:.0f} of {proposals} proposals count)"
    return printable(found)
