"""A posterior as a model of BoTorch: moments, gradients, conditions, acquisition functions."""

import numpy as np
import pytest
import torch

import subbayes
from subbayes import InputError, Network
from subbayes.baselines.ensemble import WeightSamples
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.likelihoods import Categorical, Gaussian

pytest.importorskip("botorch")

from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qUpperConfidenceBound,
)
from botorch.optim import optimize_acqf
from botorch.sampling.get_sampler import get_sampler

from subbayes.botorch import BoTorchModel

pytestmark = pytest.mark.filterwarnings("ignore")
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
X = torch.rand(25, 2, generator=torch.Generator().manual_seed(0)).double()
Y = -(X - 0.4).square().sum(1)


@pytest.fixture(scope="module", params=["laplace", "draws"])
def fitted(request):
    options = {
        "laplace": {"subspace": "full", "inference": LinearisedLaplace(gauss_newton_step=True)},
        "draws": {"subspace": "random"},
    }[request.param]
    return subbayes.fit(
        subbayes.MLP(2, (8,), 1, "tanh", seed=0).double(),
        (X, Y),
        training=subbayes.Training(epochs=200, learning_rate=0.02, swa_epochs=0),
        sampling=subbayes.Sampling(draws=30, chains=2, progress=False),
        **options,
    )


def test_moments_are_those_of_the_draws_in_any_batch_shape(fitted):
    model = BoTorchModel(fitted)
    points = torch.rand(3, 2, 4, 2, generator=torch.Generator().manual_seed(1)).double()
    posterior = model.posterior(points)
    flat = fitted.predict(points.reshape(-1, 2))
    np.testing.assert_allclose(posterior.mean.flatten().detach(), flat.mean, atol=1e-10)
    f = model.functions(points.reshape(-1, 2))[..., 0].reshape(-1, 3, 2, 4)
    torch.testing.assert_close(posterior.variance[..., 0], f.var(0))
    if fitted.draws.prediction == "network":
        torch.testing.assert_close(f.flatten(1), flat.outputs[..., 0])
    samples = get_sampler(posterior, torch.Size([len(f)]), seed=0)(posterior)[..., 0]
    # one draw is one of the functions, at all points of all batches
    found = (samples[:, None] - f[None]).abs().amax((2, 3, 4))
    assert (found.amin(1) < 1e-12).all()
    assert len(found.argmin(1).unique()) > 0.8 * len(f)


def test_a_network_of_ones_own_takes_any_number_of_points():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.GELU(), torch.nn.Linear(5, 1))
    options = {"subspace": "full", "inference": LinearisedLaplace(), "likelihood": Gaussian(0.1)}
    training = subbayes.Training(epochs=5, swa_epochs=0)
    sampling = subbayes.Sampling(draws=8, progress=False)
    module = module.double()
    model = subbayes.fit(module, (X, Y), training=training, sampling=sampling, **options)
    for n in (1, 4, 7):
        found = BoTorchModel(model).posterior(X[:n]).mean[:, 0].detach()
        np.testing.assert_allclose(found, model.predict(X[:n]).mean, atol=1e-10)


def test_mean_and_samples_pass_gradcheck(fitted):
    model = BoTorchModel(fitted, n_draws=6)
    points = torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    points.requires_grad_()
    posterior = model.posterior(points)
    sampler = get_sampler(posterior, torch.Size([3]), seed=0)
    fantasy_sampler = get_sampler(posterior, torch.Size([2]), seed=1)

    def fantasy(x):
        return model.fantasize(x, fantasy_sampler).posterior(x.flip(-1)).mean

    for function in (
        lambda x: model.posterior(x).mean,
        lambda x: model.posterior(x).variance,
        lambda x: sampler(model.posterior(x)),
        lambda x: model.posterior(x, observation_noise=True).mean,
        fantasy,
    ):
        assert torch.autograd.gradcheck(function, (points,))


