"""Simulation-based calibration of effects, and the coverage of smooths: slow."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from subbayes.inference.configuration import Sampling
from subbayes.regression import LKJ, Exponential, NormalPrior, Regression

RUNS, DRAWS, BINS = 96, 47, 6


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", ["normal", "poisson"])
def test_simulation_based_calibration_ranks_are_uniform(family):
    """Talts et al. (2018): ranks of effects drawn from the prior among posterior draws."""
    rng = np.random.default_rng(0)
    priors = {"Intercept": NormalPrior(0.5, 0.5), "x": NormalPrior(0.0, 0.5)}
    if family == "normal":
        priors["sigma.Intercept"] = Exponential(1.0)
    ranks = []
    for run in range(RUNS):
        x = rng.normal(size=25)
        level, slope, sigma = rng.normal(0.5, 0.5), rng.normal(0, 0.5), rng.exponential(1.0)
        eta = level + slope * (x - x.mean())  # the prior is of the intercept at the mean
        y = rng.normal(eta, sigma) if family == "normal" else rng.poisson(np.exp(eta))
        model = Regression("y ~ x", family=family, priors=priors).fit(
            pd.DataFrame({"x": x, "y": y}),
            sampling=Sampling(draws=DRAWS, chains=1, warmup=120, thin=3, seed=run, progress=False),
        )
        found = model.effects()
        drawn = [found["Intercept"] + found["x"] * x.mean(), found["x"]]
        truth = [level, slope]
        if family == "normal":
            drawn.append(found["sigma"])
            truth.append(sigma)
        ranks.append([(d < t).sum() for d, t in zip(drawn, truth, strict=True)])
    for column in np.array(ranks).T:
        counts = np.histogram(column, bins=BINS, range=(0, DRAWS + 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-3, counts


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", ["normal", "poisson"])
def test_calibration_of_random_slopes(family):
    """Standard deviations, the correlation and effects of groups drawn from their prior."""
    rng, ranks = np.random.default_rng(2), []
    priors = {"Intercept": NormalPrior(0.5, 0.5), "x": NormalPrior(0.0, 0.5)}
    priors |= {"sd(g)": Exponential(0.4), "cor(g)": LKJ(1.0)}
    if family == "normal":
        priors["sigma.Intercept"] = Exponential(1.0)
    g = np.repeat(np.arange(10), 5)
    for run in range(RUNS):
        x = rng.normal(size=50)
        level, slope, sigma = rng.normal(0.5, 0.5), rng.normal(0, 0.5), rng.exponential(1.0)
        tau, r = rng.exponential(0.4, 2), rng.uniform(-1, 1)
        factor = np.array([[1, 0], [r, np.sqrt(1 - r**2)]]) * tau[:, None]
        u = rng.standard_normal((10, 2)) @ factor.T
        eta = level + slope * (x - x.mean()) + u[g, 0] + u[g, 1] * x
        y = rng.normal(eta, sigma) if family == "normal" else rng.poisson(np.exp(eta))
        frame = pd.DataFrame({"x": x, "g": g, "y": y})
        model = Regression("y ~ x + (1 + x | g)", family=family, priors=priors).fit(
            frame,
            sampling=Sampling(draws=DRAWS, chains=1, warmup=120, thin=5, seed=run, progress=False),
        )
        truth = {
            "x": slope,
            "sd(Intercept | g)": tau[0],
            "sd(x | g)": tau[1],
            "cor(Intercept, x | g)": r,
            "Intercept | g[3]": u[3, 0],
            "x | g[3]": u[3, 1],
        } | ({"sigma": sigma} if family == "normal" else {})
        found = model.effects()
        ranks.append([(found[name] < value).sum() for name, value in truth.items()])
    for column in np.array(ranks).T:
        counts = np.histogram(column, bins=BINS, range=(0, DRAWS + 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-3, counts


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_intervals_of_smooths_have_nominal_coverage():
    """Pointwise 90 % intervals, averaged over rows and random functions (Nychka 1988)."""
    rng, held = np.random.default_rng(1), []
    for run in range(12):
        u = np.sort(rng.uniform(-2, 2, 120))
        a, b = rng.uniform(0.5, 1.5, 2)
        truth = a * np.sin(2 * u) + b * np.cos(u)
        frame = pd.DataFrame({"u": u, "y": truth + 0.4 * rng.normal(size=120)})
        model = Regression("y ~ s(u, df=12)").fit(
            frame, sampling=Sampling(draws=250, chains=2, seed=run, progress=False)
        )
        mu = model.predict(frame).outputs[..., 0].numpy()
        low, high = np.quantile(mu, [0.05, 0.95], axis=0)
        held.append(((low <= truth) & (truth <= high)).mean())
        assert np.sqrt(((mu.mean(0) - truth) ** 2).mean()) < 0.2
    assert 0.8 < np.mean(held) < 0.97
