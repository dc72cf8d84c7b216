"""Flat priors against least squares and maximum likelihood, and posteriors that are improper."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import optimize

import subbayes
from subbayes import InputError, Sampling, SemiStructuredRegression
from subbayes.networks.mlp import MLP
from subbayes.regression import Flat, Regression

DRAWS, CHAINS = 1000, 4
MANY = Sampling(draws=DRAWS, chains=CHAINS, progress=False)
ALL = dict.fromkeys(("Intercept", "x", "w", "sigma"), Flat())


def table(n=14):
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"x": rng.normal(4.0, 1.0, n), "w": 1000 * rng.normal(size=n)})
    frame["y"] = 1e3 + 50 * frame["x"] + 0.1 * frame["w"] + 30 * rng.normal(size=n)
    return frame


@pytest.fixture(scope="module")
def model():
    return Regression("y ~ x + w", priors=ALL).fit(table(), sampling=MANY)


def test_the_posterior_is_the_t_distribution_around_least_squares(model):
    frame, names = table(), ["Intercept", "x", "w"]
    X = np.column_stack([np.ones(len(frame)), frame["x"], frame["w"]])
    mean, residuals = np.linalg.lstsq(X, frame["y"], rcond=None)[:2]
    df = len(frame) - 3
    # p(beta, sigma) = 1 / sigma: t with df degrees of freedom, scale s^2 (X'X)^-1
    covariance = residuals[0] / (df - 2) * np.linalg.inv(X.T @ X)
    draws = np.stack([model.effects()[name].reshape(-1) for name in names], 1)
    sd = np.sqrt(np.diag(covariance))
    assert (np.abs(draws.mean(0) - mean) < 4 * sd / (0.5 * DRAWS * CHAINS) ** 0.5).all()
    # the variance of a sample variance of t_11 is 2 + 6 / 7 over the number of draws
    np.testing.assert_allclose(np.cov(draws.T) / np.outer(sd, sd), covariance / np.outer(sd, sd),
                               atol=0.15)  # fmt: skip
    precision = model.effects()["sigma"].reshape(-1) ** -2.0 * residuals[0]  # chi^2 with df
    assert precision.mean() == pytest.approx(df, abs=4 * np.sqrt(2 * df / (DRAWS * CHAINS / 2)))


def test_they_are_saved_and_shown(model, tmp_path):
    assert repr(model.priors["x"]) == repr(model.priors["sigma.Intercept"]) == "Flat()"
    again = subbayes.load(model.save(tmp_path / "model"))
    pd.testing.assert_frame_equal(again.summary(), model.summary())


def test_equalities_and_prior_draws_need_proper_priors(model):
    assert model.hypothesis("x > 0").probability > 0.9
    with pytest.raises(InputError, match="effects with proper priors in an equality, got x with"):
        model.hypothesis("x = 0")
    with pytest.raises(InputError, match="proper priors, from which there are draws, got Flat"):
        Regression("y ~ x", priors={"x": Flat()}).prior_predictive(table())
    other = Regression("y ~ x + w", priors={"Intercept": Flat(), "sigma": Flat()})
    other.fit(table(), inference="laplace", sampling=MANY)
    assert np.isfinite(other.hypothesis("x = 0").evidence_ratio)
    with pytest.raises(InputError, match="got Intercept with flat priors"):
        other.hypothesis("Intercept = 0")


def test_the_mode_of_counts_is_the_maximum_of_the_likelihood():
    rng = np.random.default_rng(0)
    x = rng.normal(size=60)
    frame = pd.DataFrame({"x": x, "y": rng.poisson(np.exp(0.3 + 0.5 * x))})
    priors = {"Intercept": Flat(), "x": Flat()}
    model = Regression("y ~ x", family="poisson", priors=priors)
    model.fit(frame, inference="laplace", sampling=MANY)
    found = optimize.minimize(
        lambda b: np.exp(b[0] + b[1] * x).sum() - frame["y"] @ (b[0] + b[1] * x), [0.0, 0.0]
    )
    sd = np.sqrt(np.diag(found.hess_inv))
    table = model.summary().loc[["Intercept", "x"]]
    assert (np.abs(table["mean"] - found.x) < 4 * sd / np.sqrt(DRAWS * CHAINS)).all()
    np.testing.assert_allclose(table["sd"], sd, rtol=0.1)


@pytest.mark.parametrize(
    ("formula", "family", "changed", "said"),
    [
        (
            "y ~ x + z",
            "normal",
            {"z": lambda f: 2 * f.x},
            "columns that vary and are no sums of others",
        ),
        ("y ~ x * w", "normal", {}, "more rows than effects, got 4 effects with flat priors for 3"),
        ("k ~ x", "bernoulli", {"k": lambda f: f.x > 4}, "a combination of .*x separates the cl"),
        ("k ~ x", "poisson", {"k": lambda f: 0 * f.x}, "separates rows whose counts are 0"),
    ],
)
def test_improper_posteriors_are_refused(formula, family, changed, said):
    names = {"y ~ x * w": ["Intercept", "x", "w", "x:w"]}.get(formula, ["Intercept", "x"])
    names += ["z"] * ("z" in formula)
    frame = table(3 if "*" in formula else 14).assign(**changed)
    model = Regression(formula, family=family, priors=dict.fromkeys(names, Flat()))
    with pytest.raises(InputError, match=said):
        model.fit(frame, inference="laplace", sampling=MANY)


def test_effects_as_wide_as_their_prior_are_refused():
    """Responses without tails: degrees of freedom have no upper bound."""
    frame = pd.DataFrame({"y": np.linspace(-1, 1, 60)})
    model = Regression("y ~ 1", family="student-t", priors={"nu": Flat(), "Intercept": Flat()})
    said = (
        r"effects that the rows do not determine, got Flat\(\) of nu.Intercept\. The posterior is"
    )
    with pytest.raises(InputError, match=said):
        model.fit(frame, inference="laplace", sampling=MANY)


def test_counts_without_zeros_do_not_bound_the_share_of_further_zeros():
    frame = pd.DataFrame({"y": np.arange(30) % 5 + 1})
    model = Regression(
        "y ~ 1", family="zero-inflated-poisson", priors={"zi": Flat(), "Intercept": Flat()}
    )
    with pytest.raises(InputError, match="zi.Intercept separates rows whose counts are 0 from"):
        model.fit(frame, inference="laplace", sampling=MANY)


def test_one_proper_prior_is_enough_for_two_equal_columns():
    priors = {"x": Flat(), "z": 1.0}
    few = Sampling(draws=100, chains=1, progress=False)
    model = Regression("y ~ x + z", priors=priors)
    model.fit(table().assign(z=lambda f: f.x), inference="laplace", sampling=few)
    assert model.summary().loc["z", "sd"] == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize(
    ("name", "formula"),
    [("sd(Intercept | g)", "y ~ re(g)"), ("gap", "k ~ x"), ("cor(g)", "y ~ (x | g)")],
)
def test_only_coefficients_can_have_them(name, formula):
    frame = table().assign(g=list("aabbccd") * 2, k=[0, 1, 2, 0, 1, 2, 0] * 2)
    family = "ordinal" if formula == "k ~ x" else "normal"
    model = Regression(formula, family=family, priors={name: Flat()})
    with pytest.raises(InputError, match=r"Flat\(\)"):
        model.fit(frame)


def test_networks_need_proper_priors():
    model = SemiStructuredRegression(
        "y ~ x", deep={"net": (MLP(1, (2,), 1), ["w"])}, priors={"x": Flat()}
    )
    with pytest.raises(InputError, match="priors: expected proper priors beside networks"):
        model.fit(table())
