"""Networks, likelihoods and densities on a device, against the same on the CPU."""

import numpy as np
import pytest
import torch
from cases import CASES, LIKELIHOODS, NETWORKS, Case, one_per_network, parametrize

from subbayes import Network, Posterior
from subbayes.likelihoods import CategoricalTokens, Weighted
from subbayes.subspace import (
    CoordinateSubspace,
    DenseSubspace,
    FullSubspace,
    RandomSubspace,
    SparseRandomSubspace,
)
from subbayes.utils.trees import leaves, tree_map

UNTIED = [case for case in CASES if case.network != "tied" or torch.cuda.is_available()]
VMAPS = [case for case in UNTIED if NETWORKS[case.network].vmaps]
IN_MEMORY = [case for case in one_per_network() if case.data == "memory" and case in UNTIED]
SUBSPACES = {
    "dense": lambda w: DenseSubspace(w, torch.randn(2, len(w), dtype=w.dtype)),
    "coordinate": lambda w: CoordinateSubspace(w, torch.tensor([3, 0, 5])),
    "full": FullSubspace,
    "random": lambda w: RandomSubspace(w, 3),
    "sparse": lambda w: SparseRandomSubspace(w, 3),
}


def moved(values, device):
    return tree_map(lambda tensor: tensor.to(device), values)


