"""Linearised Laplace against dense computations and closed forms."""

import math
import warnings
from functools import cache

import cases
import numpy as np
import pytest
import torch
from cases import training_options
from fits import compare, fit_options
from jacobians import dense, dense_rows, problem
from oracles import LinearGaussian, check_moments
from scipy import stats
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

import subbayes
from subbayes import InputError, Network, subspaces
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.linearised import (
    Evidence,
    linearised_laplace,
    predict_linearised,
    tune_prior,
)
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.inference.laplace.prior_choice import POINT, choose_prior
from subbayes.predictions.gaussian import (
    ClassPredictive,
    GaussianPredictive,
    class_probabilities,
    default_method,
)
from subbayes.subspaces.optimal import optimal, recombine_inputs
from subbayes.utils.trees import take


def test_a_linear_network_is_bayesian_linear_regression():
    rng = np.random.default_rng(0)
    x, new = rng.normal(size=(30, 3)), rng.normal(size=(5, 3))
    y = x[:, 0] + 0.3 * rng.normal(size=30)
    phi, psi = (np.column_stack([a, np.ones(len(a))]) for a in (x, new))
    S = np.linalg.inv(phi.T @ phi / 0.3**2 + 2.0 * np.eye(4))
    w = S @ phi.T @ y / 0.3**2  # the mode under a prior N(0, I / 2)
    net = torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(w[None, :3]))
        net.bias.copy_(torch.from_numpy(w[3:]))
    data = torch.from_numpy(x), torch.from_numpy(y)
    posterior = linearised_laplace(
        Network(net), subbayes.likelihoods.Gaussian(0.3), data, prior_precision=2.0
    )
    predictive = posterior.predict(torch.from_numpy(new), joint=True)
    assert predictive.kind == "gaussian"
    np.testing.assert_allclose(predictive.mean, psi @ w)
    np.testing.assert_allclose(predictive.covariance, psi @ S @ psi.T, rtol=1e-9)
    np.testing.assert_allclose(predictive.epistemic, np.diag(psi @ S @ psi.T), rtol=1e-9)
    std = np.sqrt(np.diag(psi @ S @ psi.T) + 0.09)
    truth = stats.norm(psi @ w, std)
    target = rng.normal(size=5)
    np.testing.assert_allclose(predictive.log_prob(target), truth.logpdf(target))
    np.testing.assert_allclose(predictive.cdf(target), truth.cdf(target))
    np.testing.assert_allclose(predictive.quantile(0.9), truth.ppf(0.9))
    assert predictive.components()[1].shape == (1, 5)
    evidence = stats.multivariate_normal(
        np.zeros(30), phi @ phi.T / 2.0 + 0.09 * np.eye(30)
    ).logpdf(y)
    assert math.isclose(posterior.log_marginal_likelihood(), evidence, rel_tol=1e-9)


@cases.parametrize(
    *(
        c
        for c in cases.CASES
        if c.dtype == torch.float64 and (c.network == "mlp" and c.data == "memory")
    )
)
def test_every_likelihood_predicts_from_the_dense_moments(case):
    built, new = case.build(), None
    new = take(built.inputs, slice(0, 4))
    V = dense_rows(built.network, built.likelihood, built.inputs, built.y)
    J = dense(built.network, new).flatten(0, 1)
    space = subbayes.subspace.RandomSubspace(built.network.weights, 3)
    P = space.basis()
    full = J @ torch.linalg.inv(V.T @ V + 0.5 * torch.eye(V.shape[1]).double()) @ J.T
    inner = P @ (V.T @ V + 0.5 * torch.eye(V.shape[1]).double()) @ P.T
    small = J @ P.T @ torch.linalg.inv(inner) @ P @ J.T
    noise = torch.ones(4) if case.likelihood == "per-observation" else None
    for subspace, sigma in ((None, full), (space, small)):
        posterior = linearised_laplace(
            built.network, built.likelihood, built.data, subspace, prior_precision=0.5
        )
        torch.testing.assert_close(posterior.covariance(new), sigma, rtol=1e-8, atol=1e-10)
        c = len(J) // 4
        mean = built.network(built.network.weights, new).detach()
        rows = torch.stack([sigma.reshape(4, c, 4, c)[n, :, n] for n in range(4)])
        found = posterior.predict(new, noise=noise)
        if found.kind == "mixture" or isinstance(found, ClassPredictive):
            spread = rows.diagonal(dim1=1, dim2=2).sqrt()
            assert ((found.outputs.mean(0) - mean).abs() < 5 * spread / 200**0.5 + 1e-12).all()
        else:
            units = getattr(built.likelihood, "scale", (1.0,))[0]
            expected = rows.diagonal(dim1=1, dim2=2).numpy() * units**2
            np.testing.assert_allclose(found.epistemic.reshape(expected.shape), expected)
        log_prob = found.log_prob(
            take(built.y, slice(0, 4))
            if not isinstance(built.y, tuple)
            else (built.y[0][:4], built.y[1][:4])
            if found.kind == "mixture"
            else built.y[0][:4]
        )
        assert np.isfinite(log_prob).all()


