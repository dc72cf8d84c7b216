"""Rows with weights in leave-one-out scores: an integer weight is as many equal rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.batchnorm_posterior import BatchNormPosterior
from subbayes import Draws, InputError, Network, Posterior, Sampling
from subbayes.comparison import to_arviz
from subbayes.data.data import Data
from subbayes.diagnostics import compare, loo, psis
from subbayes.diagnostics.leave_one_out import sum_se
from subbayes.diagnostics.loo_comparison import stacking_weights
from subbayes.diagnostics.metrics import score
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    CategoricalTokens,
    Gaussian,
    Poisson,
    Weighted,
)
from subbayes.likelihoods.families import FAMILIES, NormalFamily
from subbayes.networks.sharded.network import ShardedDensity
from subbayes.predictions.predictive import Predictive
from subbayes.regression import Regression
from subbayes.subspace import FullSubspace

COPIES = np.array([3, 0, 1, 2, 1, 0, 1, 2])
N = len(COPIES)
RNG = np.random.default_rng(0)
X, Y = torch.from_numpy(RNG.normal(size=(N, 2))), torch.from_numpy(RNG.normal(size=N))
NOISE = torch.linspace(0.5, 1.5, N).double()
A = torch.from_numpy(COPIES.astype(float))
TWICE = torch.from_numpy(np.repeat(np.arange(N), COPIES))
Z = 0.3 * RNG.normal(size=(60, 3))


def log_lik(seed: int = 1, spread: float = 0.4) -> np.ndarray:
    """Log densities of N rows under 4 chains of 100 draws."""
    return np.random.default_rng(seed).normal(-1, spread, size=(4, 100, N))


def linear() -> tuple[Network, FullSubspace]:
    network = Network(nn.Linear(2, 1).double())
    return network, FullSubspace(torch.zeros(3).double())


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("weighted_draws", [False, True])
def test_weights_are_copies_of_rows(temperature, weighted_draws):
    terms, more = log_lik(), {"temperature": temperature, "quiet": True}
    if weighted_draws:
        more["log_weights"] = np.random.default_rng(2).normal(size=400) / 4
    found = loo(terms, row_weights=COPIES.astype(float), **more)
    written_out = loo(np.repeat(terms, COPIES, axis=2), **more)
    for name in ("elpd", "se", "p_loo"):
        assert getattr(found, name) == pytest.approx(getattr(written_out, name), rel=1e-12)
    for name in ("pointwise", "pareto_k"):
        np.testing.assert_allclose(
            np.repeat(getattr(found, name), COPIES), getattr(written_out, name), rtol=1e-12
        )
    assert found.n_observations == written_out.n_observations == COPIES.sum()


def test_rows_of_weight_zero_count_as_no_rows():
    terms, some = log_lik(spread=3.0), COPIES > 0
    assert (loo(terms, quiet=True).pareto_k[~some] > 0.7).all()
    found = loo(terms, row_weights=some.astype(float), quiet=True)
    left_out = loo(terms[:, :, some], quiet=True)
    for name in ("elpd", "se", "p_loo"):
        assert getattr(found, name) == pytest.approx(getattr(left_out, name), rel=1e-12)
    assert (found.n_bad, found.n_rows) == (left_out.n_bad, some.sum())
    assert f"at {left_out.n_bad} of {some.sum()} points" in found.reliability()
    assert np.isneginf(found.pareto_k[~some]).all()
    terms[0, 3, ~some] = -np.inf  # of no matter
    other = log_lik(2)
    other[..., ~some] = -np.inf
    rows = some.astype(float)
    both = {"a": loo(terms, row_weights=rows, quiet=True), "b": loo(other, row_weights=rows)}
    kept = {"a": left_out, "b": loo(other[..., some])}
    for one, same in zip(compare(both), compare(kept), strict=True):
        for name in ("elpd", "difference", "difference_se", "weight"):
            assert getattr(one, name) == pytest.approx(getattr(same, name), rel=1e-9, abs=1e-12)


def test_a_copy_or_the_whole_row_is_left_out():
    """The mean of unit normals under a flat prior, of weights below and above 1."""
    rng = np.random.default_rng(3)
    y, a = rng.normal(size=40), np.resize([0.2, 0.4, 1.0, 3.5], 40)
    theta = a @ y / a.sum() + rng.normal(size=20_000) / np.sqrt(a.sum())
    terms = stats.norm.logpdf(y, theta[:, None])
    out = np.minimum(a, 1)
    rest = a.sum() - out
    exact = stats.norm.logpdf(y, (a @ y - out * y) / rest, np.sqrt(1 + 1 / rest))
    weights, p = np.exp(psis(-out * terms)[0]), np.exp(terms)
    error = np.sqrt((weights**2 * (p - np.exp(exact)) ** 2).sum(0)) / np.exp(exact)
    found = loo(terms, row_weights=a)
    assert (np.abs(found.pointwise - exact) < 4.5 * error).all()
    assert found.elpd == pytest.approx(a @ found.pointwise)


def test_the_standard_error_of_copies():
    terms = np.array([1.0, 4.0, -2.0])
    assert sum_se(terms, np.array([2.0, 3.0, 0.0])) == pytest.approx(
        sum_se(np.array([1.0, 1.0, 4.0, 4.0, 4.0]))
    )
    assert sum_se(terms, np.array([0.0, 3.0, 0.0])) == 0  # three equal observations
    assert np.isnan(sum_se(terms, np.array([0.0, 1.0, 0.0])))


def test_comparisons_and_stacking_of_weighted_rows():
    good = np.where(COPIES > 1, 0.7, -0.7)  # the first model is better at rows of several copies
    models = {"a": log_lik(1) + good, "b": log_lik(2) - good, "c": log_lik(3) - 1}
    counts = COPIES.astype(float)
    weighted = {n: loo(terms, row_weights=counts, quiet=True) for n, terms in models.items()}
    copies = {n: loo(np.repeat(terms, COPIES, axis=2), quiet=True) for n, terms in models.items()}
    for one, other in zip(compare(weighted), compare(copies), strict=True):
        assert one.name == other.name
        for name in ("elpd", "se", "difference", "difference_se", "p_loo"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-12)
        assert one.weight == pytest.approx(other.weight, abs=1e-4)
    plain = stacking_weights({n: loo(terms, quiet=True) for n, terms in models.items()})
    assert abs(plain["a"] - stacking_weights(weighted)["a"]) > 0.05


def test_results_of_other_weights_are_not_compared():
    with pytest.raises(InputError, match="results: expected the row weights of a, got others for"):
        compare({"a": loo(log_lik(), quiet=True), "b": loo(log_lik(), row_weights=2 * np.ones(N))})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a finite number above 0, got 0"),
        ({"temperature": -1.0}, "temperature: expected a finite number above 0, got -1"),
        ({"log_weights": np.full(5, np.nan)}, "log_weights: .* got NaN or infinity at 5 draws"),
        ({"log_weights": np.array([0, 0, 0, 0, np.inf])}, "log_weights: .* infinity at 1 draws"),
        ({"log_weights": np.full(5, -np.inf)}, "log_weights: .* got minus infinity at all draws"),
        ({"row_weights": np.ones(4)}, r"row_weights: expected one for each of 3 points"),
        ({"row_weights": np.array([1, -1.0, 1])}, "row_weights: .* at least 0.* got -1 at point 1"),
        ({"row_weights": np.zeros(3)}, "row_weights: .* one is above 0, got zeros only"),
    ],
)
def test_loo_rejects_weights_and_temperatures_without_meaning(options, message):
    with pytest.raises(InputError, match=message):
        loo(np.zeros((5, 3)), **options)


def test_loo_leaves_out_draws_of_weight_zero():
    terms = np.random.default_rng(0).normal(size=(200, 4)) / 4
    weights = np.where(np.arange(200) < 150, 0.0, -np.inf)
    found, expected = loo(terms, log_weights=weights), loo(terms[:150])
    assert found.p_loo == pytest.approx(expected.p_loo, rel=0.1)
    assert np.isfinite(found.pointwise).all()


# --- posteriors -----------------------------------------------------------------------------------


def posteriors(kind: str, temperature: float = 1.0) -> tuple[Posterior, Posterior]:
    """A posterior of weighted rows, and that of their copies."""
    network, space = linear()
    options = {"prior": 1.0, "temperature": temperature}
    if kind == "family":
        network = Network(nn.Linear(2, 2).double())
        space = FullSubspace(torch.zeros(6).double())
        return (
            Posterior(network, NormalFamily(), (X, (Y, A)), space, **options),
            Posterior(network, NormalFamily(), (X[TWICE], Y[TWICE]), space, **options),
        )
    if kind == "noise":
        likelihood = Gaussian("per-observation")
        rows, copies = (X, (Y, NOISE)), (X[TWICE], (Y[TWICE], NOISE[TWICE]))
    else:
        likelihood, rows, copies = Gaussian(0.7), (X, Y), (X[TWICE], Y[TWICE])
    data = Data.of(rows).weighted(A)
    if kind == "loader":
        loader = DataLoader(TensorDataset(X, Y, A), 3, collate_fn=_with_weights)
        data = Data.of(loader, memory_limit=0)
    return (
        Posterior(network, Weighted(likelihood), data, space, **options),
        Posterior(network, likelihood, copies, space, **options),
    )


def _with_weights(rows):
    x, y, a = (torch.stack(part) for part in zip(*rows, strict=True))
    return x, (y, a)


KINDS = ("memory", "loader", "noise", "family")


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_pointwise_densities_are_of_one_copy(kind):
    weighted, copies = posteriors(kind)
    z = np.resize(Z, (60, weighted.rank))
    terms = weighted.pointwise(z)
    np.testing.assert_allclose(terms[:, TWICE], copies.pointwise(z), rtol=1e-12)
    np.testing.assert_array_equal(weighted.row_weights, COPIES)
    assert copies.row_weights is None
    np.testing.assert_allclose(weighted.log_likelihood(z), copies.log_likelihood(z), rtol=1e-12)
    np.testing.assert_allclose(weighted.log_likelihood(z), terms @ COPIES, rtol=1e-12)


def test_batchnorm_posteriors_of_weighted_rows():
    network = Network(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double())
    space = FullSubspace(network.weights)
    kept = COPIES > 0  # rows of weight 0 have no effect on the statistics
    parts = (
        (Weighted(Gaussian(0.7)), Data.of((X, Y)).weighted(A)),
        (Gaussian(0.7), (X[kept], Y[kept])),
    )
    weighted, plain = (BatchNormPosterior(network, *part, space) for part in parts)
    z = 0.1 * np.random.default_rng(0).normal(size=(3, space.rank))
    terms = weighted.pointwise(z)
    np.testing.assert_allclose(terms[:, kept], plain.pointwise(z), rtol=1e-12)
    np.testing.assert_allclose(weighted.log_likelihood(z), terms @ COPIES, rtol=1e-12)


@pytest.mark.usefixtures("unchecked")
def test_sharded_densities_of_weighted_rows():
    likelihood, outputs = Weighted(Gaussian(0.7)), torch.zeros(N, 1).double()
    terms, total = (
        ShardedDensity(None, likelihood, what)._terms(outputs, (Y, A))
        for what in ("pointwise", "value")
    )
    torch.testing.assert_close(terms, Gaussian(0.7).log_prob(outputs, Y))
    torch.testing.assert_close(total, terms @ A)


# --- ArviZ ----------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_arviz_data_of_weighted_rows(kind):
    arviz = pytest.importorskip("arviz")
    weighted, copies = posteriors(kind)
    draws = Draws(np.repeat(Z[None, :1], 4000, axis=1))
    data = to_arviz(draws, weighted)
    rows = data["log_likelihood"]["y"].values
    np.testing.assert_allclose(rows[0][:1, TWICE], copies.pointwise(Z[:1]), rtol=1e-12)
    np.testing.assert_array_equal(data["constant_data"]["row_weights"].values, COPIES)
    np.testing.assert_array_equal(data["observed_data"]["y"].values, Y)
    # replicates have the noise of the rows, and not the weights as their scale
    scale = NOISE.numpy() if kind == "noise" else np.full(N, 0.7)
    replicates = data["posterior_predictive"]["y"].values[0]
    mean = data["posterior"]["prediction"].values[0, 0].reshape(N)
    np.testing.assert_allclose(replicates.mean(0), mean, atol=5 * scale.max() / np.sqrt(4000))
    np.testing.assert_allclose(replicates.std(0), scale, rtol=5 / np.sqrt(2 * 4000))
    both = Draws(np.resize(Z, (2, 30, 3)))
    theirs = arviz.loo(to_arviz(both, weighted), pointwise=True, reff=1.0)
    ours = loo(weighted.pointwise(both.flat()), quiet=True)
    np.testing.assert_allclose(theirs.pareto_k, ours.pareto_k, rtol=1e-6)
    assert "constant_data" not in to_arviz(both, copies)


# --- semi-structured models -----------------------------------------------------------------------


def test_a_weighted_semi_structured_model_is_scored_by_copies():
    arviz = pytest.importorskip("arviz")
    rng = np.random.default_rng(4)
    frame = pd.DataFrame({"x": rng.normal(size=30), "w": np.resize([1.0, 2.0, 3.0], 30)})
    frame["y"] = frame["x"] + rng.normal(size=30)
    sampling = Sampling(draws=100, chains=2, progress=False)
    model = Regression("y ~ x", weights="w").fit(frame, sampling=sampling)
    effects = {name: draws[..., None] for name, draws in model.effects().items()}
    mean = effects["Intercept"] + effects["x"] * frame["x"].to_numpy()
    terms = stats.norm.logpdf(frame["y"].to_numpy(), mean, effects["sigma"])
    copies = np.repeat(terms, frame["w"].astype(int), axis=2)
    found, written_out = model.loo(quiet=True), loo(copies, quiet=True)
    for name in ("elpd", "se", "p_loo"):
        assert getattr(found, name) == pytest.approx(getattr(written_out, name), rel=1e-6)
    data = model.to_arviz()
    np.testing.assert_allclose(data["log_likelihood"]["y"].values, terms, rtol=1e-6)
    np.testing.assert_array_equal(data["constant_data"]["row_weights"].values, frame["w"])
    assert arviz.loo(data).n_data_points == 30


# --- scores of predictions ------------------------------------------------------------------------


SCORED = {
    "gaussian": (Gaussian(0.5), 1, Y),
    "two targets": (Gaussian((0.5, 2.0)), 2, torch.stack([Y, Y.square()], 1)),
    "gamma": (FAMILIES["gamma"](), 2, Y.exp()),
    "poisson": (Poisson(), 1, torch.arange(N) % 4),
    "two classes": (Bernoulli(), 1, torch.arange(N) % 2),
    "three classes": (Categorical(3), 3, torch.arange(N) % 3),
    "tokens": (CategoricalTokens(3, shift=True), 12, torch.arange(4 * N).reshape(N, 4) % 3),
}


@pytest.mark.parametrize("kind", SCORED)
def test_weights_of_scores_are_copies_of_rows(kind):
    likelihood, outputs, y = SCORED[kind]
    if kind == "tokens":
        y = torch.where(torch.arange(4) < torch.arange(N)[:, None] % 3 + 2, y, -100)
    f = torch.from_numpy(np.random.default_rng(3).normal(size=(5, N, outputs)))
    found = score(Predictive(f, likelihood), y, 0.8, COPIES.astype(float))
    written_out = score(Predictive(f[:, TWICE], likelihood), y[TWICE], 0.8)
    assert found.pop("crps", 0) == pytest.approx(
        written_out.pop("crps", 0),
        rel=0.2 if kind == "gamma" else 1e-9,  # estimated from draws
    )
    assert found == pytest.approx(written_out, rel=1e-9)
    once = score(Predictive(f, likelihood), y, 0.8, np.ones(N))
    assert once == pytest.approx(score(Predictive(f, likelihood), y, 0.8), rel=1e-12)


def test_scores_reject_weights_that_do_not_fit():
    predictive = Predictive(torch.zeros(2, N, 1), Gaussian(1.0))
    for weights in (np.zeros(N), np.arange(N) - 1.0):
        with pytest.raises(InputError, match="weights"):
            score(predictive, Y, weights=weights)


@pytest.mark.filterwarnings("ignore")
def test_evaluate_of_a_regression_counts_rows_by_their_weights():
    rng = np.random.default_rng(5)
    frame = pd.DataFrame({"x": rng.normal(size=30), "w": np.resize([0.0, 2.0, 3.0], 30)})
    frame["y"] = frame["x"] + rng.normal(size=30)
    sampling = Sampling(draws=100, chains=2, progress=False)
    model = Regression("y ~ x", weights="w").fit(frame, sampling=sampling)
    copies = frame.loc[frame.index.repeat(frame["w"].astype(int))]
    found, expected = model.evaluate(frame), model.evaluate(copies.drop(columns="w"))
    assert found == pytest.approx(expected, rel=1e-9)
    effects = {name: draws.reshape(-1, 1) for name, draws in model.effects().items()}
    mean = effects["Intercept"] + effects["x"] * copies["x"].to_numpy()
    density = stats.norm.pdf(copies["y"].to_numpy(), mean, effects["sigma"]).mean(0)
    assert found["log_likelihood"] == pytest.approx(np.log(density).mean(), rel=1e-6)
    assert model.evaluate(frame)["rmse"] != pytest.approx(
        model.evaluate(frame.drop(columns="w"))["rmse"]
    )


@pytest.mark.filterwarnings("ignore:auroc")
def test_rows_of_weight_0_may_have_a_density_of_0():
    impossible = torch.tensor([[[0.0, 0.0], [0.0, -np.inf]]])
    weights = np.array([1.0, 0.0])
    found = score(Predictive(impossible, Categorical(2)), [0, 1], weights=weights)
    assert found["log_likelihood"] == pytest.approx(np.log(0.5))
    tokens = Predictive(impossible, CategoricalTokens(2))
    found = score(tokens, np.array([[0], [1]]), weights=weights)
    assert found["log_likelihood_per_token"] == pytest.approx(np.log(0.5))


def test_weights_of_ordered_rows_are_refused():
    predictive = Predictive(torch.zeros(1, 3, 1), Gaussian(1.0))
    with pytest.raises(InputError) as error:
        score(predictive, np.zeros(3), weights=np.ones(3), ordered=True)
    assert error.value.argument == "ordered"
