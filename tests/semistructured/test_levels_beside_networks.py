"""The level of a predictor without an intercept stays in cell means or thresholds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from in_sample_effects import in_sample

from subbayes import MLP, Sampling, SemiStructuredRegression, Training
from subbayes.semistructured import SemiStructuredSubspace
from subbayes.semistructured.contributions import Contributions
from subbayes.semistructured.orthogonal_columns import orthogonal_networks
from tests.fits import with_network

QUICK = {
    "training": Training(epochs=20, batch_size=None, validation=None, patience=None),
    "sampling": Sampling(draws=15, chains=2, warmup=5, progress=False, seed=4, mode="eager"),
    "subspace": SemiStructuredSubspace(2),
}


def table(n=80):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(2, 1, n), "u": rng.normal(size=n)})
    frame["g"], frame["h"] = rng.choice(["a", "b", "c"], n), rng.choice([*"pqrs"], n)
    frame["k"], frame["one"] = rng.integers(1, 4, n), 1
    frame["y"] = 5 + (frame.g == "b") + 2 * frame.u**2 + 0.3 * rng.normal(size=n)
    frame["level"] = pd.cut(frame.y, [-99, 6, 8, 99], labels=False)
    return frame


def prepared(formula, reads=("u",), family="normal", parameter=None, **options):
    inputs = sum(4 if name == "h" else 1 for name in reads)
    networks = {"n": MLP(inputs, (4,), 1, seed=0)}
    formula = with_network(formula, f"n({', '.join(reads)})", parameter)
    model = SemiStructuredRegression(formula, networks=networks, family=family, **options)
    return model.specification.prepare(table(), {})


def parts_of(model):
    """What the network adds at the training rows, and what moves to the coefficients."""
    own = orthogonal_networks(model)
    contributions = Contributions(model.deep, model.inputs, own, model.structured.n_corrected)
    module = model.deep.networks["network0"]
    weights = torch.cat([p.detach().reshape(1, -1) for p in module.parameters()], 1)
    raw = Contributions(model.deep, model.inputs, (), model.structured.n_corrected)
    place = model.deep.places["n"]
    f = raw(weights)[0, :, place]
    return own, f, contributions(weights)[0, :, place], contributions.projections(weights)[0]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("y ~ 0 + C(g)", ["C(g)[a]", "C(g)[b]", "C(g)[c]"]),
        ("y ~ 0 + C(g) + x", ["C(g)[a]", "C(g)[b]", "C(g)[c]"]),
        ("y ~ 0 + x + one", ["one"]),
        ("y ~ 0 + C(g) + (1 | h)", ["C(g)[a]", "C(g)[b]", "C(g)[c]"]),
        ("y ~ 0 + bs(x, df=5, include_intercept=True)", 5),
        ("y ~ 0 + C(g):C(h)", 12),
    ],
)
@pytest.mark.parametrize("weights", [None, "k"])
def test_networks_are_centred_where_columns_add_up_to_a_constant(formula, expected, weights):
    model = prepared(formula, weights=weights)
    (own,), f, rest, gamma = parts_of(model)
    assert own.centred
    names = [model.design.names[i] for i in own.columns.columns]
    assert len(names) == expected if isinstance(expected, int) else names == expected
    counts = np.ones(80) if weights is None else table().k
    mean = np.average(f, weights=counts)
    assert abs(mean) > 0.05
    np.testing.assert_allclose(rest, f - mean, atol=1e-5)
    np.testing.assert_allclose(model.inputs["design"].double() @ gamma, mean, atol=1e-5)
    np.testing.assert_allclose(rest, f - model.inputs["design"].double() @ gamma, atol=1e-9)


@pytest.mark.parametrize("formula", ["y ~ 0 + x", "y ~ 0 + (1 | g)", "y ~ 0 + s(x)"])
def test_networks_are_not_centred_without_a_level(formula):
    model = prepared(formula)
    assert orthogonal_networks(model) == ()


def test_cell_means_of_sigma_hold_its_level():
    formula = {"mu": "y ~ x", "sigma": "~ 0 + C(g)"}
    model = prepared(formula, parameter="sigma")
    (own,), f, rest, gamma = parts_of(model)
    assert [model.design.names[i] for i in own.columns.columns][0] == "sigma.C(g)[a]"
    np.testing.assert_allclose(rest, f - f.mean(), atol=1e-6)
    np.testing.assert_allclose(gamma[list(own.columns.columns)], f.mean(), atol=1e-6)


def test_groups_beside_cell_means_have_the_deviations_from_the_level():
    model = prepared("y ~ 0 + C(g) + (1 | h)", ("h", "u"))
    (own,), f, rest, gamma = parts_of(model)
    assert not own.centred
    design, frame = model.inputs["design"].double(), table()
    np.testing.assert_allclose(rest, f - design @ gamma, atol=1e-9)
    np.testing.assert_allclose(pd.Series(rest).groupby(frame.h).mean(), 0, atol=1e-9)
    groups = gamma[[i for i, name in enumerate(model.design.names) if "| h" in name]]
    assert abs(float(groups.sum())) < 1e-9
    assert np.ptp(gamma[:3]) < 1e-9  # of the cells, the same level


@pytest.mark.parametrize(("reads", "x"), [(("u",), False), (("u", "x"), True)])
@pytest.mark.parametrize("weights", [None, "k"])
def test_the_level_of_an_ordinal_response_stays_in_the_thresholds(reads, x, weights):
    model = prepared("level ~ x", reads, "ordinal", weights=weights)
    (own,), f, rest, gamma = parts_of(model)
    assert own.centred is not x
    assert own.columns.columns == ((0, 1) if x else (1,))
    design = np.column_stack([*([model.inputs["design"][:, 0]] if x else []), np.ones(80)])
    root = np.sqrt(np.ones(80) if weights is None else table().k.to_numpy())
    f = f.numpy()
    naive = np.linalg.lstsq(design * root[:, None], f * root, rcond=None)[0]
    np.testing.assert_allclose(gamma[list(own.columns.columns)], naive, atol=1e-6)
    np.testing.assert_allclose(rest, f - design @ naive, atol=1e-6)
    assert abs(naive[-1]) > 0.001


@pytest.fixture(scope="module")
def ordinal():
    deep = {"n": MLP(2, (4,), 1, seed=0)}
    model = SemiStructuredRegression(
        "level ~ x + n(x, u)", family="ordinal", networks=deep, weights="k"
    )
    with pytest.warns(UserWarning, match="not mixed"):  # so few draws have not mixed
        return model.fit(table(), **QUICK)


def test_predictions_of_training_rows_are_those_that_were_sampled(ordinal):
    state = ordinal.state
    zeta = torch.from_numpy(state.joint.effects_of(state.draws))
    f = state.joint.contributions(state.joint.networks_of(state.draws))
    sampled = state.joint.effect_density.predictors(zeta, f)
    assert float(f.mean()) != 0
    found = ordinal.predict(table()).outputs
    np.testing.assert_allclose(found, sampled, atol=1e-4)
    rows = table().iloc[[3, 1]]
    np.testing.assert_allclose(ordinal.predict(rows).outputs, sampled[:, [3, 1]], atol=1e-4)


def test_thresholds_of_the_population_are_those_of_weighted_rows(ordinal):
    own, state = in_sample(ordinal), ordinal.state
    assert (ordinal.estimand, own.estimand) == ("population", "sample")
    assert ordinal.orthogonal_to == {"n": "effects"}
    f = state.joint.contributions(state.joint.networks_of(state.draws))[..., 0].numpy()
    x = state.model.inputs["design"].double()[:, 0].numpy()
    design, changes = np.column_stack([x, np.ones(80)]), []
    for s in range(30):
        w = np.random.default_rng((4, 3, s)).standard_gamma(table().k.to_numpy(dtype=float))
        root = np.sqrt(w)
        changes.append(np.linalg.lstsq(design * root[:, None], f[s] * root, rcond=None)[0])
    slope, level = np.transpose(changes)
    assert np.abs(changes).max(0).min() > 1e-4
    ours, theirs, center = ordinal.effects(), own.effects(), state.model.design.center[0]
    np.testing.assert_allclose((ours["x"] - theirs["x"]).reshape(-1), slope, atol=1e-8)
    for name in ("threshold[0]", "threshold[1]"):  # at x = 0, where columns are not centred
        moved = (ours[name] - theirs[name]).reshape(-1)
        np.testing.assert_allclose(moved, slope * center - level, atol=1e-7)
    # probabilities are the same, and contributions those beside the thresholds of the estimand
    rows = table().iloc[:7]
    np.testing.assert_array_equal(ordinal.predict(rows).mean, own.predict(rows).mean)
    parts = [m.contributions(rows)["predictor"]["mean"] for m in (ordinal, own)]
    np.testing.assert_allclose(parts[0] - parts[1], -level.mean(), atol=1e-4)
    effects = [m.effect("x", [-1.0, 1.0]).draws for m in (ordinal, own)]
    np.testing.assert_allclose(np.diff(effects[0] - effects[1])[:, 0], 2 * slope, atol=1e-8)
    # what the effect of x gains, the network's partial dependence loses
    network = [m.effect("n", [-1.0, 1.0], variable="x").draws for m in (ordinal, own)]
    np.testing.assert_allclose(np.diff(network[0] - network[1])[:, 0], -2 * slope, atol=1e-6)


def test_a_saved_ordinal_model_is_the_same(ordinal, tmp_path):
    loaded = SemiStructuredRegression.load(ordinal.save(tmp_path / "model"))
    rows = table().iloc[:5]
    np.testing.assert_allclose(loaded.predict(rows).mean, ordinal.predict(rows).mean, atol=1e-6)
    for name, values in ordinal.effects().items():
        np.testing.assert_allclose(loaded.effects()[name], values, rtol=1e-6, atol=1e-6)


def test_cell_means_are_the_intercept_plus_the_effects_of_levels():
    """Draws of one space in both parameterisations: the network has mean 0 in both."""
    found = []
    for formula in ("y ~ C(g)", "y ~ 0 + C(g)"):
        model = prepared(formula)
        (own,), _, rest, _ = parts_of(model)
        assert own.centred
        found.append(rest)
    np.testing.assert_allclose(*found, atol=1e-6)
