"""Regression without networks: effective draws per second, many rows, and a million rows.

(a) Simulated cases of common size (a normal response as in kidiq, a random intercept, counts,
counts with a random intercept) by `SemiStructuredRegression` with its defaults, beside bambi with
nutpie and numpyro: effective draws (the smallest bulk effective sample size of the linear effects)
per second of the whole call, with what a peer compiles, and of the sampling alone, with warm-up.
The peers run in an interpreter of their own, named by the variable `SUBBAYES_PEERS`; without one
the bars do not hold.

(b) `y ~ x0 + ... + x9` with 50,000 rows and 4 x 1000 draws: seconds of the whole call for normal,
Poisson and Bernoulli responses.

(c) `y ~ s(x0) + s(x1)`, and the same with a surface `te(x2, x3)`, with a million rows: seconds and
peak memory in a process of its own each.

(d) Smooths beside mgcv: see `benchmarks/regress_mgcv.py`.

(e) Smooths, groups and horseshoes of other responses, beside NUTS: see
`benchmarks/regress_other.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import bar, own_peak
from benchmarks.regress_mgcv import beside_mgcv
from benchmarks.regress_other import other_responses
from subbayes.inference import Sampling
from subbayes.regression import Regression

DRAWS, ROUNDS = 1000, 3
FASTER, MANY_SECONDS, MILLION_SECONDS, MILLION_GIB = 3.0, 30.0, 60.0, 4.0
CASES = {
    "normal": ("y ~ x0 + x1 + x2", "normal"),
    "mixed": ("y ~ x0 + x1 + re(g)", "normal"),
    "poisson": ("y ~ x0 + x1 + x2 + x3", "poisson"),
    "counts": ("y ~ x0 + x1 + re(g)", "poisson"),
}
MILLION = {"smooths": "y ~ s(x0) + s(x1)", "surface": "y ~ s(x0) + s(x1) + te(x2, x3)"}


def simulated(case: str) -> pd.DataFrame:
    """Rows of a case."""
    rng = np.random.default_rng(0)
    if case == "normal":
        frame = pd.DataFrame(
            {
                "x0": rng.binomial(1, 0.8, 434),
                "x1": rng.normal(100, 15, 434),
                "x2": rng.integers(18, 30, 434),
            }
        )
        noise = 18 * rng.standard_normal(434)
        return frame.assign(y=20 + 6 * frame.x0 + 0.6 * frame.x1 + 0.2 * frame.x2 + noise)
    if case in ("mixed", "counts"):
        frame = pd.DataFrame(rng.standard_normal((900, 2)), columns=["x0", "x1"])
        frame["g"] = rng.integers(0, 60, 900)
        level = 0.4 * rng.standard_normal(60)
        noise = 0.8 * rng.standard_normal(900)
        if case == "counts":
            eta = 0.5 + 0.3 * frame.x0 - 0.2 * frame.x1 + level[frame.g]
            return frame.assign(y=rng.poisson(np.exp(eta)))
        return frame.assign(y=frame.x0 - 0.5 * frame.x1 + level[frame.g] + noise)
    frame = pd.DataFrame(rng.standard_normal((600, 4)), columns=[f"x{j}" for j in range(4)])
    eta = 0.5 + frame.to_numpy() @ [0.3, -0.2, 0.1, 0.0]
    return frame.assign(y=rng.poisson(np.exp(eta)))


def ours(case: str, frame: pd.DataFrame, seed: int) -> dict[str, float]:
    """Seconds of the whole call and of the sampling, with the mode, and effective draws."""
    formula, family = CASES[case]
    sampling = Sampling(draws=DRAWS, chains=4, seed=seed, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun = time.perf_counter()
        model = Regression(formula, family=family).fit(frame, sampling=sampling)
        whole = time.perf_counter() - begun
    effects = [name for name in frame if name.startswith("x")]
    ess = float(model.summary().loc[effects, "ess_bulk"].min())
    joint, begun = model.state.joint, time.perf_counter()
    from subbayes.inference.engine import engine_of

    joint.sample(engine_of("nuts"), sampling, automatic=True)
    return {"whole": whole, "sampling": time.perf_counter() - begun, "ess": ess}


def peers(case: str, frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The same of the peers, in their interpreter."""
    interpreter = os.environ.get("SUBBAYES_PEERS")
    if not interpreter:
        missing = {"missing": "the variable SUBBAYES_PEERS names no interpreter"}
        return {"bambi and nutpie": missing, "numpyro": missing}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "frame.csv")
        frame.to_csv(file, index=False)
        script = Path(__file__).with_name("regress_peers.py")
        command = [interpreter, "-P", str(script), str(file), case, str(DRAWS)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(out.stdout.splitlines()[-1])
    return found


def effective_draws(rounds: int, say: Callable[..., None]) -> tuple[dict[str, Any], list[Any]]:
    """Part (a)."""
    results: dict[str, Any] = {}
    bars = []
    for case in CASES:
        frame = simulated(case)
        ours(case, frame, 0)  # imports
        runs = [ours(case, frame, 1 + r) for r in range(rounds)]
        found = {"subbayes": {k: float(np.median([r[k] for r in runs])) for k in runs[0]}}
        found |= peers(case, frame)
        for name, values in found.items():
            if "missing" in values:
                say(f"{case:8s} {name:18s} missing: {values['missing']}")
                continue
            for part in ("whole", "sampling"):
                values[f"ess_per_second_{part}"] = values["ess"] / values[part]
            say(
                f"{case:8s} {name:18s} whole {values['whole']:7.2f} s, sampling "
                f"{values['sampling']:7.3f} s, {values['ess']:6.0f} effective"
            )
        results[case] = found
        peer = found["bambi and nutpie"]
        for part in ("whole", "sampling"):
            key = f"ess_per_second_{part}"
            ratio = found["subbayes"][key] / peer[key] if key in peer else 0.0
            what = f"{case}: effective draws per second ({part}) / those of bambi with nutpie"
            bars.append(bar(what if key in peer else f"{what} (not installed)", ratio, FASTER))
    return results, bars


def many_rows(family: str, rows: int) -> float:
    """Seconds of a fit of part (b)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 10))
    eta = x @ rng.uniform(-0.3, 0.3, 10)
    frame = pd.DataFrame(x, columns=[f"x{j}" for j in range(10)])
    frame["y"] = {
        "normal": lambda: eta + rng.standard_normal(rows),
        "poisson": lambda: rng.poisson(np.exp(eta)),
        "bernoulli": lambda: (rng.random(rows) < 1 / (1 + np.exp(-eta))).astype(int),
    }[family]()
    formula = "y ~ " + " + ".join(f"x{j}" for j in range(10))
    sampling = Sampling(draws=DRAWS, chains=4, progress=False)
    begun = time.perf_counter()
    Regression(formula, family=family).fit(frame, sampling=sampling)
    return time.perf_counter() - begun


def million(rows: int, case: str) -> None:
    """A case of part (c), in a process of its own: print seconds, peak memory, effective draws."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({f"x{j}": rng.uniform(size=rows) for j in range(4)})
    frame["y"] = np.sin(6 * frame.x0) + frame.x1**2 + np.sin(3 * frame.x2) * frame.x3
    frame["y"] += rng.standard_normal(rows)
    sampling = Sampling(draws=DRAWS, chains=4, progress=False)
    begun = time.perf_counter()
    model = Regression(MILLION[case]).fit(frame, sampling=sampling)
    seconds = time.perf_counter() - begun
    ess = float(model.summary()["ess_bulk"].min())
    found = {"seconds": seconds, "cpu_seconds": time.process_time()}
    found |= {"peak_gib": own_peak() / 1024, "ess": ess}
    print(json.dumps(found | {"engine": model.draws.engine}))


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure; see the module's text."""
    del data_dir
    cases, bars = effective_draws(1 if quick else ROUNDS, say)
    rows = 5_000 if quick else 50_000
    many = {family: many_rows(family, rows) for family in ("normal", "poisson", "bernoulli")}
    for family, seconds in many.items():
        say(f"{family}, {rows} rows: {seconds:.2f} s")
        bars.append(bar(f"{family}, {rows} rows: seconds", seconds, MANY_SECONDS, "lower"))
    rows = 50_000 if quick else 1_000_000
    huge: dict[str, Any] = {}
    for case, formula in MILLION.items():
        code = f"from benchmarks.regress import million; million({rows}, {case!r})"
        command = [sys.executable, "-c", code]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        one = huge[case] = json.loads(out.stdout.splitlines()[-1])
        say(f"{formula}, {rows} rows: {one}")
        what = f"{formula}, {rows} rows"
        bars += [
            bar(f"{what}: seconds", one["seconds"], MILLION_SECONDS, "lower"),
            bar(f"{what}: peak GiB", one["peak_gib"], MILLION_GIB, "lower"),
        ]
    smooths, more = beside_mgcv(1_000 if quick else 10_000, rows, say)
    others, beside = other_responses(2_000 if quick else 10_000, 1 if quick else ROUNDS, say)
    found = {"cases": cases, "many_rows": many, "million": huge, "mgcv": smooths}
    return found | {"other_responses": others}, bars + more + beside
