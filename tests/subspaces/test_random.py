"""Sparse random directions in densities, in `fit` and in files, against their dense matrix."""

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, Network, Posterior, Sampling, Training
from subbayes.artifacts import folder as artifact
from subbayes.likelihoods import Gaussian
from subbayes.subspace import DenseSubspace, RandomSubspace, SparseRandomSubspace
from subbayes.subspaces import Random


def module():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def rows(n=20):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1)).double()
    return x, x[:, 0] * x[:, 1]


@pytest.mark.parametrize("mode", ["eager", "trace"])
def test_densities_and_gradients_are_those_of_the_dense_matrix(mode):
    network = Network(module())
    sparse = SparseRandomSubspace(network.weights, 4, seed=3)
    dense = DenseSubspace(network.weights, sparse.basis())
    found, expected = (
        Posterior(network, Gaussian(0.3), rows(), space, mode=mode) for space in (sparse, dense)
    )
    z = np.random.default_rng(0).normal(size=(3, 4))
    np.testing.assert_allclose(found.value(z), expected.value(z), rtol=1e-12)
    for a, b in zip(found.value_and_grad(z), expected.value_and_grad(z), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    tensor = torch.from_numpy(z).requires_grad_()
    found.log_prob(tensor).sum().backward()
    np.testing.assert_allclose(tensor.grad, expected.value_and_grad(z)[1], rtol=1e-9, atol=1e-9)


def fitted(kind):
    return subbayes.fit(
        module(),
        rows(),
        subspace=Random(rank=3, kind=kind),
        training=Training(epochs=3),
        sampling=Sampling(draws=8, chains=2, progress=False),
    )


@pytest.mark.filterwarnings("ignore")
def test_files_hold_the_seed_and_damaged_ones_are_refused(tmp_path):
    model = fitted("sparse")
    assert isinstance(model.subspace, SparseRandomSubspace)
    model.save(tmp_path / "m")
    found = artifact.read(tmp_path / "m")
    assert [n for n in found.tensors if n.startswith("subspace.")] == ["subspace.shift"]
    x = rows()[0]
    again = subbayes.load(tmp_path / "m", module())
    np.testing.assert_array_equal(again.predict(x).mean, model.predict(x).mean)
    for change in ({"rank": 10**6}, {"rank": 4}, {"seed": -1}, {"name": "DenseSubspace"}):
        facts = found.facts | {"subspace": found.facts["subspace"] | change}
        artifact.write(tmp_path / "m", found.kind, found.tensors, facts, overwrite=True)
        with pytest.raises(InputError):
            subbayes.load(tmp_path / "m", module())


def test_the_kind_by_name():
    network = Network(module())
    assert Random().subspace_class(network) is RandomSubspace
    assert Random(kind="gaussian").subspace_class(network) is RandomSubspace
    assert Random(kind="sparse").subspace_class(network) is SparseRandomSubspace


@pytest.mark.usefixtures("unchecked")
def test_another_kind_is_refused():
    with pytest.raises(InputError, match="kind: expected"):
        Random(kind="dense")


def test_adapters_take_sparse_directions():
    adapted = pytest.importorskip("adapted")
    network = Network(adapted.adapted(), "adapters")
    assert Random().subspace_class(network) is SparseRandomSubspace
