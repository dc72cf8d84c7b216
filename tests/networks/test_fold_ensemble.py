"""The mean of plain networks, each trained without one fold of the rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from subbayes.networks.hierarchical.fold_ensemble import FoldEnsemble
from subbayes.networks.hierarchical.rank_features import RankFeatures

RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.normal(size=(60, 3))).float()
X[:, 2] = (X[:, 2] > 0).float()  # two values: no embedding
Y = torch.sin(2 * X[:, 0]) + X[:, 2]


@pytest.fixture(scope="module")
def fitted() -> tuple[FoldEnsemble, torch.Tensor]:
    return FoldEnsemble.fit(X, Y, seed=3)


def by_hand(ensemble: FoldEnsemble, k: int, x: np.ndarray) -> float:
    """The output of network k for one row, in loops."""
    p = {name: buffer.double().numpy()[k] for name, buffer in ensemble.named_buffers()}
    z = [value / math.sqrt(1 + (value / 3) ** 2) for value in x]
    h = list(z)
    for row, column in enumerate(ensemble.numbers):
        angles = 2 * np.pi * (p["frequencies"][0, row] * z[column] + p["phases"][0, row])
        h += list(np.cos(angles) @ p["embedding"][row])
    h = np.array(h) * p["input_scale"][0]
    for layer in range(4):
        if layer:
            h = h * np.tanh(np.log1p(np.exp(h)))  # Mish
        h = h @ p[f"weight_{layer}"] / math.sqrt(len(h)) + p[f"bias_{layer}"][0]
    return float(h[0])


def test_outputs_are_means_of_the_equations(fitted):
    ensemble, _ = fitted
    assert ensemble.numbers == [0, 1]
    expected = [np.mean([by_hand(ensemble, k, row) for k in range(5)]) for row in X[:4].numpy()]
    np.testing.assert_allclose(ensemble(X[:4])[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_outputs_of_training_rows_are_of_networks_that_have_not_seen_them(fitted):
    _, before = fitted
    y = Y.clone()
    y[7] += 5.0
    _, after = FoldEnsemble.fit(X, y, seed=3)
    assert after[7] == before[7]
    assert (after != before).sum() > 40  # four of five networks have seen it


def test_rows_of_weight_0_have_no_effect_and_a_seed_determines_the_networks(fitted):
    weights, y = np.ones(60), Y.clone()
    weights[:5] = 0.0
    y[:5] = 99.0
    state = torch.get_rng_state()
    first, _ = FoldEnsemble.fit(X, Y, weights, seed=1)
    again, _ = FoldEnsemble.fit(X, y, weights, seed=1)
    assert torch.equal(first(X), again(X))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first(X), fitted[0](X))


def test_a_smooth_function_is_learned_out_of_fold():
    x = torch.from_numpy(np.random.default_rng(5).normal(size=(400, 2))).float()
    y = torch.sin(2 * x[:, 0]) * x[:, 1]
    ensemble, out_of_fold = FoldEnsemble.fit(x, y, seed=0)
    assert (out_of_fold[:, 0] - y).square().mean() < 0.1 * y.var()
    inside = x.abs().amax(1) < 2
    assert (ensemble(x)[inside, 0] - y[inside]).square().mean() < 0.02


def test_features_have_the_outputs_unless_these_are_given(fitted):
    ensemble, outputs = fitted
    given = torch.cat([X, outputs], 1)
    features = RankFeatures.fit(given, 1, ensemble)
    found = features(given)
    assert found.shape == (60, len(features.kept) + 1)
    torch.testing.assert_close(found[:, -1:], outputs)
    torch.testing.assert_close(features(X), features(torch.cat([X, ensemble(X)], 1)))