def test_joint_regression_with_two_targets():
    net, _, (x, _), new = problem(0, 2)
    y = x[:, :2]
    posterior = linearised_laplace(net, subbayes.likelihoods.Gaussian((0.5, 2.0)), (x, y))
    predictive = posterior.predict(new, joint=True)
    sigma = posterior.covariance(new)
    np.testing.assert_allclose(predictive.covariance, sigma.numpy(), rtol=1e-10)
    noise = torch.tensor([0.25, 4.0]).double()
    mean = net(net.weights, new).detach()
    rows = sigma.reshape(8, 2, 8, 2)
    expected = [
        MultivariateNormal(mean[n], rows[n, :, n] + noise.diag()).log_prob(y[n]) for n in range(8)
    ]
    np.testing.assert_allclose(predictive.log_prob(y[:8]), torch.stack(expected).numpy())
    draws = predictive.sample(4000)
    spread = predictive.std
    assert (np.abs(draws.mean(0) - predictive.mean) < 5 * spread / 4000**0.5).all()
    found = np.cov(draws.reshape(4000, -1).T)
    truth = sigma.numpy() + np.diag(np.tile([0.25, 4.0], 8))
    scale = np.sqrt(np.diag(truth))
    assert (np.abs(found - truth) < 5 * np.outer(scale, scale) * (2 / 4000) ** 0.5).all()
    functions = posterior.function_samples(new, 4000)
    found = np.cov(functions.reshape(4000, -1).T)
    scale = sigma.diagonal().sqrt().numpy()
    assert (np.abs(found - sigma.numpy()) < 5 * np.outer(scale, scale) * (2 / 4000) ** 0.5).all()


def test_approximations_of_class_probabilities():
    """Softmax without variance, 1/K with infinite variance, and otherwise close to draws."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    A = torch.randn(6, 4, 4, generator=generator, dtype=torch.float64)
    covariance = A @ A.transpose(1, 2)
    for method in ("probit", "extended-probit"):
        torch.testing.assert_close(
            class_probabilities(mean, 1e-12 * covariance, method),
            mean.softmax(-1),
            rtol=1e-9,
            atol=0,
        )
        torch.testing.assert_close(
            class_probabilities(mean, 1e12 * covariance, method),
            torch.full_like(mean, 0.25),
            rtol=1e-4,
            atol=0,
        )
    eps = torch.randn(20_000, 6, 4, generator=generator, dtype=torch.float64)
    away = torch.einsum("nij,snj->sni", A, eps)
    for method, size, off in (
        ("probit", 1.0, 0.2),
        ("extended-probit", 1.0, 0.12),
        ("probit", 0.3, 0.05),
        ("extended-probit", 0.3, 0.05),
    ):
        p = class_probabilities(mean, size**2 * covariance, method)
        drawn = (mean + size * away).softmax(-1).mean(0)
        torch.testing.assert_close(p.sum(-1), torch.ones(6).double())
        assert float((p - drawn).abs().max()) < off, method


def test_the_laplace_bridge_inverts_the_laplace_approximation_of_a_dirichlet():
    """In MacKay's basis the Laplace approximation of Dir(alpha) has this mean and covariance."""
    alpha = torch.tensor([[2.0, 5.0, 9.0]]).double()
    K, mu = 3, alpha.log() - alpha.log().mean()
    inverse = 1 / alpha[0]
    sigma = (inverse.diag() - (inverse[:, None] + inverse) / K + inverse.sum() / K**2)[None]
    found = class_probabilities(mu, sigma, "laplace-bridge")
    torch.testing.assert_close(found, alpha / alpha.sum())
    shifted = class_probabilities(mu + 7.0, sigma + 3.0, "laplace-bridge")  # the sum is arbitrary
    torch.testing.assert_close(shifted, found)


