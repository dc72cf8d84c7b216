"""The default model of tables: its density, its stack, its estimators and what it refuses."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from sklearn.base import clone

import subbayes
from subbayes import InputError, Sampling
from subbayes.diagnostics.stacking import maximise_log_score
from subbayes.likelihoods import Gaussian
from subbayes.networks.hierarchical.fold_ensemble import FoldEnsemble
from subbayes.networks.hierarchical.mlp import HierarchicalMLP
from subbayes.predictions.predictive import Predictive
from subbayes.tables import DataFrameModel, TableClassifier, TableRegressor
from subbayes.tables.hierarchical import (
    EFFORTS,
    Candidate,
    Effort,
    _constant_noise,
    _likely_chains,
    fit_hierarchical,
    head_of,
)
from subbayes.utils.seeding import derive_seed

TINY = Effort((Candidate((4,), 1),), climb=30, constant=20, chains=2, steps=60)
TWO = replace(TINY, candidates=(Candidate((4,), 1), Candidate((6,), 2)), compared=30)
PLAIN = replace(TINY, candidates=(Candidate((3,), None),))
PROCESS = Candidate((), None)
AROUND = replace(TINY, candidates=(Candidate((3,), 1, ensemble=True), PROCESS), compared=30)
QUIET = Sampling(progress=False, seed=3, mode="eager")  # of few evaluations


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    n = 80
    found = pd.DataFrame({"a": rng.normal(size=n), "b": rng.choice(["x", "y", "z"], n)})
    found["m"] = np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n))
    found["y"] = 100 + 10 * found.a + 5 * (found.b == "x") + rng.normal(size=n)
    return found


@pytest.fixture(scope="module")
def stack():
    x = np.random.default_rng(1).normal(size=(60, 2))
    y = 5 + 3 * x[:, 0] + np.random.default_rng(2).normal(size=60)
    return fit_hierarchical(x, y, "regression", TWO, sampling=QUIET), x, y


def test_stacking_weights_maximise_the_log_score():
    rng = np.random.default_rng(0)
    terms, rows = rng.normal(size=(200, 3)), rng.integers(1, 4, 200).astype(float)

    def loss(z):
        w = np.exp(z) / np.exp(z).sum()
        return -np.average(np.log(np.exp(terms) @ w), weights=rows)

    best = minimize(loss, np.zeros(3), tol=1e-12).x
    expected = np.exp(best) / np.exp(best).sum()
    np.testing.assert_allclose(maximise_log_score(terms, rows), expected, atol=1e-4)
    repeated = np.repeat(terms, rows.astype(int), 0)
    np.testing.assert_allclose(
        maximise_log_score(terms, rows), maximise_log_score(repeated), atol=1e-6
    )


def test_prediction_is_the_mixture_of_its_members(stack):
    model, x, y = stack
    outputs = [
        member.predict(x, n_draws=count).log_prob(y)
        for member, count in zip(model.members, model.counts, strict=True)
    ]
    with pytest.raises(InputError, match="n_draws"):
        model.predict(x, n_draws=0)
    share = np.array(model.counts) / sum(model.counts)
    expected = np.log(np.einsum("m,mn->n", share, np.exp(outputs)))
    np.testing.assert_allclose(model.predict(x).log_prob(y), expected, rtol=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("effort", [None, PLAIN], ids=["stack", "plain"])
def test_density_is_the_student_t_with_standard_normal_parameters(stack, effort):
    model, x, y = stack
    if effort is not None:
        model = fit_hierarchical(x, y, "regression", effort, sampling=QUIET)
    member = model.members[0]
    z = member.sampled.z[:, -1]
    f = torch.stack([member.network(w.float(), torch.tensor(x).float()) for w in torch.tensor(z)])
    mu, sigma, nu = f[..., 0], f[..., 1].exp(), 1 + f[..., 2].exp()
    units = torch.distributions.StudentT(nu.double(), mu.double(), sigma.double())
    terms = units.log_prob((torch.tensor(y) - y.mean()) / y.std()) - np.log(y.std())
    expected = terms.sum(1).detach().numpy() - 0.5 * (z**2).sum(1)
    found = member.posterior.value(z)
    constant = -0.5 * z.shape[1] * np.log(2 * np.pi)
    difference = found - expected
    np.testing.assert_allclose(difference - difference[0], 0.0, atol=1e-2)
    assert min(abs(difference[0]), abs(difference[0] - constant)) < 1e-2


def test_a_network_around_plain_ones_has_their_outputs_in_its_density(tmp_path, monkeypatch):
    monkeypatch.setattr("subbayes.tables.hierarchical._PROCESS_ROWS", 50)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    y = 5 + 3 * np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=60)
    model = fit_hierarchical(x, y, "regression", AROUND, sampling=QUIET)
    (member,) = model.members
    _, outputs = FoldEnsemble.fit(
        torch.tensor(x), torch.tensor((y - y.mean()) / y.std()), seed=derive_seed(3, 5)
    )
    given = torch.cat([torch.tensor(x), outputs], 1)
    torch.testing.assert_close(member.posterior.data.inputs, given)
    loaded = subbayes.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict(x).mean, model.predict(x).mean)
    assert loaded.update((torch.tensor(x[:1]), torch.tensor(y[:1]))).updates[0].rows == 1


@pytest.mark.parametrize("task", ["count", "regression"])
def test_plain_networks_are_left_out_where_they_do_not_apply(task):
    x = np.random.default_rng(7).normal(size=(60, 1))
    counts = np.random.default_rng(8).poisson(3, 60).astype(float)
    model = fit_hierarchical(x, counts, task, AROUND, sampling=QUIET)
    names = {"regression": [False, False]}.get(task, [])
    assert [one["ensemble"] for one in model.record.get("candidates", [])] == names


def test_weights_of_rows_are_repeated_rows(stack):
    _, x, y = stack
    counts = np.random.default_rng(4).integers(1, 3, len(y)).astype(float)
    weighted = fit_hierarchical(x, y, "regression", TINY, weights=counts, sampling=QUIET)
    again = np.repeat(np.arange(len(y)), counts.astype(int))
    member = weighted.members[0]
    plain = subbayes.Posterior(
        member.network, member.likelihood, (torch.tensor(x[again]).float(), torch.tensor(y[again])),
        member.subspace, member.prior,
    )  # fmt: skip
    z = member.sampled.z[0, :3]
    np.testing.assert_allclose(member.posterior.value(z), plain.value(z), rtol=1e-6)


def test_a_seed_determines_the_model_and_an_interrupted_run_resumes(stack, tmp_path):
    model, x, y = stack
    kept = replace(QUIET, checkpoint=tmp_path, checkpoint_seconds=0)
    first = fit_hierarchical(x, y, "regression", TWO, sampling=kept)
    again = fit_hierarchical(x, y, "regression", TWO, sampling=kept)
    for other in (first, again):
        np.testing.assert_array_equal(other.predict(x).mean, model.predict(x).mean)


@pytest.mark.parametrize("likelihood", [None, "gaussian"])
def test_a_gaussian_process_is_a_member_and_predicts_as_the_exact_one(likelihood, tmp_path):
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    rng = np.random.default_rng(6)
    x = rng.normal(size=(80, 2))
    y = 50 + 4 * np.sin(x[:, 0]) + 0.5 * rng.normal(size=80)
    effort = replace(TINY, candidates=(Candidate((), None),), steps=1200, chains=8)
    model = fit_hierarchical(x, y, "regression", effort, likelihood=likelihood, sampling=QUIET)
    kernel = ConstantKernel() * RBF([1.0, 1.0]) + WhiteKernel(0.1)
    exact = GaussianProcessRegressor(kernel, normalize_y=True).fit((x - x.mean(0)) / x.std(0), y)
    new = rng.normal(size=(100, 2))
    mean, sd = exact.predict((new - x.mean(0)) / x.std(0), return_std=True)
    found = model.predict(new)
    assert np.sqrt(np.mean((found.mean - mean) ** 2)) < 0.15 * 0.5
    assert abs(np.log(np.sqrt(found.variance) / sd)).mean() < 0.1
    loaded = subbayes.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict(new).mean, found.mean)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["weights", "exact", "repeated", "columns"])
def test_a_gaussian_process_takes_tables_that_are_nearly_singular(case):
    rng = np.random.default_rng(9)
    x = rng.normal(size=(40, 60 if case == "columns" else 2))
    y = x[:, 0] if case == "exact" else rng.normal(size=40)
    if case == "repeated":
        x = np.repeat(x[:4], 10, 0)
    weights = np.arange(40) % 2.0 if case == "weights" else None
    effort = replace(TINY, candidates=(Candidate((), None),))
    model = fit_hierarchical(x, y, "regression", effort, weights=weights, sampling=QUIET)
    assert np.isfinite(model.predict(x).log_prob(y)).all()
    if case == "weights":
        y = np.where(weights > 0, y, 1e3)
        other = fit_hierarchical(x, y, "regression", effort, weights=weights, sampling=QUIET)
        np.testing.assert_allclose(other.predict(x).mean, model.predict(x).mean, rtol=1e-6)


def test_a_gaussian_process_is_left_out_where_it_does_not_apply():
    x = np.random.default_rng(7).normal(size=(60, 1))
    effort = replace(TINY, candidates=(Candidate((3,), None), Candidate((), None)))
    counts = np.random.default_rng(8).poisson(3, 60)
    model = fit_hierarchical(x, counts, "count", effort, sampling=QUIET)
    assert not model.record  # one network, with which nothing is compared


def test_line_is_found_with_its_noise():
    rng = np.random.default_rng(5)
    x = rng.uniform(-2, 2, size=(150, 1))
    y = 3 * x[:, 0] + 0.5 * rng.normal(size=150)
    effort = replace(EFFORTS["quick"], steps=600)
    model = TableRegressor(effort=effort, random_state=0).fit(x, y)
    new = np.linspace(-1.8, 1.8, 30)[:, None]
    predicted = model.predict_dist(new)
    assert np.abs(predicted.mean - 3 * new[:, 0]).max() < 0.35
    np.testing.assert_allclose(np.sqrt(predicted.aleatoric), 0.5, rtol=0.3)


@pytest.mark.usefixtures("untraced")
def test_frames_with_text_and_missing_values(frame, tmp_path):
    x, y = frame.drop(columns="y"), frame.y
    model = TableRegressor(effort=TINY, random_state=0).fit(x, y)
    new = pd.DataFrame({"a": [0.0, 0.0], "b": ["unseen", None], "m": [np.nan, 1.0]})
    assert np.isfinite(model.predict(new)).all()
    loaded = subbayes.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
    pd.testing.assert_frame_equal(
        loaded.predict_dist(x).to_frame(), model.predict_dist(x).to_frame()
    )


@pytest.mark.usefixtures("untraced")
def test_loaded_estimators_are_fitted_again_in_no_folder_of_the_file(frame, tmp_path):
    x, y = frame.drop(columns="y"), frame.y
    model = TableRegressor(effort=TINY, random_state=0, checkpoint=tmp_path / "checkpoint")
    loaded = subbayes.load(model.fit(x, y).save(tmp_path / "model"))
    assert (loaded.effort, loaded.checkpoint) == (TINY, None)
    np.testing.assert_array_equal(clone(loaded).fit(x, y).predict(x), model.predict(x))


def test_chains_are_dropped_for_the_rows_that_count():
    """A chain that misses half of the rows by four standard deviations."""
    means = torch.zeros(2, 40, 1)
    means[1, 20:] = 4.0
    predictive, y = Predictive(means, Gaussian(1.0)), np.zeros(40)
    weights = np.repeat([1.0, 1e-3], 20)
    assert _likely_chains(predictive, y, 2).tolist() == [0, 0]
    assert _likely_chains(predictive, y, 2, weights[::-1].copy()).tolist() == [0, 0]
    assert _likely_chains(predictive, y, 2, weights).tolist() == [0, 1]


@pytest.mark.usefixtures("untraced")
def test_rows_of_weight_0_have_no_effect_on_the_encoding(frame):
    x, y = frame.drop(columns="y"), frame.y
    none = pd.DataFrame({"a": [1e6, 0.0], "b": ["never", None], "m": [np.nan, 1e9]})
    every, weights = pd.concat([none, x]), np.r_[np.zeros(2), np.ones(len(y))]
    model = TableRegressor(effort=TINY, random_state=0).fit(x, y, np.ones(len(y)))
    same = TableRegressor(effort=TINY, random_state=0).fit(every, np.r_[5.0, 5.0, y], weights)
    np.testing.assert_array_equal(same.predict(x), model.predict(x))
    assert list(same.encoder_.get_feature_names_out()) == list(
        model.encoder_.get_feature_names_out()
    )
    lists = TableRegressor(effort=TINY, random_state=0).fit(
        every.values.tolist(), [5, 5, *y], weights
    )
    np.testing.assert_array_equal(lists.predict(x), model.predict(x))


@pytest.mark.usefixtures("untraced")
def test_pickles_hold_no_rows_and_names_are_those_of_the_last_fit(frame):
    x, y = frame.drop(columns="y"), frame.y
    model = TableRegressor(effort=TINY, random_state=0).fit(x, y)
    copied = pickle.loads(pickle.dumps(model))
    assert all(member.posterior is None for member in copied.model_.members)
    np.testing.assert_array_equal(copied.predict(x), model.predict(x))
    model.fit(np.stack([x.a, x.a**2], 1), y)
    assert not hasattr(model, "feature_names_in_")


@pytest.mark.usefixtures("untraced")
def test_classes_and_counts(frame, tmp_path):
    x = frame.drop(columns="y")
    labels = np.where(frame.y > 100, "high", "low")
    model = TableClassifier(effort=TINY, random_state=0).fit(x, labels)
    probabilities = model.predict_proba(x)
    np.testing.assert_allclose(probabilities.sum(1), 1.0)
    assert model.classes_.tolist() == ["high", "low"]
    loaded = TableClassifier.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(x), probabilities)
    counts = np.random.default_rng(0).poisson(20, len(x))
    model = TableRegressor(effort=TINY, likelihood="negative-binomial").fit(x, counts)
    assert abs(model.predict(x).mean() - 20) < 4


@pytest.mark.usefixtures("untraced")
def test_without_settings_a_frame_has_hierarchical_networks(frame, monkeypatch, tmp_path):
    monkeypatch.setitem(EFFORTS, "standard", TINY)
    model = DataFrameModel.fit(frame, "y", progress=False)
    assert model.model.name == "hierarchical"
    loaded = DataFrameModel.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict(frame).mean, model.predict(frame).mean)


@pytest.mark.usefixtures("untraced")
def test_many_categories_are_grouped_and_identifiers_dropped(frame):
    rng = np.random.default_rng(0)
    x = pd.DataFrame({"a": rng.normal(size=400), "id": [f"row {k}" for k in range(400)]})
    x["city"] = [f"city {k}" for k in rng.geometric(0.02, 400)]
    with pytest.warns(UserWarning, match="'id' has another text in each row"):
        model = TableRegressor(effort=replace(TINY, steps=10)).fit(x, x.a)
    names = model.encoder_.get_feature_names_out().tolist()
    assert len(names) == 1 + 50
    assert "city=(others)" in names
    rare = x.assign(city="nowhere").head(1)
    assert model.encoder_.transform(rare)[0, names.index("city=(others)")] == 1.0


def test_more_rows_than_the_effort_takes_are_drawn_with_a_warning():
    x = np.random.default_rng(0).normal(size=(50, 3))
    with pytest.warns(UserWarning, match="50 rows, of which 40 are drawn at random"):
        model = fit_hierarchical(
            x, x.sum(1), "regression", replace(TINY, most_rows=40), sampling=QUIET
        )
    assert model.members[0].posterior.n == 40


@pytest.mark.usefixtures("untraced")
def test_more_columns_than_rows_and_a_response_on_few_integers():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 300)), rng.integers(0, 3, 30).astype(float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = TableRegressor(effort=TINY, random_state=0).fit(x, y)
    assert np.isfinite(model.predict_dist(x).log_prob(y)).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("x", "y", "argument"),
    [
        (np.zeros((1, 2)), [1.0], "X"),
        (np.ones((20, 1)), np.arange(20.0), "X"),
        (np.arange(20.0)[:, None], np.ones(20), "y"),
        (np.arange(20.0)[:, None], np.full(20, np.nan), "y"),
    ],
)
def test_tables_that_teach_nothing_are_refused(x, y, argument):
    with pytest.raises(InputError) as error:
        TableRegressor(effort=TINY).fit(x, y)
    assert error.value.argument == argument


@pytest.mark.parametrize("name", ["student-t", "heteroscedastic", "gaussian", "gamma"])
def test_chains_begin_with_the_same_noise_for_all_rows(name):
    head = head_of(name, "regression", np.array([1.0, 2.0, 4.0]))
    module = HierarchicalMLP(2, (4,), head.outputs, head.shapes, seed=0)
    held = _constant_noise(module)
    weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    before = module(x).detach()
    torch.nn.utils.vector_to_parameters(
        torch.where(held.isnan(), weights, held), module.parameters()
    )
    after = module(x).detach()
    torch.testing.assert_close(after[:, :1], before[:, :1])  # the mean is as it was
    torch.testing.assert_close(after[:, 1:], after[:1, 1:].expand(50, -1))
    assert (before[:, 1:].std(0) > 1e-3).any() == (name != "gaussian")


def test_effort_is_a_known_name_or_sizes():
    with pytest.raises(InputError) as error:
        TableRegressor(effort="fast").fit(np.arange(9.0)[:, None], np.arange(9.0))
    assert error.value.argument == "effort"


def test_heads_of_likelihoods():
    y = np.array([1.0, 2.0, 4.0])
    assert head_of(None, "regression", y).outputs == 3
    assert [shape.varies for shape in head_of("gaussian", "regression", y).shapes] == [False]
    assert [shape.varies for shape in head_of("gamma", "regression", y).shapes] == [True]
    assert head_of(None, "count", y.astype(int)).offset == pytest.approx(np.log(7 / 3))
    assert head_of(None, "classification", np.array([0, 2, 1])).outputs == 3
