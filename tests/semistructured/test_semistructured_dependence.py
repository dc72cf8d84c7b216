"""Partial dependence of networks on their columns against its definition; figures."""

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

from subbayes import InputError, Training
from subbayes.inference.configuration import Sampling
from subbayes.plots.effects import effect, forest
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace

QUICK = {
    "inference": "elliptical-slice",
    "sampling": Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager"),
    "training": Training(epochs=3, batch_size=None, weight_decay=1e-4, clip_norm=None),
    "subspace": SemiStructuredSubspace(2),
}
pytestmark = pytest.mark.filterwarnings("ignore:effects have not mixed")


def table(n=30):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"u": rng.uniform(-2, 2, n), "x": rng.normal(size=n), "sex": rng.choice(["f", "m"], n)}
    )
    return frame.assign(y=frame.x + np.sin(frame.u) + 0.2 * rng.normal(size=n))


def net(inputs=1, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("orthogonal", [True, False])
def test_partial_dependence_is_the_mean_contribution_with_the_column_set(orthogonal):
    """The definition, row by row, through `contributions`."""
    frame = table()
    model = SemiStructuredRegression(
        "y ~ x + net(u, x)", networks={"net": net(2)}, orthogonal=orthogonal
    ).fit(frame, **QUICK)
    values = [-1.0, 0.5]
    level = model.contributions(frame)["deep"]["mean"].mean()
    for column in ("u", "x"):
        naive = [
            model.contributions(frame.assign(**{column: v}))["deep"]["mean"].mean() - level
            for v in values
        ]
        found = model.effect("net", values, variable=column)
        assert found.draws.shape == (12, 2)
        assert np.ptp(naive) > 1e-3
        np.testing.assert_allclose(found.draws.mean(0), naive, atol=2e-5)


def test_networks_of_one_column_add_up_to_the_contribution_of_all():
    frame = table()
    model = SemiStructuredRegression(
        "y ~ a(u) + b(sex)", networks={"a": net(), "b": net(2, 1)}
    ).fit(frame, **QUICK)
    parts = [model.effect("a", frame.u).draws, model.effect("b", frame.sex).draws]
    whole = model.contributions(frame)["deep"]["mean"]
    np.testing.assert_allclose(sum(parts).mean(0), whole - whole.mean(), atol=2e-5)
    shown = model.effect("b")
    assert shown.discrete
    assert shown.x.tolist() == ["f", "m"]
    assert [p.variable for p in model.partials()] == ["u", "sex"]
    axes = model.plot(columns=2).axes
    assert [ax.get_ylabel() for ax in axes] == ["network a", "network b"]
    np.testing.assert_allclose(axes[0].get_lines()[1].get_ydata(), model.effect("a").draws.mean(0))


def test_partial_dependence_of_a_frozen_network():
    frame = table()
    module = nn.Linear(1, 1).requires_grad_(False)
    model = SemiStructuredRegression("y ~ net(u)", networks={"net": module}).fit(frame, **QUICK)
    slope = float(module.weight) * frame.y.std(ddof=0) / frame.u.std(ddof=0)
    np.testing.assert_allclose(
        model.effect("net", [0.0, 2.0]).draws,
        np.tile(slope * (np.array([0.0, 2.0]) - frame.u.mean()), (12, 1)),
        atol=1e-5,
    )


def test_partial_dependence_errors_name_the_remedy():
    frame = table()
    model = SemiStructuredRegression(
        "y ~ image(image) + two(u, x)", networks={"image": net(3), "two": net(2)}
    ).fit(frame, {"image": torch.zeros(30, 3)}, **QUICK)
    with pytest.raises(InputError, match=r"'image', which reads a tensor\. contributions\(frame"):
        model.effect("image")
    with pytest.raises(InputError, match="a column that the network 'two' reads: u, x, got None"):
        model.effect("two")
    with pytest.raises(InputError, match="None for a term of the formula"):
        SemiStructuredRegression.effect(model, "Intercept", variable="u")


# --- labels -------------------------------------------------------------------------------------


def overlapping(labels, renderer):
    boxes = [label.get_window_extent(renderer) for label in labels if label.get_text()]
    return sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


@pytest.mark.parametrize(
    "levels",
    [
        ["f", "m"],
        [f"school of {i}" for i in range(9)],
        [f"a very long name, number {i}" for i in range(120)],
    ],
)
def test_names_of_levels_do_not_overlap(levels):
    from subbayes.regression.design.design import Term
    from subbayes.regression.questions.partial_effects import Partial

    draws = np.random.default_rng(0).normal(size=(20, len(levels)))
    partial = Partial(
        Term("re(g)", "mu", "random", (), ("g",)), "g", np.array(levels), draws, np.zeros(0), 0.95
    )
    assert repr(partial) == f"Partial('re(g)' along 'g': {len(levels)} values, 20 draws)"
    ax = effect(partial)
    canvas = FigureCanvasAgg(ax.figure)
    canvas.draw()
    assert overlapping(ax.get_xticklabels(), canvas.get_renderer()) == 0


def test_the_forest_plot_shows_the_intercept_only_without_effects():
    from subbayes.regression.report import _forest_caption, _forest_effects

    draws = np.zeros((2, 5))
    effects = {"Intercept": draws, "x": draws, "sigma.Intercept": draws}
    assert list(_forest_effects(effects)) == ["x"]
    assert "Intercept, sigma.Intercept left out" in _forest_caption(
        effects, _forest_effects(effects)
    )
    assert list(_forest_effects({"Intercept": draws})) == ["Intercept"]
    assert len(forest(_forest_effects(effects)).get_yticklabels()) == 1


@pytest.mark.slow
def test_numbers_that_are_groups_or_factors_of_the_formula_vary_over_their_levels(tmp_path):
    """Effects of the formula have no value between them."""
    frame = table().assign(g=lambda t: np.arange(len(t)) % 4, k=lambda t: np.arange(len(t)) % 3)
    deep = {"net": net(2), "other": net()}
    model = SemiStructuredRegression(
        "y ~ C(k) + (1 | g) + net(g, u) + other(k)", networks=deep
    ).fit(frame, **QUICK)
    for name, column, levels in (("net", "g", [0, 1, 2, 3]), ("other", "k", [0, 1, 2])):
        found = model.effect(name, variable=column)
        assert found.discrete
        assert found.x.tolist() == levels
    assert len(model.effect("net", variable="u").x) == 50
    model.report(tmp_path / "report.html")
