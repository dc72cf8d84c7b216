"""The regularised horseshoe against draws written out by NumPy, and on data with few effects."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import subbayes
from subbayes import InputError
from subbayes.inference import Sampling
from subbayes.regression import Horseshoe, Regression
from subbayes.regression.priors.horseshoe import half_cauchy


def table(n=60, d=8, seed=0):
    rng = np.random.default_rng(seed)
    found = pd.DataFrame({f"x{j}": (j + 1) * rng.normal(size=n) for j in range(d)})
    found["y"] = 2 * found["x0"] + rng.normal(size=n)
    return found, [f"x{j}" for j in range(d)]


def test_half_cauchy_is_the_quantile():
    zeta = torch.linspace(-6, 6, 41, dtype=torch.float64)
    expected = np.where(
        zeta < 0,
        stats.halfcauchy.ppf(stats.norm.cdf(zeta)),
        stats.halfcauchy.isf(stats.norm.sf(zeta)),
    )
    np.testing.assert_allclose(half_cauchy(zeta), expected, rtol=1e-9)


def test_prior_draws_have_the_distribution_of_the_definition():
    frame, names = table()
    prior = Horseshoe(global_scale=0.3, slab_scale=1.5, slab_df=5.0)
    model = Regression("y ~ " + " + ".join(names), priors=dict.fromkeys(names, prior))
    structured = model.specification.prepare(frame, None).structured
    n = 60_000
    zeta = torch.randn(n, structured.size, generator=torch.Generator().manual_seed(0)).double()
    at = [structured.names.index(name) for name in names]
    scaled = structured.coefficients(zeta)[:, at].numpy() * frame[names].std(ddof=0).to_numpy()
    rng = np.random.default_rng(1)
    tau = 0.3 * np.abs(rng.standard_cauchy((n, 1)))
    local = np.abs(rng.standard_cauchy((n, len(names))))
    c2 = 1 / rng.gamma(2.5, 1 / (2.5 * 1.5**2), (n, 1))
    expected = (
        rng.normal(size=local.shape) * tau * np.sqrt(c2 * local**2 / (c2 + tau**2 * local**2))
    )
    levels = [0.05, 0.25, 0.5, 0.75, 0.95]
    for j in range(len(names)):
        for level in levels:
            share = (scaled[:, j] <= np.quantile(expected, level)).mean()
            assert abs(share - level) < 5 * np.sqrt(level * (1 - level) / n) + 0.003
    sizes, others = (np.log(np.abs(part[:, :2])) for part in (scaled, expected))
    np.testing.assert_allclose(np.cov(sizes.T), np.cov(others.T), rtol=0.06)  # of common scales
    correlation = np.corrcoef(scaled.T)[0, 1]
    assert abs(correlation) < 0.03


@pytest.mark.slow
def test_one_effect_among_many_is_kept_and_saved(tmp_path):
    frame, names = table(n=50, d=6)
    priors = dict.fromkeys(names, Horseshoe(global_scale=1 / 5 / 50**0.5))
    model = Regression("y ~ " + " + ".join(names), priors=priors)
    sampling = Sampling(draws=500, chains=4, progress=False)
    means = model.fit(frame, sampling=sampling).summary()["mean"]
    assert model.draws.engine == "independence-metropolis"
    vague = Regression("y ~ " + " + ".join(names)).fit(frame, sampling=sampling)
    others = vague.summary()["mean"]
    assert means["x0"] == pytest.approx(2, abs=0.5)
    assert np.abs(means[names[1:]]).mean() < 0.8 * np.abs(others[names[1:]]).mean()
    model.save(tmp_path / "model")
    again = subbayes.load(tmp_path / "model")
    assert again.priors["x3"] == priors["x3"]
    pd.testing.assert_series_equal(again.summary()["mean"], means)


@pytest.mark.slow
def test_the_posterior_has_the_moments_of_weighted_prior_draws():
    """Scales and sigma from the prior, weighted by the likelihood without coefficients."""
    frame, names = table(n=25, d=3)
    prior = Horseshoe(global_scale=0.3, slab_scale=1.5, slab_df=5.0)
    model = Regression("y ~ " + " + ".join(names), priors=dict.fromkeys(names, prior))
    model.fit(frame, sampling=Sampling(draws=4000, chains=4, progress=False))
    y, x = frame["y"].to_numpy(), (frame[names] - frame[names].mean()).to_numpy()
    sd, rng, n = y.std(), np.random.default_rng(2), 100_000
    tau, local = 0.3 * np.abs(rng.standard_cauchy((n, 1))), np.abs(rng.standard_cauchy((n, 3)))
    c2 = 1 / rng.gamma(2.5, 1 / (2.5 * 1.5**2), (n, 1))
    scales = tau * np.sqrt(c2 * local**2 / (c2 + tau**2 * local**2)) / x.std(0)
    sigma = rng.exponential(sd, n)
    wide = np.column_stack([np.ones(len(x)), x])
    prior_sd = np.column_stack([np.full(n, 2.5 * sd), scales])
    r = y - y.mean()
    precision = wide.T @ wide / sigma[:, None, None] ** 2
    whole = precision * prior_sd[:, :, None] * prior_sd[:, None, :] + np.eye(4)
    pulled = prior_sd * (wide.T @ r) / sigma[:, None] ** 2
    solved = np.linalg.solve(whole, pulled[..., None])[..., 0]
    log_w = 0.5 * (pulled * solved).sum(1) - 0.5 * (r @ r) / sigma**2
    log_w -= len(y) * np.log(sigma) + 0.5 * np.linalg.slogdet(whole)[1]
    w = np.exp(log_w - log_w.max())
    w /= w.sum()
    size = 1 / np.square(w).sum()
    means = (prior_sd * solved)[:, 1:]
    inverse = np.linalg.inv(whole) * prior_sd[:, :, None] * prior_sd[:, None, :]
    mean = w @ means
    covariance = np.einsum("s,sij->ij", w, inverse[:, 1:, 1:])
    covariance += (means - mean).T @ ((means - mean) * w[:, None])
    found = np.stack([model.effects()[name].reshape(-1) for name in names], 1)
    size = min(size, model.summary().loc[names, "ess_bulk"].min())
    assert size > 400
    spread = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(found.mean(0) - mean) < 5 * spread / np.sqrt(size))
    outer = np.outer(spread, spread)
    assert np.all(np.abs(np.cov(found.T) - covariance) < 8 * outer / np.sqrt(size))


def test_different_horseshoes_and_scales_raise():
    frame, names = table()
    priors = {"x0": Horseshoe(0.1), "x1": Horseshoe(0.2)}
    with pytest.raises(InputError, match="one Horseshoe for all terms"):
        Regression("y ~ x0 + x1", priors=priors).prior_predictive(frame)
    with pytest.raises(InputError, match="global_scale"):
        Horseshoe(0.0)
