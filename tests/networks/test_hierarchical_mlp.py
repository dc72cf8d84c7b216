"""The network with a hierarchical prior and its features, against loops in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from subbayes import InputError, Network
from subbayes.networks.hierarchical.mlp import HierarchicalMLP, Shape
from subbayes.networks.hierarchical.rank_features import RankFeatures
from subbayes.networks.saving import network_facts, network_from, network_tensors

SHAPES = [Shape(-1.5, 1.5, varies=True), Shape(2.0, 0.5, least=math.log(1.5))]


def by_hand(net: HierarchicalMLP, x: np.ndarray) -> np.ndarray:
    """The outputs of one row, by the equations of the module."""
    p = {name: value.detach().double().numpy() for name, value in net.named_parameters()}
    relevance = np.exp(p["relevance"])
    h = x
    for layer in range(len(net.weights)):
        weight = p[f"weights.{layer}"] * (relevance if layer == 0 else 1.0)
        gain = math.exp(p["weight_scales"][layer]) * 1.5 / math.sqrt(len(h))
        h = np.tanh(gain * weight @ h + math.exp(p["bias_scales"][layer]) * p[f"biases.{layer}"])
    tau_v, tau_s, tau_h = np.exp(p["output_scales"] * np.array([1.0, 1.0, 1.5]))
    mean = tau_v / math.sqrt(len(h)) * p["output"][:-1] @ h
    mean = mean + tau_s * math.exp(-1) / math.sqrt(len(x)) * (p["skip"][:-1] * relevance) @ x
    g = p["output"][-1] @ h / math.sqrt(len(h)) + (p["skip"][-1] * relevance) @ x / math.sqrt(
        len(x)
    )
    change = 2.5 * math.tanh(tau_h * math.exp(-2.5) * g / 2.5)
    log_sigma = -1.5 + 1.5 * p["shape_constant"][0] + change
    excess = 1.5 + math.exp(2.0 + 0.5 * p["shape_constant"][1])
    return np.array([*(mean + p["constant"] + net.offset), log_sigma, math.log(excess)])


def test_outputs_are_those_of_the_equations():
    net = HierarchicalMLP(3, (5, 4), 4, SHAPES, offset=0.7, seed=0).double()
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = np.stack([by_hand(net, row) for row in x.numpy()])
    np.testing.assert_allclose(net(x).detach(), expected, rtol=1e-12)


def test_further_inputs_are_added_to_the_mean():
    net = HierarchicalMLP(3, (5,), 3, SHAPES, seed=0)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    expected = net(x[:, :3])
    expected[:, :1] += x[:, 3:]
    torch.testing.assert_close(net(x), expected)


def test_varying_noise_is_bounded_and_a_constant_one_is_not_changed():
    net = HierarchicalMLP(2, (4,), 3, SHAPES, seed=0)
    with torch.no_grad():
        net.output_scales[2] = 20.0  # the largest changes
    found = net(torch.randn(200, 2)).detach()
    centre = -1.5 + 1.5 * net.shape_constant[0].item()
    assert float((found[:, 1] - centre).abs().max()) == pytest.approx(2.5, abs=1e-3)
    assert len(found[:, 2].unique()) == 1


def test_ranks_are_mean_ranks_and_new_values_are_between_them():
    x = torch.tensor([[3.0], [1.0], [2.0], [2.0], [10.0]])
    features = RankFeatures.fit(x, harmonics=0)
    ranks = (rankdata(x[:, 0]) - 0.5) / 5
    found = features(x)[:, 1] * 2  # ranks are halved
    np.testing.assert_allclose(found, (ranks - ranks.mean()) / ranks.std(), rtol=1e-5)
    between, below, above = features(torch.tensor([[6.5], [-9.0], [99.0]]))[:, 1] * 2
    np.testing.assert_allclose(between, (0.8 - ranks.mean()) / ranks.std(), rtol=1e-5)
    np.testing.assert_allclose(below, found[1], rtol=1e-5)
    np.testing.assert_allclose(above, found[4], rtol=1e-5)


def test_harmonics_are_standardised_and_shrink_with_their_order():
    x = torch.from_numpy(np.random.default_rng(0).gamma(1.0, size=(4000, 2))).float()
    x[:, 1] = (x[:, 1] > 1).float()  # two values: no ranks
    found = RankFeatures.fit(x, harmonics=3)(x).double()
    assert found.shape == (4000, 2 + 1 + 6)
    np.testing.assert_allclose(found.mean(0), 0.0, atol=1e-4)
    expected = [1, 1, 1 / 2, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 6, 1 / 6]
    np.testing.assert_allclose(found.std(0, correction=0), expected, rtol=1e-4)


def test_few_values_have_few_harmonics():
    x = torch.arange(60.0)[:, None] % 4
    assert RankFeatures.fit(x, harmonics=4)(x).shape[1] == 2 + 2


def test_a_file_makes_no_larger_tables_of_ranks_than_it_holds():
    x = torch.randn(30, 3)
    features = RankFeatures.fit(x, harmonics=0)
    network = Network(HierarchicalMLP(features(x).shape[1], (4,), 2, features=features, seed=0))
    facts = network_facts(network)
    facts.module.features.columns, facts.module.features.ranked = 10**6, [0] * 10**6
    with pytest.raises(InputError, match="numbers, as are stored"):
        network_from(network_tensors(network), facts, network.weights)


def test_saved_network_has_equal_outputs():
    x = torch.randn(30, 3)
    features = RankFeatures.fit(x, harmonics=2)
    net = HierarchicalMLP(features(x).shape[1], (4,), 3, SHAPES, features=features, seed=0)
    network = Network(net)
    loaded = network_from(network_tensors(network), network_facts(network), network.weights)
    assert torch.equal(loaded(network.weights, x), network(network.weights, x))
