"""Predictions from loaders are those of the same rows as a tensor: each row once, in order."""

from itertools import chain

import numpy as np
import pytest
import torch
from cases import sparse_options
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import subbayes
from subbayes import InputError, Network, Training, sparse
from subbayes.baselines.ensemble import WeightSamples
from subbayes.data.loaders import iterate_preserving_rng
from subbayes.diagnostics import metrics
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.likelihoods import Gaussian
from subbayes.predictions.averaging import count_known_rows, count_rows
from subbayes.subspaces.optimal import Optimal
from subbayes.subspaces.subnetwork import Subnetwork

X = torch.arange(20.0).reshape(10, 2) / 10
Y = X.sum(1)


class Once(IterableDataset):
    """A stream that goes on where it stopped."""

    def __init__(self, rows) -> None:
        self.rows = iter(rows)

    def __iter__(self):
        return self.rows


def once():
    return DataLoader(Once(X), batch_size=4)


def batches_in_random_order(drop_last=False):
    rows = TensorDataset(X, Y)
    return DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 4, drop_last))


LOADERS = pytest.mark.parametrize("loader", [once, batches_in_random_order])


def members_with_buffers():
    """Three members with weights and BatchNorm statistics of their own."""
    network = Network(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval())
    own = [{n: t + s if t.ndim else t for n, t in network.frozen.items()} for s in range(3)]
    weights = network.weights * torch.arange(1.0, 4.0)[:, None]
    return WeightSamples(network, weights, Gaussian(1.0), "members", own)


def sparse_network():
    module = sparse.convert(subbayes.MLP(2, (4,), 1, seed=0))
    return sparse.SparseNetwork(module, Gaussian(1.0), n_draws=7)


def linearised():
    return subbayes.fit(
        subbayes.MLP(2, (3,), 1, seed=0),
        (X, Y),
        likelihood=Gaussian(0.1),
        subspace="random",
        inference=LinearisedLaplace(),
        training=Training(epochs=2, swa_epochs=0),
        sampling=Sampling(draws=4, chains=2, progress=False),
    )


@LOADERS
def test_linearised_predictions_have_all_rows(loader):
    model = linearised()
    expected, found = model.predict(X), model.predict(loader())
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(found.std, expected.std, rtol=1e-6)


@LOADERS
def test_members_with_buffers_predict_the_same_rows(loader):
    model = members_with_buffers()
    expected, found = model.predict(X), model.predict(loader())
    torch.testing.assert_close(found.outputs, expected.outputs)


@LOADERS
@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("memory_limit", [2**30, 2000])
def test_draws_of_sparse_networks_predict_the_same_rows(
    monkeypatch, loader, products, memory_limit
):
    monkeypatch.setattr(sparse.SparseNetwork, "_uses_sparse_products", lambda *_: products)
    model = sparse_network()
    expected, found = model.predict(X), model.predict(loader(), memory_limit=memory_limit)
    torch.testing.assert_close(found.outputs, expected.outputs)


def test_a_batch_sampler_is_read_in_the_order_of_its_rows():
    model = WeightSamples(Network(nn.Linear(2, 1)), torch.ones(1, 3), Gaussian(1.0), "one")
    some = SequentialSampler(range(6))
    for loader, rows in (
        (batches_in_random_order(drop_last=True), X),
        (DataLoader(X, batch_sampler=BatchSampler(some, 4, True)), X[:6]),
        (DataLoader(X, batch_sampler=BatchSampler(RandomSampler(range(6)), 4, False)), X[:6]),
        (DataLoader(X, batch_sampler=[[3, 1], [0]]), X[[3, 1, 0]]),
    ):
        np.testing.assert_allclose(model.predict(loader).mean, rows.sum(1) + 1, rtol=1e-6)
    assert count_known_rows(DataLoader(X, batch_sampler=BatchSampler(some, 4, True))) == 6


