"""`SubspaceRegressor` of several targets: the fit of one network, and draws that share it."""

import numpy as np
import pandas as pd
import pytest

import subbayes
from subbayes import MLP, Sampling, SubspaceRegressor, TableRegressor
from subbayes.likelihoods import Gaussian, HeteroscedasticGaussian, Standardized
from subbayes.utils.checks import InputError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("unchecked")]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2))
Y = X @ RNG.normal(size=(2, 3)) * [1, 10, 100] + RNG.normal(size=(60, 3)) * [0.1, 1, 10]
SHORT = {"training": {"epochs": 10, "swa_epochs": 6}, "sampling": {"draws": 20, "chains": 2}}


def fitted(y=Y, **options):
    return SubspaceRegressor(**SHORT, network={"hidden": (8,)}, random_state=0, **options).fit(X, y)


@pytest.mark.parametrize("name", ["heteroscedastic", "gaussian"])
def test_it_is_the_fit_of_one_network(name):
    model = fitted(likelihood=name)
    noise = {"heteroscedastic": HeteroscedasticGaussian(), "gaussian": Gaussian()}[name]
    inputs = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
    settings = model._settings()
    by_hand = subbayes.fit(
        MLP(2, (8,), 3 * (1 + (name == "heteroscedastic")), settings.network.activation, seed=0),
        (inputs, Y),
        likelihood=Standardized(noise, tuple(Y.mean(0)), tuple(Y.std(0))),
        training=settings.training_for("regression", 60),
        subspace="pca",
        sampling=Sampling(draws=20, chains=2, seed=0, progress=False),
    )
    expected = by_hand.predict(inputs)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (60, 3)
    np.testing.assert_allclose(mean, expected.mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(std, expected.std, rtol=1e-4)
    lower, upper = model.predict_interval(X, level=0.9)
    assert ((lower < mean) & (mean < upper)).all()
    assert model.score(X, Y) == pytest.approx(
        np.mean(1 - ((Y - mean) ** 2).sum(0) / ((Y - Y.mean(0)) ** 2).sum(0))
    )


def test_draws_share_the_function():
    predictive = fitted(likelihood="gaussian").predict_dist(X[:2])
    means = predictive.likelihood.mean(predictive.outputs).numpy().reshape(-1, 6)
    drawn = predictive.sample(40000, seed=1).reshape(-1, 6)
    covariance = np.cov(means.T, bias=True) + np.diag(predictive.aleatoric.ravel())
    scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    np.testing.assert_array_less(np.abs(np.cov(drawn.T) - covariance), 5 * scale * 0.01)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() > 0


def test_frames_one_column_and_saving(tmp_path):
    frame = pd.DataFrame(Y, columns=list("abc"))
    model, same = fitted(), fitted(frame)
    np.testing.assert_allclose(model.predict(X), same.predict(X), rtol=1e-4, atol=1e-4)
    again = subbayes.load(model.save(tmp_path / "model"))
    np.testing.assert_allclose(again.predict(X), model.predict(X), rtol=1e-6)
    assert again.predict_dist(X[:2]).to_frame().filter(like="mean").shape == (2, 3)
    assert fitted(Y[:, :1]).predict(X).shape == (60,)
    calibrated = model.conformal(X, Y)
    lower, upper = calibrated.predict_interval(X, 0.9)
    table = calibrated.to_frame(X, 0.9)
    names = ["lower[0]", "lower[1]", "lower[2]", "upper[0]", "upper[1]", "upper[2]"]
    assert list(table) == names
    np.testing.assert_array_equal(table, np.c_[lower, upper])
    inside = ((lower <= Y) & (upper >= Y)).all(1)
    assert inside.mean() >= 55 / 60 - 1e-9


def test_rows_of_weight_zero_have_no_effect():
    weights = np.repeat([1.0, 0.0], [50, 10])
    options = {**SHORT, "network": {"hidden": (8,)}, "random_state": 0}
    some = SubspaceRegressor(**options).fit(X, Y, sample_weight=weights)
    wild = np.where(weights[:, None] > 0, Y, 1e6)
    same = SubspaceRegressor(**options).fit(X, wild, sample_weight=weights)
    np.testing.assert_allclose(some.predict(X), same.predict(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", ["student-t", "gamma"])
def test_families_of_one_target_are_refused(bad):
    with pytest.raises(InputError) as error:
        fitted(np.abs(Y) + 1, likelihood=bad)
    assert error.value.argument == "y"


def test_bad_targets_are_refused():
    missing = Y.copy()
    missing[3, 1] = np.nan
    constant = Y.copy()
    constant[:, 2] = 1.0
    for y in (missing, constant, pd.DataFrame(missing), Y[:10]):
        with pytest.raises(InputError, match="y"):
            fitted(y)
    with pytest.raises(ValueError, match="1d"):
        TableRegressor().fit(X, Y)
    with pytest.raises(InputError, match="y"):
        fitted().conformal(X, Y[:, 0])