def test_the_default_does_not_depend_on_the_sum_of_the_logits():
    """Softmax does not; a wide prior leaves the variance of the sum as large as it is."""
    generator = torch.Generator().manual_seed(3)
    A = torch.randn(50, 4, 4, generator=generator, dtype=torch.float64)
    mean, covariance = 2 * A[:, 0], A @ A.mT
    method = default_method(subbayes.likelihoods.Categorical(4), mean)
    found = class_probabilities(mean, covariance, method)
    torch.testing.assert_close(class_probabilities(mean + 7, covariance + 100, method), found)
    plain = class_probabilities(mean, covariance + 100, "probit")
    assert plain.max(1).values.mean() < found.max(1).values.mean() - 0.15


def test_the_largest_evidence_of_an_interpolating_classifier_warns():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator).double()
    y = (x[:, 0] > 0).long()
    module = subbayes.MLP(5, (30,), 2, "tanh", seed=0).double()
    options = {"epochs": 150, "learning_rate": 0.02}
    network = subbayes.training.train(
        module,
        subbayes.likelihoods.Categorical(2),
        (x, y),
        subbayes.Training(**options),
        progress=False,
    ).network
    posterior = linearised_laplace(network, subbayes.likelihoods.Categorical(2), (x, y))
    with pytest.warns(UserWarning, match="prior: at the precision .* predictions are undercon"):
        tuned = tune_prior(posterior)
    evidence = Evidence.of(tuned)
    e, norm = evidence.eigenvalues, evidence.norm  # MacKay's fixed point: the evidence is right
    right = float((e / (e + tuned.prior_precision)).sum() / norm)
    assert tuned.prior_precision == pytest.approx(right, rel=1e-3)
    labels = y[:, None].numpy()
    probability = np.take_along_axis(tuned.predict(x).probabilities, labels, 1).mean()
    assert probability < 0.8


def test_two_classes_by_one_logit_or_two_agree():
    mean, variance = torch.tensor([[0.7]]).double(), torch.tensor([[[2.5]]]).double()
    one = class_probabilities(mean, variance)
    expected = torch.sigmoid(mean / (1 + math.pi / 8 * variance[0]).sqrt())
    torch.testing.assert_close(one[:, 1:], expected)
    A = torch.tensor([[1.0, 0.2], [0.2, 0.5]]).double()
    two = class_probabilities(torch.tensor([[0.3, 1.0]]).double(), A[None], "extended-probit")
    gap = torch.tensor([[0.7]]).double(), torch.tensor([[[1.0 + 0.5 - 0.4]]]).double()
    torch.testing.assert_close(two, class_probabilities(*gap))


@pytest.mark.parametrize(
    "method", ["auto", "extended-probit", "laplace-bridge", "monte-carlo", "network"]
)
def test_classifiers_predict_in_every_way(method):
    net, likelihood, data, new = problem(1, 3)
    posterior = linearised_laplace(net, likelihood, data, prior_precision=5.0)
    found = posterior.predict(new, method=method, n_draws=50, seed=1)
    assert found.kind == ("mixture" if method in ("monte-carlo", "network") else "gaussian")
    p = found.probabilities
    np.testing.assert_allclose(p.sum(1), 1)
    labels = torch.arange(8) % 3
    np.testing.assert_allclose(found.log_prob(labels), np.log(p[np.arange(8), labels]))
    np.testing.assert_allclose(found.mean, p)
    assert (found.entropy >= 0).all()
    assert (found.mutual_information >= 0).all()
    assert (found.epistemic <= p * (1 - p) + 0.02).all()
    again = posterior.predict(new, method=method, n_draws=50, seed=1)
    np.testing.assert_array_equal(found.outputs, again.outputs)
    shares = np.stack([(found.sample(4000) == k).mean(0) for k in range(3)], 1)
    assert np.abs(shares - p).max() < 0.06


