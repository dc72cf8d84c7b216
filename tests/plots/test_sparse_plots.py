"""Figures of sparse networks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from cases import nested
from torch import nn

from subbayes import SparseRegressor, plots, sparse
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
    (only,) = plots.inclusion(deep, layers=["7"])
    assert only.texts[0].get_text().startswith("7: 4 weights")


def test_the_history_is_drawn_with_and_without_accuracy():
    history = {"elbo": [-9.0, -5.0, -4.0], "density": [0.9, 0.5, 0.1], "accuracy": [0.3, 0.6, 0.7]}
    above, below = plots.sparse_history(history)
    assert above.lines[0].get_ydata().tolist() == history["elbo"]
    assert [line.get_ydata().tolist() for line in below.lines] == [
        history["density"],
        history["accuracy"],
    ]
    assert len(plots.sparse_history(history | {"accuracy": []})[1].lines) == 1


def test_trade_off_sorts_by_density():
    ax = plots.trade_off({"a": [0.5, 0.1, 0.2], "b": 1.0}, {"a": [0.9, 0.7, 0.8], "b": 0.95})
    assert [line.get_xydata().tolist() for line in ax.lines] == [
        [[0.1, 0.7], [0.2, 0.8], [0.5, 0.9]],
        [[1.0, 0.95]],
    ]


def test_trade_off_with_density_zero():
    ax = plots.trade_off({"a": [0.0, 0.01, 0.1]}, {"a": [0.3, 0.8, 0.9]})
    assert ax.get_xscale() == "symlog"
    assert ax.get_xlim()[0] == 0
    assert plots.trade_off({"a": [0.0]}, {"a": [0.3]}).get_xscale() == "symlog"


@pytest.mark.parametrize(
    ("densities", "expected"),
    [
        ([0.1, 0.5, 0.052], ["5%", "10%", "20%", "50%"]),
        ([0.41, 0.44], ["41%", "42%", "43%", "44%"]),
        ([0.05], ["1%", "2%", "5%", "10%"]),
        ([0.0], ["0%", "2%", "4%"]),
        ([0.01, 1.0], ["1%", "3%", "10%", "30%", "100%"]),
        ([0.0, 0.05, 0.5], ["0%", "1%", "2%", "5%", "10%", "20%", "50%"]),
        ([1e-4, 1e-3, 1.0], ["0.01%", "0.1%", "1%", "10%", "100%"]),
    ],
)
def test_density_labels_do_not_overlap(densities, expected):
    ax = plots.trade_off({"a": densities}, {"a": [0.5] * len(densities)})
    ax.figure.draw_without_rendering()
    low, high = ax.get_xlim()
    shown = [tick for tick in ax.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert [tick.label1.get_text() for tick in shown] == expected
    assert not any(text.get_text() for text in ax.get_xticklabels(minor=True))
    boxes = [tick.label1.get_window_extent() for tick in shown]
    assert all(one.x1 < other.x0 for one, other in zip(boxes, boxes[1:], strict=False))


def test_networks_and_fitted_estimators_are_accepted():
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 2)), columns=["age", "dose"])
    model = SparseRegressor(**nested(hidden=(), epochs=3, random_state=0, sparse=True)).fit(
        X, X["dose"]
    )
    for given in (model, model.model_):
        assert len(plots.inclusion(given)) == 1
        drawn = plots.sparse_history(given)[0].lines[0].get_ydata()
        assert drawn.tolist() == model.model_.history["elbo"]
    for given, names in ((model, {"age", "dose"}), (model.model_, {"input 0", "input 1"})):
        ax = plots.feature_inclusion(given)
        assert {text.get_text() for text in ax.get_yticklabels()} == names
        assert sorted(ax.collections[-1].get_offsets()[:, 0]) == sorted(model.feature_inclusion_)


def test_feature_inclusion_sorts_inputs():
    p = pd.Series({"a": 0.1, "b": 0.9, "c": 0.6, "d": 0.2})
    ax = plots.feature_inclusion(p, most=3)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["b", "c", "d"]
    assert ax.collections[-1].get_offsets()[:, 0].tolist() == [0.9, 0.6, 0.2]
    assert [text.get_text() for text in ax.texts] == ["3 of 4 inputs"]
    for unnamed in (np.array([0.3, 0.7]), [0.3, 0.7]):
        ax = plots.feature_inclusion(unnamed)
        assert [text.get_text() for text in ax.get_yticklabels()] == ["input 1", "input 0"]
