"""Modules that differentiate inside their forward, as forces that are gradients of an energy."""

import numpy as np
import pytest
import torch
from torch import nn

from subbayes import InputError, Network, Posterior, Sampling, Training, fit
from subbayes.curvature.products import Curvature
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Gaussian
from subbayes.subspace import FullSubspace
from subbayes.training import train

X = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.square().sum(1)


class Force(nn.Module):
    """The derivative of an energy in the first coordinate."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.energy = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def forward(self, x):
        if self.way == "func":
            return torch.func.grad(lambda x: self.energy(x).sum())(x)[:, :1]
        if self.way == "rows":
            return torch.func.vmap(torch.func.grad(lambda row: self.energy(row).sum()))(x)[:, :1]
        with torch.enable_grad():
            if self.way != "in place":
                x = x.detach().clone()
            if not x.requires_grad:
                x.requires_grad_()
            total = self.energy(x).sum()
            return torch.autograd.grad(total, x, create_graph=True)[0][:, :1]


def by_hand(weights, x):
    """The derivative of w2 tanh(W1 x + b1) in the first coordinate."""
    W1, b1, w2 = weights[:6].reshape(3, 2), weights[6:9], weights[9:12]
    return ((1 - torch.tanh(x @ W1.T + b1) ** 2) * w2) @ W1[:, :1]


WAYS = ("autograd", "in place", "func", "rows")


@pytest.mark.parametrize("mode", ["trace", "eager"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:vectorising over weights failed")
def test_densities_and_their_gradients(way, mode):
    network = Network(Force(way))
    space = FullSubspace(network.weights)
    posterior = Posterior(network, Gaussian(0.5), (X, Y), space, mode=mode)
    z = 0.1 * np.random.default_rng(0).standard_normal((2, network.size))
    value, slope = posterior.value_and_grad(z)
    for row, own, gradient in zip(z, value, slope, strict=True):
        point = torch.tensor(row, requires_grad=True)
        mean = by_hand(network.weights + point, X)[:, 0]
        wanted = torch.distributions.Normal(mean, 0.5).log_prob(Y).sum()
        wanted = wanted + torch.distributions.Normal(0.0, 1.0).log_prob(point).sum()
        assert own == pytest.approx(wanted.item(), rel=1e-12)
        np.testing.assert_allclose(gradient, torch.autograd.grad(wanted, point)[0], rtol=1e-9)


@pytest.mark.parametrize("covariance", ["dual", "diagonal"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:vectorising over rows failed")
def test_linearised_laplace(way, covariance):
    network = Network(Force(way))
    J = torch.func.jacrev(lambda w: by_hand(w, X)[:, 0])(network.weights)
    precision = J.T @ J / 0.25 + 2.0 * torch.eye(network.size)
    if covariance == "diagonal":
        precision = precision.diagonal().diag()
    found = linearised_laplace(
        network, Gaussian(0.5), (X, Y), covariance=covariance, prior_precision=2.0
    ).covariance(X)
    wanted = J @ torch.linalg.solve(precision, J.T)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


def test_products_with_the_curvature_name_the_call():
    with pytest.raises(InputError, match=r"Force, which raises RuntimeError: ") as caught:
        Curvature(Network(Force("autograd")), Gaussian(1.0), (X, Y))
    assert caught.value.argument == "module"
    Curvature(Network(Force("func")), Gaussian(1.0), (X, Y))


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["nuts", "laplace-linearised"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_fits(way, engine):
    model = fit(
        Force(way),
        (X, Y),
        likelihood=Gaussian(),
        subspace="full" if engine == "laplace-linearised" else "random",
        inference=engine,
        training=Training(epochs=2, swa_epochs=0),
        sampling=Sampling(draws=4, warmup=4, chains=2, seed=0),
    )
    assert np.isfinite(model.predict(X).mean).all()


@pytest.mark.parametrize("engine", ["nuts", "laplace-linearised"])
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_inference_mode(engine):
    with torch.inference_mode():
        made = X.clone(), Y.clone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = nn.Linear(2, 1).double()
    means = []
    for data in ((X, Y), made):
        model = fit(
            module,
            data,
            likelihood=Gaussian(0.5),
            subspace="full",
            inference=engine,
            training=Training(epochs=2, swa_epochs=0),
            sampling=Sampling(draws=4, warmup=4, chains=2, seed=0),
        )
        means.append(model.predict(data[0]).mean)
    assert np.array_equal(*means)


@pytest.mark.filterwarnings("ignore")
def test_data_that_a_module_asks_gradients_of_are_left_as_they_are():
    """Whether the learned noise has converged is asked of the same rows after training."""
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    training = Training(epochs=2, batch_size=None, learning_rate=1e-9)
    result = train(Force("in place"), Gaussian(), (x, x[:, 0]), training)
    wanted = by_hand(result.network.weights.detach(), x)
    torch.testing.assert_close(result.network(result.network.weights, x), wanted)
