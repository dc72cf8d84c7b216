"""The library gives the same results without private interfaces of torch."""

import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from subbayes import MLP, Network, Posterior, Training, sparse
from subbayes.inference.variational.flows import Flow
from subbayes.inference.variational.gaussians import FullRank
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.networks.tracing.private_torch import private_torch_enabled
from subbayes.sparse import steps
from subbayes.subspace import RandomSubspace
from subbayes.training import many_steps
from subbayes.training.many import train_many

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1).sin()


def density(mode):
    network = Network(MLP(3, (8,), 1, activation="tanh", seed=0))
    space = RandomSubspace(network.weights, 4, seed=0)
    posterior = Posterior(network, Gaussian(0.3), (X, Y), space, mode=mode)
    z = np.random.default_rng(0).normal(size=(3, 4))
    value, gradient = posterior.value_and_grad(z)
    return np.concatenate([value, posterior.value(z), gradient.ravel()])


def sparse_network():
    torch.manual_seed(0)
    module = sparse.convert(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    training = sparse.SparseTraining(epochs=3)
    result = sparse.fit(module, Categorical(), (X, (Y > 0).long()), training, progress=False)
    return np.concatenate([t.detach().numpy().ravel() for t in result.module.state_dict().values()])


def networks():
    modules = [MLP(3, (4,), 1, seed=seed) for seed in range(2)]
    training = Training(epochs=4, batch_size=20)
    members = train_many(modules, Gaussian(1.0), (X, Y), training, progress=False)
    return np.concatenate([member.network.weights.numpy() for member in members])


def flow():
    if find_spec("zuko") is None:  # importing it changes global state of torch
        pytest.skip("zuko is not installed")
    made = Flow.identity(FullRank(np.zeros(3), np.eye(3)), seed=0)
    eps = np.random.default_rng(0).normal(size=(5, 3))
    z, log_q, _ = made.reparameterise(eps)
    return np.concatenate([z.ravel(), log_q])


CASES = {
    "traced density": lambda: density("trace"),
    "compiled density": lambda: density("compile"),
    "sparse network": sparse_network,
    "stacked networks": networks,
    "flow": flow,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_results_are_the_same_without_private_torch(name, monkeypatch):
    monkeypatch.setattr(steps, "_MIN_STEPS", 1)
    monkeypatch.setattr(many_steps, "TRACED_AFTER", 1)
    found = CASES[name]()
    monkeypatch.setenv("SUBBAYES_PRIVATE_TORCH", "0")
    assert not private_torch_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without = CASES[name]()
    np.testing.assert_allclose(without, found, rtol=2e-4, atol=2e-4)
