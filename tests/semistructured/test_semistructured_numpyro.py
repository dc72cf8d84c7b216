"""Without a network the model is a Bayesian GLM: long runs of numpyro on the same model."""

import numpy as np
import pandas as pd
import pytest

from subbayes.inference.configuration import Sampling
from subbayes.regression import NormalPrior, Regression

pytestmark = pytest.mark.slow
numpyro = pytest.importorskip("numpyro", reason="numpyro is not installed")


def table(n=150, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {"x": rng.normal(1, 2, n), "v": rng.normal(size=n), "sex": rng.choice(["f", "m"], n)}
    )
    frame["v"] += 0.3 * frame["x"]  # correlated, so that the posterior's correlations show
    eta = 0.2 + 0.3 * frame.x - 0.4 * frame.v + 0.5 * (frame.sex == "m")
    frame["count"] = rng.poisson(np.exp(0.5 * eta))
    frame["ill"] = np.where(rng.random(n) < 1 / (1 + np.exp(-eta)), "yes", "no")
    return frame


def long_run(x, y, family):
    """Moments of (intercept, effects) from 20,000 draws; columns of x are centred."""
    import jax
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    centre = x.mean(0)

    def model():
        level = numpyro.sample("level", dist.Normal(0.3, 1.5))
        beta = numpyro.sample("beta", dist.Normal(0, 0.8).expand([x.shape[1]]).to_event(1))
        eta = level + (x - centre) @ beta
        observed = (
            dist.Poisson(jax.numpy.exp(eta)) if family == "poisson" else dist.Bernoulli(logits=eta)
        )
        numpyro.sample("y", observed, obs=y)

    run = MCMC(NUTS(model), num_warmup=1000, num_samples=20_000, progress_bar=False)
    run.run(jax.random.key(0))
    beta = np.asarray(run.get_samples()["beta"], dtype=np.float64)
    level = np.asarray(run.get_samples()["level"], dtype=np.float64) - beta @ centre
    return np.column_stack([level, beta])


@pytest.mark.parametrize(("family", "response"), [("poisson", "count"), ("bernoulli", "ill")])
def test_moments_equal_those_of_numpyro(family, response):
    frame = table()
    model = Regression(
        f"{response} ~ x + v + C(sex)",
        family=family,
        priors={"Intercept": NormalPrior(0.3, 1.5), "x": 0.8, "v": 0.8, "C(sex)": 0.8},
    ).fit(frame, sampling=Sampling(draws=2500, chains=4, progress=False))
    effects = model.effects()
    ours = np.column_stack(
        [effects[name].reshape(-1) for name in ("Intercept", "x", "v", "C(sex)[T.m]")]
    )
    x = np.column_stack([frame.x, frame.v, frame.sex == "m"]).astype(float)
    y = frame["count"].to_numpy() if family == "poisson" else (frame.ill == "yes").to_numpy(int)
    theirs = long_run(x, y, family)
    sd = theirs.std(0)
    n = model.summary()["ess_bulk"].min() / 2  # both runs have errors
    assert np.all(np.abs(ours.mean(0) - theirs.mean(0)) < 4 * sd / np.sqrt(n))
    assert np.all(np.abs(ours.std(0) / sd - 1) < 4 / np.sqrt(n))
    between = np.corrcoef(ours.T) - np.corrcoef(theirs.T)
    assert np.abs(between).max() < 4 / np.sqrt(n)
    assert np.abs(np.corrcoef(theirs.T) - np.eye(4)).max() > 0.3