def test_the_posterior_in_the_optimal_subspace_is_the_full_one_at_its_inputs():
    net, likelihood, data, new = problem(2)
    space = optimal(net, likelihood, data, inputs=new, rank=8)
    inside = linearised_laplace(net, likelihood, data, space)
    full = linearised_laplace(net, likelihood, data)
    np.testing.assert_allclose(inside.predict(new).std, full.predict(new).std, rtol=1e-8)
    draws = inside.draws(500, 2)
    assert draws.z.shape == (2, 500, 8)
    assert np.abs(np.cov(draws.flat().T) - np.eye(8)).max() < 5 * (2 / 1000) ** 0.5
    assert draws.engine == "laplace-linearised"
    with pytest.raises(InputError, match="subspace: expected a subspace to draw coordinates in"):
        full.draws()


@pytest.mark.parametrize("classes", [1, 3])
def test_evidence_against_a_dense_computation(classes):
    net, likelihood, data, _ = problem(3, classes)
    V = dense_rows(net, likelihood, *data)
    f = net(net.weights, data[0]).detach()
    fit = float(likelihood.log_prob(f, data[1]).sum())
    space = subbayes.subspace.RandomSubspace(net.weights, 4)
    P = space.basis()
    for lam in (0.3, 20.0):
        eye = torch.eye(net.size).double()
        inside = linearised_laplace(net, likelihood, data, space, prior_precision=lam)
        whole = linearised_laplace(net, likelihood, data, prior_precision=lam)
        dense_whole = (
            fit
            - lam / 2 * float(net.weights.square().sum())
            + net.size / 2 * math.log(lam)
            - 0.5 * float(torch.logdet(V.T @ V + lam * eye))
        )
        assert math.isclose(whole.log_marginal_likelihood(), dense_whole, rel_tol=1e-9)
        part = torch.linalg.pinv(P) @ P @ net.weights
        dense_inside = (
            fit
            - lam / 2 * float(part.square().sum())
            + 0.5 * float(torch.logdet(lam * P @ P.T))
            - 0.5 * float(torch.logdet(P @ (V.T @ V + lam * eye) @ P.T))
        )
        assert math.isclose(inside.log_marginal_likelihood(), dense_inside, rel_tol=1e-9)


@pytest.mark.parametrize("subspace", [None, 4])
def test_tuning_finds_the_largest_evidence(subspace):
    net, likelihood, data, new = problem(4)
    space = None if subspace is None else subbayes.subspace.RandomSubspace(net.weights, subspace)
    start = linearised_laplace(net, likelihood, data, space)
    tuned = tune_prior(start)
    best = tuned.log_marginal_likelihood()
    # products shared under the new noise equal those of a new posterior
    anew = linearised_laplace(
        net, tuned.likelihood, data, space, prior_precision=tuned.prior_precision
    )
    assert math.isclose(anew.log_marginal_likelihood(), best, rel_tol=1e-9)
    torch.testing.assert_close(anew.covariance(new), tuned.covariance(new), rtol=1e-7, atol=0)
    for p, c in ((1.1, 1.0), (0.9, 1.0), (1.0, 1.1), (1.0, 0.9)):
        assert (
            tuned.with_prior_and_noise(p * tuned.prior_precision, c).log_marginal_likelihood()
            <= best
        )
    only_prior = tune_prior(start, noise=False)
    assert only_prior.likelihood == likelihood
    assert start.log_marginal_likelihood() <= only_prior.log_marginal_likelihood() <= best


def test_evidence_in_other_units_of_y():
    net, likelihood, (x, y), _ = problem(5)
    other = subbayes.likelihoods.Standardized(likelihood, (3.0,), (10.0,))
    plain = linearised_laplace(net, likelihood, (x, y))
    scaled = linearised_laplace(net, other, (x, 3 + 10 * y))
    a, b = Evidence.of(plain), Evidence.of(scaled)
    assert math.isclose(a.squares, b.squares, rel_tol=1e-9)
    assert math.isclose(a.log_likelihood, b.log_likelihood + 15 * math.log(10), rel_tol=1e-9)
    assert other.scale_noise(2.0).likelihood.noise == pytest.approx(0.6)