def close(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def on(device, case):
    """A case whose module is on the device, as a user has it, and the same on the CPU."""
    cpu, other = case.build(), case.build()
    options = NETWORKS[case.network].options
    return cpu, other, Network(other.module.to(device), **options)


def accuracy(case, tolerance):
    """On CUDA torch computes norms of weights in float32, whatever their dtype."""
    fused = case.network == "weight-norm" and torch.cuda.is_available()
    return max(tolerance, 1e-6) if fused else tolerance


@pytest.mark.few(14)
@parametrize(*IN_MEMORY)
def test_networks(device, case):
    cpu, _, network = on(device, case)
    assert network.device == device
    x = moved(cpu.inputs, device)
    expected = cpu.network(cpu.network.weights, cpu.inputs)
    tolerance = accuracy(case, case.tolerance * 10)
    close(network(network.weights, x).cpu(), expected, tolerance)
    close(cpu.network.to(device)(network.weights, x).cpu(), expected, tolerance)
    close(network.to("cpu")(cpu.network.weights, cpu.inputs), expected, tolerance)
    assert network.check(x) == expected.shape[1]
    w = torch.stack([network.weights, network.weights * 1.1])
    if case.vmaps:
        close(network.batched(w, x).cpu(), cpu.network.batched(w.cpu(), cpu.inputs), tolerance)
    module = network.module_with(w[1])
    assert {p.device for p in module.parameters()} == {device}
    close(network.flatten(module).cpu(), w[1].cpu(), tolerance)
    again = network.centred_on(w[1], (cpu.inputs, cpu.y))
    assert again.device == device


def one_batch_traced_on(device):
    """Skip where batches after the first would be replayed with the values of the first.

    The pretended device moves tensors by making new ones, which `make_fx` records as constants.
    """
    if not torch.cuda.is_available():
        pytest.skip(f"traces on {device} without CUDA hold the rows of the first batch")


@pytest.mark.few(6)
@parametrize(*VMAPS)
@pytest.mark.parametrize("mode", ["eager", "trace"])
def test_densities(device, case, mode):
    if mode == "trace" and case.data in ("loader", "shuffled"):
        one_batch_traced_on(device)
    cpu, other, network = on(device, case)
    space = RandomSubspace(cpu.network.weights, 3, seed=1)
    expected = Posterior(cpu.network, cpu.likelihood, cpu.data, space, mode="eager")
    found = Posterior(network, cpu.likelihood, other.data, space, mode=mode)
    assert found.subspace.shift.device == device
    z = np.random.default_rng(0).normal(size=(2, 3))
    tolerance = accuracy(case, 1e-9 if case.dtype == torch.float64 else 1e-4)
    for _ in range(2):
        close(found.value(z), expected.value(z), tolerance)
        for a, b in zip(found.value_and_grad(z), expected.value_and_grad(z), strict=True):
            close(a, b, tolerance)
    if case.data != "shuffled":
        close(found.pointwise(z), expected.pointwise(z), tolerance)
    tensor = torch.from_numpy(z).to(device).requires_grad_()
    value = found.log_prob(tensor)
    value.sum().backward()
    close(value.detach().cpu(), expected.value(z), tolerance)
    close(tensor.grad.cpu(), expected.value_and_grad(z)[1], tolerance)


@pytest.mark.parametrize("subspace", SUBSPACES)
def test_subspaces(device, subspace):
    space = SUBSPACES[subspace](torch.randn(9, dtype=torch.float64))
    other = space.to(device)
    z, w = torch.randn(2, space.rank).double(), torch.randn(2, 9).double()
    assert {t.device for t in other.tensors().values()} == {device}
    for name, argument in (("push", z), ("weights", z), ("pull", w), ("project", w)):
        close(
            getattr(other, name)(argument.to(device)).cpu(), getattr(space, name)(argument), 1e-12
        )
    close(other.basis().cpu(), space.basis(), 1e-12)
    close(other.to("cpu").basis(), space.basis(), 1e-12)


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_rows_of_either_device(device, where, batch_size):
    if batch_size is not None:
        one_batch_traced_on(device)
    cpu, other, network = on(device, Case("cnn", "categorical"))
    data = other.data if where == "cpu" else moved(other.data, device)
    space = RandomSubspace(cpu.network.weights, 3)
    found = Posterior(network, cpu.likelihood, data, space, batch_size=batch_size)
    expected = Posterior(cpu.network, cpu.likelihood, cpu.data, space)
    z = np.random.default_rng(0).normal(size=(2, 3))
    rows = np.array([0, 4, 5])
    close(found.value(z), expected.value(z), 1e-9)
    for a, b in zip(found.value_and_grad(z, rows), expected.value_and_grad(z, rows), strict=True):
        close(a, b, 1e-9)
    inputs = cpu.inputs if where == "cpu" else moved(cpu.inputs, device)
    a, b = found.predict(z, inputs), expected.predict(z, cpu.inputs)
    close(a.probabilities, b.probabilities, 1e-9)
    moved_back = found.to("cpu")
    close(moved_back.value(z), expected.value(z), 1e-9)
    assert found.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods(device, name):
    noise = LIKELIHOODS[name]
    rng = np.random.default_rng(0)
    y, f = noise.targets(rng, 6), torch.from_numpy(rng.normal(size=(4, 6, noise.n_outputs)))
    likelihood = noise.likelihood.for_outputs(noise.n_outputs, y)
    there_y, there_f = moved(y, device), f.to(device)
    likelihood.check_targets(there_y)
    likelihood.check_outputs(noise.n_outputs, there_y)
    close(likelihood.log_prob(there_f, there_y).cpu(), likelihood.log_prob(f, y), 1e-12)
    close(likelihood.score(there_f[0], there_y).cpu(), likelihood.score(f[0], y), 1e-12)
    own, here = likelihood.for_targets(there_y), likelihood.for_targets(y)
    for method in ("curvature", "mean", "variance"):
        close(getattr(own, method)(there_f).cpu(), getattr(here, method)(f), 1e-12)
    check_blocks(own, there_f[0], here, f[0])
    a = own.sample(there_f, torch.Generator().manual_seed(0))
    b = here.sample(f, torch.Generator().manual_seed(0))
    close(a.cpu(), b, 1e-9)
    if own.components(there_f) is not None:
        for a, b in zip(own.components(there_f), here.components(f), strict=True):
            close(a.cpu(), b, 1e-12)
    fitted = likelihood.fit_parameters(there_f[0], there_y)
    assert fitted.is_complete
    assert leaves(there_y)[0].device == device


def check_blocks(own, there, likelihood, f):
    """Blocks of the curvature, and products with them and their roots."""
    blocks, here = own.curvature_blocks(there), likelihood.curvature_blocks(f)
    close(blocks.dense().cpu(), here.dense(), 1e-12)
    u = torch.randn(2, *f.shape, dtype=torch.float64)
    close(blocks.times(u.to(there)).cpu(), here.times(u), 1e-12)
    root = blocks.root()
    close(root.times(root.transposed(u.to(there))).cpu(), here.times(u), 1e-10)


def test_likelihoods_of_tokens(device):
    f = torch.randn(3, 4 * 5, dtype=torch.float64)
    y = torch.tensor([[1, 2, 3, -100], [0, 1, 1, 4], [2, -100, -100, 0]])
    likelihood = CategoricalTokens().for_outputs(20, y)
    there = f.to(device)
    close(likelihood.log_prob(there, y.to(device)).cpu(), likelihood.log_prob(f, y), 1e-12)
    close(likelihood.score(there, y.to(device)).cpu(), likelihood.score(f, y), 1e-12)
    for method in ("curvature", "mean", "variance"):
        close(getattr(likelihood, method)(there).cpu(), getattr(likelihood, method)(f), 1e-12)
    check_blocks(likelihood.for_targets(y.to(device)), there, likelihood.for_targets(y), f)
    a = likelihood.sample(there, torch.Generator().manual_seed(0))
    assert torch.equal(a.cpu(), likelihood.sample(f, torch.Generator().manual_seed(0)))


def test_weighted_likelihoods(device):
    noise = LIKELIHOODS["gaussian"]
    rng = np.random.default_rng(0)
    y, f = noise.targets(rng, 6), torch.from_numpy(rng.normal(size=(6, 1)))
    likelihood, pair = Weighted(noise.likelihood), (y, torch.linspace(0.5, 2, 6).double())
    found = likelihood.log_prob(f.to(device), moved(pair, device))
    close(found.cpu(), likelihood.log_prob(f, pair), 1e-12)
    close(
        likelihood.for_targets(moved(pair, device)).curvature(f.to(device)).cpu(),
        likelihood.for_targets(pair).curvature(f),
        1e-12,
    )
