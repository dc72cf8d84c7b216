r"""Hypotheses about effects: `hypothesis("x > 0")`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from subbayes.diagnostics.convergence import mcse_mean
from subbayes.regression.formula.names import pattern_of, written_as
from subbayes.regression.questions.summary import central
from subbayes.utils.checks import check_fraction, fail


@dataclass(frozen=True)
class Hypothesis:
    """What the posterior says about a hypothesis.

    Attributes:
        expression: the hypothesis.
        draws: the larger side minus the smaller one, for each draw.
        level: level of the interval.
        chains: number of chains, which follow each other in the draws.
    """

    expression: str
    draws: Float[np.ndarray, "S"]
    level: float
    chains: int = 1

    @property
    def probability(self) -> float:
        """Posterior probability."""
        return float(np.mean(self.draws > 0))

    @property
    def evidence_ratio(self) -> float:
        """Posterior odds, infinite if all draws agree."""
        p = self.probability
        return p / (1 - p) if p < 1 else np.inf

    @property
    def evidence_ratio_mcse(self) -> float:
        """Monte Carlo standard error of the evidence ratio; NaN if all draws agree."""
        p = self.probability
        if p in (0, 1):
            return np.nan
        agree = (self.draws > 0).astype(float).reshape(self.chains, -1)
        return float(mcse_mean(agree)) / (1 - p) ** 2

    @property
    def interval(self) -> tuple[float, float]:
        """Central interval of the difference of both sides."""
        low, high = list(central(self.draws[:, None], self.level).values())[2:]
        return float(low[0]), float(high[0])

    def table(self) -> pd.DataFrame:
        """One row: mean, deviation, interval, probability, evidence ratio and its error."""
        statistics = central(self.draws[:, None], self.level)
        row = {name: values[0] for name, values in statistics.items()} | {
            "probability": self.probability,
            "evidence_ratio": self.evidence_ratio,
            "evidence_ratio_mcse": self.evidence_ratio_mcse,
        }
        return pd.DataFrame([row], index=[self.expression]).rename_axis("hypothesis")

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"Hypothesis({self.expression!r}: probability {self.probability:.3g}, difference "
            f"{self.draws.mean():.3g} [{low:.3g}, {high:.3g}])"
        )


def evaluate_hypothesis(
    expression: str,
    effects: Mapping[str, Float[np.ndarray, "S"]],
    level: float = 0.95,
    chains: int = 1,
) -> Hypothesis:
    """Evaluate a hypothesis about effects; see `Results.hypothesis`.

    Args:
        expression: such as "x > 0" or "2 * x < z", which pandas evaluates.
        effects: posterior draws of each effect.
        level: level of the interval.
        chains: number of chains, which follow each other in the posterior draws.

    Raises:
        InputError: an expression that is not a comparison of effects, or an unknown effect; or
            sides with the same difference in all draws, such as "x - x > 0".

    Example:
        >>> draws = {"x": np.array([1.0, 2.0, -1.0, 3.0]), "C(g)[T.b]": np.zeros(4)}
        >>> evaluate_hypothesis("x > C(g)[T.b]", draws).probability
        0.75
    """
    check_fraction("level", level)
    order = sorted(effects, key=len, reverse=True)
    prefix = "effect"
    while any(prefix in text for text in [expression, *order]):  # may be a name
        prefix += "_"

    def replaced(found: re.Match[str]) -> str:
        name = written_as(found[0], order)  # it may be one of several
        return f" {prefix}{order.index(name)} " if name in order else found[0]

    # all at once, longest first, so that no replacement is taken for a name
    every = "|".join(
        rf"`{pattern}`|(?<![\w.`\[\]]){pattern}(?![\w`\[(.])" for pattern in map(pattern_of, order)
    )
    columns = {f"{prefix}{place}": effects[name] for place, name in enumerate(order)}
    sides = re.split(r"([<>])=?", re.sub(every, replaced, expression).replace("^", "**"))
    try:
        left, sign, right = sides
        larger, smaller = (left, right) if sign == ">" else (right, left)
        with np.errstate(all="ignore"):
            found = pd.DataFrame(columns).eval(f"({larger}) - ({smaller})", engine="python")
        draws = np.broadcast_to(np.asarray(found, dtype=float), len(next(iter(effects.values()))))
    except Exception as error:
        shown = "The effects are " + ", ".join(list(effects)[:20]) + ", ..." * (len(effects) > 20)
        expected = "a comparison of effects, such as 'x > 0' or 'x < 2 * z'"
        fail("hypothesis", expected, repr(expression), shown, cause=error)
    if not np.isfinite(draws).all():
        got = f"{int((~np.isfinite(draws)).sum())} draws without one"
        fail("hypothesis", f"finite numbers of {expression!r}", got)
    if draws.min() == draws.max():
        got = f"a difference of {draws[0]:g} in all draws of {expression!r}"
        fail("hypothesis", "sides whose difference varies", got, "Compare different effects")
    return Hypothesis(expression, draws, level, chains)
