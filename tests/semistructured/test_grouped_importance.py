"""Effects of groups integrated out of counts and binary responses, against quadrature and NUTS."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from subbayes.inference import Sampling
from subbayes.regression import Regression
from subbayes.regression.integrals.effects_sampling import draw_effects
from subbayes.regression.integrals.grouped_importance import GroupedImportance, has_groups

CASES = [
    ("c ~ x + (1 | g)", "poisson"),
    ("b ~ x + re(g)", "bernoulli"),
    ("c ~ x + (1 + x | g)", "poisson"),
    ("b ~ (x || g) + re(k)", "bernoulli"),
]


def table(n=120, groups=8, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(size=n), "k": rng.integers(0, 3, n)})
    frame["g"] = rng.integers(0, groups, n)
    frame["w"], frame["o"] = rng.integers(1, 3, n), 0.3 * rng.normal(size=n)
    level = rng.normal(size=groups) * 0.7
    eta = 0.3 + 0.4 * frame.x + level[frame.g]
    frame["c"] = rng.poisson(np.exp(eta))
    frame["b"] = (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(int)
    return frame


def prepared(formula, family, frame, **options):
    model = Regression(formula, family=family, **options)
    return model.specification.prepare(frame, None)


def quadrature(grouped, likelihood, h):
    """Log p(D, h), and moments of the first group given h, on a grid for each group."""
    q = grouped.groups.shape[1]
    zeta = torch.zeros(1, grouped.size, dtype=torch.float64)
    zeta[:, grouped.rest] = torch.from_numpy(h)
    base = float(likelihood.value(zeta)[0])

    def integral(columns, centre, width):
        x = np.linspace(-1, 1, 401 if q == 1 else 121)
        grid = centre + width * np.stack(np.meshgrid(*[x] * q, indexing="ij"), -1).reshape(-1, q)
        moved = zeta.repeat(len(grid), 1)
        moved[:, columns] = torch.from_numpy(grid)
        log = likelihood.value(moved).numpy() - base - 0.5 * np.square(grid).sum(1)
        p = np.exp(log - log.max())
        cell = np.prod(width * (x[1] - x[0])) / (2 * np.pi) ** (q / 2)
        total, p = log.max() + np.log(p.sum() * cell), p / p.sum()
        mean = p @ grid
        return total, mean, (grid - mean).T @ ((grid - mean) * p[:, None])

    total, moments = base - 0.5 * h @ h, []
    for columns in grouped.groups.tolist():
        _, mean, covariance = integral(columns, np.zeros(q), np.full(q, 6.0))
        value, *found = integral(columns, mean, 8 * np.sqrt(np.diag(covariance)) + 0.1)
        total += value
        moments.append(found)
    return total, *moments[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"weights": "w", "offset": "o"}])
@pytest.mark.parametrize(("formula", "family"), CASES)
def test_the_estimate_is_unbiased_and_its_draws_have_the_conditional_moments(
    formula, family, options
):
    model = prepared(formula, family, table(), **options)
    likelihood = model.effects_likelihood
    grouped = GroupedImportance(likelihood)
    zero = torch.zeros(model.structured.size, dtype=torch.float64)
    start = likelihood.mode(zero)[0].numpy()[grouped.rest]
    grouped.start_near(start)
    rng = np.random.default_rng(1)
    for h in start + 0.5 * rng.standard_normal((2, len(start))):
        exact, mean, covariance = quadrature(grouped, likelihood, h)
        n = 4000
        value = grouped.estimate(np.tile(h, (n, 1)), [rng])
        ratio = np.exp(value - exact)
        assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / np.sqrt(n) + 1e-9
        assert ratio.std() < 0.05
        # draws of the first group, weighted by the estimates: one accepts h by them
        w = ratio / ratio.sum()
        draws = grouped.chosen[:, 0].numpy()
        size = 1 / np.square(w).sum()
        sd = np.sqrt(np.diag(covariance))
        assert np.all(np.abs(w @ draws - mean) < 4.5 * sd / np.sqrt(size))
        spread = (draws - mean).T @ ((draws - mean) * w[:, None])
        assert np.all(np.abs(spread - covariance) < 6 * np.outer(sd, sd) * np.sqrt(2 / size))
        assert grouped.laplace(h[None])[0] == pytest.approx(exact, abs=1.0)


def test_a_chain_does_not_depend_on_the_others():
    model = prepared(*CASES[0], table())
    likelihood = model.effects_likelihood
    start = likelihood.mode(torch.zeros(model.structured.size, dtype=torch.float64))[0].numpy()
    four = draw_effects(likelihood, start, Sampling(draws=100, chains=4, progress=False))
    two = draw_effects(likelihood, start, Sampling(draws=100, chains=2, progress=False))
    np.testing.assert_allclose(four.z[:2], two.z, rtol=1e-6, atol=1e-8)
    value = likelihood.value(torch.from_numpy(four.flat().copy())).numpy()
    np.testing.assert_allclose(four.stats["log_likelihood"].reshape(-1), value)


def test_groups_that_share_rows_are_not_integrated_out():
    frame = table()
    frame["s"] = frame.g + 0.5
    shared = prepared("c ~ x + gp(s, k=5)", "poisson", frame)
    assert not has_groups(shared.effects_likelihood)


def test_few_rows_of_each_group_agree_with_quadrature_and_mix():
    """The logarithm of a standard deviation that may be 0 has a long tail on one side."""
    rng = np.random.default_rng(4)
    g = np.repeat(np.arange(15), 6)
    b = rng.binomial(1, 1 / (1 + np.exp(0.3 - rng.normal(0, 0.7, 15)[g])))
    frame = pd.DataFrame({"g": g.astype(str), "b": b})
    priors = {"Intercept": 1.5, "sd(g)": stats.halfnorm(scale=1.0)}
    model = Regression("b ~ (1 | g)", family="bernoulli", priors=priors)
    model.fit(frame, sampling=Sampling(draws=1000, chains=4, progress=False))
    assert model.draws.meta["integrated_out"] == "groups"
    found = model.summary(groups=False)
    assert (found["ess_tail"] > 800).all()  # 113 to 430 in such data with one component

    level, tau = np.meshgrid(np.linspace(-4, 4, 161), np.linspace(1e-4, 6, 300), indexing="ij")
    x, weight = np.polynomial.hermite_e.hermegauss(60)
    p = 1 / (1 + np.exp(-(level[..., None] + tau[..., None] * x)))
    log_p = -0.5 * (level / 1.5) ** 2 - 0.5 * tau**2
    for count, groups in frame.groupby("g").b.sum().value_counts().items():
        log_p += groups * np.log((p**count * (1 - p) ** (6 - count)) @ weight)
    mass = np.exp(log_p - log_p.max())
    mass /= mass.sum()
    points = np.stack([level.ravel(), tau.ravel()])
    mean, cov = points @ mass.ravel(), np.cov(points, aweights=mass.ravel(), ddof=0)
    error = np.sqrt(np.diag(cov) / found["ess_bulk"])
    assert (np.abs(found["mean"] - mean) < 4 * error).all()
    effects = model.effects()
    drawn = np.cov(np.stack([effects[name].reshape(-1) for name in found.index]))
    np.testing.assert_allclose(drawn, cov, atol=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("formula", "family"), CASES[:3])
def test_draws_have_the_moments_of_nuts(formula, family):
    """Means, standard deviations and correlations of all effects, by NUTS over all coordinates."""
    frame, sampling = table(), Sampling(draws=1000, chains=4, progress=False)
    direct = Regression(formula, family=family).fit(frame, sampling=sampling)
    nuts = Regression(formula, family=family)
    nuts.fit(frame, inference="nuts", sampling=sampling)
    assert (direct.draws.engine, nuts.draws.engine) == ("independence-metropolis", "nuts")
    a, b = direct.summary(), nuts.summary()
    assert (a["ess_bulk"] > 300).all()
    n = np.minimum(a["ess_bulk"], b["ess_bulk"]) / 2
    assert (np.abs(a["mean"] - b["mean"]) < 4.5 * b["sd"] / np.sqrt(n)).all()
    assert (np.abs(a["sd"] / b["sd"] - 1) < 6 / np.sqrt(n)).all()
    first, second = (
        np.corrcoef(np.stack([v.reshape(-1) for v in m.effects().values()])) for m in (direct, nuts)
    )
    assert np.abs(first - second).max() < 6 / np.sqrt(n.min())
