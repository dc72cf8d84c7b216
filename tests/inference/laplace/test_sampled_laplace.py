"""Linearised Laplace by draws: predictions, the prior by EM, fit, files."""

import numpy as np
import pytest
import torch
from jacobians import dense, problem

import subbayes
from subbayes import InputError, Network
from subbayes.inference import linearised_laplace, tune_prior
from subbayes.inference.laplace.linearised import Evidence
from subbayes.likelihoods import CategoricalTokens, Gaussian
from subbayes.subspaces.optimal import optimal

S = 1000


def both(seed=0, classes=1, lam=1.0, samples=S):
    net, likelihood, data, new = problem(seed, classes)
    options = dict(prior_precision=lam)
    sampled = linearised_laplace(
        net, likelihood, data, covariance="sampled", samples=samples, **options
    )
    return linearised_laplace(net, likelihood, data, **options), sampled, new


def test_predictions_of_regression_are_those_of_the_exact_form():
    exact, sampled, new = both()
    one, other = exact.predict(new), sampled.predict(new)
    assert other.kind == "gaussian"
    np.testing.assert_allclose(other.mean, one.mean, rtol=1e-12)
    assert (np.abs(other.epistemic / one.epistemic - 1) < 4.5 * (2 / S) ** 0.5).all()
    joint = sampled.predict(new, joint=True).covariance
    v = np.diag(exact.covariance(new))
    limit = 4.5 * np.sqrt((np.outer(v, v) + exact.covariance(new).numpy() ** 2) / S)
    assert (np.abs(joint - exact.covariance(new).numpy()) < limit).all()
    mixture = sampled.predict(new, method="monte-carlo")
    assert mixture.n_draws == S
    assert (np.abs(mixture.epistemic / one.epistemic - 1) < 4.5 * (2 / S) ** 0.5).all()


def test_class_probabilities_are_those_of_the_exact_form():
    exact, sampled, new = both(1, classes=3)
    limits = {"auto": 0.01, "probit": 0.01, "laplace-bridge": 0.06}  # of it, four seeds had 0.042
    for method, limit in limits.items():
        one, other = (p.predict(new, method=method).probabilities for p in (exact, sampled))
        assert np.abs(one - other).max() < limit
    draws = sampled.predict(new, method="monte-carlo").probabilities
    many = exact.predict(new, method="monte-carlo", n_draws=20_000).probabilities
    assert np.abs(draws - many).max() < 4.5 * 0.5 / S**0.5


def test_functions_are_the_draws_themselves():
    _, sampled, new = both(samples=20)
    functions = sampled.function_samples(new, 20, seed=1)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    J, f = dense(sampled.network, new)[:, 0], sampled.network(sampled.network.weights, new)
    expected = f.detach()[:, 0] + sampled.precision.draws.x[order] @ J.T
    np.testing.assert_allclose(functions[..., 0], expected, rtol=1e-9)
    assert np.array_equal(functions[:3], sampled.function_samples(new, 20, seed=1)[:3])
    with pytest.raises(InputError, match="n_draws: expected at most 20, the draws of the post"):
        sampled.function_samples(new, 21)
    weights = sampled.predict(new, method="network", n_draws=5)
    assert weights.n_draws == 5


@pytest.mark.few(1)
@pytest.mark.parametrize("classes", [1, 3])
def test_updates_end_at_a_stationary_point_of_the_exact_evidence(classes):
    """The exact slope there is that of an effective dimension within its Monte Carlo error."""
    exact, sampled, _ = both(2, classes)
    tuned = tune_prior(sampled, noise=False)
    lam, evidence = tuned.prior_precision, Evidence.of(exact)
    gamma = float((evidence.eigenvalues / (evidence.eigenvalues + lam)).sum())
    fitted = tuned.precision.draws.fitted
    error = float(fitted.std()) / S**0.5
    assert abs(lam * evidence.norm - gamma) < 4.5 * error + 0.02 * gamma  # and the last change
    best = tune_prior(exact, noise=False)
    assert abs(np.log(lam / best.prior_precision)) < 0.25
    assert evidence.log_marginal_likelihood(lam) > best.log_marginal_likelihood() - 0.1
    found = tuned.log_marginal_likelihood()
    assert abs(found - evidence.log_marginal_likelihood(lam)) < 1e-6


@pytest.mark.parametrize("form", ["exact", "sampled"])
@pytest.mark.parametrize(("weight", "end"), [(0.0, 20.0), (3.0, -20.0)])
def test_evidence_without_a_maximum_ends_at_the_range_with_a_warning(form, weight, end):
    """Weights of 0 fit every narrower prior; inputs of 0 say nothing of weights that are not 0."""
    net = subbayes.Network(torch.nn.Linear(2, 1, bias=False).double())
    net = net.with_weights(torch.full_like(net.weights, weight))
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0)).double()
    x = x if weight == 0 else 1e-9 * x
    options = {"samples": 8} if form == "sampled" else {}
    start = linearised_laplace(net, Gaussian(1.0), (x, x[:, 0]), covariance=form, **options)
    with pytest.warns(UserWarning, match="prior: the evidence is largest at .*, an end of the ra"):
        found = tune_prior(start, noise=False)
    assert 5 < np.sign(end) * np.log(found.prior_precision) < 20.1


