"""Effects of the population: a naive projection, coverage, what is not changed, saving."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from in_sample_effects import in_sample
from torch import nn

from subbayes import InputError, Sampling, SemiStructuredRegression, Training
from subbayes.regression import Regression
from subbayes.regression.questions.summary import summary_text
from subbayes.semistructured.contributions import Contributions
from subbayes.semistructured.estimand import bootstrap_projections
from subbayes.semistructured.orthogonal_columns import OrthogonalColumns
from subbayes.semistructured.subspace import SemiStructuredSubspace
from subbayes.utils.seeding import fork_rng

QUICK = {
    "training": Training(epochs=20, batch_size=None, validation=None, patience=None),
    "sampling": Sampling(draws=15, chains=2, warmup=5, progress=False, seed=4, mode="eager"),
    "subspace": SemiStructuredSubspace(2),
}


def net(inputs=1):
    with fork_rng(2):
        return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 1))


def table(n=40):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(size=n), "u": rng.uniform(-2, 2, n)})
    frame["k"] = rng.integers(1, 4, n)
    frame["y"] = 1 + frame.x + frame.u**2 + 0.3 * rng.normal(size=n)
    return frame


def columns_of(x):
    return OrthogonalColumns.of(torch.from_numpy(x), range(x.shape[1]))


@pytest.fixture(scope="module")
def fitted():
    frame = table()
    deep = {"a": net(2), "b": net()}
    with pytest.warns(UserWarning, match="not mixed"):  # so few draws have not mixed
        return frame, SemiStructuredRegression(
            "y ~ x + a(x, u) + b(u)", networks=deep, weights="k"
        ).fit(frame, **QUICK)


def contributions_of(state, name):
    """What one network adds at the training rows, orthogonal to its columns, shape (S, n)."""
    joint, model = state.joint, state.model
    only = Contributions(
        model.deep, model.inputs, joint.orthogonal, len(model.design.names), [name]
    )
    return only(joint.networks_of(state.draws))[..., 0]


def test_projections_are_weighted_least_squares():
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(30), rng.normal(size=(30, 2))])
    f, count = rng.normal(size=(5, 30)), rng.integers(0, 4, 30).astype(float)
    seeds = [(7, s) for s in range(5)]
    for weights in (None, count):
        found = bootstrap_projections(torch.from_numpy(f), columns_of(x), seeds, weights)
        for one, own, seed in zip(found.numpy(), f, seeds, strict=True):
            generator = np.random.default_rng(seed)
            w = generator.standard_gamma(np.ones(30) if weights is None else weights)
            if weights is None:
                w = np.random.default_rng(seed).standard_exponential(30)
            naive = np.linalg.lstsq(x * np.sqrt(w)[:, None], own * np.sqrt(w), rcond=None)[0]
            np.testing.assert_allclose(one, naive, atol=1e-10)
    # a column twice: the same fitted values, of the smallest coefficients
    twice = bootstrap_projections(torch.from_numpy(f), columns_of(x[:, [0, 1, 2, 2]]), seeds)
    once = bootstrap_projections(torch.from_numpy(f), columns_of(x), seeds)
    np.testing.assert_allclose(twice[:, 2:].sum(1), once[:, 2], atol=1e-10)
    np.testing.assert_allclose(twice[:, 2], twice[:, 3], atol=1e-10)


@pytest.mark.parametrize("count", [20, 80])
def test_projections_on_many_groups_are_those_of_dense_least_squares(count):
    rng = np.random.default_rng(2)
    codes = np.concatenate([np.arange(count), rng.integers(0, count, 300)])
    x = np.column_stack([np.ones(len(codes)), rng.normal(size=len(codes))])
    indicators = np.eye(count)[codes]
    z = np.concatenate([indicators, indicators * rng.normal(size=(len(codes), 1))], 1)
    design = torch.from_numpy(np.column_stack([x, z]))
    own = OrthogonalColumns.of(design, [0, 1], range(2, design.shape[1]))
    f, w = rng.normal(size=len(codes)), rng.standard_exponential(len(codes))
    found = own.coefficients(own.weighted(f, w)[None])[0].numpy()
    root = np.sqrt(w)
    naive = np.linalg.lstsq(design.numpy() * root[:, None], f * root, rcond=1e-9)[0]
    np.testing.assert_allclose(design.numpy() @ found, design.numpy() @ naive, atol=1e-7)
    assert abs(found[2 : 2 + count].sum()) < 1e-6  # the smallest random effects
    w[codes == 3] = 0.0  # a group without weight
    assert np.isfinite(own.coefficients(own.weighted(f, w)[None])).all()


def test_groups_that_fixed_effects_have_already_add_nothing():
    codes = np.arange(30) % 3
    x = np.eye(3)[codes]
    design = torch.from_numpy(np.concatenate([x, x], 1))
    own = OrthogonalColumns.of(design, [0, 1, 2], [3, 4, 5])
    assert own.basis.shape == (30, 3)
    found = own.pseudo_inverse @ torch.linspace(0, 1, 30, dtype=torch.float64)
    np.testing.assert_allclose(found[3:], 0, atol=1e-12)


@pytest.mark.slow
def test_intervals_cover_the_effect_of_the_population_and_in_sample_ones_do_not():
    """The predictor x b + f(u) + e is known up to noise: the network is known exactly."""
    rng, inside, tail, n, noise = np.random.default_rng(5), [], 0.05, 120, 0.3
    for data_set in range(300):
        x, u = rng.normal(size=n), rng.normal(size=n)
        f = 0.5 * (u**2 - 1) / 2**0.5
        y = x + f + noise * rng.normal(size=n)
        design = np.column_stack([np.ones(n), x])
        inverse = np.linalg.inv(design.T @ design)
        gamma = inverse @ design.T @ f
        centre = inverse @ design.T @ (y - f + design @ gamma)  # of the effects beside f_perp
        draws = centre + rng.multivariate_normal(np.zeros(2), noise**2 * inverse, 400)
        rest = torch.from_numpy(np.broadcast_to(f - design @ gamma, (400, n)).copy())
        seeds = [(data_set, s) for s in range(400)]
        moved = draws + bootstrap_projections(rest, columns_of(design), seeds).numpy()
        ends = [np.quantile(d[:, 1], [tail, 1 - tail]) for d in (draws, moved)]
        inside.append([low < 1 < high for low, high in ends])
    sample, population = np.mean(inside, 0)
    assert abs(population - 0.9) < 2.5 * (0.09 / 300) ** 0.5
    assert sample < 0.7


@pytest.mark.slow
def test_intervals_cover_random_effects_beside_a_network_that_reads_the_groups():
    """As above with random intercepts, whose standard deviation is known: a normal posterior."""
    rng, inside, tail, n, noise = np.random.default_rng(6), [], 0.05, 120, 0.3
    for data_set in range(150):
        codes, u, groups = rng.integers(0, 8, n), rng.normal(size=n), 0.5 * rng.normal(size=8)
        f = 0.5 * (u**2 - 1) / 2**0.5
        design = torch.from_numpy(np.column_stack([np.ones(n), np.eye(8)[codes]]))
        own, x = OrthogonalColumns.of(design, [0], range(1, 9)), design.numpy()
        rest = f - own.basis.numpy() @ (own.basis.numpy().T @ f)
        y = groups[codes] + f + noise * rng.normal(size=n)
        precision = x.T @ x / noise**2 + np.diag([1e-4, *[0.5**-2] * 8])
        covariance = np.linalg.inv(precision)
        mean = covariance @ x.T @ (y - rest) / noise**2
        draws = rng.multivariate_normal(mean, covariance, 400)
        beside = torch.from_numpy(np.broadcast_to(rest, (400, n)).copy())
        seeds = [(data_set, s) for s in range(400)]
        moved = draws + bootstrap_projections(beside, own, seeds).numpy()
        ends = [np.quantile(d[:, 1:], [tail, 1 - tail], axis=0) for d in (draws, moved)]
        inside.append([((low < groups) & (groups < high)).mean() for low, high in ends])
    sample, population = np.mean(inside, 0)
    error = np.std(inside, 0)[1] / 150**0.5
    assert abs(population - 0.9) < 3 * error
    assert sample < population - 0.03


def test_effects_of_the_population_are_those_of_weighted_rows(fitted):
    frame, model = fitted
    assert model.estimand == "population"
    assert model.summary().attrs["effects"] == "population"
    state, own = model.state, in_sample(model)
    assert own.estimand == own.summary().attrs["effects"] == "sample"
    for one, line in [
        (model, "those of +the population of rows: .* Assumes rows drawn independently"),
        (own, "effects are those of +the training rows: intervals leave out which rows were seen"),
    ]:
        assert re.search(line, str(one))
        assert summary_text(one.summary()) in str(one)
    f, centred = (contributions_of(state, name).numpy() for name in "ab")
    design = state.model.inputs["design"].double()[:, :2].numpy()
    assert state.model.design.names[:2] == ["Intercept", "x"]
    for s in range(30):
        w = np.random.default_rng((4, 3, s)).standard_gamma(frame.k.to_numpy(dtype=float))
        root = np.sqrt(w)[:, None]
        shift = np.linalg.lstsq(design * root, f[s] * root[:, 0], rcond=None)[0]
        shift[0] += centred[s] @ w / w.sum()
        for name, change in {
            "x": shift[1],
            "Intercept": shift[0] - shift[1] * state.model.design.center[1],
        }.items():
            moved = model.effects()[name].reshape(-1)[s] - own.effects()[name].reshape(-1)[s]
            np.testing.assert_allclose(moved, change, atol=1e-8)
            assert abs(change) > 1e-6
    np.testing.assert_array_equal(model.effects()["sigma"], own.effects()["sigma"])
    slopes = np.diff(model.effect("x", values=[0.0, 1.0]).draws)[:, 0]
    np.testing.assert_allclose(slopes, model.effects()["x"].reshape(-1), rtol=1e-9)
    # diagnostics are those of the chains
    for name in ("rhat", "ess_bulk", "ess_tail"):
        np.testing.assert_array_equal(model.summary()[name], own.summary()[name])
    assert model.warnings() == own.warnings()


def test_predictors_do_not_depend_on_the_estimand(fitted):
    frame, model = fitted
    own = in_sample(model)
    rows = frame.iloc[:7]
    np.testing.assert_array_equal(model.predict(rows).mean, own.predict(rows).mean)
    ours, theirs = (m.contributions(rows, n_draws=9) for m in (model, own))
    np.testing.assert_allclose(ours["predictor"], theirs["predictor"], atol=1e-5)
    assert np.abs(ours["deep"]["mean"] - theirs["deep"]["mean"]).max() > 1e-4
    # the parts of effect and networks along x change by the same, in opposite directions
    values, level = [-1.0, 0.0, 2.0], model.state.model.design.center[1]
    changes = [
        (m.effect("x", values).draws, *(m.effect(n, values, variable=c).draws for n, c in parts))
        for m in (model, own)
        for parts in [[("a", "x")]]
    ]
    (effect, network), (effect0, network0) = changes
    _, other = (m.effect("b", [0.0], variable="u").draws for m in (model, own))
    assert other.shape == (30, 1)
    state = model.state
    part = state.joint.orthogonal[0]
    assert part.names == ("a",)
    own_part = contributions_of(state, "a")
    slope = state.projections(own_part, part.columns, np.arange(30))[:, 1].numpy()
    assert np.abs(slope).max() > 1e-6
    np.testing.assert_allclose(effect - effect0, np.outer(slope, np.array(values) - level))
    np.testing.assert_allclose(
        np.diff(network - network0), -np.outer(slope, np.diff(values)), atol=1e-9
    )


def test_without_orthogonal_networks_both_are_the_same():
    frame = table(20)
    networks = {"net": net()}
    options = {"networks": networks, "orthogonal": False}
    models = [
        SemiStructuredRegression("y ~ x + net(u)", effects=name, **options).fit(frame, **QUICK)
        for name in ("population", "sample")
    ]
    plain = Regression("y ~ x").fit(frame, sampling=replace(QUICK["sampling"], draws=5))
    assert [m.estimand for m in (*models, plain)] == ["model"] * 3
    assert str(plain).startswith("formula    y ~ x\nfamily     normal")
    for claim in ("population", "effects are", "the sample"):
        assert claim not in str(models[0]) + str(plain)
    np.testing.assert_array_equal(*(m.effects()["x"] for m in models))
    np.testing.assert_array_equal(*(m.marginal_means("x", [0, 1]).draws for m in models))
    with pytest.raises(InputError, match=r"^effects: expected one of 'population', 'sample'"):
        SemiStructuredRegression("y ~ x + net(u)", effects="rows", networks=networks)


def test_a_saved_model_has_the_same_effects(fitted, tmp_path):
    _, model = fitted
    loaded = SemiStructuredRegression.load(
        model.save(tmp_path / "model"), networks={"a": net(2), "b": net()}
    )
    assert loaded.estimand == "population"
    for name, values in model.effects().items():
        np.testing.assert_allclose(loaded.effects()[name], values, rtol=1e-6, atol=1e-6)
