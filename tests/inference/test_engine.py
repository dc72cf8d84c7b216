"""Draws of every engine are loaded again; draws that an engine does not give are refused."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

import subbayes
from subbayes import Sampling, Training
from subbayes.draws import Draws
from subbayes.inference.engine import ENGINES, FunctionEngine, engine_of
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace

X = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
MADE = {name: engine_of(name) for name in ENGINES} | {
    "with a step": LinearisedLaplace(gauss_newton_step=True)
}


def fitted(inference, temperature=2.0):
    return subbayes.fit(
        subbayes.MLP(2, (3,), 1, seed=0),
        (X, X[:, 0]),
        subspace=subbayes.subspaces.PCA(rank=2),
        inference=inference,
        temperature=temperature,
        training=Training(epochs=1, swa_epochs=3),
        sampling=Sampling(draws=10, warmup=5, chains=2, progress=False),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MADE)
def test_draws_of_every_engine_are_loaded_again(name, tmp_path):
    if name == "realnvp" and find_spec("zuko") is None:
        pytest.skip("zuko is not installed")
    model = fitted(MADE[name])
    loaded = subbayes.load(model.save(tmp_path / "model"))
    assert np.array_equal(loaded.predict(X).mean, model.predict(X).mean)
    kept = subbayes.load(model.save(tmp_path / "kept", n_draws=4))
    assert np.isfinite(kept.predict(X).mean).all()


def nuts(posterior, sampling):
    """A function with the name of an engine, whose draws are independent."""
    rng = np.random.default_rng(sampling.seed)
    z = posterior.prior.sample((sampling.chains, sampling.draws, posterior.rank), rng)
    return Draws(z, validity="approximation", independent=True)


@pytest.mark.filterwarnings("ignore")
def test_a_function_with_the_name_of_an_engine_is_saved(tmp_path):
    model = fitted(nuts)
    assert FunctionEngine(nuts).name == model.draws.engine == "own nuts"
    assert subbayes.load(model.save(tmp_path / "model")).draws.independent


def test_a_function_has_to_return_draws():
    with pytest.raises(TypeError, match=r"inference: .* returns Draws, got"):
        FunctionEngine(lambda posterior, sampling: np.zeros((2, 5, 2))).run(None, Sampling())
