"""Smoothing by restricted maximum likelihood, against statsmodels and dense matrices."""

from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, stats

import subbayes
from subbayes import InputError
from subbayes.inference import Sampling
from subbayes.regression import HalfNormal, NormalPrior, Regression
from subbayes.regression.integrals import effects_sampling, empirical_bayes
from subbayes.regression.integrals.empirical_bayes import singular_warnings, smoothing_coordinates

SAMPLING = Sampling(draws=1000, chains=4, progress=False)


def table(n=240, groups=16, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(size=n), "v": rng.uniform(-2, 2, n)})
    frame["g"] = np.arange(n) % groups
    u = rng.normal(size=(groups, 2)) * [0.8, 0.5]
    eta = 1 + 0.5 * frame.x + u[frame.g, 0] + u[frame.g, 1] * frame.x
    frame["y"] = eta + 0.6 * rng.normal(size=n)
    frame["f"] = np.sin(2 * frame.v) + 0.4 * rng.normal(size=n)
    frame["c"] = rng.poisson(np.exp(0.4 + 0.2 * frame.x + 0.6 * u[frame.g, 0]))
    return frame


def test_random_slopes_are_those_of_mixed_lm():
    smf = pytest.importorskip("statsmodels.formula.api")
    frame = table()
    priors = {"x": 100.0, "Intercept": NormalPrior(1.0, 100.0)}
    model = Regression("y ~ x + (1 + x | g)", priors=priors)
    summary = model.fit(frame, smooth="reml", sampling=SAMPLING).summary()
    other = smf.mixedlm("y ~ x", frame, groups="g", re_formula="~x").fit(reml=True)
    covariance = other.cov_re.to_numpy()
    sd = np.sqrt(np.diag(covariance))
    found = summary["mean"]
    assert found["sd(Intercept | g)"] == pytest.approx(sd[0], rel=2e-3)
    assert found["sd(x | g)"] == pytest.approx(sd[1], rel=2e-3)
    expected = covariance[0, 1] / sd.prod()
    assert found["cor(Intercept, x | g)"] == pytest.approx(expected, abs=5e-3)
    assert found["sigma"] == pytest.approx(np.sqrt(other.scale), rel=0.03)
    n = summary.loc[["Intercept", "x"], "ess_bulk"].min()
    for name in ("Intercept", "x"):
        se = other.bse_fe[name]
        assert abs(found[name] - other.fe_params[name]) < 4.5 * se / np.sqrt(n)
        assert summary.loc[name, "sd"] == pytest.approx(se, rel=0.06)
    draws = model.effects()
    correlation = np.corrcoef(draws["Intercept"].reshape(-1), draws["x"].reshape(-1))[0, 1]
    both = other.cov_params().loc[["Intercept", "x"], ["Intercept", "x"]].to_numpy()
    assert abs(correlation - both[0, 1] / np.sqrt(np.diag(both)).prod()) < 5 / np.sqrt(n)
    assert summary.attrs["smooth"] == "empirical Bayes (REML)"


def test_a_smooth_is_that_of_dense_matrices():
    frame = table()
    model = Regression("f ~ s(v, df=8)")
    model.fit(frame, smooth="reml", sampling=SAMPLING)
    structured = model.state.model.structured
    design = structured.design.matrix(frame)[0][:, :-1]  # without the column of sigma
    penalised = list(structured.design.terms[1].penalised)
    level, scale = structured._mean.numpy()[:-1], structured._scale.numpy()[:-1].copy()
    r = frame["f"].to_numpy() - design @ level
    best = optimize.minimize(dense_criterion(model, frame), [0.0, -1.0]).x
    found = model.summary()["mean"]
    assert found["sd(s(v, df=8))"] == pytest.approx(np.exp(best[0]), rel=5e-3)
    own, sigma = scale.copy(), found["sigma"]
    own[penalised] = np.exp(best[0])
    precision = np.diag(own**-2.0) + design.T @ design / sigma**2
    fit = design @ (level + np.linalg.solve(precision, design.T @ r) / sigma**2)
    sd = np.sqrt(np.einsum("np,pq,nq->n", design, np.linalg.inv(precision), design))
    predictor = model.predict(frame).outputs[..., 0]
    assert np.abs((predictor.mean(0).numpy() - fit) / sd).max() < 0.15
    assert np.abs(predictor.std(0).numpy() / sd - 1).max() < 0.1