def test_hypothetical_observations_give_the_linear_models_posterior():
    """A linear network, whose functions are jointly Gaussian."""
    network = Network(torch.nn.Linear(2, 1).double())
    generator, S, noise = torch.Generator().manual_seed(0), 20000, 0.3
    w = torch.randn(S, 3, generator=generator, dtype=torch.float64)
    model = BoTorchModel(WeightSamples(network, w, Gaussian(noise), "draws"), X)
    seen, y = X[:4], Y[:4, None] + torch.tensor([0.0, 1.0, -1.0]).double()[:, None, None]
    A = torch.cat([seen, torch.ones(4, 1)], 1)
    B = torch.cat([X[4:7], torch.ones(3, 1)], 1)
    K = torch.linalg.inv(torch.eye(3) + A.T @ A / noise**2)
    expected = torch.einsum("qk,kn,fn->fq", B, K @ A.T / noise**2, y[..., 0])
    covariance = B @ K @ B.T
    first = model.condition_on_observations(seen[:2], y[:, :2])
    in_two = first.condition_on_observations(seen[2:].expand(3, 2, 2), y[:, 2:])
    at_once = model.condition_on_observations(seen, y)
    for conditioned in (at_once, in_two):
        posterior = conditioned.posterior(X[4:7])
        assert posterior.mean.shape == (3, 3, 1)
        assert conditioned.batch_shape == torch.Size([3])
        # the gain has the errors of covariances of S draws
        error = 4 * (covariance.diagonal().max() / S).sqrt() + 8 * y.abs().max() / S**0.5
        assert (posterior.mean[..., 0] - expected).abs().max() < error
        f = posterior.values[0, ..., 0]
        scale = covariance.diagonal().sqrt()
        gap = (torch.cov(f.T) - covariance).abs() / scale / scale[:, None]
        assert gap.max() < 8 * (2 / S) ** 0.5


def test_real_observations_update_the_model(fitted):
    model = BoTorchModel(fitted)
    new = torch.tensor([[0.9, 0.9], [0.1, 0.8]], dtype=torch.float64)
    y = -(new - 0.4).square().sum(1)
    updated = model.condition_on_observations(new, y[:, None], seed=3)
    expected = fitted.update((new, y), seed=3)
    assert updated.model.updates == expected.updates
    found = updated.posterior(X).mean[:, 0].detach().numpy()
    np.testing.assert_allclose(found, expected.predict(X).mean, atol=1e-10)


def test_acquisition_functions_run_unchanged_and_find_the_optimum(fitted):
    model = BoTorchModel(fitted)
    best = Y.max()
    torch.manual_seed(0)
    for acquisition, q in (
        (qLogExpectedImprovement(model, best), 2),
        (qLogNoisyExpectedImprovement(model, X), 2),
        (qUpperConfidenceBound(model, 0.2), 2),
        (qKnowledgeGradient(model, num_fantasies=4), 1),
        (LogExpectedImprovement(model, best), 1),
    ):
        points, value = optimize_acqf(acquisition, BOUNDS, q=q, num_restarts=2, raw_samples=16)
        assert points.shape == (q, 2)
        assert torch.isfinite(value)
    points, _ = optimize_acqf(PosteriorMean(model), BOUNDS, q=1, num_restarts=4, raw_samples=32)
    grid = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 41, dtype=torch.float64)])
    value = model.posterior(points).mean.detach().item()
    assert value >= fitted.predict(grid).mean.max() - 1e-6


def test_several_outputs_and_estimators():
    network = Network(subbayes.MLP(2, (4,), 2, seed=0))
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(5, network.size, generator=generator)
    model = BoTorchModel(WeightSamples(network, w, Gaussian(0.1), "draws"))
    assert model.num_outputs == 2
    assert model.posterior(X[:3]).mean.shape == (3, 2)
    assert model.posterior(X[:3], output_indices=[1]).mean.shape == (3, 1)
    y = torch.zeros(4, 3, 2).double()
    fantasy = model.condition_on_observations(X[:3], y)
    assert fantasy.posterior(X[3:5]).mean.shape == (4, 2, 2)
    quick = {"training": {"epochs": 5, "swa_epochs": 4}, "sampling": {"draws": 10}}
    table = subbayes.SubspaceRegressor(**quick, random_state=0, likelihood="gaussian")
    table = table.fit(100 * X.numpy(), Y.numpy())
    points = (100 * X[:4]).requires_grad_()
    mean = BoTorchModel(table).posterior(points).mean
    np.testing.assert_allclose(
        mean[:, 0].detach(), table.predict(100 * X[:4].numpy()), rtol=1e-4, atol=1e-6
    )
    assert torch.autograd.grad(mean.sum(), points)[0].abs().min() > 0


def test_classes_are_refused():
    network = Network(torch.nn.Linear(2, 3))
    model = WeightSamples(network, network.weights[None], Categorical(3), "MAP")
    with pytest.raises(InputError, match="model"):
        BoTorchModel(model, X.float())
