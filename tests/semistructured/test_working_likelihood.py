"""Quantile regression: intervals against large-sample standard errors, and what averages show."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from subbayes.inference import Sampling
from subbayes.likelihoods.families import AsymmetricLaplaceFamily, CensoredFamily
from subbayes.regression import Regression

SOME = Sampling(draws=200, chains=2, progress=False, seed=1)
NOISE, TAU = 0.5, 0.9


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    x = rng.normal(1.0, 2.0, size=200)
    return pd.DataFrame({"x": x, "y": 1 + 2 * x + NOISE * rng.normal(size=200), "seen": 0})


def fitted(formula, frame, **options):
    family = AsymmetricLaplaceFamily(quantile=TAU)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "effects have not mixed")
        warnings.filterwarnings("error", ".*intervals of effects are those")
        model = Regression(formula, family=family, **options)
        return model.fit(frame, sampling=SOME)


@pytest.fixture(scope="module")
def model(frame):
    return fitted("y ~ x", frame)


def test_standard_deviations_are_the_standard_errors_of_quantile_regression(frame, model):
    X = np.column_stack([np.ones(len(frame)), frame["x"]])
    # Koenker and Bassett (1978): tau (1 - tau) / f(q)^2 (X'X)^-1
    density = stats.norm.pdf(stats.norm.ppf(TAU)) / NOISE
    expected = np.sqrt(TAU * (1 - TAU) * np.diag(np.linalg.inv(X.T @ X))) / density
    found = model.summary().loc[["Intercept", "x"], "sd"]
    # f is estimated from about 0.2 * 200 rows; without the correction the ratio is 0.6
    np.testing.assert_allclose(found, expected, rtol=0.3)


def test_weights_count_rows_and_effects_without_rows_keep_their_prior(frame):
    few = frame.iloc[:40].assign(w=3, z=np.where(np.arange(40) == 0, 1e-4, 0.0))
    often = pd.concat([few, few, few], ignore_index=True)
    priors = {"x": 1.0, "Intercept": 1.0, "sigma": 1.0, "z": 3.0}
    counted = fitted("y ~ x + z", few, weights="w", priors=priors).summary()["sd"]
    repeated = fitted("y ~ x + z", often, priors=priors).summary()["sd"]
    np.testing.assert_allclose(counted, repeated, rtol=0.2)
    assert counted["z"] == pytest.approx(3.0, rel=0.15)


@pytest.mark.slow
def test_too_few_draws_for_a_correction_warn(frame):
    few = replace(SOME, draws=3, chains=1)
    rows = frame.assign(
        **{f"z{i}": frame.y.sample(frac=1, random_state=i).to_numpy() for i in (1, 2, 3)}
    )
    model = Regression("y ~ x + z1 + z2 + z3", family=AsymmetricLaplaceFamily(quantile=TAU))
    with pytest.warns(UserWarning, match="intervals of effects are those of responses with an"):
        model.fit(rows, sampling=few)


def test_averages_show_the_quantile_and_predictions_have_the_corrected_draws(frame, model):
    at = pd.DataFrame({"x": [0.0, 3.0]})
    effects = {name: draws.reshape(-1) for name, draws in model.effects().items()}
    lines = effects["Intercept"][:, None] + effects["x"][:, None] * at["x"].to_numpy()
    outputs = model.predict(at).outputs[..., 0]
    np.testing.assert_allclose(outputs, lines, atol=1e-8)
    means = model.marginal_means("x", [0.0, 3.0])
    np.testing.assert_allclose(means.draws, lines, atol=1e-8)
    curve = model.conditional_effect("x")
    below = frame["y"] <= np.interp(frame["x"], curve.x, curve.draws[0].mean(0))
    assert below.mean() == pytest.approx(TAU, abs=0.02)
    assert (model.predict(at).mean < means.draws.mean(0)).all()  # of the density, below mu


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("formula", "family"),
    [
        ("y ~ x", AsymmetricLaplaceFamily(quantile=TAU)),  # Laplace approximation
        ("y ~ x", CensoredFamily(family=AsymmetricLaplaceFamily(), status="seen")),
    ],
)
def test_models_without_a_correction_warn(frame, formula, family):
    model = Regression(formula, family=family)
    few = Sampling(draws=20, chains=2, progress=False)
    with pytest.warns(UserWarning, match="intervals of effects are those of responses"):
        model.fit(frame.iloc[:50], inference="laplace", sampling=few)
