"""Functions that are launched as CUDA graphs give what they give without them."""

import gc
from functools import partial

import numpy as np
import pytest
import torch

from subbayes import MLP, Network, Posterior, sparse
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.networks.tracing import cuda_graphs
from subbayes.networks.tracing.cuda_graphs import CALLS
from subbayes.networks.tracing.tracer import Tracer
from subbayes.subspace import RandomSubspace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def recordings():
    gc.collect()
    return len(cuda_graphs._recordings)


def calls_beside_eager_ones(function, arguments, count=3 * CALLS):
    """Check a traced function against itself, and return how many graphs it has."""
    before, traced = recordings(), Tracer(function, "the function")
    for _ in range(count):
        given = arguments()
        expected, found = function(*given), traced(*given)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)
    assert traced.status == "traced", traced.reason
    return recordings() - before


def test_a_function_of_new_tensors_and_of_one_that_stays():
    weight = torch.randn(3, 2, device="cuda")
    found = calls_beside_eager_ones(
        lambda x, w: (torch.tanh(x @ w), w.sum()),
        lambda: (torch.randn(5, 3, device="cuda"), weight),
    )
    assert found == 1


@pytest.mark.parametrize("what", ["waits", "large"])
def test_a_function_that_cannot_or_should_not_be_recorded(what):
    def function(x):
        if what == "waits":
            return (x.cpu().to(x.device) * 2,)
        return (x[:, None] * torch.ones(1, 8 * 2**20, device="cuda") * 2,)

    assert calls_beside_eager_ones(function, lambda: (torch.randn(2, device="cuda"),)) == 0


@pytest.mark.parametrize("mode", ["trace", "compile"])
def test_densities_and_gradients(mode):
    x, y = torch.randn(30, 3), torch.randn(30)
    module = MLP(3, (8, 8), 1, "tanh", seed=0)
    network = Network(module)
    space = RandomSubspace(network.weights, 3)
    expected = Posterior(network, Gaussian(0.5), (x, y), space)
    there = Network(MLP(3, (8, 8), 1, "tanh", seed=0).to("cuda"))
    found = Posterior(there, Gaussian(0.5), (x, y), space, mode=mode)
    before = recordings()
    for seed in range(3 * CALLS):
        z = np.random.default_rng(seed).normal(size=(2, 3))
        pairs = zip(found.value_and_grad(z), expected.value_and_grad(z), strict=True)
        for a, b in [(found.value(z), expected.value(z)), *pairs]:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert recordings() == before + 2


@pytest.mark.parametrize("mode", ["trace", "compile"])
@pytest.mark.parametrize("posterior", ["mean-field", "low-rank", "mvn", "all"])
def test_sparse_networks(posterior, mode, monkeypatch):
    x = torch.randn(200, 3)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    training = sparse.SparseTraining(
        epochs=12, early_epochs=6, batch_size=20, post="fixed", post_epochs=8, mode=mode
    )
    fit = partial(sparse.fit, data=(x, y), training=training, progress=False)
    before, found = recordings(), []
    for enabled in ("1", "0"):
        monkeypatch.setenv("SUBBAYES_CUDA_GRAPHS", enabled)
        module = MLP(3, (8,), 3, "relu", seed=0).to("cuda")
        most = before
        converted = sparse.convert(module, posterior, seed=0)

        def count(*_):
            nonlocal most
            most = max(most, recordings())

        found.append(fit(converted, Categorical(3), callback=count))
        assert (most > before) == (enabled == "1")
    a, b = (result.history["elbo"] for result in found)
    np.testing.assert_allclose(a, b, rtol=1e-4)
    for p, q in zip(found[0].module.parameters(), found[1].module.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
