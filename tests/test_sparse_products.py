"""Products with sparse matrices, and predictions by them, are those of the dense networks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import subbayes
from subbayes import sparse
from subbayes.sparse import result as results
from subbayes.sparse.products import thin_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 15, 16, 127, 128, 129, 300])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_thin_products_are_dense_ones(rows, density, dtype):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(7, 11, generator=generator, dtype=dtype)
    weight *= torch.rand(7, 11, generator=generator) < density
    weight[2] = 0.0  # a unit nothing leads to
    x = torch.randn(rows, 11, generator=generator, dtype=dtype)
    bias = torch.randn(7, generator=generator, dtype=dtype)
    crow, columns, values = parts(weight)
    for own in (None, bias):
        torch.testing.assert_close(thin_product(x, crow, columns, values, 11, own),
                                   nn.functional.linear(x, weight, own))


def parts(weight):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the layout a beta, once
        found = weight.to_sparse_csr()
    return found.crow_indices(), found.col_indices(), found.values()


def test_thin_products_keep_leading_dimensions_and_gradients():
    weight = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, -1.0]], dtype=torch.float64)
    crow, columns = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2])
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    found = thin_product(x, crow, columns, torch.tensor([2.0, 1.0, -1.0]).double(), 3)
    expected = nn.functional.linear(x, weight)
    torch.testing.assert_close(found, expected)
    pull = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, pull)[0]
                                 for out in (found, expected)))


NETS = {
    "dense": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)),
    "alone": lambda: nn.Linear(6, 3),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(),
                                  nn.Flatten(), nn.Linear(16, 3, bias=False)),
}
CASES = [(posterior, "weights") for posterior in
         ("mean-field", "mvn", "low-rank", "all", "dropout", "horseshoe")] + [
             ("mean-field", "units"), ("low-rank", "units")]


def network(kind, posterior, structure):
    torch.manual_seed(1)
    made = sparse.convert(NETS[kind](), posterior, structure=structure, inclusion=0.5, sd=0.2)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in sparse.sparse_layers(made).values():
            noise = torch.randn(layer.logits.mean.shape, generator=generator)
            layer.logits.mean += noise if torch.isfinite(layer.logits.mean).all() else 0.0
    return sparse.SparseNetwork(made.eval(), subbayes.Categorical(3))


@pytest.mark.parametrize("kind", list(NETS))
@pytest.mark.parametrize(("posterior", "structure"), CASES)
def test_predictions_by_thin_products_are_those_of_the_weight_vectors(
        kind, posterior, structure, monkeypatch):
    result = network(kind, posterior, structure)
    x = torch.randn(40, 6)
    for which in ("sample", "median"):
        for weights in ("sample", "mean"):
            asked = dict(structure=which, weights=weights, draws=4, seed=3)
            dense = result.predict(x, **asked).outputs
            with monkeypatch.context() as patch:
                patch.setattr(results, "_LARGE", 0)
                patch.setattr(results, "_THIN", 1.0)
                thin = result.predict(x, **asked).outputs
                by_rows = result.predict(x, memory_limit=1, **asked).outputs
                loader = DataLoader(TensorDataset(x), batch_size=17)
                loaded = result.predict(loader, **asked).outputs
            for found in (thin, by_rows, loaded):
                torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5)


def test_thin_products_are_for_large_networks_that_are_sparse(monkeypatch):
    result = network("dense", "mean-field", "weights")
    assert not result._is_thin("median")
    monkeypatch.setattr(results, "_LARGE", 81)
    monkeypatch.setattr(results, "_THIN", result.density())
    assert result._is_thin("median")
    assert not result._is_thin("all")
    monkeypatch.setattr(results, "_THIN", result.density() - 0.01)
    assert not result._is_thin("median")


@pytest.mark.parametrize(("posterior", "structure"), CASES)
def test_the_first_draws_are_the_same_however_many_follow(posterior, structure):
    result = network("dense", posterior, structure)
    for which in ("sample", "median"):
        few, many = (result.weights(which, "sample", draws=n, seed=5) for n in (2, 6))
        assert torch.equal(few, many[:2])
        points = posterior == "dropout" and which == "median"
        assert len(np.unique(many.numpy(), axis=0)) == (1 if points else 6)
