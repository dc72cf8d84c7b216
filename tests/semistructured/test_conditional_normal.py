"""Coefficients proposed around their mode given deviations, against grids and dense Newton."""

import numpy as np
import pandas as pd
import pytest
import torch

from subbayes.inference import Sampling
from subbayes.regression import Regression
from subbayes.regression.integrals import conditional_normal
from subbayes.regression.integrals.conditional_normal import ConditionalNormal
from subbayes.regression.integrals.corrected_draws import corrected_proposals
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood

CASES = [
    ("c ~ x + s(v, k=4) + (1 | g)", "poisson", None),
    ("b ~ s(v, k=5) + (1 | g)", "bernoulli", None),
    ("c ~ s(v, k=4) + (1 + x | g)", "poisson", "w"),
    ("p ~ x + (1 | g)", "gamma", None),
    ("p ~ x + (1 | g)", "gamma", "w"),
    ("r ~ x + s(v, k=4)", "ordinal", None),
]


def table(n=40, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(size=n), "v": rng.normal(size=n)})
    frame["g"], frame["w"] = rng.integers(0, 5, n).astype(str), rng.uniform(0.5, 2, n)
    eta = 0.5 * frame.x + np.sin(2 * frame.v)
    frame["c"] = rng.poisson(np.exp(eta))
    frame["b"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-2 * eta))).astype(int)
    frame["p"] = np.exp(eta) * rng.gamma(3, 1 / 3, n)
    frame["r"] = np.digitize(eta + rng.logistic(size=n), [-1, 0, 1])
    return frame


def likelihood_of(formula, family, frame, **options):
    model = Regression(formula, family=family, **options)
    model = model.specification.prepare(frame, None)
    inputs = model.inputs
    return EffectsLikelihood(
        model.structured, model.family, inputs["design"], inputs["offset"], model.data.y
    )


def mode_of(likelihood):
    return likelihood.mode(torch.zeros(likelihood.map.structured.size).double())[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(("formula", "family", "weights"), CASES)
def test_the_density_is_laplaces_at_each_point(formula, family, weights, monkeypatch):
    """Newton's method to the end with the Hessian by differences of gradients."""
    monkeypatch.setattr(conditional_normal, "_STEPS", 40)
    likelihood = likelihood_of(formula, family, table(), weights=weights)
    conditional = ConditionalNormal(likelihood, mode_of(likelihood))
    h = 0.7 * np.random.default_rng(2).normal(size=(3, len(conditional.rest)))
    values = conditional.log_density(h)
    eps = np.random.default_rng(3).normal(size=(3, len(conditional.linear)))
    zeta, log_det = conditional.with_coefficients(h, eps)
    at_mode = conditional.with_coefficients(h, np.zeros_like(eps))[0]
    structured, model = likelihood.map.structured, likelihood

    def log_joint(linear, point):
        whole = torch.zeros(1, structured.size, dtype=torch.float64)
        whole = whole.index_put((torch.tensor([0]), torch.tensor(conditional.rest)), point)
        whole = whole.index_put((torch.tensor([0]), torch.tensor(conditional.linear)), linear)
        value = model.rows.value(model.map.coefficients(whole))[0]
        return value - 0.5 * whole.square().sum()

    def gradient(linear, point):
        at = linear.clone().requires_grad_()
        return torch.autograd.grad(log_joint(at, point), at)[0]

    for i, point in enumerate(torch.from_numpy(h)):
        linear = torch.from_numpy(at_mode[i, conditional.linear])
        assert gradient(linear, point).abs().max() < 1e-6  # the mode
        steps = 1e-5 * torch.eye(len(linear), dtype=torch.float64)
        pairs = [gradient(linear - e, point) - gradient(linear + e, point) for e in steps]
        curved = torch.stack(pairs) / 2e-5
        assert log_joint(linear, point).item() + log_det[i] == pytest.approx(values[i], rel=1e-9)
        away = torch.from_numpy(zeta[i, conditional.linear]) - linear
        if family in ("poisson", "bernoulli"):  # whose information is the Hessian
            assert log_det[i] == pytest.approx(-0.5 * torch.logdet(curved).item(), rel=1e-6)
            assert (away @ curved @ away).item() == pytest.approx(eps[i] @ eps[i], rel=1e-5)
        else:  # the information is its expectation, close to it
            assert log_det[i] == pytest.approx(-0.5 * torch.logdet(curved).item(), abs=2.5)


def test_proposals_depend_on_their_own_coordinates_alone():
    likelihood = likelihood_of(*CASES[1][:2], table())
    conditional = ConditionalNormal(likelihood, mode_of(likelihood))
    rng = np.random.default_rng(0)
    h, eps = (
        rng.normal(size=(6, len(conditional.rest))),
        rng.normal(size=(6, len(conditional.linear))),
    )
    together, log_det = conditional.with_coefficients(h, eps)
    for i in range(6):
        alone = conditional.with_coefficients(h[i : i + 1], eps[i : i + 1])
        np.testing.assert_allclose(alone[0][0], together[i], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(alone[1][0], log_det[i], rtol=1e-9)


def test_draws_have_the_moments_of_quadrature():
    """Few binary responses of two groups, on a grid of intercept, deviation and both effects."""
    frame = pd.DataFrame({"g": ["a"] * 3 + ["b"] * 3, "b": [1, 1, 1, 0, 1, 0]})
    likelihood = likelihood_of("b ~ re(g)", "bernoulli", frame)
    start = mode_of(likelihood).numpy()
    sampling = Sampling(draws=8000, chains=4, progress=False)
    corrected = corrected_proposals(likelihood, start, sampling, conditional=True)
    draws, zeta, value = corrected.draw(sampling, 1)
    flat = zeta.reshape(-1, zeta.shape[2])
    np.testing.assert_allclose(
        value.reshape(-1)[:50], likelihood.value(torch.from_numpy(flat[:50].copy())), rtol=1e-9
    )
    axis = np.linspace(-5, 5, 31)
    grid = np.stack(np.meshgrid(*[axis] * len(start), indexing="ij"), -1).reshape(-1, len(start))
    beta = likelihood.map.structured.coefficients(torch.from_numpy(grid)).numpy()
    eta = beta @ likelihood.rows.design.numpy().T  # six rows or the joined ones
    response = likelihood.rows.response.numpy()
    count = np.ones(eta.shape[1]) if likelihood.rows.weights is None else likelihood.rows.weights
    log = eta @ response - np.logaddexp(0, eta) @ np.asarray(count) - 0.5 * (grid**2).sum(1)
    w = np.exp(log - log.max())
    w /= w.sum()
    mean = w @ grid
    covariance = (grid - mean).T @ ((grid - mean) * w[:, None])
    size, sd = draws.ess_bulk().min(), np.sqrt(np.diag(covariance))
    assert size > 4000
    assert np.all(np.abs(flat.mean(0) - mean) < 4.5 * sd / np.sqrt(size))
    scale = np.sqrt(np.outer(sd, sd) ** 2 + covariance**2)
    assert np.all(np.abs(np.cov(flat.T) - covariance) < 4.5 * scale / np.sqrt(size))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 8])