@pytest.mark.filterwarnings("ignore:prior. the prior precision still changes")
@pytest.mark.parametrize("form", ["exact", "sampled"])
def test_noise_of_rows_that_are_fitted_exactly_has_a_lower_bound(form):
    net = subbayes.Network(torch.nn.Linear(1, 1).double())
    x = torch.linspace(-1, 1, 20).double()[:, None]
    y = net(net.weights, x).detach()[:, 0]
    tuned = tune_prior(linearised_laplace(net, Gaussian(0.5), (x, y), covariance=form))
    assert tuned.likelihood.noise == pytest.approx(0.5 * np.exp(-7.0))


@pytest.mark.slow
def test_noise_is_tuned_too():
    exact, sampled, _ = both(3)
    one, other = tune_prior(exact), tune_prior(sampled)
    assert abs(np.log(other.likelihood.noise / one.likelihood.noise)) < 0.1
    value = Evidence.of(exact).log_marginal_likelihood(
        other.prior_precision, other.likelihood.noise / exact.likelihood.noise
    )
    assert value > one.log_marginal_likelihood() - 0.2


@pytest.mark.parametrize("classes", [1, 3])
def test_saved_draws_predict_the_same_without_data(classes, tmp_path):
    _, sampled, new = both(0, classes, samples=30)
    path = sampled.save(tmp_path / "model")
    loaded, whole = subbayes.load(path), subbayes.load(path, data=problem(0, classes)[2])
    assert repr(loaded) == repr(sampled)
    assert loaded.describe() == sampled.describe()
    assert np.array_equal(loaded.predict(new).variance, sampled.predict(new).variance)
    assert np.array_equal(loaded.function_samples(new, 4), sampled.function_samples(new, 4))
    again = whole.with_prior_precision(2.0).predict(new).variance
    np.testing.assert_allclose(
        again, sampled.with_prior_precision(2.0).predict(new).variance, rtol=0.05
    )
    with pytest.raises(InputError, match="data: expected the training data, over which this"):
        loaded.with_prior_precision(2.0)


def test_optimal_subspace_by_draws_keeps_almost_as_much():
    net, likelihood, data, new = problem(0)
    kept = []
    for options in ({}, {"covariance": "sampled", "samples": 400}):
        space = optimal(net, likelihood, data, inputs=new, rank=2, **options)
        kept.append(float(linearised_laplace(net, likelihood, data, space).covariance(new).trace()))
    assert kept[1] > 0.95 * kept[0]


class Places(torch.nn.Module):
    """Logits of three classes at each of 6 x 6 pixels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Conv2d(2, 3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def by_place(out):
    return out.flatten(2).mT.flatten(1)


def test_segmentation_predicts_by_its_draws_as_the_exact_posterior():
    net = Network(Places().double(), output=by_place)
    x = torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    y = torch.arange(4 * 36).reshape(4, 36) % 3
    options = dict(prior_precision=2.0)
    exact = linearised_laplace(net, CategoricalTokens(3), (x[:4], y), **options)
    sampled = linearised_laplace(
        net, CategoricalTokens(3), (x[:4], y), covariance="sampled", samples=S, **options
    )
    found, errors = sampled.precision.output_variances(x[4:])
    known = exact.precision.blocks(x[4:]).diagonal(dim1=1, dim2=2)
    assert ((found - known).abs() < 5 * errors).all()
    predictive = sampled.predict(x[4:])
    assert predictive.kind == "mixture"
    assert predictive.mean.shape == (2, 108)
    np.testing.assert_allclose(predictive.mean.reshape(2, 36, 3).sum(2), 1, rtol=1e-12)
    many = exact.predict(x[4:], method="monte-carlo", n_draws=4000)
    assert np.abs(predictive.mean - many.mean).max() < 4.5 * 0.5 / S**0.5
    assert np.isfinite(predictive.log_prob(y[:2])).all()


def test_many_outputs_without_a_matrix_of_them():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3000))
    net = Network(module.double())
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, size, generator=generator).double() for size in (2, 3000))
    posterior = linearised_laplace(net, Gaussian(0.5), (x, y), covariance="sampled", samples=10)
    predictive = posterior.predict(x)
    assert predictive.kind == "mixture"
    assert predictive.epistemic.shape == (4, 3000)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["exact", "kfac", "diagonal"])
def test_few_draws_of_many_outputs_are_pushed_with_the_covariance_of_the_form(form):
    """With fewer draws than outputs no covariance of outputs is made, and the law is the same."""
    torch.manual_seed(0)
    net = Network(torch.nn.Linear(3, 6).double())
    data, new = (torch.randn(20, 3).double(), torch.arange(20) % 6), torch.randn(2, 3).double()
    posterior = linearised_laplace(net, "categorical", data, covariance=form)
    runs = [
        posterior.predict(new, method="monte-carlo", n_draws=5, seed=seed).outputs
        for seed in range(300)
    ]
    draws = torch.cat(runs).flatten(1)  # jointly at both inputs
    mean, covariance = net(net.weights, new).flatten(), posterior.covariance(new)
    scale = covariance.diagonal()
    assert ((draws.mean(0) - mean).abs() < 4 * (scale / len(draws)).sqrt()).all()
    error = (torch.outer(scale, scale) + covariance**2).sqrt() / len(draws) ** 0.5
    assert ((draws.T.cov() - covariance).abs() < 4.5 * error).all()
