"""Estimators: checks of scikit-learn, comparison with its models, saving, errors."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from importlib.util import find_spec

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from cases import nested, without_equal_weights
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import subbayes
from subbayes import (
    InputError,
    Predictive,
    Sampling,
    SparseRegressor,
    SubspaceClassifier,
    SubspaceRegressor,
)
from subbayes.artifacts import folder as artifact
from subbayes.data.data import Data
from subbayes.data.encoder import TabularEncoder
from subbayes.diagnostics import metrics
from subbayes.inference.engine import ENGINES
from subbayes.models.defaults import with_evidence_prior
from subbayes.models.fit import fit
from subbayes.models.settings import TableSettings
from subbayes.models.table_networks import make_likelihood, make_module
from subbayes.networks.network import Network
from subbayes.subspaces.registry import SUBSPACES
from subbayes.tables.array_model import fit_arrays

pytestmark = pytest.mark.usefixtures("untraced")

SMALL = dict(hidden=(10,), epochs=25, learning_rate=0.03, swa_epochs=5, rank=2, draws=8, chains=2)
QUICK = SMALL | dict(random_state=0)


def numbers(n=60, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)) * [1, 10, 100][:d] + [0, 5, -50][:d]
    return X, 1000 + 20 * X[:, 0] + X[:, 1] + 5 * rng.normal(size=n)


def labels(n=60, seed=0, names=("a", "b", "c")):
    X, y = numbers(n, seed=seed)
    return X, np.array(names)[np.digitize(X[:, 0], [-0.5, 0.5])]


def counts(n=80, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    return X, rng.poisson(np.exp(3 + 0.5 * X[:, 0]))


# --- scikit-learn's own checks ------------------------------------------------------------------


def with_quick_checks(estimators):
    """Parametrise by the checks of scikit-learn; those repeated on read-only memory are slow."""
    marked = parametrize_with_checks(estimators, expected_failed_checks=without_equal_weights)
    names, cases = marked.args
    found = []
    for case in cases:
        estimator, check = getattr(case, "values", case)
        marks = [*getattr(case, "marks", ())]
        if getattr(check, "keywords", {}).get("readonly_memmap"):
            marks.append(pytest.mark.slow)
        found.append(pytest.param(estimator, check, marks=marks))
    return pytest.mark.parametrize(names, found, **marked.kwargs)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@with_quick_checks([SubspaceRegressor(**nested(**SMALL)), SubspaceClassifier(**nested(**SMALL))])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [SubspaceRegressor(), SubspaceClassifier()], expected_failed_checks=without_equal_weights
)
def test_scikit_learns_checks_with_the_defaults(estimator, check):
    check(estimator)


# --- oracles ------------------------------------------------------------------------------------

LINEAR = dict(
    hidden=(),
    epochs=400,
    learning_rate=0.05,
    batch_size=None,
    prior_scale=np.inf,
    swa_epochs=8,
    swa_learning_rate=1e-3,
    rank=1,
    draws=20,
    chains=4,
    random_state=0,
)


def test_without_hidden_layers_it_is_linear_regression():
    X, y = numbers(100)
    model = SubspaceRegressor(**nested(likelihood="gaussian", **LINEAR)).fit(X, y)
    reference = LinearRegression().fit(X, y)
    mean, std = model.predict(X, return_std=True)
    residual = np.std(y - reference.predict(X))
    np.testing.assert_allclose(mean, reference.predict(X), atol=0.15 * residual)
    np.testing.assert_allclose(std, residual, rtol=0.1)


def test_without_hidden_layers_it_is_logistic_regression():
    X, y = labels(200)
    y = np.where(np.random.default_rng(0).random(200) < 0.2, "a", y)
    model = SubspaceClassifier(**nested(**LINEAR)).fit(X, y)
    scaled = (X - X.mean(0)) / X.std(0)
    reference = LogisticRegression(C=1e6, max_iter=1000).fit(scaled, y)
    np.testing.assert_allclose(model.predict_proba(X), reference.predict_proba(scaled), atol=0.04)
    assert np.mean(model.predict(X) == reference.predict(scaled)) > 0.97


def test_without_hidden_layers_it_is_poisson_regression():
    X, y = counts()
    model = SubspaceRegressor(**nested(likelihood="poisson", **LINEAR)).fit(X, y)
    reference = PoissonRegressor(alpha=0, max_iter=1000).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, reference.predict(X), rtol=0.05)
    np.testing.assert_allclose(std, np.sqrt(mean), rtol=0.05)
    lower, upper = model.predict_interval(X, level=0.9)
    assert (lower == np.round(lower)).all()
    assert 0.8 < np.mean((lower <= y) & (y <= upper)) < 1.0


def test_model_equals_fit_matrix_of_standardised_columns():
    X, y = numbers()
    model = SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    scaled = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
    by_hand = fit_arrays(scaled, y, "regression", model._settings(), progress=False)
    assert np.array_equal(model.model_.draws.z, by_hand.draws.z)
    assert np.array_equal(model.predict(X), by_hand.predict(scaled).mean)


def test_without_options_posterior_and_prior_are_those_of_fit():
    X, y = numbers()
    options = {"training": {"epochs": 20, "swa_epochs": 3}, "sampling": {"draws": 8, "chains": 2}}
    model = SubspaceRegressor(**options, random_state=0).fit(X, y)
    scaled = torch.from_numpy(((X - X.mean(0)) / X.std(0)).astype(np.float32))
    settings = model._settings()
    likelihood = make_likelihood(None, "regression", y)
    network, training = with_evidence_prior(
        Network(make_module(settings, likelihood, scaled.numpy(), y)),
        likelihood,
        Data.of((scaled, torch.from_numpy(y))),
        settings.training,
        progress=False,
    )
    by_hand = fit(
        network.module_with(),
        (scaled, torch.from_numpy(y)),
        likelihood=likelihood,
        training=training,
        sampling=settings.sampling,
    )
    assert by_hand.draws.engine == "laplace-linearised"
    np.testing.assert_allclose(model.predict(X), by_hand.predict(scaled).mean, rtol=1e-4)
    own = model.predict(X, return_std=True)[1]
    np.testing.assert_allclose(own, by_hand.predict(scaled).std, rtol=1e-3)

    classifier, fixed = (
        SubspaceClassifier(**options, **subspace, random_state=0).fit(*labels())
        for subspace in ({}, {"subspace": "pca"})
    )
    assert classifier.model_.label == fixed.model_.label == "PCA + ESS"
    assert fixed.model_.settings["training"]["prior_scale"] == 1.0
    codes = torch.from_numpy(np.unique(labels()[1], return_inverse=True)[1])
    likelihood = make_likelihood(None, "classification", codes.numpy())
    _, training = with_evidence_prior(
        Network(make_module(classifier._settings(), likelihood, scaled.numpy(), codes.numpy())),
        likelihood,
        Data.of((scaled, codes)),
        classifier._settings().training,
        progress=False,
    )
    found = classifier.model_.settings["training"]["prior_scale"]
    assert found == pytest.approx(training.prior_scale, rel=1e-5)


# --- predictions --------------------------------------------------------------------------------


def test_predictions_match_predict_dist_in_units_of_y():
    X, y = numbers()
    model = SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    dist = model.predict_dist(X)
    assert isinstance(dist, Predictive)
    mean, std = model.predict(X, return_std=True)
    lower, upper = model.predict_interval(X, level=0.8)
    for ours, theirs in (
        (mean, dist.mean),
        (std, dist.std),
        (lower, dist.quantile(0.1)),
        (upper, dist.quantile(0.9)),
        (model.predict(X), mean),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert abs(mean.mean() - y.mean()) < 5
    assert metrics.log_likelihood(dist, y) == pytest.approx(np.mean(dist.log_prob(y)))
    np.testing.assert_allclose(dist.variance, dist.epistemic + dist.aleatoric)


def test_predict_proba_matches_predict_dist():
    X, y = labels()
    model = SubspaceClassifier(**nested(**QUICK)).fit(X, y)
    assert model.classes_.tolist() == ["a", "b", "c"]
    p = model.predict_proba(X)
    np.testing.assert_allclose(p.sum(1), 1)
    np.testing.assert_allclose(p, model.predict_dist(X).probabilities, rtol=1e-12)
    frame = model.predict_dist(X).to_frame()
    np.testing.assert_allclose(frame[["p[a]", "p[b]", "p[c]"]], p, rtol=1e-12)
    assert frame["label"].tolist() == model.predict(X).tolist()
    assert [part.classes for part in model.predict_batches(X)] == [("a", "b", "c")]
    assert (model.predict(X) == model.classes_[p.argmax(1)]).all()
    assert model.score(X, y) == np.mean(model.predict(X) == y)


def test_rows_are_predicted_in_batches(monkeypatch):
    X, y = numbers()
    regressor = SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    classifier = SubspaceClassifier(**nested(**QUICK)).fit(*labels())
    whole = [*regressor.predict(X, return_std=True), *regressor.predict_interval(X)]
    p = classifier.predict_proba(X)
    monkeypatch.setattr("subbayes.diagnostics.predictor.OUTPUTS_AT_ONCE", 16 * 7)
    pieces = [*regressor.predict(X, return_std=True), *regressor.predict_interval(X)]
    for one, other in zip([*whole, p], [*pieces, classifier.predict_proba(X)], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_column_units_do_not_change_predictions():
    X, y = numbers()
    one = SubspaceRegressor(**nested(**QUICK)).fit(X, y).predict(X)
    other = (
        SubspaceRegressor(**nested(**QUICK)).fit(X * 1024 + 4096, y * 2).predict(X * 1024 + 4096)
    )
    np.testing.assert_allclose(other, 2 * one, rtol=1e-3)


def test_constant_columns_have_no_effect():
    X, y = numbers()
    padded = np.column_stack([X, np.full(len(X), 0.1), np.full(len(X), 1e9)])
    model = SubspaceRegressor(**nested(**QUICK)).fit(padded, y)
    assert model.scale_[3:].tolist() == [1, 1]
    assert np.abs(model._standardize(padded)[:, 3:]).max() < 1e-5
    assert model.score(padded, y) > 0.5


def test_standardize_false():
    X, y = numbers()
    scaled = (X - X.mean(0)) / X.std(0)
    model = SubspaceRegressor(**nested(standardize=False, **QUICK)).fit(scaled, y)
    assert model.mean_.tolist() == [0, 0, 0]
    assert model.score(scaled, y) > 0.5


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature="validation"),
        dict(patience=2, epochs=50),
        dict(subspace="random"),
        dict(subspace="full", hidden=(2,)),
        dict(likelihood="gaussian"),
        dict(hidden=[4, 4]),
        dict(temperature=10.0, dropout=0.1, activation="tanh", batch_size=None, warmup=0),
    ],
)
def test_parameters_are_passed_to_fit(options, monkeypatch):
    from functools import partial

    from subbayes.inference.tempering import choose_temperature

    monkeypatch.setattr(
        "subbayes.models.fit.choose_temperature", partial(choose_temperature, draws=4, chains=2)
    )
    X, y = numbers()
    model = SubspaceRegressor(**nested(**QUICK | options)).fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    settings = model.model_.settings
    assert settings["subspace"] == options.get("subspace", "pca")
    assert settings["training"]["patience"] == options.get("patience")
    if "patience" in options:
        assert len(model.model_.history["train"]["validation_log_likelihood"]) <= 50
    if options.get("temperature") == "validation":
        assert model.model_.posterior.data.n == 48


def test_random_states():
    X, y = numbers()
    rng = np.random.RandomState(0)
    fits = [
        SubspaceRegressor(**nested(**SMALL, random_state=state)).fit(X, y)
        for state in (0, 0, rng, rng, np.random.RandomState(0))
    ]
    z = [model.model_.draws.z for model in fits]
    assert np.array_equal(z[0], z[1])
    assert np.array_equal(z[2], z[4])
    assert not np.array_equal(z[2], z[3])
    assert (
        SubspaceRegressor(**nested(**SMALL)).fit(X, y).seed_
        != SubspaceRegressor(**nested(**SMALL)).fit(X, y).seed_
    )


# --- tools of scikit-learn ----------------------------------------------------------------------


def mixed(n=60, seed=0):
    X, y = numbers(n, seed=seed)
    table = pd.DataFrame(X, columns=["age", "height", "weight"])
    table["job"] = np.random.default_rng(seed).choice(["smith", "baker"], n)
    table["member"] = table["age"] > 0
    return table, y


def test_pipeline_with_encoder_takes_mixed_tables():
    table, y = mixed()
    pipeline = make_pipeline(TabularEncoder(), SubspaceRegressor(**nested(**QUICK))).fit(table, y)
    assert pipeline.score(table, y) > 0.5
    mean, std = pipeline.predict(table, return_std=True)
    assert mean.shape == std.shape == (60,)
    with pytest.raises(InputError, match="X: expected the categories seen in fitting, got 'pilot'"):
        pipeline.predict(table.assign(job="pilot"))
    with pytest.raises(
        InputError, match="X: expected the columns it was fitted with, got none named 'job'"
    ):
        pipeline.predict(table.drop(columns="job"))


def test_grid_search_cross_validation_and_clones():
    X, y = labels()
    search = GridSearchCV(
        SubspaceClassifier(**nested(**QUICK)), {"network__hidden": [(4,), ()]}, cv=2
    )
    assert search.fit(X, y).best_params_["network__hidden"] in ((4,), ())
    assert cross_val_score(SubspaceClassifier(**nested(**QUICK)), X, y, cv=2).mean() > 0.5
    other = clone(SubspaceClassifier(**nested(**QUICK)).fit(X, y))
    assert other.get_params() == SubspaceClassifier(**nested(**QUICK)).get_params()
    assert not hasattr(other, "model_")


def test_feature_names_are_stored_and_checked():
    table, y = mixed()
    X = table[["age", "height", "weight"]]
    model = SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    assert model.feature_names_in_.tolist() == ["age", "height", "weight"]
    assert model.n_features_in_ == 3
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(X[["height", "age", "weight"]])


def test_a_row_without_its_axis_is_named_in_predictions():
    X, y = labels()
    model = SubspaceClassifier(**nested(**QUICK)).fit(X, y)
    for predict in (model.predict, model.predict_proba, model.predict_dist):
        for row in (X[0], list(X[0]), pd.Series(X[0]), torch.from_numpy(X[0])):
            with pytest.raises(InputError, match=r"^X: .*got one axis of 3 values\. .*X\[:1\]"):
                predict(row)
        assert len(predict(X[:1])) == 1


@pytest.mark.parametrize("compress", [0, 3])
def test_joblib_stores_estimators_and_pipelines(tmp_path, compress):
    X, y = labels()
    model = make_pipeline(TabularEncoder(), SubspaceClassifier(**nested(**QUICK))).fit(X, y)
    regressor = SubspaceRegressor(**nested(**QUICK)).fit(*numbers())
    joblib.dump((model, regressor), tmp_path / "models", compress=compress)
    other, numbers_again = joblib.load(tmp_path / "models")
    np.testing.assert_array_equal(other.predict_proba(X), model.predict_proba(X))
    np.testing.assert_array_equal(numbers_again.predict(X), regressor.predict(X))
    assert numbers_again.model_.posterior is None
    assert other[-1].classes_.tolist() == model[-1].classes_.tolist()


def test_pickled_copies_have_no_posterior():
    X, y = numbers()
    model = SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert np.array_equal(other.predict(X), model.predict(X))
        assert other.model_.posterior is None
    assert model.model_.posterior is not None


def test_progress_is_only_shown_with_verbose(capsys):
    X, y = numbers()
    SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    out = capsys.readouterr()
    assert out.out == out.err == ""
    SubspaceRegressor(**nested(**QUICK, verbose=True)).fit(X, y)
    assert "Training" in capsys.readouterr().err


# --- saving -------------------------------------------------------------------------------------


def fields_of(estimator):
    """All parameters, with configurations as their fields."""
    whole = ("network", "training", "sampling")
    return {name: value for name, value in estimator.get_params().items() if name not in whole}


def test_loaded_regressor_predicts_identically(tmp_path):
    table, y = mixed()
    X = table[["age", "height", "weight"]]
    model = SubspaceRegressor(**nested(**QUICK | dict(prior_scale=np.inf))).fit(X, y)
    back = SubspaceRegressor.load(model.save(tmp_path / "model"))
    assert np.array_equal(back.predict(X), model.predict(X))
    assert fields_of(back) == fields_of(model)
    assert back.feature_names_in_.tolist() == list(X)
    assert (back.n_features_in_, back.seed_) == (3, 0)
    assert sorted(p.suffix for p in (tmp_path / "model").iterdir()) == [".json", ".safetensors"]


@pytest.mark.parametrize(
    "names", [["a", "b", "c"], [3, 1, 2], [1.5, 2.5, 3.5], np.array(["x", "y", "z"], dtype=object)]
)
def test_loaded_classifier_has_the_same_classes(tmp_path, names):
    if isinstance(names[0], float):
        names = [1.0, 2.0, 3.0]
    X, y = labels(names=names)
    model = SubspaceClassifier(**nested(**QUICK)).fit(X, y)
    back = SubspaceClassifier.load(model.save(tmp_path / "model"))
    assert back.classes_.dtype == model.classes_.dtype
    assert back.predict(X).tolist() == model.predict(X).tolist()
    assert np.array_equal(back.predict_proba(X), model.predict_proba(X))


def test_boolean_classes(tmp_path):
    X, y = numbers()
    model = SubspaceClassifier(**nested(**QUICK)).fit(X, X[:, 0] > 0)
    assert model.predict(X).dtype == bool
    back = SubspaceClassifier.load(model.save(tmp_path / "model"))
    assert np.array_equal(back.predict(X), model.predict(X))


def test_numbers_of_draws_are_chosen_and_checked():
    X, y = numbers()
    every = SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    sparse = SparseRegressor(draws=6, training={"epochs": 3}, random_state=0).fit(X, y)
    for model, draws in ((every, 16), (sparse, 6)):
        assert (model.predict_dist(X).n_draws, model.predict_dist(X, 4).n_draws) == (draws, 4)
        found, inputs = model.conformal(X, y, n_draws=4), model._inputs(X)
        few = model.model_.conformal(inputs, y, n_draws=4)
        np.testing.assert_allclose(found.scores[0], few.scores[0])
        with pytest.raises(InputError, match="n_draws"):
            model.functions(n_draws=0)


def test_numpy_integers_are_saved_as_numbers(tmp_path):
    X, y = numbers()
    counts = {"epochs": np.int64(6), "swa_epochs": np.int64(12)}
    sampling = {"draws": np.int64(7), "warmup": np.int64(3)}
    model = SubspaceRegressor(training=counts, sampling=sampling, random_state=0).fit(X, y)
    for estimator in (model, SparseRegressor(draws=np.int64(5), training={"epochs": 3}).fit(X, y)):
        back = subbayes.load(estimator.save(tmp_path / type(estimator).__name__))
        np.testing.assert_array_equal(back.predict(X), estimator.predict(X))


def test_random_state_object_is_saved_as_its_seed(tmp_path):
    X, y = numbers()
    model = SubspaceRegressor(**nested(**SMALL, random_state=np.random.RandomState(3))).fit(X, y)
    back = SubspaceRegressor.load(model.save(tmp_path / "model"))
    assert back.random_state == back.seed_ == model.seed_
    assert np.array_equal(clone(back).fit(X, y).predict(X), model.predict(X))


def test_save_and_load_errors(tmp_path):
    X, y = numbers()
    model = SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    path = model.save(tmp_path / "model")
    with pytest.raises(InputError, match="path: expected a new or an empty folder"):
        model.save(path)
    model.save(path, overwrite=True)
    with pytest.raises(
        InputError,
        match="path: expected a saved SubspaceClassifier, got "
        "SubspaceRegressor at .*Use SubspaceRegressor.load",
    ):
        SubspaceClassifier.load(path)
    model.model_.save(tmp_path / "bare")
    with pytest.raises(
        InputError, match="path: expected a saved SubspaceRegressor, got FittedModel"
    ):
        SubspaceRegressor.load(tmp_path / "bare")
    with pytest.raises(InputError, match="path: expected an artifact, got"):
        SubspaceRegressor.load(tmp_path / "nothing")
    with pytest.raises(NotFittedError):
        SubspaceRegressor().save(tmp_path / "new")


@pytest.mark.parametrize(
    ("name", "line"),
    [("target", "a network of 2 outputs, got one of 3"), ("encoder", "of 2 inputs, got one of 3")],
)
def test_sizes_are_those_of_the_network(tmp_path, name, line):
    X, y = labels()
    path = SubspaceClassifier(**nested(**QUICK)).fit(X, y).save(tmp_path / "model")
    saved = artifact.read(path)
    if name == "target":
        saved.facts["target"]["classes"].pop()
    else:
        saved.facts["encoder"]["columns"].pop()
        for values in saved.facts["encoder"]["numeric"].values():
            values.pop()
    artifact.write(path, saved.kind, saved.tensors, saved.facts, overwrite=True)
    with pytest.raises(InputError, match=line):
        SubspaceClassifier.load(path)


def test_names_of_a_file_are_escaped_in_errors_of_scikit_learn(tmp_path):
    """A terminal would obey the names of a file that was changed."""
    table, y = mixed()
    X = table[["age", "height"]]
    path = SubspaceRegressor(**nested(**QUICK)).fit(X, y).save(tmp_path / "model")
    saved = artifact.read(path)
    names = ["a\x1b]0;title\x07", "b\r\x1b[2K"]
    saved.facts["encoder"]["columns"] = saved.facts["encoder"]["numeric"]["columns"] = names
    artifact.write(path, saved.kind, saved.tensors, saved.facts, overwrite=True)
    loaded = SubspaceRegressor.load(path)
    for other in (X, X[["age"]]):
        with pytest.raises(ValueError, match=r"a\\x1b]0;title\\x07") as error:
            loaded.predict(other)
        assert not {"\x1b", "\x07", "\r"} & set(str(error.value))


def test_content_that_does_not_fit_is_an_error_with_the_path(tmp_path, monkeypatch):
    X, y = numbers()
    path = SubspaceRegressor(**nested(**QUICK)).fit(X, y).save(tmp_path / "model")

    def broken(*_):
        raise KeyError("weights")

    monkeypatch.setattr(SubspaceRegressor, "_restore", broken)
    with pytest.raises(
        InputError, match="path: expected content of the kind estimator, got '.*model'"
    ):
        SubspaceRegressor.load(path)


def test_the_manifest_is_plain_json(tmp_path):
    X, y = labels()
    path = SubspaceClassifier(**nested(**QUICK)).fit(X, y).save(tmp_path / "model")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["facts"]["target"]["classes"] == ["a", "b", "c"]


# --- errors -------------------------------------------------------------------------------------


def changed(value, row=3, column=1):
    X, y = numbers()
    X[row, column] = value
    return X, y


def target(change):
    X, y = numbers()
    return X, change(y)


R, C = SubspaceRegressor, SubspaceClassifier
REFUSALS = {
    "NaN in X": (
        R,
        {},
        *changed(np.nan),
        r"X: expected finite numbers, got 1 NaN or infinite "
        r"value \(first in row 3\)\. Drop or impute them first",
    ),
    "infinity in X": (C, {}, *changed(np.inf), "X: expected finite numbers, got 1 NaN or infinite"),
    "masked X": (
        R,
        {},
        np.ma.masked_array(numbers()[0], numbers()[0] > 0),
        numbers()[1],
        r"X: expected no masked entries, got \d+ of \d+\. Drop these rows",
    ),
    "masked y": (
        R,
        {},
        *target(lambda y: np.ma.masked_array(y, y > 0)),
        "y: expected no masked entries",
    ),
    "NaN in y": (
        R,
        {},
        *target(lambda y: np.where(np.arange(60) == 5, np.nan, y)),
        r"y: expected finite numbers, .*row 5",
    ),
    "NaN among labels": (
        C,
        {},
        *target(lambda y: np.where(np.arange(60) == 5, np.nan, y > 1000)),
        r"y: expected finite numbers, .*row 5",
    ),
    "no rows": (R, {}, np.zeros((0, 3)), np.zeros(0), "0 sample"),
    "one row": (R, {}, np.zeros((1, 3)), np.zeros(1), "1 sample.* minimum of 2"),
    "one axis": (
        R,
        {},
        np.zeros(9),
        np.zeros(9),
        r"^X: expected a matrix with one row per observation, got one axis of 9 values\. "
        r"Reshape your data: one row is X\[:1\], or X\[None\]; one column is X\[:, None\]\.$",
    ),
    "no columns": (R, {}, np.zeros((9, 0)), np.zeros(9), "0 feature"),
    "lengths": (
        R,
        {},
        *target(lambda y: y[:-1]),
        "X and y: expected the same number of rows, got "
        "60 and 59. Pass one row of each per observation",
    ),
    "text": (
        R,
        {},
        [["a", 1], ["b", 2]],
        [1, 2],
        "X: expected numbers, got 'a'. Put a "
        "subbayes.data.encoder.TabularEncoder before it in a pipeline",
    ),
    "constant target": (R, {}, *target(np.ones_like), "y: expected targets that vary"),
    "text for a number": (
        R,
        {},
        *target(lambda y: y.astype(str)[:0].tolist() + ["a"] * 60),
        "y: expected numbers",
    ),
    "one class": (C, {}, *target(np.ones_like), "y: expected at least 2 classes"),
    "numbers as labels": (C, {}, *numbers(), "Unknown label type: continuous"),
    "negative counts": (
        R,
        dict(likelihood="poisson"),
        *target(lambda y: np.arange(60) - 1),
        "y: expected counts: whole numbers of at least 0, got -1",
    ),
    "fractional counts": (
        R,
        dict(likelihood="poisson"),
        *target(lambda y: np.arange(60) / 2),
        "y: expected counts: .*got 0.5",
    ),
    "likelihood": (
        R,
        dict(likelihood="normal"),
        *numbers(),
        "likelihood: expected one of .*, got 'normal'",
    ),
    "rank": (
        R,
        dict(rank=40),
        *numbers(),
        "rank: expected at most 39, what the 40 snapshots of swa_epochs span, got 40",
    ),
    "hidden": (
        R,
        dict(hidden=50),
        *numbers(),
        r"hidden: expected widths of hidden layers, such as "
        r"\(50,\), got 50",
    ),
    "width": (
        R,
        dict(hidden=(0,)),
        *numbers(),
        "hidden: expected a whole number of at least 1, got 0",
    ),
    "activation": (R, dict(activation="sine"), *numbers(), "activation: expected one of 'relu'"),
    "prior": (R, dict(prior_scale=0), *numbers(), "prior_scale: expected a finite number above 0"),
    "epochs": (R, dict(epochs=-1), *numbers(), "epochs: expected a whole number of at least"),
    "temperature": (
        R,
        dict(temperature="best"),
        *numbers(),
        "temperature: expected one of 'loo', ",
    ),
    "held out": (
        R,
        dict(temperature="validation", validation=0.999),
        *numbers(),
        "validation: expected a fraction that leaves rows on both sides of 60",
    ),
    "seed": (
        R,
        dict(random_state=-1),
        *numbers(),
        "seed: expected a whole number of at least 0, got -1",
    ),
    "huge": (
        R,
        {},
        *changed(1e308),
        "X: expected columns whose variance float64 can hold, got another in 'x1'",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "options", "X", "y", "pattern"), REFUSALS.values(), ids=REFUSALS)
def test_invalid_parameters_raise_one_line_errors(kind, options, X, y, pattern):
    estimator = kind(**nested(options))
    with pytest.raises(ValueError, match=pattern) as error:
        estimator.fit(X, y)
    assert "\n" not in str(error.value)


def test_prediction_errors():
    X, y = numbers()
    model = SubspaceRegressor(**nested(**QUICK)).fit(X, y)
    with pytest.raises(InputError, match="X: expected finite numbers"):
        model.predict(changed(np.nan)[0])
    with pytest.raises(ValueError, match="X has 2 features, but SubspaceRegressor is expecting 3"):
        model.predict(X[:, :2])
    with pytest.raises(InputError, match="level: expected a number strictly between 0 and 1"):
        model.predict_interval(X, level=1.0)
    with pytest.raises(InputError, match="X: expected finite numbers, .*row 3"):
        model.predict(changed(1e300)[0])
    with pytest.raises(NotFittedError, match="not fitted yet"):
        SubspaceRegressor().predict(X)


X3, Y3 = np.linspace(-1, 1, 24).reshape(8, 3), np.linspace(0, 1, 8)
FRAME = pd.DataFrame(X3, columns=["a", "b", "c"])
OF_SCIKIT_LEARN = {
    "complex numbers": (lambda m: m.fit(X3 + 1j, Y3), "^Complex data not supported"),
    "complex targets": (lambda m: m.fit(X3, Y3 + 1j), "^Complex data not supported"),
    "three axes": (lambda m: m.fit(X3[None], Y3), "Found array with dim 3"),
    "no rows": (lambda m: m.fit(X3[:0], Y3[:0]), r"Found array with 0 sample\(s\)"),
    "no columns": (lambda m: m.fit(X3[:, :0], Y3), r"Found array with 0 feature\(s\)"),
    "no targets": (lambda m: m.fit(X3, None), "requires y to be passed"),
    "a parameter": (lambda m: m.set_params(foo=1), "Invalid parameter 'foo'"),
    "random state": (lambda m: m.set_params(random_state="a").fit(X3, Y3), "'a' cannot be used to"),
    "sparse": (lambda m: m.fit(sparse.csr_matrix(X3), Y3), "Sparse data was passed"),
    "dicts": (lambda m: m.fit(np.array([[{}], [1]]), Y3[:2]), "must be .*string.* number"),
    "names": (
        lambda m: m.fit(FRAME.rename(columns={"a": 1}), Y3),
        "all input features have string",
    ),
    "other columns": (
        lambda m: m.fit(FRAME, Y3).predict(FRAME.rename(columns={"a": "zz"})),
        "unseen at fit time: - zz Feature names seen at fit time, yet now missing: - a$",
    ),
    "fewer columns": (lambda m: m.fit(FRAME, Y3).predict(X3[:, :2]), "X has 2 features"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("call", OF_SCIKIT_LEARN)
def test_errors_of_scikit_learn_are_raised(call):
    function, said = OF_SCIKIT_LEARN[call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, TypeError), match=said):
            function(SubspaceRegressor(**nested(**QUICK)))


def test_labels_that_are_not_classes_raise():
    with pytest.raises(ValueError, match="^Unknown label type: continuous"):
        SubspaceClassifier().fit(X3, Y3)


def test_integer_boolean_and_tensor_inputs():
    X, y = numbers()
    for form in (X.round().astype(int), X > 0, torch.from_numpy(X), X.astype(np.float32).tolist()):
        assert SubspaceRegressor(**nested(**QUICK)).fit(form, y).predict(form).shape == (60,)


def test_fit_emits_no_warnings():
    X, y = numbers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)  # few draws do not mix
        SubspaceRegressor(**nested(**QUICK)).fit(X, y).predict(X)


# --- every engine, every subspace ---------------------------------------------------------------

PAIRS = [(engine, "pca") for engine in ENGINES] + [
    ("elliptical-slice", subspace) for subspace in list(SUBSPACES)[1:]
]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [SubspaceRegressor, SubspaceClassifier])
@pytest.mark.parametrize(("inference", "subspace"), PAIRS)
def test_engines_and_subspaces(inference, subspace, kind):
    if inference == "realnvp" and find_spec("zuko") is None:
        pytest.skip("needs zuko")
    X, y = numbers() if kind is SubspaceRegressor else labels()
    options = QUICK | dict(hidden=(3,), epochs=5, rank=None if subspace == "full" else 2)
    model = kind(**nested(options, subspace=subspace, inference=inference)).fit(X, y)
    assert model.model_.draws.engine == inference
    assert np.isfinite(
        model.predict(X) if kind is SubspaceRegressor else model.predict_proba(X)
    ).all()


DATES = pd.date_range("2020", periods=20)


@pytest.mark.parametrize(
    ("X", "y", "message"),
    {
        "a column": (
            pd.DataFrame({"a": np.arange(20.0), "day": DATES}),
            np.arange(20.0),
            "X: expected numbers, got dtype datetime64.* in column 'day'. Convert them",
        ),
        "an array": (
            np.array(DATES)[:, None],
            np.arange(20.0),
            "X: expected numbers, got dtype datetime64",
        ),
        "targets": (np.arange(20.0)[:, None], pd.Series(DATES), "y: expected"),
        "targets that overflow": (
            np.arange(20.0)[:, None],
            np.arange(20.0) * 1e300,
            "y: expected targets that vary, of a scale float64 holds",
        ),
    }.values(),
    ids=str,
)
def test_dates_and_overflowing_targets(X, y, message):
    with pytest.raises(InputError, match=message):
        SubspaceRegressor(**nested(**QUICK)).fit(X, y)


def test_a_saved_estimator_names_no_folder_of_a_checkpoint(tmp_path):
    X, y = numbers()
    options = nested(**QUICK)
    options["sampling"] |= {"checkpoint": str(tmp_path / "run")}
    path = SubspaceRegressor(**options).fit(X, y).save(tmp_path / "model")
    tensors, facts, kind = artifact.read(path)
    assert facts["params"]["sampling"]["checkpoint"] is None
    facts["params"]["sampling"]["checkpoint"] = str(tmp_path / "theirs")
    artifact.write(tmp_path / "forged", kind, tensors, facts)
    SubspaceRegressor.load(tmp_path / "forged").fit(X, y)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("as_object", [True, False])
def test_a_fit_saves_the_checkpoint_of_its_sampling_and_resumes(tmp_path, as_object, monkeypatch):
    X, y = numbers()
    options = nested(**QUICK)
    expected = SubspaceRegressor(**options).fit(X, y).predict(X)
    options["sampling"] |= {"checkpoint": str(tmp_path / "run"), "checkpoint_seconds": 0.001}
    if as_object:
        options["sampling"] = Sampling(**options["sampling"])
    first = SubspaceRegressor(**options).fit(X, y)
    np.testing.assert_array_equal(first.predict(X), expected)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["sampling", "trained"]
    monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)  # nothing is trained again
    again = clone(first).fit(X, y)
    np.testing.assert_array_equal(again.predict(X), expected)
    with pytest.raises(InputError, match="checkpoint: expected one made with the same model"):
        SubspaceRegressor(**options).fit(X, y + 1)


def test_a_baseline_has_no_checkpoint(tmp_path):
    options = nested(**SMALL)
    options["sampling"] = {"checkpoint": str(tmp_path / "run")}
    with pytest.raises(InputError, match="sampling.checkpoint: expected None for 'ensemble'"):
        fit_arrays(
            *numbers(), "regression", TableSettings().change(options), method="ensemble",
            progress=False,
        )  # fmt: skip


def test_labels_of_two_types_are_named():
    X, _ = labels()
    y = np.array(["a", 1] * 30, dtype=object)
    with pytest.raises(InputError, match="labels of one type, got int and str: 'a', '1'"):
        SubspaceClassifier(**nested(**QUICK)).fit(X, y)
