"""Inclusion of inputs against enumeration of all structures and against Jacobians of draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from experiments.sparse_baselines import convert
from subbayes import sparse
from subbayes.sparse.dependency_graph import edges
from subbayes.sparse.path_inclusion import path_probability


def network(module, posterior="mean-field", inclusion=0.4, seed=0, **options):
    """A sparse network whose probabilities differ from weight to weight."""
    made = convert(module, posterior, inclusion=inclusion, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("logits.mean"):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return sparse.SparseNetwork(made, subbayes.likelihoods.Gaussian(1.0))


def test_path_probabilities_agree_with_enumeration():
    found = network(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    first, second = (layer.probability().double().detach() for layer in found.layers.values())
    alpha = torch.cat([first.reshape(-1), second.reshape(-1)]).numpy()
    exact = np.zeros(2)
    for gamma in itertools.product((0, 1), repeat=9):
        inside = np.array(gamma)
        p = np.prod(np.where(inside == 1, alpha, 1 - alpha))
        exact += p * (inside[6:] @ inside[:6].reshape(3, 2) > 0)
    draws = 4000
    got = found.feature_inclusion(draws=draws)
    np.testing.assert_allclose(got, exact, atol=5 * 0.5 / math.sqrt(draws))
    assert (got < 1 - np.prod(1 - first.numpy(), axis=0)).all()  # not all included weights are read
    hidden = found.feature_inclusion(layer="2")
    np.testing.assert_allclose(hidden, second.numpy()[0], rtol=1e-6)  # exact without further layers


@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["mean-field", "mvn", "low-rank"])
def test_path_probabilities_agree_with_jacobians_of_draws(posterior):
    module = nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)
    ).double()
    found = network(module, posterior, inclusion=0.2)
    draws = 500
    weights = found.weights("sample", "sample", draws, seed=3)
    x = torch.randn(5, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    used = torch.zeros(5)
    for row in weights:
        drawn = found.network.module_with(row)
        slope = torch.autograd.functional.jacobian(drawn, x)
        used += (slope != 0).any(0)
    share = used.numpy() / draws
    assert 0.05 < share.min() < share.max() < 0.98
    np.testing.assert_allclose(
        found.feature_inclusion(draws=2000), share, atol=5 * 0.5 * math.sqrt(1 / draws + 1 / 2000)
    )


def test_paths_of_channels_pass_pools_and_flattening():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * 4, 2)
    ).double()
    found = network(module, inclusion=0.02)
    draws, x = 500, torch.randn(1, 3, 4, 4, dtype=torch.double)
    used = torch.zeros(3)
    for row in found.weights("sample", "mean", draws, seed=3):
        slope = torch.autograd.functional.jacobian(found.network.module_with(row), x)
        used += (slope != 0).reshape(2, 3, 16).any(2).any(0)
    np.testing.assert_allclose(
        found.feature_inclusion(draws=2000),
        used.numpy() / draws,
        atol=5 * 0.5 * math.sqrt(1 / draws + 1 / 2000),
    )


def test_paths_pass_layers_that_are_not_converted():
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    found = network(module, keep=("2",))
    out = found.layers["4"].probability().double().detach().numpy()
    first = found.layers["0"].probability().double().detach().numpy()
    exact = (1 - np.prod(1 - out)) * (1 - np.prod(1 - first, axis=0))
    np.testing.assert_allclose(found.feature_inclusion(draws=4000), exact, atol=0.04)


def test_units_with_unknown_readers_count_as_read():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            h = torch.relu(self.a(x))
            return self.c(h + torch.relu(self.b(h)))

    found = network(Skip())
    assert edges(found.network.module_with(), ("a",)) == []
    first = found.layers["a"].probability().double().detach().numpy()
    np.testing.assert_allclose(found.feature_inclusion(), 1 - np.prod(1 - first, axis=0), rtol=1e-6)


def test_paths_of_random_inputs_and_known_indicators():
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    found = network(module, "dropout")
    alpha = [layer.probability().double().detach().numpy() for layer in found.layers.values()]
    exact = alpha[0][0] * (1 - np.prod(1 - alpha[1][0]))
    np.testing.assert_allclose(found.feature_inclusion(draws=4000), exact, atol=0.04)
    assert network(module, "all").feature_inclusion().tolist() == [1.0, 1.0]


def test_path_probabilities_depend_on_seed_and_draws():
    found = network(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    same = [found.feature_inclusion(draws=20, seed=s).tolist() for s in (0, 0, 1)]
    assert same[0] == same[1] != same[2]
    with pytest.raises(subbayes.InputError, match="draws"):
        found.feature_inclusion(draws=0)
    with pytest.raises(subbayes.InputError, match="layer"):
        found.feature_inclusion(layer="7")
    with pytest.raises(subbayes.InputError, match="one of whole units"):
        network(nn.Linear(2, 3), structure="units").feature_inclusion()


def test_masks_of_large_layers_are_drawn_in_parts(monkeypatch):
    found = network(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    whole = path_probability(found.network.module_with(), found.layers, "0", 50)
    monkeypatch.setattr("subbayes.sparse.path_inclusion._MAX_WEIGHTS", 1)
    parts = path_probability(found.network.module_with(), found.layers, "0", 50)
    torch.testing.assert_close(whole, parts)


@pytest.mark.few(1)
@pytest.mark.parametrize("posterior", ["mean-field", "mvn", "dropout"])
def test_channels_are_read_by_the_units_of_their_group(posterior):
    module = nn.Sequential(
        nn.Conv1d(4, 6, 3, groups=2, padding=1), nn.Flatten(), nn.Linear(6 * 3, 1)
    ).double()
    found = network(module, posterior, inclusion=0.1)
    draws, x = 500, torch.randn(1, 4, 3, dtype=torch.double)
    kept = found.network.module_with()[2].weight.detach().abs() + 1.0  # all units are read
    used = torch.zeros(4)
    for row in found.weights("sample", "mean", draws, seed=3):
        drawn = found.network.module_with(row)
        drawn[2].weight.data.copy_(kept)
        slope = torch.autograd.functional.jacobian(drawn, x)
        used += (slope != 0).reshape(4, 3).any(1)
    got = found.feature_inclusion(draws=2000)
    assert got.shape == (4,)
    np.testing.assert_allclose(
        got, used.numpy() / draws, atol=5 * 0.5 * math.sqrt(1 / draws + 1 / 2000)
    )
    if posterior == "mean-field":  # exact
        alpha = found.layers["0"].probability().double().detach().numpy()
        out = [1 - np.prod(1 - alpha[3 * g : 3 * g + 3, c]) for g in (0, 1) for c in (0, 1)]
        np.testing.assert_allclose(got, out, rtol=1e-6)


def test_paths_pass_norms_and_flattening_of_rows():
    plain = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    more = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(3, 1))
    first, second = (network(module).feature_inclusion() for module in (plain, more))
    np.testing.assert_allclose(first, second, atol=5 * 0.5 * math.sqrt(2 / 1000))


def test_readers_along_another_axis_are_unknown():
    for module in (
        nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(15, 2)),
        nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.Linear(6, 2)),
    ):
        found = network(module)
        alpha = found.layers["0"].probability().double().detach()
        exact = (
            1 - (1 - alpha).flatten(2).prod(2).prod(0)
            if alpha.ndim > 2
            else (1 - (1 - alpha).prod(0))
        )
        np.testing.assert_allclose(found.feature_inclusion(), exact, rtol=1e-6)
