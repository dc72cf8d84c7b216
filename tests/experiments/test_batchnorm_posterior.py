"""BatchNorm statistics at each point against a loop over modules."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.batchnorm_posterior import BatchNormPosterior
from subbayes import Network, Posterior
from subbayes.data.data import Data
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.nuts import NUTS
from subbayes.likelihoods import Categorical, Gaussian, Weighted
from subbayes.subspace import RandomSubspace
from subbayes.utils.checks import InputError

N, ROWS = 2500, 1024  # batches of 1024, 1024 and 452


class Convolutions(nn.Module):
    """Two BatchNorm layers, the second of which depends on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm1 = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.dense, self.norm2 = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        hidden = torch.relu(self.norm1(self.conv(x))).mean((2, 3))
        return self.head(torch.relu(self.norm2(self.dense(hidden))))


def dense():
    return nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


def rows(kind, n, seed):
    rng = np.random.default_rng(seed)
    if kind == "dense":
        x = torch.from_numpy(rng.normal(1.0, 2.0, size=(n, 2)))
        return x, torch.sin(x[:, 0])
    x = torch.from_numpy(rng.normal(size=(n, 1, 4, 4)))
    return x, torch.from_numpy(rng.integers(3, size=n))


def naive(module, weights, x, new):
    """Outputs of the module at new inputs for flat weights, with statistics collected on x."""
    other, at = copy.deepcopy(module), 0
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(weights[at : at + parameter.numel()].reshape(parameter.shape))
            at += parameter.numel()
        norms = [m for m in other.modules() if hasattr(m, "running_mean")]
        found = {i: [] for i in range(len(norms))}
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        for part in x[order].split(ROWS):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = 1.0
            other.train()(part)
            for i, norm in enumerate(norms):
                found[i].append((len(part), norm.running_mean.clone(), norm.running_var.clone()))
        for i, norm in enumerate(norms):
            values = len(x) * (16 if isinstance(norm, nn.BatchNorm2d) else 1)
            mean = sum(n * m for n, m, _ in found[i]) / len(x)
            each = values / len(x)
            within = sum((n * each - 1) * v for n, _, v in found[i])
            between = sum(n * each * (m - mean).square() for n, m, _ in found[i])
            norm.running_mean.copy_(mean)
            norm.running_var.copy_((within + between) / (values - 1))
        return other.eval()(new)


