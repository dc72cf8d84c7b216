"""A regression with a term and a prior of another package, found by their entry points."""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd

from subbayes import Sampling
from subbayes.cli import run
from subbayes.regression import Regression


def main(folder: Path):
    """Fit, summarise, predict, save and load, in Python and by the command line."""
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=80), "hour": rng.uniform(0, 24, 80)})
    frame["y"] = frame.x + 2 * np.sin(np.pi * frame.hour / 12) + 0.3 * rng.normal(size=80)
    frame.to_csv(folder / "t.csv", index=False)
    from subbayes_plugin.prior import Logistic

    formula, priors = "y ~ x + wave(hour, period=24)", {"x": Logistic(0.0, 2.0)}
    model = Regression(formula, priors=priors)
    model.fit(frame, sampling=Sampling(draws=200, chains=2, progress=False))
    mean = frame.x + 2 * np.sin(np.pi * frame.hour / 12)
    assert np.abs(np.ravel(model.predict(frame).mean) - mean).max() < 0.4
    assert {"x", "sd(wave(hour, period=24))"} <= set(model.summary().index)
    assert repr(model.state.model.structured.priors["x"]) == "Logistic(location=0, scale=2)"
    loaded = Regression.load(model.save(folder / "model"))
    assert loaded.state.model.structured.priors["x"] == Logistic(0.0, 2.0)
    np.testing.assert_array_equal(loaded.predict(frame).mean, model.predict(frame).mean)

    words = ["regress", str(folder / "t.csv"), formula, "--prior", "x=logistic(0, 2)", "--quiet"]
    words += ["--draws", "50", "--chains", "2", "--out", str(folder / "again")]
    assert run(words) == 0
    again = Regression.load(folder / "again" / "model")
    assert again.state.model.structured.priors["x"] == Logistic(0.0, 2.0)
