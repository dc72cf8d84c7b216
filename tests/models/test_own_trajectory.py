"""A module trained in a loop of one's own: BatchNorm statistics belong to the centre."""

import copy
import warnings

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import nn

from subbayes import Network, Posterior, fit
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods import Categorical
from subbayes.models.fit import build, fit_settings
from subbayes.priors import Normal
from subbayes.subspace import RandomSubspace
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.subspaces.registry import subspace_method
from subbayes.training.configuration import Training
from subbayes.training.pipeline import without_training
from subbayes.utils.seeding import fork_rng

SAMPLING = Sampling(draws=4, chains=2, progress=False)
MESSAGE = "subspace: its centre is not the module's own weights, so the BatchNorm statistics are re"


def loaded_with(module, weights):
    """A copy of the module with flat weights, and statistics of one pass in training mode."""
    other = copy.deepcopy(module)
    nn.utils.vector_to_parameters(weights, other.parameters())
    for norm in other.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.reset_running_stats()
            norm.momentum = None  # the average over batches
    return other.train()


@pytest.fixture(scope="module")
def trained():
    """A module, its data and the recorder of its training."""
    with fork_rng(0):
        x = torch.randn(96, 3)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
        net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
        recorder = TrajectoryRecorder()
        for _ in range(12):
            for rows in torch.randperm(96).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()
            recorder.update(net)
    return net, (x, y), recorder


def check_statistics(network, module, x):
    expected = loaded_with(module, network.weights)
    with torch.no_grad():
        expected(x)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(network.frozen[name], buffer, rtol=1e-5, atol=1e-6)
    expected.eval()
    torch.testing.assert_close(network(network.weights, x), expected(x))


def test_statistics_are_those_of_the_centre(trained):
    net, (x, y), recorder = trained
    before, mode = copy.deepcopy(net.state_dict()), net.training
    space = recorder.pca(2)
    with pytest.warns(UserWarning, match=MESSAGE):
        model = fit(net, (x, y), likelihood="categorical", subspace=space, sampling=SAMPLING)
    check_statistics(model.network, net, x)
    assert torch.equal(model.network.weights, recorder.mean)
    assert not torch.allclose(model.network.frozen["1.running_mean"], net[1].running_mean)
    assert model.posterior.network is model.network
    assert net.training == mode
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_statistics_of_the_modules_own_weights_are_kept(trained):
    net, (x, y), _ = trained
    space = RandomSubspace(Network(net).weights, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)  # few draws do not mix
        model = fit(net, (x, y), likelihood="categorical", subspace=space, sampling=SAMPLING)
    assert torch.equal(model.network.frozen["1.running_mean"], net[1].running_mean)


def test_a_subspace_that_a_method_centres_elsewhere(trained):
    net, (x, y), recorder = trained
    training, likelihood = Training(epochs=0, swa_epochs=0), Categorical()
    method = subspace_method(lambda _: recorder.pca(2))
    settings = fit_settings(likelihood, method, Normal(), training, 0)
    start = without_training(Network(net), likelihood, (x, y), training)
    check_statistics(build(start, method, Normal(), settings).network, net, x)


def test_a_posterior_warns(trained):
    net, (x, y), recorder = trained
    space, network = recorder.pca(2), Network(net)
    with pytest.warns(UserWarning, match="BatchNorm statistics are used; pass network.centred_on"):
        Posterior(network, Categorical(), (x, y), space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Posterior(network.centred_on(space.shift, (x, y)), Categorical(), (x, y), space)