@pytest.fixture(params=["dense", "convolutions"])
def case(request):
    """A module in training mode with unrelated statistics, its posterior, and new inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = (dense() if request.param == "dense" else Convolutions()).double().train()
        module(rows(request.param, 50, 9)[0] * 3 + 1)
    x, y = rows(request.param, N, 0)
    likelihood = Gaussian(0.5) if request.param == "dense" else Categorical(3)
    network = Network(module)
    space = RandomSubspace(network.weights, 2)
    return (
        module,
        BatchNormPosterior(network, likelihood, (x, y), space),
        rows(request.param, 30, 1)[0],
    )


Z = np.array([[0.0, 0.0], [1.5, -0.5], [-3.0, 2.0]])


def expected(case, new):
    module, posterior, _ = case
    x = posterior.data.inputs
    return torch.stack(
        [naive(module, w, x, new) for w in posterior.subspace.weights(torch.from_numpy(Z))]
    )


def test_predictions_of_draws(case):
    _, posterior, new = case
    f = expected(case, new)
    found = posterior.predict(Z, new)
    np.testing.assert_allclose(found.outputs.numpy(), f.numpy(), rtol=1e-10)
    plain = Posterior(posterior.network, posterior.likelihood, posterior.data, posterior.subspace)
    again = plain.predict(Z, new, refresh_batchnorm=True)
    np.testing.assert_array_equal(again.outputs.numpy(), found.outputs.numpy())
    assert not np.allclose(plain.predict(Z, new).outputs.numpy(), f.numpy(), rtol=0.05)
    at = posterior.network_at(Z[1])
    np.testing.assert_allclose(at(at.weights, new).detach(), f[1], rtol=1e-10)


def test_the_density(case):
    _, posterior, _ = case
    x, y = posterior.data.inputs, posterior.data.targets()
    terms = posterior.likelihood.log_prob(expected(case, x), y).numpy()
    np.testing.assert_allclose(posterior.pointwise(Z), terms, rtol=1e-9)
    np.testing.assert_allclose(posterior.log_likelihood(Z), terms.sum(1), rtol=1e-10)
    warm = posterior.with_temperature(7.0)
    np.testing.assert_allclose(warm.value(Z), terms.sum(1) / 7 + warm.prior.log_prob(Z), rtol=1e-10)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["permuted", "loader of one row", "loader of 40 rows"])
def test_the_density_does_not_depend_on_the_order_of_rows_or_on_batches(form):
    """Sorted rows, of which neighbours are alike, against one batch of all rows."""
    x = torch.linspace(-2, 2, N, dtype=torch.float64)[:, None].repeat(1, 2)
    y = torch.sin(2 * x[:, 0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(dense().double().eval())
    space = RandomSubspace(network.weights, 2)
    expected = []
    for weights in space.weights(torch.from_numpy(Z)):
        f = network.module_with(weights).train()(x).detach()  # biased variances: within 1 / N
        expected.append(float(Gaussian(0.5).log_prob(f, y).sum()))
    data, order = (x, y), torch.randperm(N, generator=torch.Generator().manual_seed(1))
    if form == "permuted":
        data = x[order], y[order]
    elif "loader" in form:
        size = 1 if "one" in form else 40
        data = Data.of(DataLoader(TensorDataset(x, y), batch_size=size), memory_limit=0)
    found = BatchNormPosterior(network, Gaussian(0.5), data, space).log_likelihood(Z)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    whole = BatchNormPosterior(network, Gaussian(0.5), (x, y), space).log_likelihood(Z)
    np.testing.assert_allclose(found, whole, rtol=1e-10)


def test_rows_of_weight_zero_have_no_effect():
    """Weights that `Data` does not know of, since they are in a tuple of targets."""
    x, y = rows("dense", 30, 0)
    weights = (torch.arange(30) % 3).double()
    kept = weights > 0
    x[~kept] += 100
    network = Network(dense().double())
    space, likelihood = RandomSubspace(network.weights, 2), Weighted(Gaussian(0.5))
    both = (x, (y, weights)), (x[kept], (y[kept], weights[kept]))
    found, expected = (
        BatchNormPosterior(network, likelihood, data, space).value(Z) for data in both
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_module_is_not_changed(case):
    module, posterior, new = case
    before = copy.deepcopy(module.state_dict())
    posterior.value(Z)
    posterior.predict(Z, new)
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_sampling():
    """The density is invariant under scaling of the weights before a BatchNorm layer."""
    module = dense().double()
    network, (x, y) = Network(module, "0.weight"), rows("dense", 60, 0)
    posterior = BatchNormPosterior(
        network,
        Gaussian(0.5),
        (x, y),
        RandomSubspace(torch.zeros_like(network.weights), 2),
        temperature=10.0,
    )
    z = np.array([[0.3, -0.2]])
    np.testing.assert_allclose(
        posterior.log_likelihood(50 * z), posterior.log_likelihood(100 * z), rtol=1e-4
    )
    draws = EllipticalSlice().sample(posterior, draws=10, chains=2, progress=False)
    np.testing.assert_allclose(
        draws.stats["log_likelihood"].reshape(-1),
        posterior.log_likelihood(draws.flat()),
        rtol=1e-12,
    )
    assert (
        posterior.fingerprint()
        != Posterior(
            network, Gaussian(0.5), (x, y), posterior.subspace, temperature=10.0
        ).fingerprint()
    )
    for call in (
        lambda: NUTS().sample(posterior, chains=4, draws=5, progress=False),
        lambda: posterior.log_prob(torch.zeros(2)),
    ):
        with pytest.raises(
            InputError,
            match="posterior: expected a density with gradients, got one"
            " with BatchNorm statistics of each z. Use EllipticalSlice",
        ):
            call()
