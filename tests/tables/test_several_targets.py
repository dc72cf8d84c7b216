"""Several targets and labels of a row: one network, draws that share it, missing entries."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics

import subbayes
from subbayes import (
    MLP,
    Sampling,
    SparseRegressor,
    SubspaceClassifier,
    SubspaceRegressor,
    TableClassifier,
    TableRegressor,
)
from subbayes.diagnostics.metrics import crps
from subbayes.likelihoods import Gaussian, HeteroscedasticGaussian, SeveralTargets, Standardized
from subbayes.models.table_networks import make_likelihood
from subbayes.predictions.predictive import Predictive
from subbayes.tables.hierarchical import Candidate, Effort
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
    model = fitted(likelihood=name, subspace="pca")
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


@pytest.mark.parametrize("name", ["student-t", "gamma", "poisson", "negative-binomial"])
def test_families_of_one_target_take_several(name, tmp_path):
    y = np.abs(Y) + 1
    y = y.round() if name in ("poisson", "negative-binomial") else y
    model = fitted(y, likelihood=name)
    lone = [fitted(y[:, t], likelihood=name).model_.likelihood for t in range(3)]
    predictive = model.predict_dist(X)
    parts = predictive.outputs.unflatten(-1, (-1, 3)).unbind(-1)
    each = [
        one.log_prob(f, torch.from_numpy(y[:, t]))
        for t, (one, f) in enumerate(zip(lone, parts, strict=True))
    ]
    expected = torch.stack(each).sum(0).logsumexp(0) - np.log(len(predictive.outputs))
    np.testing.assert_allclose(predictive.log_prob(y), expected, rtol=1e-6)
    again = subbayes.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


TINY = Effort((Candidate((4,), 1), Candidate((3,), None), Candidate((), None)), 30, 2, 60, 30)
LABELS = (Y > 0).astype(float)
GAPS = np.random.default_rng(1).random(Y.shape) < 0.3
GAPS[7] = True
KINDS = {
    "table": lambda y: TableRegressor(effort=TINY, random_state=0).fit(X, y),
    "subspace": fitted,
    "labels of a table": lambda y: TableClassifier(effort=TINY, random_state=0).fit(X, y),
    "labels": lambda y: SubspaceClassifier(**SHORT, network={"hidden": (8,)}, random_state=0).fit(
        X, y
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_missing_entries_are_left_out_of_fit_and_scores(kind, tmp_path):
    y = np.where(GAPS, np.nan, LABELS if "labels" in kind else Y)
    model = KINDS[kind](y)
    scores = model.evaluate(X, y)
    assert all(np.isfinite(value) for value in scores.values())
    predictive = model.predict_dist(X)
    likelihood = predictive.likelihood
    inner = getattr(likelihood, "likelihood", likelihood)
    shift, scale = (
        getattr(likelihood, "shift", (0.0,) * 3),
        getattr(likelihood, "scale", (1.0,) * 3),
    )
    inner = inner.likelihood if isinstance(inner, SeveralTargets) else inner
    parts = predictive.outputs.unflatten(-1, (-1, 3)).unbind(-1)
    total, lone = 0.0, {}
    for t, f in enumerate(parts):
        value = torch.from_numpy((np.where(GAPS[:, t], 1.0, y[:, t]) - shift[t]) / scale[t])
        own = inner
        if isinstance(own, HeteroscedasticGaussian):
            own = HeteroscedasticGaussian(own.global_variance[t])
        terms = own.log_prob(f, value) - np.log(scale[t])
        if "labels" not in kind:
            lone[t] = f[:, ~GAPS[:, t]], Standardized(own, (shift[t],), (scale[t],))
        total = total + torch.where(torch.from_numpy(GAPS[:, t]), 0.0, terms)
    expected = total.logsumexp(0) - np.log(len(total))
    np.testing.assert_allclose(predictive.log_prob(y), expected, rtol=1e-6, atol=1e-9)
    assert scores["log_likelihood"] == pytest.approx(float(expected.mean()))
    if "labels" not in kind:
        each = [crps(Predictive(f, own), y[~GAPS[:, t], t]) for t, (f, own) in lone.items()]
        assert scores["crps"] == pytest.approx(np.average(each, weights=(~GAPS).sum(0)), rel=0.05)
        residual = np.nanmean((model.predict(X) - y) ** 2) ** 0.5
        assert scores["rmse"] == pytest.approx(residual)
        lower, upper = model.predict_interval(X)
        inside = (lower <= y) & (y <= upper)
        assert scores["coverage"] == pytest.approx(inside[~GAPS].mean())
    again = subbayes.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_a_row_without_targets_has_no_effect_on_units_and_density():
    y, kept = np.where(GAPS, np.nan, Y), np.arange(60) != 7
    made = [make_likelihood("student-t", "regression", part) for part in (y, y[kept])]
    np.testing.assert_allclose(made[0].shift, made[1].shift)
    f = torch.randn(60, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = made[0].log_prob(f, torch.from_numpy(y))
    assert terms[7] == 0
    torch.testing.assert_close(terms[kept], made[1].log_prob(f[kept], torch.from_numpy(y[kept])))


def test_scores_of_labels_are_those_of_scikit_learn():
    model = KINDS["labels"](LABELS)
    p, scores = model.predict_proba(X), model.evaluate(X, LABELS)
    likely = (p > 0.5).astype(int)
    np.testing.assert_array_equal(model.predict(X), likely)
    assert scores["hamming_loss"] == pytest.approx(metrics.hamming_loss(LABELS, likely))
    for average in ("micro", "macro"):
        expected = metrics.f1_score(LABELS, likely, average=average)
        assert scores[f"f1_{average}"] == pytest.approx(expected)
    expected = metrics.average_precision_score(LABELS, p, average="macro")
    assert scores["average_precision"] == pytest.approx(expected)
    losses = [metrics.log_loss(LABELS[:, t], p[:, t]) for t in range(3)]
    assert [scores[f"log_loss[{t}]"] for t in range(3)] == pytest.approx(losses)
    assert scores["log_loss"] == pytest.approx(np.mean(losses))
    assert model.score(X, LABELS) == (likely == LABELS).all(1).mean()
    assert list(model.predict_dist(X).to_frame()) == ["p[0]", "p[1]", "p[2]"]


def test_labels_are_exported_with_their_probabilities(tmp_path):
    model = KINDS["labels"](LABELS)
    file = model.export(tmp_path / "model.pt2", levels=())
    found = torch.export.load(file).module()(torch.from_numpy(X))
    np.testing.assert_allclose(found["mean"], model.predict_proba(X), atol=1e-6)


def test_bad_targets_are_refused():
    constant, infinite = Y.copy(), Y.copy()
    constant[:, 2] = 1.0
    infinite[3, 1] = np.inf
    for y in (constant, infinite, Y[:10]):
        with pytest.raises(InputError, match="y"):
            fitted(y)
    for y in (LABELS + 0.5, np.where(GAPS, 2.0, LABELS)):
        with pytest.raises(InputError, match="y"):
            SubspaceClassifier(**SHORT).fit(X, y)
    with pytest.raises(InputError, match="y"):
        fitted(np.where(GAPS, np.nan, Y)[:, :1])
    with pytest.raises(ValueError, match="1d"):
        SparseRegressor().fit(X, Y)
    for y in (Y[:, 0], np.where(GAPS, np.nan, Y)):
        with pytest.raises(InputError, match="y"):
            fitted().conformal(X, y)
