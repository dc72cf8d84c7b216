"""Samplers of other packages against closed forms and our own NUTS."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import training_options
from densities import Banana, Bimodal, Toy
from oracles import LinearGaussian, check_moments, sample
from scipy import stats

import subbayes
from subbayes.diagnostics import ess_mean
from subbayes.inference import adapters
from subbayes.inference.samplers.nuts import NUTS
from subbayes.priors import Normal
from subbayes.utils.checks import InputError

PRIOR = Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0]))
MODELS = {
    "subspace": LinearGaussian(rank=2),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "prior": LinearGaussian(rank=2, prior=PRIOR),
}
QUICK = {
    "emcee": {"draws": 400, "walkers": 40, "thin": 4, "progress": False},
    "dynesty": {"draws": 300, "live": 300, "progress": False},
    "nutpie": {"draws": 400, "progress": False},
    "blackjax": {"draws": 150, "chains": 16},
}
every = pytest.mark.parametrize("name", QUICK)
pytestmark = pytest.mark.usefixtures("unchecked")


ENGINES = {
    "emcee": adapters.Emcee,
    "dynesty": adapters.Dynesty,
    "nutpie": adapters.Nutpie,
    "blackjax": adapters.BlackJAX,
}


def sampled(name, density, **settings):
    pytest.importorskip(name)
    return sample(ENGINES[name], density, **{"chains": 4} | QUICK[name] | settings)


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


FAST = [("emcee", "tempered"), ("dynesty", "prior"), ("nutpie", "subspace"), ("nutpie", "prior")]


def slow_unless(fast, values):
    """The cases of a test; expensive ones are marked slow."""
    return [
        v
        if v in fast
        else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow)
        for v in values
    ]


@pytest.mark.parametrize(
    ("name", "model"), slow_unless(FAST, [(name, model) for name in QUICK for model in MODELS])
)
def test_draws_match_the_closed_form(name, model):
    draws = sampled(name, gaussian(MODELS[model]), seed=1)
    check_moments(draws, *MODELS[model].moments())
    assert draws.engine == name
    assert draws.temperature == MODELS[model].temperature


@pytest.mark.parametrize("name", slow_unless(["emcee"], QUICK))
def test_a_posterior_over_a_network(name):
    model = MODELS["subspace"]
    few = {
        "emcee": {"draws": 100, "warmup": 100, "thin": 1},
        "dynesty": {"live": 100},
        "nutpie": {"draws": 100},
        "blackjax": {"draws": 80, "warmup": 100},
    }
    posterior = model.posterior()
    draws = sampled(name, posterior, **few[name])
    check_moments(draws, *model.moments())
    if "log_density" in draws.stats:
        np.testing.assert_allclose(
            draws.stats["log_density"].reshape(-1)[:20],
            posterior.value(draws.flat()[:20]),
            rtol=1e-12,
        )
    else:
        np.testing.assert_allclose(
            draws.stats["log_likelihood"].reshape(-1)[:20],
            posterior.log_likelihood(draws.flat()[:20]),
            rtol=1e-12,
        )


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
    assert draws.meta["effective_draws"] > 300


def test_dynesty_finds_both_modes():
    density = Bimodal(2, prior=Normal(2.0), distance=3.0)
    draws = sampled("dynesty", density, draws=400)
    mean, covariance = density.moments()
    check_moments(draws, mean, covariance, errors=6.0)  # the run itself adds to resampling


def check_agreement(a, b, errors=4.5):
    """Means and second moments of two runs differ by no more than their Monte Carlo errors."""
    for moment in (lambda z: z, lambda z: z[..., :, None] * z[..., None, :]):
        first, second = (moment(d.z).reshape(*d.z.shape[:2], -1) for d in (a, b))
        variance = sum(x.var((0, 1)) / ess_mean(x) for x in (first, second))
        assert (np.abs(first.mean((0, 1)) - second.mean((0, 1))) < errors * np.sqrt(variance)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nutpie", "emcee", "blackjax"])
def test_our_nuts_agrees_on_a_banana(name):
    options = {
        "nutpie": {"draws": 1000, "options": {"target_accept": 0.9}},
        "emcee": {"draws": 1500},
        "blackjax": {"draws": 400, "chains": 16, "target_acceptance": 0.9},
    }
    ours = NUTS(target_acceptance=0.9).sample(
        Banana(2), draws=80, chains=150, warmup=80, progress=False
    )
    check_agreement(ours, sampled(name, Banana(2), **options[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nutpie", "blackjax"])
def test_our_nuts_agrees_on_a_small_network(name):
    import torch

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
    theirs = sampled(name, posterior, draws=600, chains=8)
    check_agreement(ours, theirs)


@pytest.mark.parametrize("name", ["emcee", "dynesty", "nutpie"])
def test_results_depend_on_the_seed_and_global_generators_are_untouched(name):
    settings = {"draws": 20} | ({"live": 40} if name == "dynesty" else {})
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, again = (sampled(name, Banana(2), seed=3, **settings).z for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, sampled(name, Banana(2), seed=4, **settings).z)
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


@every
def test_missing_package_names_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError,
        match=rf"adapters\.{name} needs {name}: pip install "
        r"'subbayes\[samplers\]'",
    ):
        ENGINES[name]().sample(Banana(2))


@every
def test_bad_input(name):
    class Impossible(Toy):
        def likelihood(self, z):
            return np.full(len(z), -np.inf), np.zeros_like(z)

    expected = "some draw from the prior" if name == "dynesty" else "start points where the log"
    with pytest.raises(InputError, match=f"expected .*{expected}.*minus infinity"):
        sampled(name, Impossible(2))
    with pytest.raises(InputError, match="draws: expected a whole number of at least 1, got 0"):
        sampled(name, Banana(2), draws=0)
    if name in ("nutpie", "blackjax"):

        class Gradientless:
            rank, prior, temperature = 2, Normal(), 1.0

            def log_likelihood(self, z):
                return np.zeros(len(z))

            def fingerprint(self):
                return ""

        with pytest.raises(InputError, match="posterior: expected a density with value_and_grad"):
            sampled(name, Gradientless())


def test_emcee_rejects_too_few_walkers():
    with pytest.raises(InputError, match="walkers: expected at least 2 k = 4, got 3"):
        sampled("emcee", Banana(2), walkers=3)
    with pytest.raises(InputError, match="initial: expected start points that span all 2"):
        sampled("emcee", Banana(2), initial="shift")


def test_nutpie_avoids_regions_of_zero_density():
    class Cliff(Toy):
        def likelihood(self, z):
            return np.where(z[:, 0] > 0, 0.0, -np.inf), np.zeros_like(z)

    draws = sampled("nutpie", Cliff(1), draws=500)
    assert (draws.z > 0).all()
    assert draws.stats["divergent"].any()


def test_custom_sampler_of_the_docs_page_runs():
    page = Path(__file__).parents[2] / "docs" / "methods" / "other-samplers.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    known = {"posterior": gaussian(MODELS["tempered"])}
    exec(compile(code, str(page), "exec"), known)
    check_moments(known["draws"], *MODELS["tempered"].moments())
