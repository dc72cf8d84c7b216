"""Models of trials, classes, censored times and others, against maximum likelihood; saving."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, special, stats

import subbayes
from subbayes import InputError
from subbayes.inference import Sampling
from subbayes.likelihoods.families import (
    BinomialFamily,
    CensoredFamily,
    MixtureFamily,
    NormalFamily,
    OrdinalFamily,
    PiecewiseExponentialFamily,
    TruncatedFamily,
)
from subbayes.regression import Regression

N = 400
FEW = Sampling(draws=400, chains=2, progress=False, seed=1)


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    x = rng.normal(size=N)
    found = pd.DataFrame({"x": x, "n": rng.integers(1, 12, N)})
    found["wins"] = rng.binomial(found["n"], special.expit(0.3 + 0.8 * x))
    scores = np.column_stack([np.zeros(N), 0.5 + x, -0.5 * x])
    p = special.softmax(scores, 1)
    found["kind"] = [rng.choice(["a", "b", "c"], p=row) for row in p]
    time = np.exp(1 + 0.5 * x) * rng.weibull(1.5, N)
    end = rng.exponential(6, N)
    found["time"], found["censored"] = np.minimum(time, end), time > end
    found["zeros"] = np.where(rng.random(N) < 0.3, 0, rng.poisson(np.exp(1 + 0.4 * x)))
    return found


def fitted(formula, family, frame, **options):
    model = Regression(formula, family=family, **options)
    return model.fit(frame, inference="laplace", sampling=FEW)


def agrees(model, names, negative, start):
    """Posterior means are within a standard deviation of maximum likelihood, sds alike."""
    found = optimize.minimize(negative, start, method="BFGS")
    table = model.summary()
    means, sds = (table.loc[names, c].to_numpy() for c in ("mean", "sd"))
    assert np.all(np.abs(means - found.x) < 0.35 * sds + 0.01), (means, found.x)
    np.testing.assert_allclose(sds, np.sqrt(np.diag(found.hess_inv)), rtol=0.25)


def test_binomial_trials_are_a_column(frame, tmp_path):
    model = fitted("wins ~ x", BinomialFamily(trials="n"), frame)
    wins, n, x = (frame[c].to_numpy() for c in ("wins", "n", "x"))

    def negative(b):
        return -stats.binom(n, special.expit(b[0] + b[1] * x)).logpmf(wins).sum()

    agrees(model, ["Intercept", "x"], negative, [0.0, 0.0])
    assert model.describe()["of each row"] == "trials in n"
    new = pd.DataFrame({"x": [0.0, 0.0], "n": [1, 50]})
    mean = model.predict(new).mean
    assert mean[1] == pytest.approx(50 * mean[0])
    model.save(tmp_path / "model")
    again = subbayes.load(tmp_path / "model")
    np.testing.assert_allclose(again.predict(new).mean, mean)
    assert again.loo(quiet=True).elpd == pytest.approx(model.loo(quiet=True).elpd)
    with pytest.raises(InputError, match="none called n"):
        model.predict(new[["x"]])
    for n in (-3, 0):
        with pytest.raises(InputError, match="trials: expected numbers above 0"):
            model.predict(new.assign(n=n))
    with pytest.raises(InputError, match="at most as many successes as trials"):
        fitted("wins ~ x", BinomialFamily(trials="n"), frame.assign(n=1))


@pytest.mark.parametrize("trials", [1, "n"])
@pytest.mark.parametrize(
    ("link", "share"),
    [
        ("probit", special.ndtr),
        ("cloglog", lambda eta: -np.expm1(-np.exp(eta))),
        ("cauchit", stats.cauchy.cdf),
    ],
)
def test_links_of_probabilities(frame, link, share, trials, tmp_path):
    x, rng = frame["x"].to_numpy(), np.random.default_rng(3)
    n = frame["n"].to_numpy() if trials == "n" else 1
    data = frame.assign(wins=rng.binomial(n, share(0.3 + 0.8 * x)))
    response = "wins | trials(n)" if trials == "n" else "wins"
    model = Regression(f"{response} ~ x", family="bernoulli", link=link)
    model = model.fit(data, sampling=FEW)
    assert model.state.model.family.links[0] == link

    def negative(b):
        return -stats.binom(n, share(b[0] + b[1] * x)).logpmf(data["wins"]).sum()

    agrees(model, ["Intercept", "x"], negative, [0.0, 0.0])
    new = pd.DataFrame({"x": [-1.0, 2.0], "n": 1})
    draws = model.effects()
    b = np.column_stack([draws[name].reshape(-1) for name in ("Intercept", "x")])
    expected = share(b @ np.array([[1.0, 1.0], [-1.0, 2.0]])).mean(0)
    found = model.predict(new)
    found = found.mean if trials == "n" else found.probabilities[:, 1]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    model.save(tmp_path / "model")
    again = subbayes.load(tmp_path / "model")
    assert again.state.model.family == model.state.model.family


def test_ordinal_probit_is_that_of_statsmodels(frame, tmp_path):
    from statsmodels.miscmodels.ordinal_model import OrderedModel

    x, rng = frame["x"].to_numpy(), np.random.default_rng(5)
    grade = np.digitize(0.9 * x + rng.normal(size=N), [-0.8, 0.1, 1.2])
    model = Regression("grade ~ x", family="ordinal", link="probit")
    table = model.fit(frame.assign(grade=grade), sampling=FEW).summary()
    again = subbayes.load(model.save(tmp_path / "model"))
    assert again.state.model.family == OrdinalFamily(n_classes=4, cumulative="probit")
    np.testing.assert_allclose(
        again.predict(frame).probabilities, model.predict(frame).probabilities
    )
    expected = OrderedModel(grade, x[:, None], distr="probit").fit(method="bfgs", disp=0)
    thresholds = expected.model.transform_threshold_params(expected.params)[1:-1]
    names = ["x", "threshold[0]", "threshold[1]", "threshold[2]"]
    values = np.concatenate([expected.params[:1], thresholds])
    assert np.all(np.abs(table.loc[names, "mean"] - values) < 0.35 * table.loc[names, "sd"])
    np.testing.assert_allclose(table.loc["x", "sd"], expected.bse[0], rtol=0.15)


def test_categorical_effects_are_log_odds_to_the_reference(frame, tmp_path):
    model = fitted("kind ~ x", "categorical", frame)
    x, codes = frame["x"].to_numpy(), frame["kind"].map({"a": 0, "b": 1, "c": 2}).to_numpy()

    def negative(b):
        scores = np.column_stack([np.zeros(N), b[0] + b[1] * x, b[2] + b[3] * x])
        return -special.log_softmax(scores, 1)[np.arange(N), codes].sum()

    names = ["mu[b].Intercept", "mu[b].x", "mu[c].Intercept", "mu[c].x"]
    agrees(model, names, negative, [0.0] * 4)
    p = model.predict(frame.head()).probabilities
    np.testing.assert_allclose(p.sum(1), 1)
    assert model.evaluate(frame)["accuracy"] > 0.4
    model.save(tmp_path / "model")
    again = subbayes.load(tmp_path / "model")
    np.testing.assert_allclose(again.predict(frame.head()).probabilities, p)


def softmax_by_hand(model, x):
    """Probabilities of a, b and c in each draw, shape (S, 3)."""
    e = {name: draws.reshape(-1) for name, draws in model.effects().items()}
    scores = [e[f"mu[{k}].Intercept"] + e[f"mu[{k}].x"] * x for k in "bc"]
    return special.softmax(np.column_stack([0 * scores[0], *scores]), 1)


def test_averages_of_a_class_are_those_of_its_probability(frame):
    model = fitted("kind ~ x", "categorical", frame)
    for k, category in enumerate("abc"):
        found = model.marginal_means("x", [0.5], category=category)
        np.testing.assert_allclose(found.draws[:, 0], softmax_by_hand(model, 0.5)[:, k])
        difference = softmax_by_hand(model, 0.5) - softmax_by_hand(model, -1.0)
        found = model.contrast("x", [(0.5, -1.0)], category=category)
        np.testing.assert_allclose(found.draws[:, 0], difference[:, k], atol=1e-12)
    assert model.describe()["response"] == "kind: 'b', 'c', each beside 'a'"
    assert model.describe()["family"] == "categorical(classes=3)"
    table = model.predict(frame.assign(x=0.5)[:1]).to_frame(threshold=0.9)
    p = table[["p[a]", "p[b]", "p[c]"]].to_numpy()[0]
    np.testing.assert_allclose(p, softmax_by_hand(model, 0.5).mean(0))
    assert table.loc[0, "label"] == "abc"[p.argmax()]
    assert table.loc[0, "doubt"] == (p.max() <= 0.9)
    slopes = [model.marginal_slopes("x", category=k).draws for k in "abc"]
    np.testing.assert_allclose(sum(slopes), 0.0, atol=1e-8)
    effect = model.conditional_effect("x", category="c")
    at = softmax_by_hand(model, effect.x[7])[:, 2]
    np.testing.assert_allclose(effect.draws[0][:, 7], at)
    predictors = model.marginal_means("x", [1.0], category="b", scale="link").draws[:, 0]
    e = model.effects()
    by_hand = e["mu[b].Intercept"].reshape(-1) + e["mu[b].x"].reshape(-1)
    np.testing.assert_allclose(predictors, by_hand)
    for options in ({}, {"category": "d"}, {"scale": "link"}, {"category": 1}):
        with pytest.raises(InputError, match="one of the classes 'a', 'b', 'c'"):
            model.marginal_means("x", [0.5], **options)


def test_averages_of_two_and_of_ordered_classes(frame):
    two = fitted("high ~ x", "bernoulli", frame.assign(high=np.where(frame["x"] > 0.8, "y", "n")))
    second = two.marginal_means("x", [0.0]).draws
    np.testing.assert_array_equal(second, two.marginal_means("x", [0.0], category="y").draws)
    first = two.marginal_means("x", [0.0], category="n").draws
    np.testing.assert_allclose(first, 1 - second)
    with pytest.raises(InputError, match="None with scale='link'"):
        two.marginal_means("x", [0.0], category="n", scale="link")
    ordered = fitted("wins ~ x", "ordinal", frame.assign(wins=frame["wins"].clip(upper=2)))
    parts = [ordered.marginal_means("x", [0.3], category=k).draws for k in (0, 1, 2)]
    np.testing.assert_allclose(sum(parts), 1.0)
    assert ordered.marginal_means("x", [0.3], scale="link").draws.shape == parts[0].shape
    numbers = fitted("time ~ x", "weibull", frame)
    with pytest.raises(InputError, match="None for a response of numbers, got 'n'"):
        numbers.marginal_means("x", [0.0], category="n")


def test_censored_times_have_the_likelihood_of_survival(frame, tmp_path):
    family = CensoredFamily(family="weibull", status="censored")
    model = fitted("time ~ x", family, frame)
    time, x, alive = (frame[c].to_numpy() for c in ("time", "x", "censored"))

    def negative(b):
        shape = np.exp(b[2])
        frozen = stats.weibull_min(
            shape, scale=np.exp(b[0] + b[1] * x - special.gammaln(1 + 1 / shape))
        )
        return -np.where(alive, frozen.logsf(time), frozen.logpdf(time)).sum()

    found = optimize.minimize(negative, [0.0, 0.0, 0.0], method="BFGS").x
    table = model.summary()
    near = [*found[:2], np.exp(found[2])]
    assert np.all(np.abs(table["mean"] - near) < 0.4 * table["sd"])
    uncensored = fitted("time ~ x", "weibull", frame).summary()
    assert table.loc["Intercept", "mean"] > uncensored.loc["Intercept", "mean"]
    model.save(tmp_path / "model")
    again = subbayes.load(tmp_path / "model")
    assert again.loo(quiet=True).elpd == pytest.approx(model.loo(quiet=True).elpd)
    assert model.score_samples(frame).shape == (N,)
    assert set(model.evaluate(frame)) == {"log_likelihood"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "family"),
    [
        ("time", CensoredFamily(family=PiecewiseExponentialFamily(cuts=(1.0, 3.0)))),
        ("time", "log-logistic"),
        ("zeros", "zero-inflated-poisson"),
        ("zeros", "hurdle-negative-binomial"),
        ("x", "asymmetric-laplace"),
        ("time", TruncatedFamily(family="normal", lower=0.0)),
        ("x", MixtureFamily(first="normal", second=NormalFamily())),
    ],
)
def test_models_fit_predict_and_load(response, family, frame, tmp_path):
    model = fitted(f"{response} ~ n", family, frame)
    assert np.isfinite(model.summary()["mean"]).all()
    predictive = model.predict(frame.head())
    low, high = predictive.interval(0.9)
    assert np.all(low < high)
    np.testing.assert_array_less(predictive.cdf(torch.tensor(low) - 1e-3), 0.06)
    model.save(tmp_path / "model")
    again = subbayes.load(tmp_path / "model")
    np.testing.assert_allclose(again.predict(frame.head()).mean, predictive.mean)


def test_zero_inflation_is_recovered_by_sampling(frame):
    model = Regression("zeros ~ x", family="zero-inflated-poisson")
    table = model.fit(frame, sampling=Sampling(draws=200, chains=2, progress=False)).summary()
    assert abs(table.loc["zi", "mean"] - 0.3) < 3 * table.loc["zi", "sd"]
    assert abs(table.loc["x", "mean"] - 0.4) < 3 * table.loc["x", "sd"]


def test_a_hurdle_of_numbers_is_two_regressions():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(300)
    is_zero = rng.random(300) < 1 / (1 + np.exp(0.5 - 0.8 * x))
    y = np.where(is_zero, 0.0, rng.gamma(3, np.exp(0.5 + 0.4 * x) / 3))
    rows = pd.DataFrame({"x": x, "y": y, "zero": is_zero * 1})
    options = {"sampling": Sampling(draws=1000, chains=2, progress=False)}
    model = Regression({"mu": "y ~ x", "hu": "~ x"}, family="hurdle-gamma")
    both = model.fit(rows, **options).summary()
    above = Regression("y ~ x", family="gamma").fit(rows[~is_zero], **options)
    zeros = Regression("zero ~ x", family="bernoulli").fit(rows, **options)
    names = ["Intercept", "x", "shape"]
    for found, expected in (
        (both.loc[names], above.summary().loc[names]),
        (both.loc[["hu.Intercept", "hu.x"]], zeros.summary().loc[names[:2]]),
    ):
        error = np.abs(found["mean"].to_numpy() - expected["mean"].to_numpy())
        assert (error < 0.25 * expected["sd"].to_numpy()).all()  # priors of the intercept differ
        np.testing.assert_allclose(found["sd"], expected["sd"], rtol=0.15)
    predictive = model.predict(rows)
    chance = predictive.cdf(np.zeros(300)).ravel()
    lower = predictive.quantile(0.3).ravel()
    assert ((lower == 0) == (chance >= 0.3)).all()
    np.testing.assert_allclose(predictive.cdf(lower)[lower > 0].ravel(), 0.3, rtol=1e-6)
    assert predictive.quantile(0.99).min() > 0


def test_inflated_shares_are_those_of_their_parts(tmp_path):
    rng = np.random.default_rng(1)
    is_end, is_one = rng.random(400) < 0.3, rng.random(400) < 0.6
    y = np.where(is_end, is_one * 1.0, rng.beta(3, 2, 400))
    rows = pd.DataFrame({"y": y})
    options = {"sampling": Sampling(draws=1000, chains=2, progress=False)}
    model = Regression("y ~ 1", family="zero-one-inflated-beta").fit(rows, **options)
    mean = model.summary()["mean"]
    ends = rows[is_end].y
    # Beta(1/2, 1/2) is close to the default prior of a share with so many rows
    assert mean["zoi"] == pytest.approx((is_end.sum() + 0.5) / 401, abs=0.005)
    assert mean["coi"] == pytest.approx((ends.sum() + 0.5) / (len(ends) + 1), abs=0.01)
    inner = Regression("y ~ 1", family="beta").fit(rows[~is_end], **options)
    assert mean["Intercept"] == pytest.approx(inner.summary()["mean"]["Intercept"], abs=0.02)
    predictive = model.predict(rows.head(1))
    share = mean["zoi"] * mean["coi"] + (1 - mean["zoi"]) / (1 + np.exp(-mean["Intercept"]))
    assert predictive.mean[0] == pytest.approx(share, abs=0.005)
    assert predictive.quantile(0.02)[0] == 0
    assert predictive.quantile(0.95)[0] == 1
    again = Regression.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(rows).mean, model.predict(rows).mean)
