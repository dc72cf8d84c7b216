"""Part (e) of `regress`: smooths, groups and horseshoes of responses that are not normal.

Seconds of the whole call and the smallest bulk effective sample size of all effects, by
`SemiStructuredRegression` with its defaults and with `inference="nuts"`, 4 chains of 1000 draws
each, and of `smooth="reml"`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import bar
from subbayes.inference import Sampling
from subbayes.regression import Horseshoe, Regression

__all__ = ["other_responses"]

DRAWS, FASTER = 1000, 3.0
EFFECTS = 10
CASES: dict[str, tuple[Any, str]] = {
    "counts": ("c ~ s(x0) + s(x1)", "poisson"),
    "classes": ("b ~ s(x0) + te(x2, x3) + (1 | g)", "bernoulli"),
    "durations": ("p ~ s(x0) + s(x1)", "gamma"),
    "ranks": ("r ~ s(x0) + s(x1)", "ordinal"),
    "two parameters": ({"mu": "y ~ s(x0) + s(x1)", "sigma": "~ s(x0)"}, "normal"),
    "horseshoe": ("c ~ " + " + ".join(f"z{j}" for j in range(EFFECTS)), "poisson"),
}


def simulated(rows: int) -> pd.DataFrame:
    """Responses of all cases."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({f"x{j}": rng.uniform(size=rows) for j in range(4)})
    for j in range(EFFECTS):
        frame[f"z{j}"] = rng.standard_normal(rows)
    frame["g"] = rng.integers(0, 12, rows)
    eta = np.sin(6 * frame.x0) + 2 * frame.x1**2 + np.sin(5 * frame.x2) * frame.x3
    frame["y"] = eta + np.exp(frame.x0 - 1) * rng.standard_normal(rows)
    frame["c"] = rng.poisson(np.exp(0.5 * eta + 0.3 * frame.z0))
    groups = 0.5 * rng.standard_normal(12)[frame.g]
    frame["b"] = (rng.random(rows) < 1 / (1 + np.exp(1 - eta - groups))).astype(int)
    frame["p"] = np.exp(0.3 * eta) * rng.gamma(3, 1 / 3, rows)
    frame["r"] = np.digitize(eta + rng.logistic(size=rows), [0, 1, 2])
    return frame


def fitted(case: str, frame: pd.DataFrame, seed: int, **options: Any) -> dict[str, Any]:
    """Seconds of a fit, its engine, and its effective draws."""
    formula, family = CASES[case]
    priors = {f"z{j}": Horseshoe(global_scale=0.05) for j in range(EFFECTS)}
    model = Regression(formula, family=family, priors=priors if case == "horseshoe" else None)
    sampling = Sampling(draws=DRAWS, chains=4, seed=seed, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun = time.perf_counter()
        model.fit(frame, sampling=sampling, **options)
        seconds = time.perf_counter() - begun
        ess = float(model.summary()["ess_bulk"].min())
    return {"seconds": seconds, "ess": ess, "engine": model.draws.engine}


def other_responses(
    rows: int, rounds: int, say: Callable[..., None]
) -> tuple[dict[str, Any], list[Any]]:
    """Measure; see the module's text. NUTS has a tenth of the rows, and so has what it is beside.

    Args:
        rows: number of rows of the larger data sets.
        rounds: number of fits of which the median counts; one of NUTS.
        say: where lines go.
    """
    found: dict[str, Any] = {}
    bars = []
    few, many = simulated(rows // 10), simulated(rows)
    for case in CASES:
        fitted(case, few, 0)  # imports
        own = {
            len(frame): _median([fitted(case, frame, 1 + r) for r in range(rounds)])
            for frame in (few, many)
        }
        nuts = fitted(case, few, 1, inference="nuts")
        found[case] = {"default": own, "nuts": {len(few): nuts}}
        if case != "horseshoe":
            reml = [fitted(case, many, 1 + r, smooth="reml")["seconds"] for r in range(rounds)]
            found[case]["reml"] = {len(many): {"seconds": float(np.median(reml))}}
        say(f"{case}: {found[case]}")
        ratio = own[len(few)]["ess"] / own[len(few)]["seconds"] / (nuts["ess"] / nuts["seconds"])
        bars.append(bar(f"{case}, {len(few)} rows: effective draws / s / nuts", ratio, FASTER))
    return found, bars


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {k: float(np.median([run[k] for run in runs])) for k in ("seconds", "ess")}
    return numbers | {"engine": runs[0]["engine"]}