class Noisy(TensorDataset):
    def __getitem__(self, i):
        return super().__getitem__(i)[0] + torch.randn(())


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(X, batch_size=4, sampler=torch.utils.data.SubsetRandomSampler(range(10))),
        DataLoader(Noisy(X), batch_size=4),
        DataLoader(X, batch_size=4, shuffle=True),
    ],
    ids=["sampler", "dataset", "shuffle"],
)
def test_reading_a_loader_keeps_the_global_generator(loader):
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    found, draws = [], []
    for batch in iterate_preserving_rng(loader):
        found.append(batch)
        draws.append(torch.rand(1))  # the caller's own numbers do not depend on the loader
    draws.append(torch.rand(5 - len(draws)))
    assert torch.equal(torch.cat(draws), expected)
    torch.manual_seed(3)
    for batch, other in zip(loader, found, strict=True):  # nor those of the loader on the caller
        assert torch.equal(batch, other)


@pytest.mark.parametrize("method", [Optimal(2, once()), Subnetwork(2, once())], ids=str)
def test_inputs_of_a_subspace_have_to_be_readable_again(method):
    with pytest.raises(InputError, match="inputs: expected a loader that can be read again"):
        subbayes.fit(
            subbayes.MLP(2, (3,), 1, seed=0),
            (X, Y),
            likelihood=Gaussian(0.1),
            subspace=method,
            training=Training(epochs=2, swa_epochs=0),
        )
    network = Network(nn.Linear(2, 1))
    assert count_rows(network, DataLoader(X, batch_size=4)) == 10


# --- modules of two inputs ----------------------------------------------------------------------


class Masked(nn.Module):
    """A module with an optional second input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, mask=None):
        return self.linear(x if mask is None else x * mask)


class WithSwitch(Masked):
    def forward(self, x, return_features=False):
        assert not return_features
        return self.linear(x)


def of(module):
    network = Network(module)
    return WeightSamples(network, network.weights[None], Gaussian(1.0), "MAP")


def pairs(*tensors):
    return DataLoader(TensorDataset(*tensors), batch_size=4)


MASK = (X > 0.5).float()


def test_a_pair_of_inputs_from_a_loader_is_refused():
    model = of(Masked())
    for predict in (
        model.predict,
        lambda inputs: list(model.predict_batches(inputs)),
        lambda inputs: count_rows(model.network, inputs),
    ):
        with pytest.raises(InputError, match=r"2 numbers per row for 1 outputs.*argument 'mask'"):
            predict(pairs(X, MASK))
        predict(pairs(X, Y))


def test_two_inputs_of_a_loader_are_used():
    model = of(Masked())
    expected = model.predict((X, MASK)).outputs
    named = DataLoader([{"x": x, "mask": m} for x, m in zip(X, MASK, strict=True)], batch_size=4)
    nested = DataLoader([((x, m), 0.0) for x, m in zip(X, MASK, strict=True)], batch_size=4)
    for loader in (named, nested):
        torch.testing.assert_close(model.predict(loader).outputs, expected)


@pytest.mark.parametrize("module", [WithSwitch(), nn.Linear(2, 1), Masked()], ids=str)
def test_pairs_with_targets_are_accepted(module):
    model = of(module)
    expected = model.predict(X).outputs
    for y in (Y, Y[:, None], torch.arange(10)):
        torch.testing.assert_close(model.predict(pairs(X, y)).outputs, expected)
    if type(module) is not Masked:
        torch.testing.assert_close(model.predict(pairs(X, MASK)).outputs, expected)


# --- known noise --------------------------------------------------------------------------------


def test_sparse_networks_predict_with_known_noise():
    scales = torch.linspace(0.5, 2.0, 10)
    model = sparse.fit(
        sparse.convert(nn.Linear(2, 1)),
        Gaussian(noise="per-observation"),
        (X, (Y, scales)),
        progress=False,
        **sparse_options(epochs=2),
    )
    found = model.predict(X, noise=scales)
    np.testing.assert_allclose(found.aleatoric, scales.double() ** 2, rtol=1e-6)
    np.testing.assert_allclose(found.std**2, found.epistemic + found.aleatoric, rtol=1e-6)
    by_batch = model.predict_batches(X, batch_size=3, noise=scales)
    np.testing.assert_allclose(
        list(chain.from_iterable(p.std for p in by_batch)), found.std, rtol=1e-6
    )
    assert model.evaluate((X, (Y, scales))) == metrics.score(found, Y)
    with pytest.raises(InputError, match="noise: expected one scale for each of 10 inputs"):
        model.predict(X, noise=scales[:3])
