"""Models with vague priors, whose chains have to start and move at the posterior's scale."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from subbayes.inference.configuration import Sampling
from subbayes.regression import Regression

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

VAGUE = 5000.0


def table(n=60):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=n), "w": 1000 * rng.normal(size=n)})
    frame["y"] = 1 + 0.5 * frame.x + 0.002 * frame.w + 0.7 * rng.normal(size=n)
    frame["visits"] = rng.poisson(np.exp(0.3 + 0.5 * frame.x))
    return frame


def test_a_normal_model_with_flat_priors():
    """Given sigma the coefficients are those of least squares; sigma on a grid."""
    frame = table()
    priors = dict.fromkeys(("Intercept", "x", "w"), VAGUE)
    sampling = Sampling(draws=300, chains=4, warmup=200, progress=False)
    model = Regression("y ~ x + w", priors=priors).fit(frame, sampling=sampling)
    design = np.column_stack([np.ones(len(frame)), frame.x, frame.w])
    precision = design.T @ design
    mean = np.linalg.solve(precision, design.T @ frame.y)
    residual = ((frame.y - design @ mean) ** 2).sum()
    sigma = np.linspace(0.3, 2.0, 4000)
    logs = (
        -(len(frame) - 3) * np.log(sigma) - 0.5 * residual / sigma**2 - sigma / frame.y.std(ddof=0)
    )
    weights = np.exp(logs - logs.max())
    variance = (weights * sigma**2).sum() / weights.sum()
    covariance = variance * np.linalg.inv(precision)

    found = model.summary().loc[["Intercept", "x", "w"]]
    sd, n = np.sqrt(np.diag(covariance)), found["ess_bulk"].to_numpy()
    assert (n > 300).all()
    assert (np.abs(found["mean"] - mean) < 4.5 * sd / np.sqrt(n)).all()
    np.testing.assert_allclose(found["sd"], sd, rtol=0.15)
    assert model.state.draws.stats["evaluations"].mean() < 15


def test_chains_start_where_the_posterior_is():
    """5 % of the scale of a vague prior is far away: the mean of a count overflows there."""
    sampling = Sampling(draws=2, chains=4, warmup=2, progress=False, mode="eager")
    priors = {"Intercept": VAGUE, "x": VAGUE}
    with pytest.warns(UserWarning, match="fewer than 4 draws"):
        model = Regression("visits ~ x", family="poisson", priors=priors).fit(
            table(), inference="elliptical-slice", sampling=sampling
        )
    joint = model.state.joint
    start = joint.start_points(4)
    best = joint.density.value(joint.space.start_points)
    assert (joint.density.value(start) > best - 3).all()
    assert (start != joint.space.start_points).all()
