"""Simulated data sets of `ssr_coverage`, and the effects that intervals should cover.

The predictor is an effect plus f(a) = 0.8 tanh(a1 + a2) + 0.4 a1 a2, where a1 and a2 are columns of
the formula ("same"), have correlation 0.7 with one ("correlated"), or are independent of the
formula ("other"). Networks that read columns of the formula are made orthogonal to it: the true
effect is the projection of the predictor on the formula's columns, over the population (a sample of
20,000 rows without noise) or over the training rows. Otherwise it is that of the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from subbayes.semistructured import SemiStructuredRegression

__all__ = ["CASES", "GROUPS", "READS", "SIGMA", "Case", "Rows", "network_function", "simulate"]

READS = ("same", "correlated", "other")
"""What networks read."""

GROUPS = 12
GRID = np.linspace(-1.8, 1.8, 9)
SIGMA, SPREAD = 0.5, 0.5  # of the noise, and of the random effects
_CORRELATION = 0.7
_POPULATION = 20_000
_LEVELS = np.array(["a", "b", "c"])
_STEPS = np.array([0.0, 0.5, -0.5])  # effects of the levels


@dataclass(frozen=True)
class Case:
    """A kind of effect.

    Attributes:
        formula: the formula.
        names: names of the effects that are covered.
        same: columns of networks that read what the formula reads.
    """

    formula: str
    names: tuple[str, ...]
    same: tuple[str, ...]


CASES = {
    "linear": Case("y ~ x + C(c)", ("x", "C(c)[T.b]", "C(c)[T.c]", "sigma"), ("x", "c")),
    "smooth": Case("y ~ s(w, k=8)", ("s(w, k=8)", "sigma"), ("w", "a2")),
    "random": Case("y ~ 1 + (1 | g)", ("g", "sd(g)", "sigma"), ("g", "a1", "a2")),
}
"""Formulas: a linear effect with a factor, a smooth, random effects; sigma is part of each."""


@dataclass(frozen=True)
class Rows:
    """Rows with what simulation knows of them.

    Attributes:
        frame: the rows.
        effect: the effect without the network.
        network: f at the rows.
        groups: the random effects.
    """

    frame: pd.DataFrame
    effect: Float[np.ndarray, " n"]
    network: Float[np.ndarray, " n"]
    groups: Float[np.ndarray, " g"]


def network_function(
    first: Float[np.ndarray, " n"], second: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """What the network should learn."""
    found: np.ndarray = 0.8 * np.tanh(first + second) + 0.4 * first * second
    return found


def smooth_function(w: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The smooth effect."""
    found: np.ndarray = np.sin(1.5 * w)
    return found


def simulate(case: str, reads: str, n: int, seed: tuple[int, ...]) -> Rows:
    """Draw rows, with responses.

    Args:
        case: one of `CASES`.
        reads: one of `READS`.
        n: number of rows.
        seed: entropy; the first number also gives the random effects of a data set.
    """
    rng = np.random.default_rng([*seed, n, list(CASES).index(case), READS.index(reads)])
    groups = SPREAD * np.random.default_rng([seed[0], 7, READS.index(reads)]).normal(size=GROUPS)
    x, v, a1, a2 = rng.normal(size=(4, n))
    w, g, code = rng.uniform(-2, 2, n), rng.integers(0, GROUPS, n), np.digitize(v, [-0.43, 0.43])
    known = {"linear": x, "smooth": w * 0.75**0.5, "random": rng.normal(size=GROUPS)[g]}[case]
    if reads == "correlated":
        own = (1 - _CORRELATION**2) ** 0.5
        a1 = _CORRELATION * known + own * a1
        a2 = _CORRELATION * v + own * a2 if case == "linear" else a2
    elif reads == "same" and case == "linear":
        a1, a2 = x, code - 1.0
    elif reads == "same" and case == "smooth":
        a1 = w
    effect = {"linear": x + _STEPS[code], "smooth": smooth_function(w), "random": groups[g]}[case]
    f = network_function(a1, a2)
    frame = pd.DataFrame({"x": x, "c": _LEVELS[code], "w": w, "a1": a1, "a2": a2})
    frame["g"] = [f"g{i:02d}" for i in g]
    frame["y"] = effect + f + SIGMA * rng.normal(size=n)
    return Rows(frame, effect, f, groups)


def network_columns(case: str, reads: str) -> tuple[str, ...]:
    """The columns that the network reads."""
    return CASES[case].same if reads == "same" else ("a1", "a2")


def is_projected(case: str, reads: str) -> bool:
    """Whether effects are projections of the predictor on the formula's columns."""
    return reads == "same"


def true_effects(
    case: str, reads: str, rows: Rows, model: SemiStructuredRegression, sample: bool
) -> dict[str, Float[np.ndarray, " m"]]:
    """The effects in the population, or over the training rows, in the order of `case_draws`."""
    found = {"sigma": np.array([SIGMA])}
    projected = is_projected(case, reads)
    if case == "random":
        groups = rows.groups.copy()
        if sample and projected:  # with the means of the network over the rows of each group
            (own,) = (part.columns for part in model.state.joint.orthogonal)
            present = [int(name[1:]) for name in sorted(set(rows.frame["g"]))]
            groups[present] += (own.pseudo_inverse.numpy() @ rows.network)[1:]
        return {"g": groups, "sd(g)": np.array([SPREAD]), **found}
    if case == "linear":
        truth = np.array([1.0, *_STEPS[1:]])
        if projected:
            truth = _projection(_population(case, reads, rows, sample), model)[1:]
        return {n: truth[[i]] for i, n in enumerate(CASES[case].names[:3])} | found
    name = CASES[case].names[0]
    if not projected:
        level = smooth_function(rows.frame["w"].to_numpy()).mean()
        return {name: smooth_function(GRID) - level} | found
    coefficients = _projection(_population(case, reads, rows, sample), model)
    grid = pd.concat([rows.frame.iloc[:1]] * len(GRID), ignore_index=True).assign(w=GRID)
    columns = list(model.state.model.design.term(name).columns)
    design = model.state.model.design.matrix(grid)[0][:, columns]
    return {name: design @ coefficients[columns]} | found


def _population(case: str, reads: str, rows: Rows, sample: bool) -> Rows:
    return rows if sample else simulate(case, reads, _POPULATION, (10**6,))


def _projection(rows: Rows, model: SemiStructuredRegression) -> Float[np.ndarray, " p"]:
    """Least-squares coefficients of the predictor on the columns of the design."""
    design = model.state.model.design
    columns = [i for t in design.terms if t.parameter == "mu" for i in t.columns]
    x = design.matrix(rows.frame)[0][:, columns]
    found: np.ndarray = np.linalg.lstsq(x, rows.effect + rows.network, rcond=None)[0]
    return found
