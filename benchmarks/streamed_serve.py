"""The cases `interval` and `streamed` of `serve`: mixtures, and many rows in little memory.

**interval**: central intervals of 200 components for 5000 rows (1000 with `quick`) by Newton's
method within a bracket, beside bisection, which is kept here alone.

**streamed**: `subbayes predict` of a CSV file of a million rows (50,000 with `quick`) and ten
columns, in a process of its own, beside its memory with the model loaded and 1000 rows predicted.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import bar, in_turns, peak_memory, processor_seconds, seconds, summary
from subbayes import Predictive
from subbayes.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from subbayes.likelihoods.families import BetaFamily, GammaFamily

Say = Callable[..., Any]
Result = tuple[dict[str, Any], list[dict[str, Any]]]


# --- interval ------------------------------------------------------------------------------------


def bisection(predictive: Predictive, q: float) -> Tensor:
    """The quantile of level q by bisection on the distribution function of the mixture."""
    likelihood, outputs = predictive.likelihood, predictive.outputs
    means, stds = likelihood.mean(outputs), likelihood.variance(outputs).sqrt()
    reach = 1 + math.sqrt(max(q / (1 - q), (1 - q) / q))
    low, high = (means - reach * stds).amin(0), (means + reach * stds).amax(0)
    for _ in range(60):
        middle = (low + high) / 2
        above = likelihood.cdf(outputs, middle).mean(0) >= q
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        if bool((high - low <= 1e-11 * (stds.mean() + high.abs())).all()):
            break
    return (low + high) / 2


def mixture(likelihood: Likelihood, rows: int, n_outputs: int) -> Predictive:
    """Outputs of 200 draws that differ less than rows do."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(rows, n_outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(200, rows, n_outputs, generator=generator, dtype=torch.float64)
    return Predictive(centre + 0.3 * noise, likelihood)


MIXTURES: dict[str, tuple[Likelihood, int, int, float | None]] = {  # outputs, rows, bar
    "Gaussian": (Gaussian(1.0), 1, 5000, 10),
    "Gaussian, noise of a sixth of the spread": (Gaussian(0.05), 1, 5000, 10),
    "heteroscedastic": (HeteroscedasticGaussian(0.01), 2, 5000, 10),
    "gamma": (GammaFamily(), 2, 500, None),
    "beta": (BetaFamily(), 2, 500, 10),
}


def interval(quick: bool, say: Say) -> Result:
    """Processor seconds of `interval` by likelihood, and the largest difference."""
    results: dict[str, Any] = {}
    bars = []
    for name, (likelihood, n_outputs, rows, limit) in MIXTURES.items():
        predictive = mixture(likelihood, rows // 5 if quick else rows, n_outputs)
        predictive.interval()  # not counted
        cases = {
            "newton": partial(processor_seconds, predictive.interval),
            "bisection": partial(
                processor_seconds, lambda p=predictive: [bisection(p, q) for q in (0.025, 0.975)]
            ),
        }
        figures = in_turns(cases, 3)
        pairs = zip(figures["newton"], figures["bisection"], strict=True)
        ratio = statistics.median(slow / fast for fast, slow in pairs)
        found, exact = predictive.quantile(0.025), bisection(predictive, 0.025).numpy()[:, 0]
        error = float((np.abs(found - exact) / predictive.std).max())
        results[name] = {k: summary(v) for k, v in figures.items()}
        results[name] |= {"ratio": ratio, "difference": error}
        medians = ", ".join(f"{k} {statistics.median(v):.3g} s" for k, v in figures.items())
        say(f"interval {name}: {medians}, {ratio:.1f} times, difference {error:.1e}")
        if limit is not None:
            bars.append(bar(f"interval, {name}: times faster than bisection", ratio, limit))
        bars.append(bar(f"interval, {name}: difference in sd", error, 1e-6, "lower"))
    return results, bars


# --- streamed ------------------------------------------------------------------------------------

_MEASURED = """
from subbayes.cli import run
assert run(["predict", {model!r}, {table!r}, "--out", {out!r}, "--quiet", "--overwrite"]) == 0
"""


def write_table(path: Path, rows: int) -> None:
    """A CSV file of nine numbers and a category, a part at a time."""
    import pandas as pd

    rng = np.random.default_rng(0)
    for start in range(0, rows, 50_000):
        n = min(50_000, rows - start)
        frame = pd.DataFrame({f"x{i}": rng.normal(size=n) for i in range(9)})
        frame["group"] = rng.choice(["a", "b", "c"], n)
        frame.to_csv(path, index=False, mode="a", header=start == 0, float_format="%.6g")


def fit_table(path: Path, out: Path) -> None:
    """A model of 50 draws of a network 11-20-1 for rows like those of a file."""
    import pandas as pd

    from subbayes.models.settings import TableSettings
    from subbayes.tables.data_frame_model import DataFrameModel

    frame = pd.read_csv(path, nrows=300)
    frame["y"] = frame["x0"] + (frame["group"] == "a")
    settings = TableSettings().change(
        {
            "network.hidden": (20,),
            "training": {"epochs": 10, "swa_epochs": 5},
            "subspace.rank": 3,
            "sampling": {"draws": 25, "chains": 2},
        }
    )
    DataFrameModel.fit(frame, "y", settings, progress=False).save(out)


def streamed(quick: bool, say: Say) -> Result:
    """MiB above a prediction of 1000 rows, and seconds."""
    rows = 50_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, small, large = folder / "model", folder / "small.csv", folder / "large.csv"
        write_table(small, 1000)
        write_table(large, rows)
        fit_table(small, model)
        peaks: dict[str, float] = {}

        def measure(table: Path, out: str) -> None:
            paths = {"model": str(model), "table": str(table), "out": str(folder / out)}
            peaks[out] = peak_memory(_MEASURED.format(**paths))

        measure(small, "small.out.csv")
        time = seconds(lambda: measure(large, "large.out.csv"))
        with open(folder / "large.out.csv") as lines:
            assert sum(1 for _ in lines) == rows + 1
    above = peaks["large.out.csv"] - peaks["small.out.csv"]
    say(f"streamed, {rows} rows: {above:.0f} MiB above 1000 rows, {time:.0f} s")
    what = f"streamed, {rows} rows of 50 draws: MiB above those of 1000 rows"
    results = {"rows": rows, "seconds": time, "peaks": peaks, "above": above}
    return results, [bar(what, above, 200, "lower")]
