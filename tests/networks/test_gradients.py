"""Modules whose outputs have no gradients in their weights."""

import numpy as np
import pytest
import torch
from torch import nn

from subbayes import InputError, Network, Posterior, Sampling, Training, fit
from subbayes.curvature.precision_factory import root
from subbayes.curvature.products import Curvature
from subbayes.likelihoods import Gaussian
from subbayes.subspace import FullSubspace
from subbayes.training.trainer import train


class ThroughNumpy(nn.Module):
    """A linear layer whose outputs have no gradients in its weights."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(2, 1, bias=False), way

    def forward(self, x):
        if self.way == "item":
            first, second = (weight.item() for weight in self.linear.weight[0])
            return first * x[:, :1] + second * x[:, 1:]
        out = self.linear(x)
        if self.way == "numpy":
            return torch.from_numpy(out.numpy() * 1)
        return torch.from_numpy(out.detach().numpy() * 1) if self.way == "both" else out.detach()


def _without_gradients(way):
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    y = x @ torch.tensor([[1.0], [-1.0]]) + 0.1 * torch.randn(30, 1)
    return ThroughNumpy(way), (x, y[:, 0])


@pytest.mark.parametrize("way", ["numpy", "both", "detach", "item"])
def test_weights_without_gradients_are_refused_by_what_needs_them(way):
    module, data = _without_gradients(way)
    network, noise = Network(module), Gaussian(0.3)
    posterior = Posterior(network, noise, data, FullSubspace(network.weights))
    z = torch.zeros(1, 2)
    said = "Can't call numpy" if way == "numpy" else "do not depend on them as far as autograd sees"
    said = rf"^module: expected outputs with gradients in its weights, got .*{said}.*\. Compute.*"
    for call in (
        lambda: train(module, noise, data, Training(epochs=1), progress=False),
        lambda: posterior.value_and_grad(z.numpy()),
        lambda: posterior.log_prob(z),
        lambda: Curvature(network, noise, data),
        lambda: root(network, noise, data),
    ):
        with pytest.raises(InputError, match=said + "'elliptical-slice' or 'slice'") as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:vectorising over weights failed")
@pytest.mark.parametrize("way", ["numpy", "both", "detach", "item"])
def test_weights_without_gradients_have_densities_and_draws(way):
    module, data = _without_gradients(way)
    space, noise = FullSubspace(Network(module).weights), Gaussian(0.3)
    z = np.random.default_rng(0).standard_normal((4, 2))
    found, expected = (
        Posterior(Network(net), noise, data, space).value(z) for net in (module, module.linear)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    model = fit(
        module,
        data,
        likelihood=noise,
        subspace="full",
        training=Training(epochs=0, swa_epochs=0),
        sampling=Sampling(draws=5, chains=2, progress=False),
    )
    assert model.draws.z.std() > 0
