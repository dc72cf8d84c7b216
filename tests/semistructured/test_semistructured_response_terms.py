"""Terms of the response: the same models as those of families, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, special, stats

from subbayes import InputError, Sampling
from subbayes.likelihoods.families import (
    BinomialFamily,
    CensoredFamily,
    NormalFamily,
    TruncatedFamily,
    WeibullFamily,
)
from subbayes.regression import Regression
from subbayes.regression.formula.response_terms import read_response_terms

SAMPLING = Sampling(draws=40, chains=2, warmup=5, seed=1, progress=False, mode="eager")


def rows(n=60):
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"x": rng.normal(size=n), "w": rng.integers(1, 4, n).astype(float)})
    time, end = rng.weibull(1.5, n) * np.exp(0.3 * frame.x), rng.uniform(0.3, 2, n)
    frame["time"], frame["right"] = np.minimum(time, end), time > end
    frame["entry"] = np.where(np.arange(n) % 3, 0.5 * frame.time, 0.0)
    frame["n of trials"] = rng.integers(3, 9, n)
    frame["hits"] = rng.binomial(frame["n of trials"], 0.4)
    frame["y"] = np.abs(rng.normal(size=n))
    frame["status"] = np.where(np.arange(n) < 5, "interval", "none")
    frame["end"] = frame.y + 1
    return frame


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("formula", "family", "plain", "other", "weights"),
    [
        (
            "time | cens(right) ~ x",
            "weibull",
            "time ~ x",
            CensoredFamily(family=WeibullFamily(), status="right"),
            None,
        ),
        (
            "y | cens(status, end) ~ x",
            "normal",
            "y ~ x",
            CensoredFamily(family=NormalFamily(), status="status", upper="end"),
            None,
        ),
        (
            "y | trunc(lb=0) + weights(w) ~ x",
            "normal",
            "y ~ x",
            TruncatedFamily(family=NormalFamily(), lower=0.0),
            "w",
        ),
        (
            "hits | trials(`n of trials`) ~ x",
            "binomial",
            "hits ~ x",
            BinomialFamily(trials="n of trials"),
            None,
        ),
        (
            "hits | trunc(ub=8) + trials(`n of trials`) ~ x",
            "binomial",
            "hits ~ x",
            TruncatedFamily(family=BinomialFamily(trials="n of trials"), upper=8.0),
            None,
        ),
        ("y | weights(w) ~ x", "normal", "y ~ x", NormalFamily(), "w"),
        (
            "time | cens(right) + trunc(lb=entry) ~ x",
            "weibull",
            "time ~ x",
            CensoredFamily(
                family=TruncatedFamily(family=WeibullFamily(), lower="entry"), status="right"
            ),
            None,
        ),
    ],
)
def test_terms_are_those_families(formula, family, plain, other, weights):
    frame = rows()
    found = Regression(formula, family=family)
    expected = Regression(plain, family=other, weights=weights)
    assert found.specification.family == other
    assert found.specification.formula.split() == plain.split()
    effects = [m.fit(frame, sampling=SAMPLING).effects() for m in (found, expected)]
    for name, draws in effects[0].items():
        np.testing.assert_array_equal(draws, effects[1][name])
    without = Regression(plain, family=NormalFamily() if weights else family)
    if family in ("weibull", "normal"):  # which the terms make a difference to
        others = without.fit(frame, sampling=SAMPLING).effects()["x"]
        assert not np.allclose(others, effects[0]["x"])


def test_formulas_by_parameter_and_bars_that_belong_to_names():
    found = read_response_terms(
        {"mu": "y | trunc(lb=-1.5, ub=2) ~ x", "sigma": "~ x"}, NormalFamily()
    )
    assert found.formula == {"mu": "y ~ x", "sigma": "~ x"}
    assert (found.family.lower, found.family.upper) == (-1.5, 2.0)
    for formula in ("`a | b` ~ x", "y ~ (1 | g)", "{y + (1 | 2)} ~ x", "~ x", "y ~ x ~ z"):
        same = read_response_terms(formula, NormalFamily())
        assert same.formula == formula
        assert same.family == NormalFamily()
    assert read_response_terms("`a | b` | weights(`c + d`) ~ x", NormalFamily()).weights == "c + d"


def test_a_saved_model_keeps_the_terms(tmp_path):
    frame = rows()
    model = Regression("time | cens(right) + weights(w) ~ x", family="weibull")
    model.fit(frame, sampling=SAMPLING)
    again = Regression.load(model.save(tmp_path / "model"))
    assert again.specification.family == model.specification.family
    assert again.specification.auxiliary.weights == "w"
    assert model.evaluate(frame) == pytest.approx(again.evaluate(frame))


def test_upper_ends_are_those_of_intervals_alone(recwarn):
    frame = rows()
    frame["status"] = np.where(np.arange(60) % 3, frame.status, "right")
    model = Regression("y | cens(status, end) ~ x").fit(frame, sampling=SAMPLING)
    holes = frame.assign(end=frame.end.where(frame.status == "interval"))
    again = Regression("y | cens(status, end) ~ x").fit(holes, sampling=SAMPLING)
    assert not [w for w in recwarn if "dropped" in str(w.message)]
    np.testing.assert_array_equal(again.draws.z, model.draws.z)
    assert again.evaluate(holes) == model.evaluate(frame)
    none = holes.assign(status="none", end=None)
    none = Regression("y | cens(status, end) ~ x").fit(none, sampling=SAMPLING)
    assert len(none.state.model.frame) == 60
    codes = holes.status.map({"none": 0, "right": 1, "interval": 2}).astype(object)
    numbers = Regression("y | cens(status, end) ~ x")
    numbers.fit(holes.assign(status=codes), sampling=SAMPLING)
    assert numbers.evaluate(holes.assign(status=codes)) == again.evaluate(holes)
    holes.loc[1, "end"] = np.nan  # of an interval
    with pytest.warns(UserWarning, match=r"1 of 60 rows have missing values \(1 in end\)"):
        Regression("y | cens(status, end) ~ x").fit(holes, sampling=SAMPLING)


@pytest.mark.parametrize(
    ("formula", "family", "said"),
    [
        ("y | se(w) ~ x", "normal", "cens(status), trunc(lb=0, ub=9)"),
        ("y | w ~ x", "normal", "joined by +"),
        ("y | cens(a) * trunc(lb=0) ~ x", "normal", "joined by +"),
        ("y | cens(a) + cens(b) ~ x", "normal", "each once"),
        ("y | os.system('ls') ~ x", "normal", "joined by +"),
        ("y | weights(__import__('os')) ~ x", "normal", "columns and numbers in weights"),
        ("y | weights(2) ~ x", "normal", "a column in weights(...), got 2"),
        ("y | weights() ~ x", "normal", "weights(w), got other arguments"),
        ("y | trunc(0, 1, 2) ~ x", "normal", "trunc(lb, ub), got other arguments"),
        ("y | trunc(lower=0) ~ x", "normal", "trunc(lb, ub), got other arguments"),
        ("y | trunc(*x) ~ x", "normal", "columns, numbers, operators"),
        ("y | trunc(**x) ~ x", "normal", "columns, numbers, operators"),
        ("y | trunc(lb=2, ub=1) ~ x", "normal", "a bound below the upper one"),
        ("y | cens(a) + trunc(lb=0) ~ x", "zero-inflated-poisson", "tail probabilities"),
        ("y | cens(a) ~ x", CensoredFamily(family="normal"), "a family that is not censored"),
        ("y | trunc(lb=a) ~ x", TruncatedFamily(family="normal"), "not truncated or censored"),
        ("y | cens(upper=b) ~ x", "normal", "a column of the status, got none"),
        ("y | cens(a) ~ x", "ordinal", "tail probabilities"),
        ("y | trials(n) ~ x", "poisson", "family 'binomial' with trials(...)"),
        ("y | trials(n) ~ x", BinomialFamily(trials=3), "by name, got binomial"),
        ("y | trials(2.5) ~ x", "binomial", "a whole number of trials, got 2.5"),
        ("y | trials(1e999) ~ x", "binomial", "a number above 1e+15"),
        ("y | trials(" + 900 * "9" + ") ~ x", "binomial", "columns, numbers, operators"),
        ("y | trunc(lb=-" + 900 * "9" + ") ~ x", "normal", "columns, numbers, operators"),
        ("y | trunc(ub=1e999) ~ x", "normal", "a number above 1e+15"),
        ("y | ~ x", "normal", "which ends too early"),
        ("y | " + "(" * 2000 + ")" * 2000 + " ~ x", "normal", "at most 30 brackets"),
        ("y | " + "-" * 900 + "w ~ x", "normal", "joined by +"),
    ],
)
def test_other_terms_are_refused_in_one_line(formula, family, said):
    with pytest.raises(InputError) as caught:
        Regression(formula, family=family)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_are_given_once():
    with pytest.raises(InputError, match="one column of weights, got 'v' and 'w'"):
        Regression("y | weights(w) ~ x", weights="v")


def test_survival_with_delayed_entry_is_maximum_likelihood(tmp_path):
    rng = np.random.default_rng(0)
    x, followed, entry = rng.normal(size=900), rng.uniform(0.5, 3, 900), rng.uniform(0, 1, 900)
    entry[::3] = 0.0
    time = rng.weibull(1.5, 900) * np.exp(0.5 * x)
    frame = pd.DataFrame({"x": x, "entry": entry, "t": np.minimum(time, followed)})
    frame = frame.assign(alive=time > followed)[np.minimum(time, followed) > entry]

    def loss(theta):
        k, mu = np.exp(theta[2]), np.exp(theta[0] + theta[1] * frame.x)
        scale = mu / special.gamma(1 + 1 / k)
        hazard = np.log(k / scale) + (k - 1) * np.log(frame.t / scale)
        passed = (frame.t / scale) ** k - (frame.entry / scale) ** k
        return (passed - hazard * ~frame.alive).sum()

    best = optimize.minimize(loss, np.zeros(3))
    model = Regression("t | cens(alive) + trunc(lb=entry) ~ x", family="weibull")
    sampling = Sampling(draws=200, chains=2, seed=0, progress=False)
    found = model.fit(frame, sampling=sampling).summary()["mean"]
    errors = np.sqrt(np.diag(best.hess_inv))
    assert abs(found["Intercept"] - best.x[0]) < 0.3 * errors[0]
    assert abs(found["x"] - best.x[1]) < 0.3 * errors[1]
    assert abs(np.log(found["shape"]) - best.x[2]) < 0.4 * errors[2]
    # times of those who enter later are longer: E[T | T > entry]
    new = pd.DataFrame({"x": [0.0, 0.0], "entry": [0.0, 2.0]})
    means = model.predict(new).mean
    assert means[1] > 2.0 > means[0]
    again = Regression.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(new).mean, means)
    with pytest.raises(InputError, match="none called entry"):
        model.predict(new[["x"]])
    replicates = model.posterior_predictive(100)  # censored times are drawn beyond both bounds
    assert (replicates.completed[:, frame.alive] > frame.t[frame.alive].to_numpy()).all()
    assert replicates.statistics().loc[["mean", "sd"], "p"].between(0.02, 0.98).all()
    frame.iloc[3, 1] = 9.0
    with pytest.raises(InputError, match="bounds entry, got .* at row 3"):
        model.fit(frame, sampling=sampling)


@pytest.mark.slow
def test_bounds_of_new_rows_have_an_order_and_no_priors():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"lo": np.zeros(40), "hi": np.full(40, 3.0), "y": rng.uniform(0, 3, 40)})
    formula, sampling = "y | trunc(lb=lo, ub=hi) ~ 1", Sampling(draws=20, chains=1, progress=False)
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression(formula).fit(frame, sampling=sampling)
    wrong = pd.DataFrame({"lo": [0.0, 3.0], "hi": [3.0, 0.0]})
    with pytest.raises(InputError, match="^lo and hi: expected lower .*, got 3 and 0 at row 1"):
        model.predict(wrong)
    frame["lower"] = rng.normal(size=40)
    named = Regression("y | trunc(lb=lo, ub=hi) ~ lower", priors={"lower": 2.0})
    assert repr(named.specification.prepare(frame, None).structured.priors["lower"]) == (
        "NormalPrior(mean=0, scale=2)"
    )


def maximum_likelihoods():
    """For each family: a formula, rows, minus their log likelihood and its arguments."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=900)
    mean = np.exp(0.4 + 0.5 * x)
    counts = rng.negative_binomial(1.5, 1.5 / (1.5 + mean))
    seen = pd.DataFrame({"x": x, "y": counts})[counts > 0].reset_index(drop=True)

    def loss(theta):
        shape = np.exp(theta[2])
        before = stats.nbinom(shape, shape / (shape + np.exp(theta[0] + theta[1] * seen.x)))
        return -(before.logpmf(seen.y) - np.log1p(-before.pmf(0))).sum()

    times = rng.gamma(2.0, mean / 2.0)
    status = np.where(times > 1.5, "right", "none")
    cut = pd.DataFrame({"x": x, "t": np.minimum(times, 1.5), "s": status})

    def censored_loss(theta):
        shape = np.exp(theta[2])
        before = stats.gamma(shape, scale=np.exp(theta[0] + theta[1] * x) / shape)
        logs = np.where(status == "right", before.logsf(cut.t), before.logpdf(cut.t))
        return -logs.sum()

    trials, p = rng.integers(2, 9, 900), 1 / (1 + np.exp(0.8 - 0.7 * x))
    hits = pd.DataFrame({"x": x, "n": trials, "hits": rng.binomial(trials, p)})
    hits = hits[hits.hits > 0].reset_index(drop=True)

    def binomial_loss(theta):
        before = stats.binom(hits.n, 1 / (1 + np.exp(-theta[0] - theta[1] * hits.x)))
        return -(before.logpmf(hits.hits) - np.log1p(-before.pmf(0))).sum()

    wide = rng.normal(size=6000)
    p = 1 / (1 + np.exp(0.8 - 0.7 * wide))
    shares = pd.DataFrame({"x": wide, "share": rng.beta(5 * p, 5 * (1 - p))})
    shares = shares[shares.share > 0.3].reset_index(drop=True)

    def beta_loss(theta):
        p, precision = 1 / (1 + np.exp(-theta[0] - theta[1] * shares.x)), np.exp(theta[2])
        before = stats.beta(precision * p, precision * (1 - p))
        return -(before.logpdf(shares.share) - before.logsf(0.3)).sum()

    return {
        "negative-binomial": ("y | trunc(lb=1) ~ x", seen, loss, 3),
        "gamma": ("t | cens(s) ~ x", cut, censored_loss, 3),
        "binomial": ("hits | trials(n) + trunc(lb=1) ~ x", hits, binomial_loss, 2),
        "beta": ("share | trunc(lb=0.3) ~ x", shares, beta_loss, 3),
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gamma", "binomial", "negative-binomial", "beta"])
def test_truncated_and_censored_families_by_quadrature_agree_with_maximum_likelihood(
    family, tmp_path
):
    formula, frame, function, size = maximum_likelihoods()[family]
    best = optimize.minimize(function, np.zeros(size))
    steps = 1e-3 * np.eye(size)
    hessian = [
        [
            sum(a * b * function(best.x + a * one + b * two) for a in (1, -1) for b in (1, -1))
            for two in steps
        ]
        for one in steps
    ]
    errors = np.sqrt(np.diag(np.linalg.inv(np.array(hessian) / 4e-6)))
    model = Regression(formula, family=family)
    sampling = Sampling(draws=300, chains=4, seed=0, progress=False)
    summary = model.fit(frame, sampling=sampling).summary()
    for i, name in enumerate(("Intercept", "x")):
        row = summary.loc[name]
        assert abs(row["mean"] - best.x[i]) < 0.3 * errors[i]
        assert row["sd"] == pytest.approx(errors[i], rel=0.25)
    path = tmp_path / family
    model.save(path)
    again = Regression.load(path)
    few = frame[:50]  # means of truncated families take an integral for each row and draw
    np.testing.assert_array_equal(again.predict(few).mean, model.predict(few).mean)
