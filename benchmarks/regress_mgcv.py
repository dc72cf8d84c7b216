"""Part (d) of `regress`: smooths beside mgcv, where `Rscript` finds it.

`y ~ s(x0) + s(x1)` with cubic and thin plate splines and `y ~ s(x0) + t2(x2, x3)`, 10,000 rows: the
largest distance of curves of `fit(smooth="reml")` from those of `gam(method="REML")` in mgcv's
standard errors, and the ratio of standard deviations, over a grid; curves with the smoothing drawn
by the posterior beside them; seconds of both. With a million rows seconds beside those of
`bam(discrete=TRUE)`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from benchmarks.harness import bar
from subbayes.inference import Sampling
from subbayes.regression import Regression

__all__ = ["beside_mgcv"]

ROWS, CLOSE = 10_000, 0.1
TERMS = {
    "cubic": ('s(x0, bs="cr", k=10)', 's(x1, bs="cr", k=10)'),
    "thin plate": ('s(x0, bs="tp", k=10)', 's(x1, bs="tp", k=10)'),
    "surface": ('s(x0, bs="cr", k=10)', 't2(x2, x3, bs="cr", k=5)'),
}


def simulated(rows: int) -> pd.DataFrame:
    """Rows with two curves, a surface and normal noise."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({f"x{j}": rng.uniform(size=rows) for j in range(4)})
    frame["y"] = 2 * np.sin(np.pi * frame.x0) + np.exp(2 * frame.x1)
    frame["y"] += np.sin(3 * frame.x2) * frame.x3 + 0.5 * rng.standard_normal(rows)
    return frame


def peer(
    frame: pd.DataFrame, grid: pd.DataFrame, formula: str, function: Literal["gam", "bam"]
) -> tuple[np.ndarray, np.ndarray, float, str]:
    """Curves of mgcv by term, their standard errors, seconds of the fit, and mgcv's version."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder, f"{name}.csv")) for name in ("frame", "grid", "curves")}
        frame.to_csv(files["frame"], index=False)
        grid.to_csv(files["grid"], index=False)
        script = str(Path(__file__).with_suffix(".R"))
        command = ["Rscript", script, files["frame"], files["grid"], formula, files["curves"]]
        out = subprocess.run([*command, function], capture_output=True, text=True, check=True)
        values = pd.read_csv(files["curves"]).to_numpy()
    version, seconds = out.stdout.split()[-2:]
    half = values.shape[1] // 2
    return values[:, :half], values[:, half:], float(seconds), version


def ours(
    frame: pd.DataFrame, grid: pd.DataFrame, case: str, smooth: Literal["bayes", "reml"]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Curves by term, their standard deviations, and seconds of the fit."""
    sampling = Sampling(draws=2500, chains=4, seed=0, progress=False)
    begun = time.perf_counter()
    formula = "y ~ " + " + ".join(TERMS[case])
    model = Regression(formula).fit(frame, smooth=smooth, sampling=sampling)
    seconds = time.perf_counter() - begun
    terms = [term.name for term in model.state.model.design.terms]
    curves = []
    for term in TERMS[case]:
        names = [name for name in grid if str(name) in term]
        values = grid[names]
        name = next(n for n in terms if all(str(column) in n for column in names))
        curves.append(model.effect(name, values if len(names) > 1 else values.iloc[:, 0]).draws)
    return (
        np.stack([c.mean(0) for c in curves], 1),
        np.stack([c.std(0) for c in curves], 1),
        seconds,
    )


def beside_mgcv(rows: int, many: int, say: Callable[..., None]) -> tuple[dict[str, Any], list[Any]]:
    """Results and bars; without mgcv the reason, and a bar that does not hold."""
    found: dict[str, Any] = {}
    bars: list[Any] = []
    installed = (
        shutil.which("Rscript") is not None
        and not subprocess.run(
            ["Rscript", "-e", "library(mgcv)"], capture_output=True, check=False
        ).returncode
    )
    if not installed:
        say("mgcv is missing: install R with mgcv (r-cran-mgcv on Debian)")
        return {"missing": "Rscript with mgcv"}, [
            bar("distance from mgcv's curves, standard errors (not installed)", 9.0, CLOSE, "lower")
        ]
    spread = np.random.default_rng(1).uniform(0.02, 0.98, (100, 4))
    frame, grid = simulated(rows), pd.DataFrame(spread, columns=["x0", "x1", "x2", "x3"])
    for case, terms in TERMS.items():
        formula = "y ~ " + " + ".join(terms)
        curves, errors, seconds, version = peer(frame, grid, formula, "gam")
        one: dict[str, Any] = {"mgcv": version, "seconds_mgcv": seconds}
        for smooth in ("reml", "bayes"):
            mean, sd, own = ours(frame, grid, case, smooth)
            distance = float(np.abs((mean - curves) / errors).max())
            ratios = [float((sd / errors).min()), float((sd / errors).max())]
            one[smooth] = {"distance": distance, "sd_ratios": ratios, "seconds": own}
            say(
                f"{case}, {smooth}: at most {distance:.3f} standard errors from mgcv, "
                f"standard deviations {ratios[0]:.3f} to {ratios[1]:.3f} x, {own:.1f} s (mgcv "
                f"{seconds:.1f} s)"
            )
        what = f"{case}, {rows} rows: distance from mgcv's REML curves, standard errors"
        bars.append(bar(what, one["reml"]["distance"], CLOSE, "lower"))
        found[case] = one
    frame, (_, _, seconds, _) = (
        simulated(many),
        peer(simulated(many), grid, "y ~ " + " + ".join(TERMS["cubic"]), "bam"),
    )
    found["many"] = {"rows": many, "seconds_bam": seconds}
    for smooth in ("reml", "bayes"):
        found["many"][f"seconds_{smooth}"] = ours(frame, grid, "cubic", smooth)[2]
    say(f"{found['many']}")
    return found, bars
