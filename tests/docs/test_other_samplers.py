"""The recipes for samplers of other libraries against closed forms and our own NUTS."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from cases import training_options
from densities import Banana, Toy
from oracles import LinearGaussian, check_moments
from pages import BLOCK, ROOT, run_page
from scipy import stats

import subbayes
from subbayes.diagnostics import ess_mean
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import engine_of
from subbayes.inference.samplers.nuts import NUTS
from subbayes.priors import Normal

PAGE = ROOT / "docs" / "methods" / "other-samplers.md"
RECIPES = {
    "emcee": ("emcee_ensemble", {"draws": 1600}),
    "dynesty": ("dynesty_nested", {"draws": 300}),
    "nutpie": ("nutpie_nuts", {"draws": 400}),
    "blackjax": ("blackjax_nuts", {"draws": 150, "chains": 16}),
}
PRIOR = Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0]))
MODELS = {
    "subspace": LinearGaussian(rank=2),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "prior": LinearGaussian(rank=2, prior=PRIOR),
}
pytestmark = pytest.mark.usefixtures("unchecked")


def recipe(package):
    """The function of the page that runs the sampler of a package."""
    pytest.importorskip(package)
    code = next(code for _, code in BLOCK.findall(PAGE.read_text()) if f"import {package}" in code)
    names = {}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    return names[RECIPES[package][0]]


@pytest.fixture(autouse=True)
def jax_precision():
    """The recipe of blackjax changes a global setting of JAX."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_x64", False)


def sampled(package, density, **settings):
    sampling = Sampling(**{"chains": 4, "progress": False} | RECIPES[package][1] | settings)
    return engine_of(recipe(package)).run(density, sampling)


def gaussian(model):
    """The posterior of `LinearGaussian.posterior` in NumPy, which is fast to evaluate."""
    a = model.phi @ model.basis.T
    residual = model.y - model.phi @ model.shift

    class Known(Toy):
        def likelihood(self, z):
            off = (residual - z @ a.T) / model.noise
            constant = model.n * np.log(np.sqrt(2 * np.pi) * model.noise)
            return -0.5 * (off**2).sum(1) - constant, off @ a / model.noise

    return Known(2, model.prior, model.temperature)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("package", RECIPES)
def test_draws_match_the_closed_form(package, model):
    draws = sampled(package, gaussian(MODELS[model]), seed=1)
    check_moments(draws, *MODELS[model].moments())
    assert draws.engine == RECIPES[package][0]
    assert draws.temperature == MODELS[model].temperature


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 8.0])
def test_the_evidence_of_dynesty(temperature):
    """The tempered likelihood is a Gaussian of variance T s^2, up to a constant."""
    model = LinearGaussian(rank=2, temperature=temperature)
    a, s2 = model.phi @ model.basis.T, temperature * model.noise**2
    exact = stats.multivariate_normal.logpdf(
        model.y, model.phi @ model.shift, s2 * np.eye(model.n) + a @ a.T
    )
    n = model.n
    exact += 0.5 * n * (np.log(2 * np.pi * s2) - np.log(2 * np.pi * model.noise**2) / temperature)
    draws = sampled("dynesty", gaussian(model))
    assert draws.log_evidence_error < 0.3
    assert abs(draws.log_evidence - exact) < 4 * draws.log_evidence_error


def check_agreement(a, b, errors=4.5):
    """Means and second moments of two runs differ by no more than their Monte Carlo errors."""
    for moment in (lambda z: z, lambda z: z[..., :, None] * z[..., None, :]):
        first, second = (moment(d.z).reshape(*d.z.shape[:2], -1) for d in (a, b))
        variance = sum(x.var((0, 1)) / ess_mean(x) for x in (first, second))
        assert (np.abs(first.mean((0, 1)) - second.mean((0, 1))) < errors * np.sqrt(variance)).all()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["emcee", "blackjax"])
def test_our_nuts_agrees_on_a_banana(package):
    ours = NUTS(target_acceptance=0.9).sample(
        Banana(2), draws=80, chains=150, warmup=80, progress=False
    )
    options = {"emcee": {"draws": 1500}, "blackjax": {"draws": 400}}[package]
    check_agreement(ours, sampled(package, Banana(2), **options))


@pytest.mark.slow
@pytest.mark.parametrize("package", ["nutpie", "blackjax"])
def test_our_nuts_agrees_on_a_small_network(package):
    x = torch.linspace(-2, 2, 60)[:, None].double()
    y = torch.sin(2 * x[:, 0]) + 0.3 * torch.from_numpy(np.random.default_rng(0).normal(size=60))
    module = subbayes.MLP(1, (8,), 1, activation="tanh", seed=0).double()
    trained = subbayes.training.train(
        module,
        subbayes.likelihoods.Gaussian(0.3),
        (x, y),
        **training_options(epochs=100, progress=False),
    )
    space = subbayes.subspace.RandomSubspace(trained.network.weights, 3)
    posterior = subbayes.Posterior(
        trained.network,
        subbayes.likelihoods.Gaussian(0.3),
        (x, y),
        space,
        subbayes.priors.Normal(0.3),
        2.0,
    )
    ours = NUTS().sample(posterior, draws=500, chains=16, warmup=300, progress=False)
    assert not ours.warnings()
    check_agreement(ours, sampled(package, posterior, draws=600, chains=8))


def test_the_sampler_written_out_on_the_page_matches_the_closed_form():
    model = MODELS["tempered"]
    names = run_page(PAGE, leave_out="(posterior, sampling)", names={"posterior": gaussian(model)})
    check_moments(names["draws"], *model.moments())
