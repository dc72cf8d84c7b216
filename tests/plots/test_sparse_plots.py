"""Figures of sparse networks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import nn

from subbayes import plots, sparse
from subbayes.likelihoods import Gaussian
from subbayes.reports import sparse as sparse_report


def network():
    made = sparse.convert(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))).eval()
    with torch.no_grad():
        for layer in sparse.sparse_layers(made).values():
            p = torch.full(layer.logits.mean.shape, 0.02)
            p[:, 0] = 0.98
            layer.logits.mean.copy_(torch.logit(p))
    return sparse.SparseNetwork(made, Gaussian(1.0))


def heights(ax):
    return np.array([patch.get_height() for patch in ax.patches])


def test_inclusion_histograms_count_all_weights():
    axes = plots.inclusion(network(), bins=10)
    for ax, share in zip(axes, (0.2, 0.25), strict=True):
        np.testing.assert_allclose(heights(ax), [1 - share, *[0] * 8, share], atol=1e-12)
    words = [text.get_text() for ax in axes for text in ax.texts]
    assert words == ["0: 20 weights, 20 % above one half", "2: 4 weights, 25 % above one half"]


def test_densities_near_one_are_percentages():
    dense = sparse.SparseNetwork(sparse.convert(nn.Linear(300, 1), inclusion=0.9), Gaussian(1.0))
    with torch.no_grad():
        dense.layers[""].logits.mean[0, 0] = -5.0  # 299 of 300 are above one half
    (ax,) = plots.inclusion(dense)
    assert ax.texts[0].get_text() == "the layer: 300 weights, 99.7 % above one half"
    assert sparse_report.facts(dense)["density"].startswith("99.7 % of these weights")
    table, _ = sparse_report.inclusion(dense)
    assert table.rows[0][3] == "99.7 %"


def test_inclusion_of_many_layers_draws_some_from_the_first_to_the_last():
    layers = [nn.Linear(2, 2) for _ in range(40)]
    deep = sparse.SparseNetwork(sparse.convert(nn.Sequential(*layers)), Gaussian(1.0))
    axes = plots.inclusion(deep)
    drawn = [ax.texts[0].get_text().partition(":")[0] for ax in axes]
    assert (len(drawn), len(set(drawn)), drawn[0], drawn[-1]) == (24, 24, "0", "39")


def test_the_history_is_drawn_with_and_without_accuracy():
    history = {"elbo": [-9.0, -5.0, -4.0], "density": [0.9, 0.5, 0.1], "accuracy": [0.3, 0.6, 0.7]}
    above, below = plots.sparse_history(history)
    assert above.lines[0].get_ydata().tolist() == history["elbo"]
    assert [line.get_ydata().tolist() for line in below.lines] == [
        history["density"],
        history["accuracy"],
    ]
    assert len(plots.sparse_history(history | {"accuracy": []})[1].lines) == 1


def test_feature_inclusion_sorts_inputs():
    p = pd.Series({"a": 0.1, "b": 0.9, "c": 0.6, "d": 0.2})
    ax = plots.feature_inclusion(p, most=3)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["b", "c", "d"]
    assert ax.collections[-1].get_offsets()[:, 0].tolist() == [0.9, 0.6, 0.2]
    assert [text.get_text() for text in ax.texts] == ["3 of 4 inputs"]
    for unnamed in (np.array([0.3, 0.7]), [0.3, 0.7]):
        ax = plots.feature_inclusion(unnamed)
        assert [text.get_text() for text in ax.get_yticklabels()] == ["1", "0"]