def test_counts_have_the_maximum_of_the_laplace_approximation():
    frame = table()
    model = Regression("c ~ x + (1 | g)", family="poisson")
    model.fit(frame, smooth="reml", sampling=SAMPLING)
    structured = model.state.model.structured
    design, y = structured.design.matrix(frame)[0], frame["c"].to_numpy()
    groups = list(structured.design.terms[2].penalised)
    level, scale = structured._mean.numpy(), structured._scale.numpy()

    def mode(tau):
        own = scale.copy()
        own[groups] = tau
        z = np.zeros(len(own))
        for _ in range(50):
            mean = np.exp(design @ (level + own * z))
            hessian = (design * own).T @ (design * own * mean[:, None]) + np.eye(len(own))
            z = z + np.linalg.solve(hessian, own * (design.T @ (y - mean)) - z)
        eta = design @ (level + own * z)
        value = y @ eta - np.exp(eta).sum() - 0.5 * z @ z - 0.5 * np.linalg.slogdet(hessian)[1]
        covariance = own * np.linalg.inv(hessian) * own[:, None]
        return value, level + own * z, covariance

    best = optimize.minimize_scalar(
        lambda at: -mode(np.exp(at))[0], bounds=(-4, 1), method="bounded", options={"xatol": 1e-6}
    ).x
    summary = model.summary()
    assert summary.loc["sd(Intercept | g)", "mean"] == pytest.approx(np.exp(best), rel=5e-3)
    _, at, covariance = mode(np.exp(best))
    place = structured.design.names.index("x")
    sd = np.sqrt(covariance[place, place])
    assert abs(summary.loc["x", "mean"] - at[place]) < 0.25 * sd  # a mean beside a mode
    assert summary.loc["x", "sd"] == pytest.approx(sd, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 6])
def test_the_search_leaves_standard_deviations_near_0(seed):
    """The posterior mode has a standard deviation near 0, where the slope is almost 0 too."""
    rng = np.random.default_rng(seed)
    g, x, u = np.repeat(np.arange(25), 8), rng.normal(0, 1, 200), rng.normal(0, 0.7, 25)
    b = (rng.uniform(size=200) < 1 / (1 + np.exp(-(0.2 + 0.8 * x + u[g])))).astype(int)
    frame = pd.DataFrame({"b": b, "x": x, "g": g.astype(str)})
    model = Regression("b ~ x + (1 | g)", family="bernoulli")
    model.fit(frame, smooth="reml", sampling=Sampling(draws=50, chains=2, progress=False))
    likelihood = model.state.model.effects_likelihood
    (at,) = smoothing_coordinates(likelihood.map.structured)

    def marginal(tau):
        zeta = torch.zeros(likelihood.map.structured.size, dtype=torch.float64)
        zeta[at] = tau
        zeta, precision = likelihood.mode(zeta, [at])
        squares = float(zeta.square().sum()) - tau**2
        log_det = float(torch.linalg.slogdet(precision.dense())[1])
        return float(likelihood.value(zeta[None])) - 0.5 * squares - 0.5 * log_det

    found = marginal(float(model.state.draws.z[0, 0, at]))
    assert found >= max(marginal(tau) for tau in np.linspace(-4, 4, 81)) - 1e-3


def test_a_model_is_saved_with_its_choice(tmp_path):
    frame = table()
    model = Regression("y ~ x + re(g)")
    model.fit(frame, smooth="reml", sampling=Sampling(draws=20, chains=2, progress=False))
    model.save(tmp_path / "model")
    again = subbayes.load(tmp_path / "model")
    assert again.state.model.specification.smooth == "reml"
    assert again.summary().attrs["smooth"] == "empirical Bayes (REML)"
    pd.testing.assert_frame_equal(again.summary(), model.summary())
    assert again.update(frame).summary().attrs["smooth"] == "empirical Bayes (REML)"
    model.report(tmp_path / "model.html")
    assert "empirical Bayes" in (tmp_path / "model.html").read_text()