@cache
def overfitted():
    """A classifier trained on 60 noisy labels, and 180 held-out rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 2, generator=generator).double()
    flipped = torch.rand(240, generator=generator) < 0.15
    y = ((x[:, 0] * x[:, 1] > 0) ^ flipped).long()
    return trained_on((x[:60], y[:60])), (x[:60], y[:60]), (x[60:], y[60:])


def trained_on(rows):
    return subbayes.training.train(
        subbayes.MLP(2, (16,), 2, "tanh", seed=0).double(),
        subbayes.likelihoods.Categorical(),
        rows,
        **training_options(epochs=400, learning_rate=0.02, prior_scale=100.0, progress=False),
    ).network


@pytest.mark.slow
def test_the_prior_of_held_out_rows():
    net, data, validation = overfitted()
    likelihood = subbayes.likelihoods.Categorical()
    with pytest.warns(UserWarning, match="10000 is the largest of those tried, and others beyond"):
        choose_prior(net, likelihood, data, validation=data, prior_precisions=(1.0, 1e4))
    seen, _ = choose_prior(net, likelihood, data, validation=data)
    assert seen.prior_precision == POINT  # no posterior, which is no edge of the grid
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held, scores = choose_prior(net, likelihood, data, validation=validation)
        streamed = DataLoader(TensorDataset(*validation), batch_size=50)
        _, again = choose_prior(net, likelihood, data, validation=streamed)
    assert 1e-4 < held.prior_precision < 1e3
    assert again == pytest.approx(scores, rel=1e-9)
    p = held.prior_precision  # against a new posterior
    alone = linearised_laplace(net, likelihood, data, prior_precision=p).predict(validation[0])
    assert math.isclose(scores[p], alone.log_prob(validation[1]).mean(), rel_tol=1e-7)
    assert p == max(scores, key=lambda key: scores[key])


def test_low_rank_evidence_is_an_upper_bound():
    net, likelihood, data, new = problem(5)
    exact = linearised_laplace(net, likelihood, data)
    part = linearised_laplace(net, likelihood, data, covariance="low-rank", rank=3)
    assert part.log_marginal_likelihood() > exact.log_marginal_likelihood()
    torch.testing.assert_close(part.covariance(new), exact.covariance(new), rtol=1e-4, atol=1e-8)


def test_modules_in_training_mode_are_not_changed():
    torch.manual_seed(0)
    module = (
        torch.nn.Sequential(
            torch.nn.Linear(3, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(4, 1),
        )
        .double()
        .train()
    )
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(20, 3).double()
    posterior = linearised_laplace(
        Network(module), subbayes.likelihoods.Gaussian(1.0), (x, x[:, 0])
    )
    first, again = (posterior.predict(x).std for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.usefixtures("unchecked")
def test_error_messages_of_incompatible_arguments():
    net, likelihood, data, new = problem(7, 3)
    posterior = linearised_laplace(net, likelihood, data)
    with pytest.raises(InputError, match="method: expected one of 'auto', 'gaussian'"):
        posterior.predict(new, method="mackay")
    with pytest.raises(InputError, match="likelihood: expected Gaussian noise around the outputs"):
        posterior.predict(new, method="gaussian")
    with pytest.raises(InputError, match="joint: expected False for classes and draws"):
        posterior.predict(new, joint=True)
    with pytest.raises(InputError, match="noise: expected Gaussian noise with a scale of its own"):
        posterior.with_prior_and_noise(1.0, 2.0)
    with pytest.raises(InputError, match="inputs: expected what the module takes|mat1 and mat2"):
        posterior.predict(torch.randn(4, 2).double())
    away = subbayes.subspace.RandomSubspace(net.weights + 1, 2)
    with pytest.raises(InputError, match="subspace: expected a centre at the network's weights"):
        linearised_laplace(net, likelihood, data, away)
    with pytest.raises(InputError, match="prior_precision: expected a finite number above 0"):
        linearised_laplace(net, likelihood, data, prior_precision=-1.0)
    net, likelihood, data, new = problem(7)
    predictive = linearised_laplace(net, likelihood, data).predict(new)
    assert isinstance(predictive, GaussianPredictive)
    with pytest.raises(InputError, match="covariance: expected a prediction with joint=True"):
        predictive.covariance
    with pytest.raises(
        InputError, match="method: expected 'auto' or 'monte-carlo' for Gaussian.*not logits"
    ):
        linearised_laplace(net, likelihood, data).predict(new, method="probit")
    with pytest.raises(InputError, match="likelihood: expected all parameters learned or given"):
        linearised_laplace(net, subbayes.likelihoods.Gaussian(), data)


# --- as an engine of fit ------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "rank"), [(1.0, 2), (3.0, None)])
def test_as_an_engine_it_is_exact_for_linear_networks(temperature, rank):
    model = LinearGaussian(rank=rank, temperature=temperature, prior=subbayes.priors.Normal(0.8))
    posterior = model.posterior()
    draws = LinearisedLaplace(gauss_newton_step=True).sample(posterior, draws=500, chains=4)
    mean, covariance = model.moments()
    np.testing.assert_allclose(draws.moments.mean, mean, rtol=1e-7)
    np.testing.assert_allclose(draws.moments.covariance, covariance, rtol=1e-7)
    check_moments(draws, mean, covariance)
    if temperature == 1:
        assert math.isclose(draws.log_evidence, model.log_evidence(), rel_tol=1e-8)
    new = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    found = predict_linearised(
        posterior.network, posterior.likelihood, posterior.subspace, draws, new
    )
    phi = np.column_stack([new.numpy(), np.ones(4)])
    P = model.basis
    np.testing.assert_allclose(found.mean, phi @ (model.shift + mean @ P), rtol=1e-7)
    spread = np.einsum("nk,kl,nl->n", phi @ P.T, covariance, phi @ P.T)
    np.testing.assert_allclose(found.epistemic, spread, rtol=1e-7)


def test_engine_keeps_the_centre_without_a_gauss_newton_step():
    posterior = LinearGaussian(rank=2).posterior()
    still, moved = (
        LinearisedLaplace(gauss_newton_step=step).sample(posterior, chains=4, draws=50)
        for step in (False, True)
    )
    assert still.moments.mean.tolist() == [0.0, 0.0]
    assert np.abs(moved.moments.mean).min() > 1e-3
    assert np.array_equal(still.moments.covariance, moved.moments.covariance)
    assert still.log_evidence < moved.log_evidence


@pytest.mark.parametrize("subspace", ["optimal", "subnetwork", "full"])
def test_fit_does_not_retrain_a_trained_module(subspace):
    """Without training, the predictive is that of `linearised_laplace` in the subspace."""
    torch.manual_seed(0)
    x, new = torch.randn(60, 2).double(), torch.randn(9, 2).double()
    trained = subbayes.training.train(
        subbayes.MLP(2, (6,), 1, "tanh", seed=0).double(),
        subbayes.likelihoods.Gaussian(0.5),
        (x, x[:, 0].clone()),
        **training_options(epochs=5, prior_scale=0.7),
    )
    network = trained.network
    options = {} if subspace == "full" else {"rank": 4, "inputs": new}
    model = subbayes.fit(
        network.module_with(),
        (x, x[:, 0].clone()),
        **fit_options(
            likelihood=subbayes.likelihoods.Gaussian(0.5),
            subspace=subspace,
            prior=0.7,
            inference="laplace-linearised",
            draws=20,
            progress=False,
            training=subbayes.Training(epochs=0, swa_epochs=0),
            **options,
        ),
    )
    torch.testing.assert_close(model.network.weights, network.weights)
    space = None if subspace == "full" else model.subspace
    direct = linearised_laplace(
        network,
        subbayes.likelihoods.Gaussian(0.5),
        (x, x[:, 0].clone()),
        space,
        prior_precision=0.7**-2,
    ).predict(new)
    found = model.predict(new)
    np.testing.assert_allclose(found.mean, direct.mean, rtol=1e-9)
    np.testing.assert_allclose(found.epistemic, direct.epistemic, rtol=1e-6)


def test_a_trajectory_needs_epochs():

    x = torch.randn(20, 2)
    data, net = (x, x[:, 0].clone()), subbayes.MLP(2, (3,), 1)
    still = subbayes.Training(epochs=1, swa_epochs=0)
    for rank in (2, None):
        with pytest.raises(InputError, match="swa_epochs: expected at least 2 for the subspace"):
            subbayes.fit(net, data, subspace=subspaces.PCA(rank=rank), training=still)
    with pytest.raises(InputError, match="swa_epochs: expected at least 1 for 'swag'"):
        compare(net, subbayes.likelihoods.Gaussian(), data, data, ["swag"], training=still)


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "categorical"])
def test_fit_in_the_optimal_subspace_for_the_inputs_to_be_predicted(likelihood, tmp_path):
    torch.manual_seed(0)
    x, new = torch.randn(60, 2).double(), torch.randn(9, 2).double()
    y = (x[:, 0] > 0).long() if likelihood == "categorical" else x[:, 0]
    net = subbayes.MLP(2, (8,), 1 if likelihood == "gaussian" else 2, "tanh", seed=0).double()
    model = subbayes.fit(
        net,
        (x, y),
        subspace=subspaces.Optimal(rank=8, inputs=new),
        likelihood=likelihood,
        prior=0.5,
        inference="laplace-linearised",
        training=subbayes.Training(epochs=5, swa_epochs=3),
        sampling=Sampling(draws=50, chains=2, progress=False),
    )
    assert model.subspace.rank == 8
    found = model.predict(new)
    whole = linearised_laplace(model.network, model.likelihood, (x, y), prior_precision=4.0)
    if likelihood == "gaussian":
        assert found.kind == "gaussian"
        np.testing.assert_allclose(
            found.epistemic.sum(), whole.predict(new).epistemic.sum(), rtol=0.05
        )
    assert set(model.evaluate(new, y[:9]))
    loaded = subbayes.load(model.save(tmp_path / "model"), net)
    np.testing.assert_array_equal(loaded.predict(new).mean, found.mean)
    np.testing.assert_allclose(np.diag(model.draws.moments.covariance), 1.0, rtol=1e-6)


def test_default_inputs():
    net, likelihood, data, _ = problem(8)
    space = optimal(net, likelihood, data, rank=4)
    same = optimal(net, likelihood, data, rank=4, seed=0)
    assert torch.equal(space.basis(), same.basis())
    table = subbayes.data.Data.of((torch.tensor([[0.0, 5.0], [1.0, 6.0]]), torch.zeros(2)))
    rows = recombine_inputs(table, 50)
    assert sorted(map(tuple, rows.unique(dim=0).tolist())) == [(0, 5), (0, 6), (1, 5), (1, 6)]
    words = subbayes.data.Data.of((torch.arange(12).reshape(6, 2), torch.zeros(6)))
    assert recombine_inputs(words, 4).shape == (4, 2)


@pytest.mark.parametrize("classes", [1, 3])
def test_against_laplace_torch(classes):
    peer = pytest.importorskip("laplace", exc_type=ImportError)
    net, likelihood, (x, y), new = problem(9, classes)
    module = net.module_with()
    rows = torch.utils.data.TensorDataset(x, y[:, None] if classes == 1 else y)
    other = peer.Laplace(
        module,
        "regression" if classes == 1 else "classification",
        subset_of_weights="all",
        hessian_structure="full",
        prior_precision=2.0,
        **({"sigma_noise": 0.3} if classes == 1 else {}),
    )
    other.fit(torch.utils.data.DataLoader(rows, batch_size=5))
    mine = linearised_laplace(net, likelihood, (x, y), prior_precision=2.0)
    evidence = float(other.log_marginal_likelihood())
    assert math.isclose(mine.log_marginal_likelihood(), evidence, rel_tol=1e-5)
    if classes == 1:
        mean, variance = other(new)
        np.testing.assert_allclose(mine.predict(new).epistemic, variance.flatten(), rtol=1e-6)
        np.testing.assert_allclose(mine.predict(new).mean, mean.flatten(), rtol=1e-6)
        return
    for method, link in (("probit", "probit"), ("laplace-bridge", "bridge")):
        expected = other(new, pred_type="glm", link_approx=link).detach()
        found = mine.predict(new, method=method).probabilities
        np.testing.assert_allclose(found, expected, rtol=1e-5)
