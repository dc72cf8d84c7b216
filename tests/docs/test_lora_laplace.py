"""The example of low-rank adapters runs, and its covariances are those of the dense Jacobian."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from jacobians import dense, dense_rows

import subbayes

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora_laplace.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("lora_laplace", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_runs(example, capsys):
    with torch.random.fork_rng(devices=[]):
        found = example.main(n=60, epochs=10, rank=5)
    assert len(found) == 3
    for predictive in found.values():
        np.testing.assert_allclose(predictive.probabilities.sum(1), 1, rtol=1e-6)
    point, *posteriors = (predictive.probabilities.max(1).mean() for predictive in found.values())
    assert all(sure < point for sure in posteriors)
    printed = capsys.readouterr().out
    assert "Network(Transformer, 1024 weights in 8 parameters)" in printed
    assert "optimal subspace, rank 5 " in printed


def test_the_adapters_alone_are_random(example):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = example.with_adapters(example.Transformer(width=8), rank=2).double()
        for block in model.blocks:
            torch.nn.init.normal_(block.query.lora_b.weight)
    network = subbayes.Network(model, "*.lora_*", output=lambda out: out.logits)
    assert {name.split(".")[-2] for name in network.names} == {"lora_a", "lora_b"}
    assert network.names == subbayes.Network(model, output=lambda out: out.logits).names
    (x, y), (new, _) = example.sentences(9, 0), example.sentences(4, 1)
    V, J = (
        dense_rows(network, subbayes.likelihoods.Categorical(), x, y),
        dense(network, new).flatten(0, 1),
    )
    sigma = J @ torch.linalg.solve(V.T @ V + torch.eye(network.size).double(), J.T)
    posterior = subbayes.inference.linearised_laplace(
        network, subbayes.likelihoods.Categorical(), (x, y)
    )
    torch.testing.assert_close(posterior.covariance(new), sigma, rtol=1e-8, atol=1e-12)