def test_what_does_not_go_together_raises():
    frame = table()
    with pytest.raises(InputError, match="smooth"):
        Regression("y ~ x").fit(frame, smooth="ml")
    with pytest.raises(InputError, match="without smooths and random effects"):
        Regression("y ~ x").fit(frame, smooth="reml")
    with pytest.raises(InputError, match="Leave inference out"):
        Regression("y ~ s(v)").fit(frame, smooth="reml", inference="nuts")


def routes(monkeypatch, fit):
    """Draws of one model by corrected proposals, by proposals beside groups, and by NUTS."""
    found, maximum, known = {}, effects_sampling.restricted_maximum, []

    def once(*given):
        known.extend([maximum(*given)] if not known else [])
        return known[0].copy()

    monkeypatch.setattr(effects_sampling, "restricted_maximum", once)
    found["all"] = fit()
    monkeypatch.setattr(effects_sampling, "_corrected", lambda *_, **__: None)
    found["groups"] = fit()
    monkeypatch.setattr(effects_sampling, "MOST_BESIDE_GROUPS", -1)
    found["nuts"] = fit()
    return found


@pytest.mark.slow
def test_every_sampler_of_counts_given_the_maximum_finds_the_same_effects(monkeypatch):
    frame, sampling = table(n=100, groups=5), Sampling(draws=200, chains=2, progress=False)

    def fit():
        model = Regression("c ~ x + (1 + x | g)", family="poisson")
        return model.fit(frame, smooth="reml", sampling=sampling)

    found = routes(monkeypatch, fit)
    kinds = {name: one.draws.engine for name, one in found.items()}
    assert kinds["all"] == kinds["groups"] == "independence-metropolis"
    assert kinds["nuts"] == "nuts"
    assert "effects of groups integrated out" in found["groups"].describe()["inference"]
    tables = {name: one.summary() for name, one in found.items()}
    expected = tables["nuts"]
    assert expected.loc["sd(x | g)", "sd"] < 1e-9  # at its maximum
    drawn = expected.index[expected["sd"] > 1e-9]
    assert "x | g[0]" in drawn
    for name in ("all", "groups"):
        own = tables[name].loc[drawn]
        size = np.minimum(own["ess_bulk"], expected.loc[drawn, "ess_bulk"])
        error = 4.5 * expected.loc[drawn, "sd"] * np.sqrt(2 / size)
        assert (np.abs(own["mean"] - expected.loc[drawn, "mean"]) < error).all()
        np.testing.assert_allclose(own["sd"], expected.loc[drawn, "sd"], rtol=0.25)


@pytest.mark.slow
def test_random_slopes_of_many_groups_are_drawn_given_the_maximum():
    frame = table(n=300, groups=35)
    model = Regression("c ~ x + (1 + x | g)", family="poisson")
    summary = model.fit(
        frame, smooth="reml", sampling=Sampling(draws=40, chains=2, progress=False)
    ).summary()
    assert summary.attrs["smooth"] == "empirical Bayes (REML)"
    assert len(summary) > 70
    assert 0.3 < summary.loc["sd(Intercept | g)", "mean"] < 1.0


def test_what_maximum_likelihood_does_not_go_with_is_said_at_once(tmp_path):
    sampling = Sampling(draws=10, chains=2, progress=False, checkpoint=tmp_path)
    with pytest.raises(InputError, match="smooth: expected 'bayes' with a checkpoint.*Leave them"):
        Regression("y ~ x + (1 | g)").fit(table(), smooth="reml", sampling=sampling)


