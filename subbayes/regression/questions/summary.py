"""The summary table of effects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float

from subbayes import diagnostics
from subbayes.diagnostics.convergence import hdi
from subbayes.draws import Draws
from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design
from subbayes.regression.shapes import ChainDraws
from subbayes.utils.text_table import printable


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
