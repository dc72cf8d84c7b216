"""Options of embeddings that change gradients: derivatives are those of finite differences."""

import numpy as np
import pytest
import torch
from torch import nn

from subbayes import InputError, Network, Posterior, load
from subbayes.baselines import point_estimate
from subbayes.curvature.layers import Layers
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Gaussian
from subbayes.subspace import FullSubspace

WORDS, SIZE = 6, 3
IDS = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 0], [4, 5, 1, 1], [2, 2, 0, 0]])
OPTIONS = {
    "plain": {},
    "frequencies": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
    "padding": {"padding_idx": 0},
    "all": {"scale_grad_by_freq": True, "sparse": True, "padding_idx": 0},
}


class Words(nn.Module):
    """The sum of functions of embeddings; `tied` scores words by the same embeddings."""

    def __init__(self, embedding, tied=False):
        super().__init__()
        self.words = embedding
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        if tied:
            self.head.weight = embedding.weight

    def forward(self, ids):
        found = self.words(ids)
        return self.head(torch.tanh(found).sum(1) if found.ndim == 3 else torch.tanh(found))


def built(kind, options, tied=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Words(getattr(nn, kind)(WORDS, SIZE, **options), tied).double().eval()


def differences(network):
    """The Jacobian of all outputs from central finite differences, shape (N C, D)."""
    step, columns = 1e-5, []
    with torch.no_grad():
        for unit in torch.eye(network.size, dtype=torch.float64):
            up, down = (network(network.weights + s * step * unit, IDS) for s in (1, -1))
            columns.append(((up - down) / (2 * step)).flatten())
    return torch.stack(columns, 1)


CASES = [
    *[("Embedding", options, tied) for options in OPTIONS for tied in (False, True)],
    *[("EmbeddingBag", options, False) for options in OPTIONS],
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "options", "tied"), CASES)
def test_gradients_are_derivatives(kind, options, tied):
    network = Network(built(kind, OPTIONS[options], tied))
    J = differences(network)
    u = torch.randn(len(IDS), WORDS, generator=torch.Generator().manual_seed(2)).double()
    wanted = torch.einsum("nc,ncd->nd", u, J.unflatten(0, (len(IDS), WORDS)))
    w = network.weights.clone().requires_grad_()
    (found,) = torch.autograd.grad((network(w, IDS) * u).sum(), w)
    torch.testing.assert_close(found, wanted.sum(0), rtol=1e-7, atol=1e-8)
    plan = Layers(network, IDS[:3])
    assert (plan.rest is None) == (kind == "Embedding" and not tied)
    rows = torch.zeros_like(wanted)
    batch = plan.capture(IDS)
    for gradients in (*batch.pull(u[None]), *batch.pull_others(u[None])):
        for place, part in gradients.parts():
            rows[:, place] = part[0]
    torch.testing.assert_close(rows, wanted, rtol=1e-7, atol=1e-8)
    posterior = Posterior(
        network, Gaussian(1.0), (IDS, torch.zeros(len(IDS), WORDS)), FullSubspace(network.weights)
    )
    _, slope = posterior.value_and_grad(np.zeros((1, network.size)))
    outputs = network(network.weights, IDS).detach().flatten()
    np.testing.assert_allclose(slope[0], -J.T @ outputs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("options", ["frequencies", "padding", "all"])
@pytest.mark.parametrize("covariance", ["dual", "diagonal"])
def test_laplace_is_that_of_finite_differences(options, covariance):
    network = Network(built("Embedding", OPTIONS[options]))
    J = differences(network)
    precision = J.T @ J + 2.0 * torch.eye(network.size)
    if covariance == "diagonal":
        precision = precision.diagonal().diag()
    found = linearised_laplace(
        network,
        Gaussian(1.0),
        (IDS, torch.zeros(len(IDS), WORDS)),
        covariance=covariance,
        prior_precision=2.0,
    ).covariance(IDS)
    wanted = J @ torch.linalg.solve(precision, J.T)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-8)


def test_the_row_of_padding_is_no_weight():
    """Padding adds nothing at any weights, as at those of the module."""
    module = built("Embedding", {"padding_idx": 0})
    network = Network(module)
    longer = torch.cat([IDS, torch.zeros(len(IDS), 3, dtype=torch.long)], 1)
    for weights in (network.weights, network.weights + 1.0):
        torch.testing.assert_close(network(weights, longer), network(weights, IDS))
    torch.testing.assert_close(network(network.weights, IDS), module(IDS))
    assert type(module.words) is nn.Embedding
    copied = network.module_with(network.weights + 1.0)
    torch.testing.assert_close(copied(IDS), network(network.weights + 1.0, IDS))
    assert network.to("cpu", torch.float32)(network.weights.float(), IDS).dtype == torch.float32


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_max_norm_is_refused_for_weights(kind):
    module = built(kind, {"max_norm": 1.0})
    with pytest.raises(InputError, match=r"^module: .*max_norm=1") as caught:
        Network(module)
    assert caught.value.argument == "module"
    Network(module, "head.*")


def test_options_without_effect_are_not_compared_at_loading(tmp_path):
    module = built("Embedding", OPTIONS["all"])
    saved = point_estimate(module, Gaussian(1.0))
    saved.save(tmp_path / "model")
    again = load(tmp_path / "model", built("Embedding", OPTIONS["padding"]))
    assert again.predict(IDS).mean == pytest.approx(saved.predict(IDS).mean)