def restricted_likelihood(frame):
    """The standard deviation of groups and sigma at the maximum, by dense matrices."""
    y, fixed = frame["y"].to_numpy(), np.column_stack([np.ones(len(frame)), frame["x"]])
    groups = (frame["g"].to_numpy()[:, None] == np.unique(frame["g"])).astype(float)

    def negative(at):
        whole = np.exp(2 * at[0]) * groups @ groups.T + np.exp(2 * at[1]) * np.eye(len(y))
        inverse = np.linalg.inv(whole)
        inner = fixed.T @ inverse @ fixed
        r = y - fixed @ np.linalg.solve(inner, fixed.T @ inverse @ y)
        return 0.5 * (np.linalg.slogdet(whole)[1] + np.linalg.slogdet(inner)[1] + r @ inverse @ r)

    return np.exp(optimize.minimize(negative, [0.0, -0.5]).x)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"sd(g)": 0.02},
        {"sd(g)": HalfNormal(0.05)},
        {"sd(g)": stats.uniform(0, 0.1)},
        {"sd": 1e3},
        {"sigma": HalfNormal(0.1)},
    ],
    ids=["default", "number", "half-normal", "uniform", "all", "sigma"],
)
def test_priors_do_not_limit_the_maximum(given):
    frame = table()
    sd, _ = restricted_likelihood(frame)
    priors = {"x": 100.0, "Intercept": NormalPrior(1.0, 100.0)} | given
    model = Regression("y ~ x + (1 | g)", priors=priors)
    own = any(name.startswith("sd") for name in given)
    with (
        pytest.warns(UserWarning, match=r"priors of sd\(Intercept \| g\) are not used")
        if own
        else (nullcontext())
    ):
        model.fit(frame, smooth="reml", sampling=Sampling(draws=20, chains=2, progress=False))
    assert model.summary().loc["sd(Intercept | g)", "mean"] == pytest.approx(sd, rel=2e-3)


def test_a_maximum_at_the_upper_end_of_the_range_is_said():
    model = Regression("f ~ s(v, df=8)")
    sampling = Sampling(draws=20, chains=2, progress=False)
    structured = model.fit(table(), smooth="reml", sampling=sampling).state.model.structured
    zeta = np.zeros(structured.size)
    assert singular_warnings(structured, zeta) == []
    zeta[smoothing_coordinates(structured)] = empirical_bayes._LARGEST_SD
    (line,) = singular_warnings(structured, zeta)
    largest = structured.priors["sd(s(v, df=8))"].mean * -stats.norm.logsf(20)
    assert line.startswith(f"sd(s(v, df=8)) is {largest:.4g}, the end of the range")


def dense_criterion(model, frame):
    """Minus the restricted log-likelihood of log standard deviations, of a smooth and the rows."""
    structured = model.state.model.structured
    design = structured.design.matrix(frame)[0][:, :-1]  # without the column of sigma
    penalised = list(structured.design.terms[1].penalised)
    level, scale = structured._mean.numpy()[:-1], structured._scale.numpy()[:-1].copy()
    r = frame["f"].to_numpy() - design @ level

    def negative(at):
        own = scale.copy()
        own[penalised] = np.exp(at[0])
        whole = np.exp(2 * at[1]) * np.eye(len(r)) + (design * own**2) @ design.T
        return 0.5 * (np.linalg.slogdet(whole)[1] + r @ np.linalg.solve(whole, r))

    return negative


def test_a_function_of_many_waves_has_the_maximum_of_dense_matrices():
    """Its standard deviation is more than 20 times that of the response."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"v": np.linspace(0, 1, 300)})
    frame["f"] = np.sin(60 * frame["v"]) + 0.01 * rng.normal(size=300)
    model = Regression("f ~ s(v, k=60)")
    model.fit(frame, smooth="reml", sampling=Sampling(draws=20, chains=2, progress=False))
    assert not any("range" in line for line in singular_warnings_of(model))
    negative = dense_criterion(model, frame)
    best = np.exp(optimize.minimize(negative, [2.0, -4.0], method="Nelder-Mead").x[0])
    assert best > 20.7 * frame["f"].std()
    assert model.summary().loc["sd(s(v, k=60))", "mean"] == pytest.approx(best, rel=0.01)


def singular_warnings_of(model):
    state = model.state
    return singular_warnings(state.model.structured, state.joint.effects_of(state.draws)[0])
