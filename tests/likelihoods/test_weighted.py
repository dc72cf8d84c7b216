"""Weights of observations: integer weights have the effect of repeated rows."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import MLP, InputError, Network, Posterior, Predictive, Training, fit
from subbayes.curvature.products import Curvature
from subbayes.data.data import Data
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Standardized,
    Weighted,
    from_config,
)
from subbayes.likelihoods.families import FAMILIES, LogNormalFamily, NormalFamily, TruncatedFamily
from subbayes.sparse.configuration import SparseTraining
from subbayes.sparse.convert import convert
from subbayes.sparse.training import fit as train_sparse
from subbayes.subspace import FullSubspace
from subbayes.tables.estimators import SparseRegressor, SubspaceClassifier, SubspaceRegressor
from subbayes.training.trainer import train
from subbayes.utils.seeding import fork_rng

N = 8
COUNTS = torch.tensor([1, 0, 3, 1, 2, 0, 1, 4])
SAMPLING = Sampling(draws=6, chains=2, progress=False)
CASES = {
    "gaussian": (Gaussian(0.5), 1),
    "standardized": (Standardized(Gaussian(0.5), (3.0,), (2.0,)), 1),
    "per-observation": (Gaussian("per-observation"), 1),
    "heteroscedastic": (HeteroscedasticGaussian(0.1), 2),
    "categorical": (Categorical(), 3),
    "bernoulli": (Bernoulli(), 1),
    "poisson": (Poisson(), 1),
}


def build(name):
    """A network, a likelihood, and data with weights and with repeated rows."""
    likelihood, outputs = CASES[name]
    with fork_rng(1):
        x = torch.randn(N, 3, dtype=torch.float64)
    y = torch.arange(N) % (3 if name in ("categorical", "poisson") else 2)
    if likelihood.kind == "regression":
        y = y + x[:, 0]
    if name == "per-observation":
        y = y, torch.linspace(0.5, 1.0, N, dtype=torch.float64)
    network = Network(MLP(3, (4,), outputs, "tanh", seed=0).double())
    data = Data.of((x, y))
    repeated = data.rows(torch.arange(N).repeat_interleave(COUNTS))
    return network, likelihood, data.weighted(COUNTS), repeated


@pytest.fixture(params=CASES)
def case(request):
    return build(request.param)


def test_weights_without_a_weighted_likelihood_are_refused(case):
    network, likelihood, data, _ = case
    with pytest.raises(InputError, match=r"Weighted\(likelihood\) for data with weights, got "):
        linearised_laplace(network, likelihood, data)


@pytest.mark.few(2)
def test_density_and_gradient(case):
    network, likelihood, data, repeated = case
    space = FullSubspace(network.weights)
    weighted = Posterior(network, Weighted(likelihood), data, space)
    reference = Posterior(network, likelihood, repeated, space)
    z = np.random.default_rng(0).normal(size=(3, network.size))
    np.testing.assert_allclose(weighted.value(z), reference.value(z), rtol=1e-10)
    for found, expected in zip(
        weighted.value_and_grad(z), reference.value_and_grad(z), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["hessian", "fisher", "empirical-fisher"])
def test_curvature(case, kind):
    network, likelihood, data, repeated = case
    v = torch.linspace(-1, 1, network.size, dtype=torch.float64)
    found = Curvature(network, Weighted(likelihood), data, kind=kind)
    expected = Curvature(network, likelihood, repeated, kind=kind)
    torch.testing.assert_close(found(v), expected(v))


@pytest.mark.parametrize("covariance", ["exact", "diagonal", "low-rank"])
def test_linearised_laplace(case, covariance):
    network, likelihood, data, repeated = case
    found = linearised_laplace(network, Weighted(likelihood), data, covariance=covariance)
    expected = linearised_laplace(network, likelihood, repeated, covariance=covariance)
    assert float(found.log_marginal_likelihood()) == pytest.approx(
        float(expected.log_marginal_likelihood()), rel=1e-8
    )


def test_training_in_full_batches():
    network, likelihood, data, repeated = build("standardized")
    settings = Training(epochs=30, batch_size=None, clip_norm=None, optimizer="sgd")
    module = network.module_with()
    expected = train(module, likelihood, repeated, settings, progress=False)
    scale = float(COUNTS.sum() / (COUNTS > 0).sum())  # the mean is over rows that count
    rate = replace(settings, learning_rate=settings.learning_rate / scale)
    found = train(module, Weighted(likelihood), data, rate, progress=False)
    torch.testing.assert_close(found.network.weights, expected.network.weights)


def test_noise_is_learned_with_weights():
    network, _, data, repeated = build("gaussian")
    outputs = network(network.weights, data.inputs).detach()
    found = Weighted(Gaussian()).fit_parameters(outputs, data.y)
    index = torch.arange(N).repeat_interleave(COUNTS)
    expected = Gaussian().fit_parameters(outputs[index], repeated.y)
    assert found.likelihood.noise == pytest.approx(expected.noise, rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("inference", ["elliptical-slice", "laplace", "laplace-linearised"])
def test_fit_takes_weights(inference):
    network, likelihood, data, repeated = build("gaussian")
    options = dict(
        likelihood=likelihood,
        subspace=FullSubspace(network.weights),
        inference=inference,
        sampling=SAMPLING,
    )
    found = fit(network.module_with(), data, **options)
    expected = fit(network.module_with(), repeated, **options)
    assert found.likelihood is likelihood
    np.testing.assert_allclose(found.draws.z, expected.draws.z, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        found.predict(data.inputs).mean, expected.predict(data.inputs).mean, rtol=1e-4, atol=1e-5
    )


def test_class_weights():
    network, likelihood, data, _ = build("categorical")
    plain = Data.of((data.inputs, data.y[0]))
    by_row = plain.weighted(torch.tensor([1.0, 2.0, 0.5])[data.y[0]])
    assert torch.equal(plain.weighted({0: 1, 1: 2, 2: 0.5}).y[1], by_row.y[1].double())
    balanced = plain.weighted("balanced").y[1]
    totals = torch.zeros(3, dtype=torch.float64).index_add(0, plain.y, balanced)
    torch.testing.assert_close(totals, torch.full((3,), N / 3, dtype=torch.float64))


def test_estimators_take_sample_weight():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    # two targets for each input, of which the weights choose one
    X, y = np.concatenate([X, X]), np.concatenate([X[:, 0] + 2, X[:, 0] - 2])
    weights = np.repeat([1.0, 0.0], 40)
    quick = {"training": {"epochs": 60}, "random_state": 0}
    small = quick | {"sampling": {"draws": 8, "chains": 2}}
    for estimator in (SubspaceRegressor(**small), SparseRegressor(**quick)):
        bias = estimator.fit(X, y, sample_weight=weights).predict(X)[:40] - X[:40, 0]
        assert bias.mean() == pytest.approx(2.0, abs=0.5)
    labels = np.repeat([0, 1], 40)
    model = SubspaceClassifier(**small).fit(X, labels, sample_weight=np.repeat([9.0, 1.0], 40))
    assert model.predict_proba(X)[:, 0].mean() == pytest.approx(0.9, abs=0.05)


def weighted_table(seed=0, n=60):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2)) * [1.0, 30.0] + [5.0, -100.0]
    y = 1000 + 20 * X[:, 0] + X[:, 1] + rng.normal(size=n)
    return X, y, rng.integers(1, 5, n)


def scales(model):
    likelihood = model.model_.likelihood
    return (*model.mean_, *model.scale_, *likelihood.shift, *likelihood.scale)


@pytest.mark.filterwarnings("ignore")  # one epoch, few draws
@pytest.mark.parametrize("kind", [SubspaceRegressor, SparseRegressor])
def test_weights_standardise_as_repeated_rows(kind):
    X, y, counts = weighted_table()
    quick = {"training": {"epochs": 1, "swa_epochs": 2}, "random_state": 0}
    if kind is SubspaceRegressor:
        quick["sampling"] = {"draws": 4, "chains": 1}
    weighted = kind(**quick).fit(X, y, sample_weight=counts)
    repeated = kind(**quick).fit(X.repeat(counts, 0), y.repeat(counts))
    np.testing.assert_allclose(scales(weighted), scales(repeated), rtol=1e-12)
    assert not np.allclose(scales(weighted), scales(kind(**quick).fit(X, y)), rtol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_whole_weights_are_repeated_rows():
    """Where the training converges: a linear network, all rows in each step, and a prior."""
    X, y, counts = weighted_table()
    settings = {
        "network": {"hidden": ()},
        "likelihood": "gaussian",
        "subspace": "full",
        "inference": "laplace-linearised",
        "training": {
            "epochs": 500, "learning_rate": 0.03, "batch_size": None, "swa_epochs": 0,
            "schedule": "cosine", "prior_scale": 0.5,
        },
        "prior": 0.5,
        "random_state": 0,
    }  # fmt: skip
    weighted = SubspaceRegressor(**settings).fit(X, y, sample_weight=counts).predict_dist(X)
    repeated = SubspaceRegressor(**settings).fit(X.repeat(counts, 0), y.repeat(counts))
    repeated = repeated.predict_dist(X)
    np.testing.assert_allclose(weighted.mean, repeated.mean, atol=1e-3 * np.std(y))
    np.testing.assert_allclose(weighted.epistemic, repeated.epistemic, rtol=1e-2)
    np.testing.assert_allclose(weighted.std, repeated.std, rtol=1e-2)


@pytest.mark.parametrize("task", ["numbers", "counts", "labels", "sparse"])
def test_rows_without_weight_may_be_deleted(task):
    X, y, weights = weighted_table()
    weights = np.where(np.arange(len(y)) % 3 == 0, 0.0, weights / 2)
    X[weights == 0] *= 1000.0
    y[weights == 0] += 1e6
    quick = {"training": {"epochs": 2, "swa_epochs": 2}, "random_state": 0}
    small = quick | {"sampling": {"draws": 4, "chains": 1}}
    kept = weights > 0
    if task == "labels":
        y = np.where(kept, np.where(X[:, 0] > 5, "b", "c"), "a")
        models = [SubspaceClassifier(**small) for _ in range(2)]
    elif task == "counts":
        y = np.round(np.abs(y) / 100)
        models = [SubspaceRegressor(likelihood="poisson", **small) for _ in range(2)]
    else:
        kind, options = (SparseRegressor, quick) if task == "sparse" else (SubspaceRegressor, small)
        models = [kind(**options) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few draws
        whole = models[0].fit(X, y, sample_weight=weights)
        part = models[1].fit(X[kept], y[kept], sample_weight=weights[kept])
    if task == "labels":
        assert whole.classes_.tolist() == ["b", "c"]
        np.testing.assert_array_equal(whole.predict_proba(X), part.predict_proba(X))
    else:
        np.testing.assert_array_equal(whole.predict(X[kept]), part.predict(X[kept]))


def test_initial_noise_ignores_rows_without_weight():
    y, weights = torch.tensor([0.0, 2.0, 1e6]).double(), torch.tensor([1.0, 1.0, 0.0]).double()
    found = Weighted(Gaussian()).init_parameters((y, weights))
    torch.testing.assert_close(found, Gaussian().init_parameters(y[:2]))


def test_sparse_training_takes_weights():
    network, likelihood, data, _ = build("gaussian")
    data = Data.of((data.inputs.float(), data.y[0])).weighted(COUNTS)
    module = convert(network.module_with().float(), seed=0)
    settings = SparseTraining(epochs=2)
    found = train_sparse(module, Weighted(likelihood), data, settings, progress=False)
    assert found.likelihood == likelihood


def test_configuration():
    likelihood = Weighted(Standardized(Gaussian(0.5), (3.0,), (2.0,)))
    assert from_config(likelihood.to_config()) == likelihood


PLAIN = Data.of((torch.zeros(3, 2), torch.tensor([0, 1, 1])))


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda: PLAIN.weighted([1, 2]), "data and weights: expected the same number of rows, got"),
        (
            lambda: PLAIN.weighted([1, 2, -1]),
            "weights: expected one finite number of at least 0 fo",
        ),
        (lambda: PLAIN.weighted([1, 2, np.nan]), "weights: expected one finite number of at lea"),
        (lambda: PLAIN.weighted([0, 0, 0]), "weights: expected a weight above 0, got zeros only"),
        (
            lambda: PLAIN.weighted({0: 1.0}),
            "weights: expected a weight for each class, got none fo",
        ),
        (lambda: PLAIN.weighted("even"), "weights: expected one of 'balanced', got 'even'"),
        (lambda: PLAIN.weighted([1, 1, 1]).weighted([1, 1, 1]), "data: .* got weights already"),
        (
            lambda: linearised_laplace(
                Network(MLP(2, (), 2, seed=0)),
                Weighted(Categorical()),
                PLAIN.weighted([1, 2, 1]),
                covariance="kfac",
            ),
            "covariance: expected one that takes weights of observations, got 'kfac'. Use covaria",
        ),
        (
            lambda: linearised_laplace(
                Network(MLP(2, (), 1, seed=0)),
                Poisson(),
                (torch.zeros(3, 2), (torch.ones(3), torch.tensor([1.0, 2.0, 1.0]))),
                covariance="kfac",
            ),
            "covariance: expected one that takes weights of observations, got 'kfac'. Use covaria",
        ),
        (
            lambda: train(MLP(2, (), 2, seed=0), Weighted(Categorical()), PLAIN),
            "y: expected targets with weights, got targets alone",
        ),
    ],
)
def test_bad_weights_are_one_line(call, pattern):
    with pytest.raises(InputError, match=pattern) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["poisson", "negative-binomial"])
def test_linearised_laplace_of_a_family_counts_rows_as_often_as_their_weights(family):
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    y, counts = (torch.arange(30) % 3).float(), torch.arange(30) % 4
    copies, model = torch.arange(30).repeat_interleave(counts), MLP(2, (), 1, seed=0)
    settings = {"likelihood": FAMILIES[family](), "inference": "laplace-linearised"}
    settings |= {"training": Training(epochs=0, swa_epochs=0), "subspace": "random"}
    settings["sampling"] = Sampling(draws=4, seed=0, progress=False)
    one = fit(model, (x, (y, counts.float())), **settings)
    two = fit(model, (x[copies], y[copies]), **settings)
    np.testing.assert_allclose(one.draws.z, two.draws.z, rtol=1e-3, atol=1e-3)


def test_rows_of_weight_0_count_nothing_where_their_density_is_0():
    f = torch.tensor([[800.0], [0.5]], dtype=torch.float64, requires_grad=True)
    y, weights = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0])
    expected = 3 * (2 * 0.5 - np.exp(0.5) - np.log(2))
    for likelihood in (Weighted(Poisson()), Poisson()):
        found = likelihood.log_prob(f, (y, weights))
        assert found.tolist() == pytest.approx([0.0, expected])
        (gradient,) = torch.autograd.grad(found.sum(), f)
        assert gradient[:, 0].tolist() == pytest.approx([0.0, 3 * (2 - np.exp(0.5))])
    assert Weighted(Poisson()).score(f.detach(), (y, weights))[0].item() == 0


def test_a_subset_of_rows_has_its_weights():
    weights = torch.arange(1.0, 5.0)
    likelihood = Weighted(Gaussian(1.0)).for_targets((torch.zeros(4), weights))
    few = likelihood.select_rows(torch.tensor([3, 1]))
    assert few.curvature(torch.zeros(2, 1)).flatten().tolist() == [4.0, 2.0]
    assert few.curvature_blocks(torch.zeros(2, 1)).dense().flatten().tolist() == [4.0, 2.0]


@pytest.mark.parametrize(
    "inner",
    [Gaussian(0.5), Poisson(), LogNormalFamily(), TruncatedFamily(family="poisson", lower=1)],
)
def test_predictions_are_those_without_weights(inner):
    parts = len(getattr(inner, "parameters", ("f",)))
    f = torch.randn(5, 3, parts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, expected = Predictive(f, Weighted(inner)), Predictive(f, inner)
    for q in (0.1, 0.5, 0.9):
        assert np.array_equal(found.quantile(q), expected.quantile(q))
    y = torch.ones(3, dtype=torch.float64)
    assert np.array_equal(found.cdf(y), expected.cdf(y))


def test_weights_of_standardised_targets_keep_their_values():
    y, weights = torch.tensor([3.0, -2.0]).double(), torch.tensor([4.0, 0.5]).double()
    f = torch.tensor([[0.0, 0.0], [0.3, -0.4]], dtype=torch.float64)
    expected = weights.numpy() * stats.norm(
        1 + 2 * f[:, 0].numpy(), 2 * np.exp(f[:, 1].numpy())
    ).logpdf(y.numpy())
    for likelihood in (
        Standardized(NormalFamily(), (1.0,), (2.0,)),
        Standardized(Weighted(NormalFamily()), (1.0,), (2.0,)),
        Weighted(Standardized(NormalFamily(), (1.0,), (2.0,))),
    ):
        np.testing.assert_allclose(likelihood.log_prob(f, (y, weights)), expected, rtol=1e-12)
    noise, plain = torch.tensor([0.5, 3.0]).double(), f[:, :1]
    expected = stats.norm(1 + 2 * plain[:, 0].numpy(), noise.numpy()).logpdf(y.numpy())
    own = Gaussian("per-observation")
    found = Standardized(own, (1.0,), (2.0,)).log_prob(plain, (y, noise))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    found = Standardized(Weighted(own), (1.0,), (2.0,)).log_prob(plain, (y, noise, weights))
    np.testing.assert_allclose(found, weights.numpy() * expected, rtol=1e-12)
