"""Generalised linear models: seconds for 3000 effective draws.

Five simulated data sets without networks, with the shapes of common teaching examples (46 to 1200
rows, 2 to 8 coefficients with the intercept, normal and logistic, one with columns whose scales
differ by a factor of 1000), each with the default priors and with vague ones, N(0, 5000^2) for
every coefficient. `SemiStructuredRegression` fits each with its default engine. What is timed is
the whole call of `fit`: preparation, warm-up and sampling.

Every case is first fitted to a few draws, which is not counted and tells how many draws have about
3000 effective ones (the smallest bulk effective sample size of any unknown), and then `ROUNDS`
times to so many draws. Where fewer than 3000 are effective, the seconds are scaled up by the ratio;
where more are, they count as they are. With other work on the machine, the seconds of the
processor, given too, estimate what a free core takes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import bar, summary
from subbayes import diagnostics
from subbayes.inference import Sampling
from subbayes.regression import Regression

TARGET, LIMIT, VAGUE = 3000, 10.0, 5000.0  # effective draws, seconds, scale of a prior
ROUNDS = 3
PILOT, MARGIN = 250, 1.1  # draws of a chain, and how many more than they suggest


@dataclass(frozen=True)
class Shape:
    """A data set to simulate.

    Attributes:
        rows: number of rows.
        scales: standard deviation of each column; a coefficient is about 1 / scale.
        family: "normal" or "bernoulli".
        correlation: between any two columns.
    """

    rows: int
    scales: tuple[float, ...]
    family: str
    correlation: float = 0.0

    def simulate(self, seed: int) -> pd.DataFrame:
        """Rows with columns x0, x1, ... and a response y."""
        rng = np.random.default_rng(seed)
        k, n = len(self.scales), self.rows
        shared = np.sqrt(self.correlation) * rng.standard_normal((n, 1))
        x = shared + np.sqrt(1 - self.correlation) * rng.standard_normal((n, k))
        eta = 0.3 + x @ rng.uniform(-0.8, 0.8, k)
        frame = pd.DataFrame({f"x{i}": x[:, i] * s for i, s in enumerate(self.scales)})
        if self.family == "normal":
            frame["y"] = eta + rng.standard_normal(n)
        else:
            frame["y"] = (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(int)
        return frame


SHAPES = {
    "normal, 46 rows, 2 coefficients": Shape(46, (1.0,), "normal"),
    "normal, 200 rows, 4 coefficients, scales 1 to 1000": Shape(200, (1.0, 30.0, 1e3), "normal"),
    "normal, 1200 rows, 8 coefficients": Shape(1200, (1.0,) * 7, "normal", 0.8),
    "logistic, 100 rows, 3 coefficients": Shape(100, (1.0, 1.0), "bernoulli"),
    "logistic, 800 rows, 6 coefficients": Shape(800, (1.0,) * 5, "bernoulli", 0.5),
}


def fitted(shape: Shape, frame: pd.DataFrame, vague: bool, draws: int, seed: int) -> dict[str, Any]:
    """Fit with 4 chains of `draws` draws: seconds, and how well the unknowns have mixed."""
    columns = [name for name in frame if name != "y"]
    priors = dict.fromkeys(("Intercept", *columns), VAGUE) if vague else None
    sampling = Sampling(draws=draws, chains=4, seed=seed, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few draws; R-hat is among the results
        begun, worked = time.perf_counter(), time.process_time()
        model = Regression(f"y ~ {' + '.join(columns)}", family=shape.family, priors=priors).fit(
            frame, sampling=sampling
        )
        seconds, worked = time.perf_counter() - begun, time.process_time() - worked
    z, evaluations = model.state.draws.z, model.state.draws.stats["evaluations"]
    ess = float(diagnostics.ess_bulk(z).min())
    return {
        "seconds_for_3000": seconds * max(1.0, TARGET / ess),
        "processor_seconds_for_3000": worked * max(1.0, TARGET / ess),
        "seconds": seconds,
        "draws": draws,
        "ess": ess,
        "rhat": float(diagnostics.rhat(z).max()),
        "gradients_per_ess": float(evaluations.sum()) / ess,
    }


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure; see the module's text."""
    del data_dir
    rounds = 1 if quick else ROUNDS
    results: dict[str, Any] = {}
    bars = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        frame = shape.simulate(number)
        found: dict[str, list[dict[str, Any]]] = {}
        for vague in (False, True):
            label = f"{name}, {'vague' if vague else 'default'} priors"
            pilot = fitted(shape, frame, vague, PILOT, 0)
            draws = int(np.ceil(MARGIN * PILOT * TARGET / pilot["ess"]))
            found[label] = [fitted(shape, frame, vague, draws, 1 + r) for r in range(rounds)]
        for label, values in found.items():
            results[label] = {key: summary([v[key] for v in values]) for key in values[0]}
            middle = {key: value["median"] for key, value in results[label].items()}
            say(
                f"{label:70s} {middle['seconds_for_3000']:6.2f} s for {TARGET} "
                f"({middle['processor_seconds_for_3000']:.2f} of the processor)  "
                f"{middle['seconds']:6.2f} s for {middle['ess']:6.0f}  "
                f"{middle['gradients_per_ess']:5.1f} gradients/ESS  R-hat {middle['rhat']:.3f}"
            )
            bars.append(
                bar(f"{label}: seconds for {TARGET}", middle["seconds_for_3000"], LIMIT, "lower")
            )
    return {"rounds": rounds, "cases": results}, bars
