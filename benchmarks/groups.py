"""Many groups: `y ~ x + (1 | g)` with 10,000 groups and 50,000 rows, in a process of its own.

For a normal and a Poisson response: seconds of the processor, peak memory of the process with its
imports, and seconds of `predict` of 1000 rows and of `str(model)`. The largest effective sample
size is bounded by the 4000 draws.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import bar, own_peak
from subbayes.inference import Sampling
from subbayes.regression import Regression

SECONDS, GIB = 10.0, 1.0
FAMILIES = ("normal", "poisson")


def simulated(family: str, groups: int, rows: int) -> pd.DataFrame:
    """Rows of a random intercept."""
    rng = np.random.default_rng(0)
    g, x = rng.integers(0, groups, rows), rng.normal(size=rows)
    eta = 0.3 + 0.4 * x + 0.5 * rng.normal(size=groups)[g]
    y = eta + 0.7 * rng.normal(size=rows) if family == "normal" else rng.poisson(np.exp(eta))
    return pd.DataFrame({"y": y, "x": x, "g": g})


def one_fit(family: str, groups: int, rows: int) -> None:
    """Fit in this process, and print the figures."""
    few = Sampling(draws=20, chains=2, progress=False)
    small = simulated(family, 5, 100)  # imports what a first fit imports
    Regression("y ~ x + (1 | g)", family=family).fit(small, sampling=few)
    frame = simulated(family, groups, rows)
    begun = time.process_time()
    model = Regression("y ~ x + (1 | g)", family=family)
    model.fit(frame, sampling=Sampling(draws=1000, chains=4, progress=False))
    found = {"seconds": time.process_time() - begun, "peak_gib": own_peak() / 1024}
    begun = time.process_time()
    model.predict(frame.iloc[:1000], n_draws=1000)
    found["predict_seconds"] = time.process_time() - begun
    begun = time.process_time()
    str(model)
    found["str_seconds"] = time.process_time() - begun
    table = model.summary(groups=False)
    found["ess"] = float(table["ess_bulk"].min())
    print(json.dumps(found | {"peak_gib_at_end": own_peak() / 1024}))


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure; see the module's text."""
    del data_dir
    groups, rows = (1_000, 5_000) if quick else (10_000, 50_000)
    found, bars = {}, []
    for family in FAMILIES:
        code = f"from benchmarks.groups import one_fit; one_fit({family!r}, {groups}, {rows})"
        out = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
        )
        one = found[family] = json.loads(out.stdout.splitlines()[-1])
        what = f"{family}, {groups} groups, {rows} rows"
        say(f"{what}: {one}")
        bars += [
            bar(f"{what}: seconds", one["seconds"], SECONDS, "lower"),
            bar(f"{what}: peak GiB", one["peak_gib"], GIB, "lower"),
        ]
    return found, bars
