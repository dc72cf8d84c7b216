"""Centred coordinates of penalised effects, against derivatives and uncentred samplers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch

from subbayes import MLP, Training
from subbayes.inference import HMC, MAMS, MCLMC, NUTS, SMC, Sampling
from subbayes.inference.samplers.reparameterisation import (
    ReparameterisedDensity,
    ReparameterisedPrior,
    forward,
    inverse,
    pulled_back,
    pushed_forward,
)
from subbayes.priors import Normal
from subbayes.regression import Regression
from subbayes.regression.design.centring import Information
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.semistructured.joint_posterior import JointPosterior
from subbayes.semistructured.subspace import build_space
from subbayes.utils.checks import InputError
from tests.fits import with_network

ROWS, GROUPS = 240, 8
TRAINING = Training(epochs=200, batch_size=None, validation=None, patience=None)
FORMULAS = [
    "y ~ x + (1 | g)",
    "y ~ x + (1 + x | g)",
    pytest.param("y ~ x + (1 + x || g)", marks=pytest.mark.slow),
    pytest.param("y ~ s(x, k=6) + (1 | g)", marks=pytest.mark.slow),
    "y ~ te(x, v, k=4)",
    "y ~ gp(x, k=6) + mo(m)",
]


def frame():
    rng = np.random.default_rng(0)
    g = np.repeat(np.arange(GROUPS), ROWS // GROUPS)
    x, v, a = rng.uniform(-1, 1, (3, ROWS))
    effects = rng.standard_normal(GROUPS)
    y = np.sin(2 * x) + 0.3 * np.cos(2 * v) + (2 + 2 * x) * effects[g]
    y += 0.3 * np.tanh(2 * a) + 0.3 * rng.standard_normal(ROWS)
    m = rng.integers(0, 4, ROWS)
    return pd.DataFrame({"y": y, "x": x, "v": v, "a": a, "g": g.astype(str), "m": m})


def fitted(formula, inference="laplace", **sampling):
    network = MLP(1, (3,), 1, "tanh", seed=0)
    model = SemiStructuredRegression(with_network(formula, "net(a)"), networks={"net": network})
    return model.fit(
        frame(),
        subspace=SemiStructuredSubspace(3),
        inference=inference,
        training=TRAINING,
        sampling=Sampling(**{"draws": 20, "chains": 2, "seed": 0, "progress": False, **sampling}),
    )


@cache
def joint_of(formula):
    network = MLP(1, (3,), 1, "tanh", seed=0)
    model = SemiStructuredRegression(with_network(formula, "net(a)"), networks={"net": network})
    prepared = model.specification.prepare(frame(), None)
    space = build_space(SemiStructuredSubspace(3), prepared, TRAINING, 0, False)
    return JointPosterior(prepared, space, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("formula", FORMULAS)
def test_the_bijection_and_its_determinant(formula):
    joint = joint_of(formula)
    change = joint.information(1.0)
    assert change is not None
    assert ((change.exponent > 0.9) & (change.exponent < 1)).all()
    rng = np.random.default_rng(1)
    z = rng.standard_normal((4, joint.space.subspace.rank))
    u = forward(change, z)
    back, log_det = inverse(change, u)
    np.testing.assert_allclose(back, z, atol=1e-9)
    others = np.ones(z.shape[1], dtype=bool)
    others[joint.space.rank + change.columns.numpy()] = False
    np.testing.assert_array_equal(u[:, others], z[:, others])
    jacobians = [
        torch.func.jacrev(lambda p: change.inverse(p[None])[0][0])(torch.tensor(point))
        for point in u
    ]
    expected = [float(torch.linalg.slogdet(j)[1]) for j in jacobians]
    np.testing.assert_allclose(log_det, expected, atol=1e-8)
    gradient = rng.standard_normal(z.shape)
    pulled = pulled_back(change, u, gradient)
    expected = np.stack(
        [(j.T @ torch.tensor(g)).numpy() for j, g in zip(jacobians, gradient, strict=True)]
    )
    np.testing.assert_allclose(pulled, expected, atol=1e-8)
    np.testing.assert_allclose(pushed_forward(change, z, pulled), gradient, atol=1e-8)


def test_centred_effects_are_those_of_the_formula():
    """With c near 1, u is the effect in units of its typical scale."""
    joint = joint_of("y ~ x + (1 | g)")
    structured, change = joint.model.structured, joint.information(1.0)
    z = np.random.default_rng(1).standard_normal((5, joint.space.subspace.rank))
    beta = structured.coefficients(torch.tensor(z[:, joint.space.rank :]))[:, change.columns]
    u = torch.tensor(forward(change, z))[:, joint.space.rank + change.columns]
    ratio = (u * change.log_scale.exp() / beta).numpy()
    scales = structured.scales(torch.tensor(z[:, joint.space.rank :]))[:, change.columns]
    exponent = change.exponent.numpy() - 1
    np.testing.assert_allclose(
        ratio, (scales / change.log_scale.exp()).numpy() ** exponent, rtol=1e-9
    )


def test_information_of_normal_rows():
    """Squared scores; less of a part of the likelihood, and none at power 0."""
    joint = joint_of("y ~ x + (1 | g)")
    information = joint.information
    assert isinstance(information, Information)
    columns = information(1.0).columns
    design = joint.model.inputs["design"].double()[:, columns]
    own = information.information[columns]
    point = torch.tensor(joint.space.start_points[:1])
    rank, structured = joint.space.rank, joint.model.structured
    deep = joint.contributions(joint.space.subspace.inner.weights(point[:, :rank].float()))
    eta = joint.effect_density.predictors(point[:, rank:], deep)[0]
    scores = (joint.model.data.y - eta[:, 0]) * (-2 * eta[:, 1]).exp()
    expected = (design.square() * scores.square()[:, None]).sum(0)
    np.testing.assert_allclose(own, expected)
    scale = structured.coefficients(point[:, rank:])[0, columns].square().mean().sqrt()
    np.testing.assert_allclose(information.scale[columns], scale)
    strength = own * information.scale[columns].square()
    np.testing.assert_allclose(information(1.0).exponent, strength / (1 + strength), atol=6e-4)
    half = information(0.5)
    np.testing.assert_allclose(half.exponent, strength / (2 + strength), atol=6e-4)
    assert information(1e-6) is None
    assert information(1.0).fingerprint() != half.fingerprint()


@pytest.mark.slow
def test_models_without_groups_or_networks_keep_their_coordinates():
    assert fitted("y ~ x").state.joint.density.reparameterisation is None
    alone = Regression("y ~ x + (1 | g)").fit(
        frame(), inference="laplace", sampling=Sampling(draws=10, chains=2, progress=False)
    )
    assert alone.state.joint.density.reparameterisation is None


@pytest.mark.few(1)
@pytest.mark.parametrize("formula", FORMULAS[:2])
def test_the_density_of_other_coordinates(formula):
    joint = joint_of(formula)
    posterior, change = joint.density, joint.information(1.0)
    other = ReparameterisedDensity(posterior, change)
    z = joint.start_points(3)
    u = forward(change, z)
    log_det = inverse(change, u)[1]
    for _ in range(25):  # eagerly, then traced
        value, gradient = other.value_and_grad(u)
    np.testing.assert_allclose(value, posterior.value(z) + log_det, rtol=1e-6)
    np.testing.assert_allclose(other.log_likelihood(u), posterior.log_likelihood(z), rtol=1e-9)
    prior = other.prior
    assert isinstance(prior, ReparameterisedPrior)
    np.testing.assert_allclose(prior.log_prob(u), posterior.prior.log_prob(z) + log_det, rtol=1e-9)
    way = np.random.default_rng(0).standard_normal(u.shape)
    for function, step in ((prior.value_and_grad, 1e-5), (other.value_and_grad, 1e-3)):
        found = function(u)[1]
        high, low = (function(u + sign * step * way)[0] for sign in (1, -1))
        slope = (high - low) / (2 * step)
        np.testing.assert_allclose((found * way).sum(1), slope, rtol=2e-2, atol=0.3)
    same = posterior.prior.sample((6, other.rank), np.random.default_rng(3))
    drawn = prior.sample((6, other.rank), np.random.default_rng(3))
    np.testing.assert_allclose(inverse(change, drawn)[0], same, atol=1e-9)
    assert other.fingerprint() != posterior.fingerprint()


@pytest.mark.slow
def test_draws_are_of_the_density_itself(tmp_path):
    """Stats, start points and checkpoints are as without other coordinates."""
    joint = joint_of("y ~ x + (1 | g)")
    posterior = joint.density
    assert posterior.reparameterisation is not None
    options = {"chains": 2, "progress": False, "seed": 3}
    start = joint.start_points(2)
    draws = NUTS().sample(posterior, draws=40, warmup=60, initial=start, **options)
    flat = np.ascontiguousarray(draws.flat())
    np.testing.assert_allclose(draws.stats["log_density"].ravel(), posterior.value(flat), rtol=1e-5)
    found = posterior.log_likelihood(flat)
    np.testing.assert_allclose(draws.stats["log_likelihood"].ravel(), found, rtol=1e-4, atol=1e-3)
    runs = []
    for n, checkpoint in ((10, None), (5, tmp_path / "c"), (10, tmp_path / "c")):
        again = replace(joint)  # nothing that another run has traced
        runs.append(
            NUTS().sample(
                again.density,
                draws=n,
                warmup=0,
                initial=draws.z[:, -1],
                checkpoint=checkpoint,
                **options,
            )
        )
    np.testing.assert_array_equal(runs[0].z, runs[2].z)
    np.testing.assert_array_equal(runs[0].z[:, :5], runs[1].z)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", [HMC(), MAMS(), MCLMC()])
def test_other_engines_in_centred_coordinates(engine, monkeypatch):
    joint = joint_of("y ~ x + (1 | g)")
    powers = []

    def watched(power):
        powers.append(power)
        return joint.information(power)

    monkeypatch.setattr(joint.density, "reparameterisation", watched)
    options = {"draws": 10, "warmup": 20, "chains": 2, "initial": joint.start_points(2)}
    draws = engine.sample(joint.density, progress=False, **options)
    assert powers == [1.0]
    flat = np.ascontiguousarray(draws.flat())
    found = joint.density.value(flat)
    np.testing.assert_allclose(draws.stats["log_density"].ravel(), found, rtol=1e-4)


def test_scales_that_are_no_numbers():
    """The scale of a process whose length is far in the tail of its prior: no draw, and no NaN."""
    joint = joint_of("y ~ gp(x, k=6) + mo(m)")
    change = joint.information(1.0)
    z = np.zeros((3, joint.space.subspace.rank))
    z[:, joint.space.rank + len(joint.model.design.names) :] = np.array([-12.0, 0.0, 12.0])[:, None]
    u = forward(change, z)
    back, log_det = inverse(change, u)
    assert np.isfinite(log_det).all()
    np.testing.assert_allclose(back, z, atol=1e-9)


@pytest.mark.usefixtures("unchecked")
def test_a_density_without_gradients_is_refused_as_without_coordinates():
    class Plain:
        rank, temperature, prior = 2, 1.0, Normal()

        def log_likelihood(self, z):
            return np.zeros(len(z))

        def fingerprint(self):
            return "plain"

        def reparameterisation(self, power):
            return joint_of("y ~ x + (1 | g)").information(power)

    with pytest.raises(InputError, match="posterior: expected a density with value_and_grad"):
        NUTS().sample(Plain(), draws=4, chains=1, progress=False)


@cache
def standard_draws():
    """Draws of NUTS in standard coordinates."""
    joint = fitted("y ~ x + (1 | g)").state.joint
    joint.density.reparameterisation = None
    options = {"draws": 600, "chains": 4, "seed": 2, "progress": False}
    return NUTS().sample(joint.density, initial=joint.start_points(4), **options)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [NUTS(), SMC()])
def test_moments_are_those_in_standard_coordinates(engine):
    joint = joint_of("y ~ x + (1 | g)")
    assert joint.density.reparameterisation is not None
    start = {"initial": joint.start_points(4)} if engine.name == "nuts" else {}
    options = {"draws": 400, "chains": 4, "seed": 1, "progress": False}
    centred = engine.sample(joint.density, **options, **start)
    standard = standard_draws()
    n, m = np.minimum(centred.ess_bulk(), 1600), standard.ess_bulk()
    sd = standard.flat().std(0)
    difference = np.abs(centred.flat().mean(0) - standard.flat().mean(0))
    assert (difference < 4.5 * sd * np.sqrt(1 / n + 1 / m)).all()
    ratio = centred.flat().std(0) / sd
    assert (np.abs(ratio - 1) < 4.5 * np.sqrt(1 / n + 1 / m) + 0.03).all()