def test_small_additive_models_of_binary_responses_mix(seed, recwarn):
    """Their log-likelihood is far from quadratic: NUTS took minutes, other proposals R-hat 1.03."""
    rng = np.random.default_rng(1000 + seed)
    x, g = rng.uniform(-2, 2, 80), rng.integers(0, 8, 80)
    eta = 0.3 + np.sin(1.5 * x) + (0.5 * rng.standard_normal(8))[g]
    y = (rng.random(80) < 1 / (1 + np.exp(-eta))).astype(int)
    frame = pd.DataFrame({"y": y, "x": x, "g": [f"g{i}" for i in g]})
    model = Regression("y ~ s(x) + (1|g)", family="bernoulli")
    model.fit(frame, sampling=Sampling(draws=1000, chains=4, progress=False))
    assert not [w for w in recwarn if "mixed" in str(w.message)]
    assert model.draws.meta["integrated_out"] == "coefficients, around their modes"
    assert ", the coefficients proposed around their modes (" in model.describe()["inference"]
    assert model.draws.meta["efficiency"] > 0.5


def test_information_is_evaluated_for_few_points_at_once(monkeypatch):
    """Fisher's information of counts is a sum over them, of each point and row."""
    frame = pd.DataFrame({"x": np.linspace(-1, 1, 4), "c": [0, 1, 3, 0]})
    model = Regression("c ~ x", family="zero-inflated-poisson")
    rows, sizes = model.specification.prepare(frame, None).effects_likelihood.rows, []

    def recorded(self, eta):
        sizes.append(len(eta))
        return torch.diag_embed(eta.square())

    monkeypatch.setattr(type(rows.family), "curvature", recorded)
    b = torch.linspace(-1, 1, 70 * 8).double().reshape(70, 4, 2)
    b[:, -1] = 0.0
    gram = rows.expansion(b)[1]
    assert sizes == [64, 6]
    x = rows.design.double()
    for at, found in zip(b[:, :-1], gram, strict=True):
        location, inflation = (x @ at).square().T
        expected = torch.zeros(3, 3).double()
        expected[:2, :2] = x[:, :2].T @ (x[:, :2] * location[:, None])
        expected[2, 2] = x[:, 2] @ (x[:, 2] * inflation)
        torch.testing.assert_close(found, expected)
