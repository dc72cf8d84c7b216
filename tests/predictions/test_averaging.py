"""Predictions of linearised Laplace in chunks of inputs: same results, bounded memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from fits import fit_options
from jacobians import problem
from torch.utils.data import DataLoader

from subbayes import Training, fit
from subbayes.curvature import subspace_precision as restricted
from subbayes.curvature.subspace_precision import subspace_jacobian, subspace_jacobian_in_chunks
from subbayes.inference.laplace.linearised import linearised_laplace, predict_linearised
from subbayes.subspace import CoordinateSubspace, DenseSubspace


def spaces(net):
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(4, net.size, generator=generator).double()
    return DenseSubspace(net.weights, basis), CoordinateSubspace(
        net.weights, torch.arange(0, net.size, 3)
    )


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("size", [1, 13, 60, 10**6])
def test_results_do_not_depend_on_the_chunk_size(monkeypatch, which, classes, size):
    net, likelihood, data, new = problem(0, classes)
    posterior = linearised_laplace(net, likelihood, data, spaces(net)[which])
    new = torch.cat([new, new.flip(0) + 1])
    whole, joint = posterior.predict(new), posterior.covariance(new)
    monkeypatch.setattr(restricted, "_AT_ONCE", size)
    for inputs in (new, DataLoader(new, batch_size=5)):
        found = posterior.predict(inputs)
        np.testing.assert_allclose(found.mean, whole.mean, rtol=1e-10)
        np.testing.assert_allclose(found.std, whole.std, rtol=1e-10)
    torch.testing.assert_close(posterior.covariance(new), joint, rtol=1e-10, atol=1e-14)
    blocks = joint.reshape(16, classes, 16, classes).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    torch.testing.assert_close(posterior.precision.blocks(new), blocks, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("which", [0, 1])
def test_chunks_respect_the_memory_limit(which):
    net, likelihood, data, new = problem(0, 3)
    posterior = linearised_laplace(net, likelihood, data, spaces(net)[which])
    J, space = posterior.precision.jacobian(new.repeat(30, 1)), spaces(net)[which]
    parts = list(subspace_jacobian_in_chunks(J, space, most=60 * space.rank))
    inputs = 32 if which else 20  # entries are gathered for 32 inputs at once at the most
    assert max(map(len, parts)) <= 3 * inputs
    assert all(len(part) % 3 == 0 for part in parts)
    torch.testing.assert_close(
        torch.cat(parts), subspace_jacobian(J, space), rtol=1e-12, atol=1e-14
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("subspace", ["optimal", "subnetwork"])
@pytest.mark.parametrize("size", [1, 40, 10**6])
def test_fitted_models_do_not_depend_on_the_chunk_size(monkeypatch, subspace, size):
    net, likelihood, data, new = problem(0, 3)
    model = fit(
        net.module_with(),
        data,
        **fit_options(
            likelihood=likelihood,
            subspace=subspace,
            rank=5,
            inference="laplace-linearised",
            draws=10,
            chains=2,
            progress=False,
            training=Training(epochs=2, swa_epochs=2),
        ),
    )
    whole = predict_linearised(model.network, likelihood, model.subspace, model.draws, new)
    covariance = torch.tensor(model.draws.moments.covariance).double()
    posterior = linearised_laplace(model.network, likelihood, data, model.subspace)
    columns = posterior.precision.subspace_jacobian(new).reshape(8, 3, 5)
    spread = torch.einsum("nck,kl,ndl->ncd", columns, covariance, columns)
    variances = torch.from_numpy(np.var(whole.outputs.numpy(), 0))
    expected = spread.diagonal(dim1=1, dim2=2)  # 200 draws: 5 standard errors
    assert ((variances - expected).abs() < 5 * (2 / 200) ** 0.5 * expected).all()
    monkeypatch.setattr(restricted, "_AT_ONCE", size)
    found = predict_linearised(model.network, likelihood, model.subspace, model.draws, new)
    np.testing.assert_allclose(found.probabilities, whole.probabilities, rtol=1e-10)


PEAK = """
import resource, sys, torch, subbayes
from subbayes.subspaces.subnetwork import from_mask
net = subbayes.Network(subbayes.MLP(5, (400,), 1, seed=0))
x = torch.randn(50, 5)
posterior = subbayes.inference.linearised_laplace(
    net, subbayes.likelihoods.Gaussian(0.1), (x, x[:, 0]), from_mask(net, torch.arange(2000)))
posterior.predict(torch.randn(3000, 5))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
posterior.predict(torch.randn(int(sys.argv[1]), 5))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_inputs():
    """J_S of 60,000 inputs and 2000 weights takes 916 MiB in float64."""
    out = subprocess.run(
        [sys.executable, "-c", PEAK, "60000"], capture_output=True, text=True, check=True
    )
    assert float(out.stdout) < 150
